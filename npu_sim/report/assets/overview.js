// The first page: what was compiled, for what, and its totals.

function overviewPage(report, program, open) {
  const totals = program.totals;
  const { measured, simulated } = program;
  const arena = program.arena;
  const tiles = [
    ["kernel launches", formatCount(program.calls.length), "kernels"],
    ["work", formatFlops(totals.FLOPs), "roofline"],
    ["bytes moved", formatBytes(totals["bytes moved"]), "roofline"],
    ["weights", formatBytes(totals["weight bytes"]), null],
    ["arena", formatBytes(totals["arena bytes"]), "memory"],
    ["padding", formatBytes(totals["padding waste bytes"]), "padding"],
  ];
  if (simulated) {
    tiles.unshift(["simulated run", formatTime(simulated.run), "timeline"], ["the roofline allows", formatTime(simulated.least), "roofline"],
      ["matrix peak in use", formatShare(simulated.utilization), "roofline"], [`${simulated.outside} bandwidth in use`, formatShare(simulated.bandwidth_utilization), "traffic"]);
    if (simulated.energy) tiles.splice(4, 0, ["energy", formatEnergy(d3.sum(Object.values(simulated.energy))), "layers"]);
  }
  if (measured) tiles.unshift(["measured run", formatTime(measured.run), "timeline"]);
  const header = [["target", program.target], ["compute dtype", program.dtype], ["compiler", program.compiler]];
  if (measured) header.push(["measured on", `${measured.device}, median of ${measured.runs} runs`]);
  if (simulated) header.push(["simulated on", `chip ${simulated.chip}, ${formatCount(simulated.cycles)} cycles at ${Number((simulated.clock_hz / 1e9).toPrecision(4))} GHz`]);
  if (arena.buffers.length) {
    header.push(["peak of the arena", `${formatBytes(arena.peak_bytes)} in use at call ${arena.peak}, ${program.calls[arena.peak].node}`]);
  }
  if (report.partition) {
    header.push(["partitions", report.partition.map((part) => `${part.device} (${counted(part.nodes, "node")})`).join(", ")]);
  }
  const spec = [
    { title: "name", text: (row) => row.name },
    { title: "type", text: (row) => row.type },
    { title: "updated in place", text: (row) => row.donor ?? "" },
  ];
  return [
    element("div", { class: "tiles" }, tiles.map(([name, value, tab]) => element(tab ? "button" : "div",
      tab ? { type: "button", class: "tile", onclick: () => open(tab) } : { class: "tile" },
      element("strong", {}, value), element("span", {}, name)))),
    simulated ? runParts(simulated) : [],
    facts(header),
    report.notes.map((note) => element("p", { class: "note" }, note)),
    element("h2", {}, "Inputs"), dataTable(spec.slice(0, 2), program.inputs, { filter: true }),
    element("h2", {}, "Outputs"), dataTable(spec, program.outputs, { filter: true }),
    program.weights.length ? [element("h2", {}, "Weights"), dataTable([
      { title: "name", text: (row) => row.name },
      { title: "stored as", text: (row) => row.type },
      { title: "bytes", value: (row) => row.bytes, text: (row) => formatBytes(row.bytes), number: true },
      { title: "made from", text: (row) => row.recipe },
    ], program.weights, { filter: true })] : [],
  ];
}

// Bars of a simulated run: where its time and its energy go, and how long each engine works.
function runParts(simulated) {
  const bar = (title, parts, whole, format) => [element("h2", {}, title), hinted(stackedBar(parts, whole), () => parts.map(([name, value]) => `${name}: ${format(value)}`)),
    swatchList(parts.filter(([, value]) => value > 0).map(([name, value]) => [`${name} ${formatShare(value / whole)}`, partColour(name)]), title)];
  const engines = d3.sort(Object.entries(simulated.busy), ([, time]) => -time).filter(([, time]) => time > 0);
  return [
    bar("Where the time goes", timeParts(simulated), simulated.run, formatTime),
    simulated.energy ? bar("Where the energy goes", Object.entries(simulated.energy), d3.sum(Object.values(simulated.energy)), formatEnergy) : [],
    element("h2", {}, "Engines at work"),
    element("ul", { class: "bars" }, engines.map(([engine, time]) => element("li", {}, element("span", { class: "bar-name" }, engine), stackedBar([["computing", time]], simulated.run), element("span", { class: "bar-value" }, formatShare(time / simulated.run))))),
  ];
}
