// The kernels by what they cost together, and every call.

function kernelsPage(program, reveal) {
  const { measured, simulated } = program;
  const calls = program.calls.map((call, index) => ({ ...call, index, simulated: simulated ? simulated.calls[index].own : null }));
  const cost = measured ? (call) => call.seconds : simulated ? (call) => call.simulated : (call) => call.bytes;
  const whole = d3.sum(calls, cost);
  const rows = d3.groups(calls, (call) => call.kernel).map(([kernel, members]) => ({
    kernel, family: members[0].family, calls: members.length, flops: d3.sum(members, (c) => c.flops), bytes: d3.sum(members, (c) => c.bytes),
    seconds: d3.sum(members, (c) => c.seconds), simulated: d3.sum(members, (c) => c.simulated), share: whole ? d3.sum(members, cost) / whole : 0,
  }));
  const figures = [
    { title: "FLOP", value: (row) => row.flops, text: (row) => formatFlops(row.flops), number: true },
    { title: "bytes", value: (row) => row.bytes, text: (row) => formatBytes(row.bytes), number: true },
  ];
  if (measured) figures.push({ title: "time", value: (row) => row.seconds, text: (row) => formatTime(row.seconds), number: true });
  if (simulated) figures.push({ title: "simulated", value: (row) => row.simulated, text: (row) => formatTime(row.simulated), number: true });
  const columns = [
    { title: "kernel", text: (row) => row.kernel },
    { title: "family", text: (row) => row.family },
    { title: "launches", value: (row) => row.calls, text: (row) => formatCount(row.calls), number: true },
    ...figures,
    { title: `share of the ${measured ? "time" : simulated ? "simulated time" : "bytes"}`, value: (row) => row.share, text: (row) => formatShare(row.share), number: true },
  ];
  const each = [
    { title: "call", value: (row) => row.index, text: (row) => `${row.index} ${row.kernel}` },
    { title: "node", text: (row) => row.node },
    { title: "writes", text: (row) => row.out.join("; ") },
    ...figures,
  ];
  const says = measured ? `Each call was timed by itself on ${measured.device}; the sum is ${formatTime(whole)}, ${compared(whole, measured.run)} the ${formatTime(measured.run)} of a whole run, in which the device does not stop after each call.`
    : simulated ? `Nothing was measured: kernels are ranked by what they add to a run on the chip ${simulated.chip}.` : "Nothing was measured: kernels are ranked by the bytes that they move.";
  const page = [
    element("p", { class: "note" }, says),
    legend(new Set(calls.map((call) => call.family))), bars(calls, cost, whole), dataTable(columns, rows, { caption: "By kernel", sort: columns.length - 1 }),
    dataTable(each, calls, { caption: "Every call", filter: true, onrow: (row) => reveal(row.index) }),
  ];
  return { page, start() {} };
}

// How one time is to another, as words: a share of a percent is no difference.
function compared(time, other) {
  return Math.abs(time - other) <= 0.005 * other ? "as much as" : time > other ? "more than" : "less than";
}

// The nodes that cost the most, each named by itself and coloured by its family.
function bars(calls, cost, whole) {
  const nodes = d3.groups(calls, (call) => call.node).map(([node, members]) => ({ node, module: members[0].module, kernel: members[0].kernel, family: members[0].family, cost: d3.sum(members, cost) }));
  const top = d3.sort(nodes, (row) => -row.cost).slice(0, 12);
  return element("ul", { class: "bars", "aria-label": "The most expensive nodes" }, top.map((row) => hinted(element("li", {}, element("span", { class: "bar-name" }, row.node, row.module ? element("span", { class: "soft" }, ` ${row.module}`) : null),
    stackedBar([[row.family, row.cost]], top[0].cost, familyColour), element("span", { class: "bar-value" }, formatShare(whole ? row.cost / whole : 0))), () => [titled(row), row.kernel])));
}
