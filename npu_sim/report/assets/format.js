// Numbers with units, and elements of the page. Text from a model becomes text nodes only, never markup.

function scaled(value, base, units) {
  let unit = 0;
  while (Math.abs(value) >= base && unit < units.length - 1) { value /= base; unit += 1; }
  return `${unit === 0 && Number.isInteger(value) ? value : value.toFixed(1)} ${units[unit]}`;
}

const formatBytes = (count) => scaled(count, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const formatFlops = (count) => scaled(count, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"]);
const formatRate = (rate) => scaled(rate, 1000, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s"]);
const formatBandwidth = (rate) => scaled(rate, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);
const formatCount = (count) => count.toLocaleString("en");
const counted = (count, what) => `${formatCount(count)} ${what}${count === 1 ? "" : "s"}`;
const formatShare = (share) => `${(100 * share).toFixed(1)} %`;

function formatTime(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1e-3) return `${(1e6 * seconds).toFixed(1)} µs`;
  return seconds < 1 ? `${(1e3 * seconds).toFixed(2)} ms` : `${seconds.toFixed(2)} s`;
}

// element("p", {class: "note", onclick: f}, "text", child, …)
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

function facts(pairs) {
  return element("dl", { class: "facts" }, pairs.map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

// One colour for each kind of work, with enough contrast on light and on dark ground.
const FAMILIES = ["matmul", "conv", "attention", "elementwise", "norm", "softmax", "reduction", "indexing", "tensor", "rope", "pool", "generated"];
const familyColour = d3.scaleOrdinal(FAMILIES, [...d3.schemeTableau10, "#5e8c61", "#8a7fb5"]);

function legend(families) {
  const shown = FAMILIES.filter((family) => families.has(family));
  return element("ul", { class: "legend", "aria-label": "Colours" }, shown.map((family) => {
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.backgroundColor = familyColour(family);
    return element("li", {}, swatch, family);
  }));
}

// A text that follows the pointer over a chart.
function tooltip(parent) {
  const box = element("div", { class: "tooltip", role: "status", hidden: true });
  parent.append(box);
  return {
    show(event, lines) {
      box.replaceChildren(...lines.map((line) => element("div", {}, line)));
      box.hidden = false;
      const area = parent.getBoundingClientRect();
      box.style.left = `${Math.min(event.clientX - area.left + 14, Math.max(0, area.width - box.offsetWidth - 4))}px`;
      box.style.top = `${event.clientY - area.top + 14}px`;
    },
    hide() { box.hidden = true; },
  };
}

// A canvas that fills its parent; `draw(context, width, height)` is called when it must be drawn, in CSS pixels.
function chartCanvas(parent, label, draw) {
  const canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": label });
  parent.append(canvas);
  const redraw = () => {
    const { width, height } = parent.getBoundingClientRect();
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    draw(context, width, height);
  };
  new ResizeObserver(redraw).observe(parent);
  window.addEventListener("themechange", redraw);
  return { canvas, redraw };
}

// Zooms a chart's canvas along x, by the pointer and the keyboard; `redraw` draws what the zoom moved. Returns a function
// that gives the zoomed scale of one over the whole width.
function zoomAlongX(chart, most, redraw) {
  let zoomed = d3.zoomIdentity;
  const canvas = d3.select(chart.canvas);
  const zoom = d3.zoom().scaleExtent([1, most]).on("zoom", (event) => {
    const { width, height } = chart.canvas.getBoundingClientRect();
    zoomed = event.transform;
    zoom.translateExtent([[0, 0], [width, height]]);
    redraw();
  });
  canvas.call(zoom);
  chart.canvas.addEventListener("keydown", (event) => {
    const factor = { "+": 1.5, "=": 1.5, "-": 1 / 1.5 }[event.key], step = { ArrowLeft: 60, ArrowRight: -60 }[event.key];
    if (factor) canvas.call(zoom.scaleBy, factor);
    else if (step) canvas.call(zoom.translateBy, step / zoomed.k, 0);
    else if (event.key === "0") canvas.call(zoom.transform, d3.zoomIdentity);
    else return;
    event.preventDefault();
  });
  return (scale) => zoomed.rescaleX(scale);
}

// Ticks at multiples of a power of two, which read well as KiB and MiB.
function byteTicks([low, high], count) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, (high - low) / count)));
  return d3.range(Math.ceil(low / step) * step, high + 1, step);
}

const themeColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A binary search: the first index from which `isAfter` holds.
function firstIndex(items, isAfter) {
  let low = 0, high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isAfter(items[middle])) high = middle; else low = middle + 1;
  }
  return low;
}
