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

const formatEnergy = (joules) => scaledDown(joules, [["J", 1], ["mJ", 1e-3], ["µJ", 1e-6], ["nJ", 1e-9]]);

function scaledDown(value, units) {
  const [name, size] = units.find(([, least]) => value >= least) ?? units[units.length - 1];
  return `${Number((value / size).toPrecision(4))} ${name}`;
}

// The ticks of a scale in seconds, all in the unit that fits the largest: {unit, ticks: [[seconds, text]]}.
function timeTicks(scale, count) {
  const ticks = scale.ticks(count), most = Math.max(...scale.domain().map(Math.abs));
  const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]].find(([, least]) => most >= least) ?? ["ns", 1e-9];
  const step = ticks.length > 1 ? (ticks[1] - ticks[0]) / size : 1;
  const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  return { unit, ticks: ticks.map((tick) => [tick, (tick / size).toFixed(digits)]) };
}

// One colour for each kind of work, on every page, with enough contrast on light and on dark ground.
const FAMILY_COLOURS = {
  matmul: "#4e79a7", conv: "#f28e2c", attention: "#e15759", elementwise: "#76b7b2", norm: "#59a14f", softmax: "#edc949", reduction: "#af7aa1",
  indexing: "#ff9da7", tensor: "#9c755f", rope: "#bab0ab", pool: "#5e8c61", collective: "#c98bb9", generated: "#8a7fb5",
};
const familyColour = (family) => FAMILY_COLOURS[family] ?? "#8c939c";
// The same for what a simulated run consists of: computing and stalls by cause, energy by part.
const partColour = d3.scaleOrdinal(
  ["computing", "dram bandwidth", "dram latency", "launch", "dependency", "sram ports", "shared l2", "macs", "vector", "sram", "dram", "static", "network", "l2"],
  ["#7b8794", "#d1495b", "#edae49", "#8d5fd3", "#00798c", "#c05299", "#6b8e23", "#3f7cac", "#4fa06a", "#a56cc1", "#d9822b", "#9aa5b1", "#b5838d", "#6b8e23"],
);

// A call by its node, with the module whose weights it reads.
const titled = (call) => (call.module ? `${call.node} (${call.module})` : call.node);

function swatchList(entries, label) {
  return element("ul", { class: "legend", "aria-label": label }, entries.map(([name, colour]) => {
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.backgroundColor = colour;
    return element("li", {}, swatch, name);
  }));
}

const legend = (families) => swatchList(Object.keys(FAMILY_COLOURS).filter((family) => families.has(family)).map((family) => [family, familyColour(family)]), "Colours");
const partLegend = (parts) => swatchList(parts.map((part) => [part, partColour(part)]), "Colours");

// A bar of parts that lie side by side: parts: [[name, value]]; `whole` is the value of the full width.
function stackedBar(parts, whole, colour = partColour) {
  const bar = element("span", { class: "stack", "aria-hidden": "true" });
  for (const [name, value] of parts) {
    if (!(value > 0)) continue;
    const piece = element("span", {});
    piece.style.width = `${whole ? (100 * value) / whole : 0}%`;
    piece.style.backgroundColor = colour(name);
    bar.append(piece);
  }
  return bar;
}

// Texts of an axis: without digits that are 0.
const onAxis = (format) => (value) => format(value).replace(/\.0+(?= |$)/, "");

// A text that follows the pointer over a chart and stays inside the window.
const hint = element("div", { class: "tooltip", role: "status", hidden: true });
document.body.append(hint);
const tip = {
  show(event, lines) {
    hint.replaceChildren(...lines.map((line) => element("div", {}, line)));
    hint.hidden = false;
    const { clientWidth: width, clientHeight: height } = document.documentElement, gap = 14;
    const left = event.clientX + gap + hint.offsetWidth > width ? event.clientX - gap - hint.offsetWidth : event.clientX + gap;
    const top = event.clientY + gap + hint.offsetHeight > height ? event.clientY - gap - hint.offsetHeight : event.clientY + gap;
    hint.style.left = `${Math.max(4, Math.min(left, width - hint.offsetWidth - 4))}px`;
    hint.style.top = `${Math.max(4, Math.min(top, height - hint.offsetHeight - 4))}px`;
  },
  hide() { hint.hidden = true; },
};
function hinted(node, lines) {
  node.addEventListener("pointermove", (event) => tip.show(event, lines()));
  node.addEventListener("pointerleave", tip.hide);
  return node;
}

// A drawing as SVG that is made again when its box has another width: `draw(svg, width, height)`.
function svgChart(box, label, height, draw) {
  let drawn = 0;
  const redraw = () => {
    const width = Math.floor(box.clientWidth);
    if (!width || width === drawn) return;
    drawn = width;
    box.querySelector(":scope > svg")?.remove();
    const svg = d3.create("svg").attr("width", width).attr("height", height).attr("role", "group").attr("aria-label", label);
    draw(svg, width, height);
    box.append(svg.node());
  };
  new ResizeObserver(redraw).observe(box);
  return () => { drawn = 0; redraw(); };
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
// that gives the zoomed scale of one over the whole width; its `buttons` do the same as the keys.
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
  const along = (scale) => zoomed.rescaleX(scale);
  const button = (text, title, action) => element("button", { type: "button", title, "aria-label": title, onclick: action }, text);
  along.buttons = element("span", { class: "zoom" }, button("+", "Zoom in", () => canvas.call(zoom.scaleBy, 2)),
    button("−", "Zoom out", () => canvas.call(zoom.scaleBy, 0.5)), button("All", "Show all", () => canvas.call(zoom.transform, d3.zoomIdentity)));
  return along;
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
