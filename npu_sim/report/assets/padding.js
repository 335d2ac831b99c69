// What padded channels cost.

function paddingPage(program) {
  const whole = d3.sum(program.padding, (row) => row.waste);
  if (!whole) return { page: [element("p", { class: "note" }, "No buffer has padded channels.")], start() {} };
  const columns = [
    { title: "buffer", text: (row) => row.name },
    { title: "kind", text: (row) => row.kind },
    { title: "in memory", text: (row) => row.type },
    { title: "bytes", value: (row) => row.bytes, text: (row) => formatBytes(row.bytes), number: true },
    { title: "of these without data", value: (row) => row.waste, text: (row) => formatBytes(row.waste), number: true },
    { title: "share", value: (row) => row.waste / row.bytes, text: (row) => formatShare(row.waste / row.bytes), number: true },
  ];
  const all = d3.sum(program.padding, (row) => row.bytes);
  const page = [facts([["without data", `${formatBytes(whole)} of ${formatBytes(all)} in buffers with padded channels (${formatShare(whole / all)})`]]),
    element("p", { class: "note" }, "Arena buffers share memory, so the arena is smaller than their sum."),
    dataTable(columns, program.padding, { sort: 4, filter: true })];
  return { page, start() {} };
}
