// Bytes that a simulated run moves at each level of memory, by family and by node.

function trafficPage(program, reveal) {
  const { simulated } = program;
  const calls = program.calls.map((call, index) => ({ ...call, index }));
  const levels = Object.keys(simulated.traffic), families = d3.groups(calls, (call) => call.family);
  const most = Math.max(...Object.values(simulated.traffic), 1);
  const moved = levels.map((level) => {
    const parts = d3.sort(families.map(([family, members]) => [family, d3.sum(members, (call) => call.simulated.traffic[level])]), ([, bytes]) => -bytes);
    return hinted(element("li", {}, element("span", { class: "bar-name" }, level), stackedBar(parts, most, familyColour), element("span", { class: "bar-value" }, formatBytes(simulated.traffic[level]))),
      () => [level, ...parts.filter(([, bytes]) => bytes).map(([family, bytes]) => `${family}: ${formatBytes(bytes)}`)]);
  });
  const dram = d3.sum(levels.filter((level) => level.startsWith(simulated.outside)), (level) => simulated.traffic[level]);
  const bytes = (title, value) => ({ title, value, text: (row) => formatBytes(value(row)), number: true });
  const columns = [
    { title: "node", text: (row) => row.node }, { title: "kernel", text: (row) => row.kernel },
    ...levels.map((level) => bytes(level, (row) => row.simulated.traffic[level])),
    bytes("scratchpad in use", (row) => row.simulated.used),
  ];
  const kept = simulated.kept ? [["weights that stay on the chip", formatBytes(simulated.kept)]] : [];
  const page = [
    facts([[`${simulated.outside}, in all`, formatBytes(dram)], ["no chip moves less than", formatBytes(simulated.compulsory)], ...kept,
      [`${simulated.outside} bandwidth in use`, formatShare(simulated.bandwidth_utilization)]]),
    element("h2", {}, "By level"), legend(new Set(calls.map((call) => call.family))), element("ul", { class: "bars" }, moved),
    dataTable(columns, calls, { caption: "By call", sort: 2, filter: true, onrow: (row) => reveal(row.index) }),
  ];
  return { page, start() {} };
}
