// Time and energy of each node of a simulated run, in stacked bars: computing and stalls by cause, energy by part.

const LAYERS_AT_ONCE = 80;

// The parts of a call's time: computing first.
const timeParts = (run) => [["computing", run.computing], ...Object.entries(run.stalls)];

// Calls of one node together: {node, family, index, calls, time: Map, energy: Map or null, own, joules}.
function layersOf(program) {
  const groups = d3.groups(program.calls.map((call, index) => ({ ...call, index })), (call) => call.node);
  const sums = (calls, parts) => d3.rollup(calls.flatMap(parts), (pairs) => d3.sum(pairs, (pair) => pair[1]), (pair) => pair[0]);
  return groups.map(([node, calls]) => {
    const time = sums(calls, (call) => timeParts(call.simulated));
    const energy = program.simulated.energy ? sums(calls, (call) => Object.entries(call.simulated.energy)) : null;
    return { node, family: calls[0].family, kernel: calls[0].kernel, module: calls[0].module, index: calls[0].index, time, energy, own: d3.sum(time.values()), joules: energy ? d3.sum(energy.values()) : 0 };
  });
}

function layersPage(program, reveal) {
  const { simulated } = program;
  const layers = layersOf(program);
  const orders = { "order of the run": (layer) => layer.index, "most time": (layer) => -layer.own, "most stalls": (layer) => (layer.time.get("computing") ?? 0) - layer.own };
  if (simulated.energy) orders["most energy"] = (layer) => -layer.joules;
  const causes = Object.keys(simulated.stalls).filter((cause) => simulated.stalls[cause] > 0);
  const longest = d3.max(layers, (layer) => layer.own), most = d3.max(layers, (layer) => layer.joules);
  const list = element("div", { class: "layers", role: "table", "aria-label": "Time and energy by node" });
  const more = element("button", { type: "button", onclick: () => fill(Infinity) });
  const order = element("select", { id: "layer-order", onchange: () => fill(LAYERS_AT_ONCE) }, Object.keys(orders).map((name) => element("option", {}, name)));
  if (layers.length > LAYERS_AT_ONCE) order.value = "most time";

  function fill(count) {
    const sorted = d3.sort(layers, orders[order.value]);
    list.replaceChildren(...sorted.slice(0, count).map(row));
    more.hidden = sorted.length <= count;
    more.textContent = `Show all ${formatCount(sorted.length)} nodes`;
  }

  function row(layer) {
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.backgroundColor = familyColour(layer.family);
    const told = (parts, format, whole) => () => [titled(layer), layer.kernel, ...[...parts].filter(([, value]) => value > 0).map(([name, value]) => `${name}: ${format(value)} (${formatShare(value / whole)})`)];
    const time = hinted(element("span", { class: "layer-time", role: "cell" }, stackedBar(layer.time, longest), element("span", { class: "bar-value" }, formatTime(layer.own))), told(layer.time, formatTime, layer.own));
    const energy = layer.energy ? hinted(element("span", { class: "layer-energy", role: "cell" }, stackedBar(layer.energy, most), element("span", { class: "bar-value" }, formatEnergy(layer.joules))), told(layer.energy, formatEnergy, layer.joules)) : null;
    return element("div", { class: "layer", role: "row" }, element("span", { class: "layer-name", role: "rowheader" }, swatch, element("button", { type: "button", class: "link", title: titled(layer), onclick: () => reveal(layer.index) }, layer.node), layer.module ? element("span", { class: "soft" }, ` ${layer.module}`) : null), time, energy);
  }

  fill(LAYERS_AT_ONCE);
  const page = [
    element("div", { class: "layer head" }, element("label", {}, "Order ", order), element("div", {}, element("strong", {}, "Time"), partLegend(["computing", ...causes])),
      simulated.energy ? element("div", {}, element("strong", {}, "Energy"), partLegend(Object.keys(simulated.energy).filter((part) => simulated.energy[part] > 0)))
        : element("p", { class: "note" }, `The chip file of ${simulated.chip} has no energies, so none are shown.`)),
    list, more,
  ];
  return { page, start() {} };
}
