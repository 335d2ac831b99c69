// The calls of a run one after the other: as they were measured, as they were simulated, or both.

function timelinePage(program, reveal) {
  const { calls, measured, simulated } = program;
  const shown = [];
  if (measured) {
    shown.push(timelineChart("trace", calls, calls.map((call) => call.seconds), reveal,
      `Medians of ${measured.runs} runs on ${measured.device}, each call by itself and put end to end.`));
  }
  if (simulated) {
    shown.push(timelineChart("simulated-trace", calls, simulated.calls, reveal,
      `Simulated on the chip ${simulated.chip}: the part of the run that each call adds. Calls overlap, so a call that others hide is short or missing.`));
  }
  const page = [
    element("p", { class: "note" }, "A double click shows the call in the graph."),
    legend(new Set(calls.map((call) => call.family))), shown.map((chart) => chart.page),
  ];
  return { page, start() { for (const chart of shown) chart.start(); } };
}

function timelineChart(id, calls, seconds, reveal, says) {
  const starts = d3.cumsum([0, ...seconds]);
  const whole = starts[calls.length];
  const box = element("div", { class: "chart low", id });
  const margin = { left: 12, right: 12 };
  let x = null;
  const tip = tooltip(box);
  const chart = chartCanvas(box, `Timeline of ${calls.length} kernel calls, ${formatTime(whole)} together.`, (context, width, height) => {
    x = zoomed(d3.scaleLinear([0, whole], [margin.left, width - margin.right]));
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
  const zoomed = zoomAlongX(chart, 2000, () => chart.redraw());
  const callAt = (event) => firstIndex(starts, (start) => start > x.invert(event.clientX - chart.canvas.getBoundingClientRect().left)) - 1;
  chart.canvas.addEventListener("pointermove", (event) => {
    const index = callAt(event), call = calls[index];
    if (!call) { tip.hide(); return; }
    tip.show(event, [`${index} ${call.kernel}`, call.node, formatTime(seconds[index]), `${formatBytes(call.bytes)}, ${formatFlops(call.flops)}`]);
  });
  chart.canvas.addEventListener("pointerleave", tip.hide);
  chart.canvas.addEventListener("dblclick", (event) => { const index = callAt(event); if (calls[index]) reveal(index); });
  d3.select(chart.canvas).on("dblclick.zoom", null);
  return { page: [element("p", { class: "note" }, says), box], start() { chart.redraw(); } };
}
