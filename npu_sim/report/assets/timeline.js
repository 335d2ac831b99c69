// The measured calls of a run one after the other.

function timelinePage(program, reveal) {
  const { calls } = program;
  const starts = d3.cumsum([0, ...calls.map((call) => call.seconds)]);
  const whole = starts[calls.length];
  const box = element("div", { class: "chart low", id: "trace" });
  const margin = { left: 12, right: 12 };
  let zoomed = d3.zoomIdentity, x = null;
  const tip = tooltip(box);
  const chart = chartCanvas(box, `Timeline of ${calls.length} kernel calls, ${formatTime(whole)} together.`, (context, width, height) => {
    x = zoomed.rescaleX(d3.scaleLinear([0, whole], [margin.left, width - margin.right]));
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const [first, last] = [Math.max(0, firstIndex(starts, (start) => x(start) > 0) - 1), firstIndex(starts, (start) => x(start) > width)];
    for (let index = first; index < Math.min(last, calls.length); index += 1) {
      const left = x(starts[index]), w = Math.max(0.5, x(starts[index + 1]) - left);
      context.fillStyle = familyColour(calls[index].family);
      context.fillRect(left, 30, w, height - 60);
      if (w > 4) { context.strokeStyle = themeColour("card"); context.strokeRect(left, 30, w, height - 60); }
      if (w > 50) {
        context.fillStyle = "#000";
        context.fillText(calls[index].kernel, Math.max(left, 0) + 5, height / 2, w - 10);
      }
    }
    context.fillStyle = themeColour("ink");
    for (const tick of x.ticks(8)) if (x(tick) < width - 60) context.fillText(formatTime(tick), x(tick), 14);
  });
  const zoom = d3.zoom().scaleExtent([1, 2000]).on("zoom", (event) => {
    const { width, height } = box.getBoundingClientRect();
    zoom.translateExtent([[0, 0], [width, height]]);
    zoomed = event.transform;
    chart.redraw();
  });
  d3.select(chart.canvas).call(zoom);
  const callAt = (event) => firstIndex(starts, (start) => start > x.invert(event.clientX - chart.canvas.getBoundingClientRect().left)) - 1;
  chart.canvas.addEventListener("pointermove", (event) => {
    const call = calls[callAt(event)];
    if (!call) { tip.hide(); return; }
    tip.show(event, [`${callAt(event)} ${call.kernel}`, call.node, formatTime(call.seconds), `${formatBytes(call.bytes)}, ${formatFlops(call.flops)}`]);
  });
  chart.canvas.addEventListener("pointerleave", tip.hide);
  chart.canvas.addEventListener("dblclick", (event) => { const index = callAt(event); if (calls[index]) reveal(index); });
  d3.select(chart.canvas).on("dblclick.zoom", null);
  chart.canvas.addEventListener("keydown", (event) => {
    const factor = { "+": 1.5, "=": 1.5, "-": 1 / 1.5 }[event.key], step = { ArrowLeft: 60, ArrowRight: -60 }[event.key];
    if (factor) d3.select(chart.canvas).call(zoom.scaleBy, factor);
    else if (step) d3.select(chart.canvas).call(zoom.translateBy, step / zoomed.k, 0);
    else if (event.key === "0") d3.select(chart.canvas).call(zoom.transform, d3.zoomIdentity);
    else return;
    event.preventDefault();
  });
  const page = [
    element("p", { class: "note" }, `Medians of ${program.measured.runs} runs on ${program.measured.device}, each call by itself and put end to end. A double click shows the call in the graph.`),
    legend(new Set(calls.map((call) => call.family))), box,
  ];
  return { page, start() { chart.redraw(); } };
}
