// Two programs side by side, or one on two chips.

function comparePage(report) {
  const [a, b] = report.labels;
  const show = { bytes: formatBytes, flops: formatFlops, seconds: formatTime, count: formatCount, joules: formatEnergy, share: formatShare };
  const change = (row) => (row.a ? row.b / row.a - 1 : row.b ? Infinity : 0);
  const signed = (row) => (row.a === row.b ? "=" : row.a ? `${row.b >= row.a ? "+" : "−"}${Math.abs(100 * change(row)).toFixed(1)} %` : "new");
  const number = (title, key, format) => ({ title, value: (row) => row[key] ?? -1, text: (row) => (row[key] === null ? "–" : format(row)(row[key])), number: true });
  const hasTimes = report.is_measured || report.is_simulated;
  const totals = [
    { title: "total", text: (row) => row.name },
    number("a", "a", (row) => show[row.unit]), number("b", "b", (row) => show[row.unit]),
    { title: "change", value: change, text: signed, number: true },
  ];
  const kernels = [
    { title: "kernel", text: (row) => row.kernel },
    { title: "family", text: (row) => row.family },
    ...["count", "bytes", "seconds"].filter((unit) => unit !== "seconds" || hasTimes).flatMap((unit) => {
      const title = { count: "launches", bytes: "bytes", seconds: "time" }[unit];
      return [number(`${title}, a`, `${unit}_a`, () => show[unit]), number(`${title}, b`, `${unit}_b`, () => show[unit])];
    }),
    { title: "", text: (row) => (row.count_a ? row.count_b ? "" : "only in a" : "only in b") },
  ];
  const nodes = [
    { title: "node", text: (row) => row.node },
    { title: `kernels of a`, text: (row) => row.a.join(", ") || "–" },
    { title: `kernels of b`, text: (row) => row.b.join(", ") || "–" },
  ];
  // As in the graph: green is what is new in b, red what is gone.
  const rowClass = (row) => (row.count_a ? row.count_b ? null : "gone" : "fresh");
  const page = [
    facts([["a", a], ["b", b]]),
    report.layers.length ? comparedLayers(report) : [],
    dataTable(totals, report.totals, { caption: "Totals" }),
    dataTable(kernels, report.kernels, { caption: "By kernel", filter: true, rowClass }),
    report.nodes.length ? dataTable(nodes, report.nodes, { caption: "Nodes that other kernels compute", filter: true }) : element("p", { class: "note" }, "Each node is computed by the same kernels in both."),
  ];
  return { page, start() {} };
}

// The nodes of both simulated runs, a above b.
function comparedLayers(report) {
  const rows = d3.sort(report.layers, (row) => -Math.abs(row.seconds_b - row.seconds_a));
  const chosen = rows.slice(0, 20), longest = d3.max(chosen, (row) => Math.max(row.seconds_a, row.seconds_b));
  const programs = report.programs.map(({ simulated }) => simulated);
  const whole = Math.max(...programs.map((run) => run.run));
  const causes = new Set(programs.flatMap((run) => timeParts(run).filter(([, time]) => time > 0).map(([name]) => name)));
  const line = (letter, bar, value) => element("span", { class: "versus" }, element("span", { class: "soft" }, letter), bar, element("span", { class: "bar-value" }, value));
  const one = (row, side) => line(side, stackedBar([[row.family, row[`seconds_${side}`]]], longest, familyColour), formatTime(row[`seconds_${side}`]));
  const told = (row) => [titled(row), ...["a", "b"].map((side) => `${side}: ${formatTime(row[`seconds_${side}`])}${row[`joules_${side}`] === null ? "" : `, ${formatEnergy(row[`joules_${side}`])}`}`)];
  return [
    element("h2", {}, "Where the time goes"), partLegend([...causes]),
    element("div", { class: "layer" }, element("span", { class: "layer-name" }, "the run"), element("span", { class: "pair" }, programs.map((run, index) => hinted(line("ab"[index], stackedBar(timeParts(run), whole), formatTime(run.run)), () => [report.labels[index], ...timeParts(run).map(([name, time]) => `${name}: ${formatTime(time)}`)])))),
    element("h2", {}, "Nodes whose time changes the most"), legend(new Set(chosen.map((row) => row.family))),
    element("div", { class: "layers" }, chosen.map((row) => hinted(element("div", { class: "layer" }, element("span", { class: "layer-name" }, row.node, row.module ? element("span", { class: "soft" }, ` ${row.module}`) : null), element("span", { class: "pair" }, one(row, "a"), one(row, "b"))), () => told(row)))),
  ];
}
