// Two programs side by side.

function comparePage(report) {
  const [a, b] = report.labels;
  const show = { bytes: formatBytes, flops: formatFlops, seconds: formatTime, count: formatCount };
  const change = (row) => (row.a ? row.b / row.a - 1 : row.b ? Infinity : 0);
  const signed = (row) => (row.a === row.b ? "=" : row.a ? `${row.b >= row.a ? "+" : "−"}${Math.abs(100 * change(row)).toFixed(1)} %` : "new");
  const number = (title, key, format) => ({ title, value: (row) => row[key] ?? -1, text: (row) => (row[key] === null ? "–" : format(row)(row[key])), number: true });
  const totals = [
    { title: "total", text: (row) => row.name },
    number(a, "a", (row) => show[row.unit]), number(b, "b", (row) => show[row.unit]),
    { title: "change", value: change, text: signed, number: true },
  ];
  const kernels = [
    { title: "kernel", text: (row) => row.kernel },
    ...["count", "bytes", "seconds"].filter((unit) => unit !== "seconds" || report.is_measured).flatMap((unit) => {
      const title = { count: "launches", bytes: "bytes", seconds: "time" }[unit];
      return [number(`${title}, a`, `${unit}_a`, () => show[unit]), number(`${title}, b`, `${unit}_b`, () => show[unit])];
    }),
  ];
  const nodes = [
    { title: "node", text: (row) => row.node },
    { title: `kernels of a`, text: (row) => row.a.join(", ") || "–" },
    { title: `kernels of b`, text: (row) => row.b.join(", ") || "–" },
  ];
  const page = [
    facts([["a", a], ["b", b]]),
    dataTable(totals, report.totals, { caption: "Totals" }),
    dataTable(kernels, report.kernels, { caption: "By kernel", filter: true, rowClass: (row) => (row.count_a === row.count_b ? null : row.count_a < row.count_b ? "more" : "fewer") }),
    report.nodes.length ? dataTable(nodes, report.nodes, { caption: "Nodes that other kernels compute", filter: true }) : element("p", { class: "note" }, "Each node is computed by the same kernels in both."),
  ];
  return { page, start() {} };
}
