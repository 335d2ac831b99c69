// Each kernel against PyTorch, on the device's own inputs of that kernel.

function numericsPage(numerics) {
  const outputs = [
    { title: "output", text: (row) => row.name },
    { title: "Pearson r", value: (row) => row.pearson, text: (row) => (row.pearson === null ? "–" : row.pearson.toFixed(6)), number: true },
    { title: "RMS error", value: (row) => row.rms_error, text: (row) => row.rms_error.toExponential(2), number: true },
    { title: `PyTorch's in ${numerics.dtype}`, value: (row) => row.reference_error, text: (row) => row.reference_error.toExponential(2), number: true },
    { title: "problems", text: (row) => row.problems.join("; ") },
  ];
  const kernels = [
    { title: "kernel", text: (row) => row.kernel },
    { title: "node", text: (row) => row.node },
    { title: "computes", text: (row) => row.nodes.join(", ") },
    { title: "error, in multiples of what rounding explains", value: (row) => row.error, text: (row) => row.error.toPrecision(3), number: true },
  ];
  const wrong = numerics.kernels.filter((row) => row.error > 1).length;
  const page = [
    element("p", { class: numerics.passed ? "good" : "bad" }, numerics.passed ? "The device agrees with PyTorch." : "The device differs from PyTorch."),
    element("p", { class: "note" }, `Random inputs, seed ${numerics.seed}. Each kernel is judged by itself: PyTorch computes its output from the device's own inputs; above 1, rounding does not explain the error (${wrong} of ${numerics.kernels.length} kernels).`),
    dataTable(outputs, numerics.outputs, {}), dataTable(kernels, numerics.kernels, { sort: 3, filter: true, rowClass: (row) => (row.error > 1 ? "wrong" : null) }),
  ];
  return { page, start() {} };
}
