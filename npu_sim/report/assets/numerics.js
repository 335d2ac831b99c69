// Each kernel against PyTorch, on the device's own inputs of that kernel.

function numericsPage(numerics) {
  const shown = (error, digits) => (error === null ? "not finite" : error.toExponential(digits));
  const isWrong = (row) => row.error === null || row.error > 1;
  const outputs = [
    { title: "output", text: (row) => row.name },
    { title: "Pearson r", value: (row) => row.pearson, text: (row) => (row.pearson === null ? "–" : row.pearson.toFixed(6)), number: true },
    { title: "RMS error", value: (row) => row.rms_error ?? Infinity, text: (row) => shown(row.rms_error, 2), number: true },
    { title: `PyTorch's in ${numerics.dtype}`, value: (row) => row.reference_error ?? Infinity, text: (row) => shown(row.reference_error, 2), number: true },
    { title: "problems", text: (row) => row.problems.join("; ") },
  ];
  const kernels = [
    { title: "kernel", text: (row) => row.kernel },
    { title: "node", text: (row) => row.node },
    { title: "computes", text: (row) => row.nodes.join(", ") },
    { title: "error, in multiples of what rounding explains", value: (row) => row.error ?? Infinity, text: (row) => (row.error === null ? "not finite" : row.error.toPrecision(3)), number: true },
  ];
  const wrong = numerics.kernels.filter(isWrong).length;
  const page = [
    element("p", { class: numerics.passed ? "good" : "bad" }, numerics.passed ? "The device agrees with PyTorch." : "The device differs from PyTorch."),
    element("p", { class: "note" }, `${numerics.seed === null ? "The inputs that were given" : `Random inputs, seed ${numerics.seed}`}. Each kernel is judged by itself: PyTorch computes its output from the device's own inputs; above 1, rounding does not explain the error (${wrong} of ${numerics.kernels.length} kernels).`),
    dataTable(outputs, numerics.outputs, {}), dataTable(kernels, numerics.kernels, { sort: 3, filter: true, rowClass: (row) => (isWrong(row) ? "wrong" : null) }),
  ];
  return { page, start() {} };
}
