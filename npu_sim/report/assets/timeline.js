// The calls of a run one after the other, as they were measured; and the engines of a chip, as they were simulated.

function timelinePage(program, reveal) {
  const { calls, measured, simulated } = program;
  const charts = [];
  if (simulated) charts.push(engineChart(program, reveal));
  if (measured) charts.push(timelineChart("trace", calls, calls.map((call) => call.seconds), reveal,
    `Medians of ${measured.runs} runs on ${measured.device}, each call by itself and put end to end.`));
  const page = [legend(new Set(calls.map((call) => call.family))), charts.map((chart) => chart.page)];
  return { page, start() { for (const chart of charts) chart.start(); } };
}

const FONT = "11px system-ui, sans-serif";

function drawTimeAxis(context, x, y, right, count) {
  const { unit, ticks } = timeTicks(x, count);
  context.fillStyle = themeColour("ink");
  context.font = FONT;
  context.textBaseline = "middle";
  context.textAlign = "center";
  const [left, end] = x.range();
  for (const [at, text] of ticks) if (x(at) >= left && x(at) < end - 34) context.fillText(text, x(at), y);
  context.textAlign = "right";
  context.fillText(unit, right, y);
  context.textAlign = "left";
}

// Boxes [begin, end, colour, text] on a line of a chart, those in sight; a text only where there is room for it.
function drawBoxes(context, x, top, height, boxes) {
  const [low, high] = x.range();
  const ground = themeColour("card");
  context.font = FONT;
  context.textBaseline = "middle";
  for (const [begin, end, colour, text] of boxes) {
    const left = Math.max(low, x(begin)), right = Math.min(high, x(end));
    if (right < low || left > high) continue;
    context.fillStyle = colour;
    context.fillRect(left, top, Math.max(0.5, right - left), height);
    if (right - left > 4) { context.strokeStyle = ground; context.lineWidth = 1; context.strokeRect(left, top, right - left, height); }
    if (text && right - left > 44) { context.fillStyle = "#000"; context.fillText(fitting(context, text, right - left - 8), left + 4, top + height / 2); }
  }
}

// The text, without the module in brackets or with its end cut off where there is no room.
function fitting(context, whole, room) {
  if (context.measureText(whole).width <= room) return whole;
  const text = whole.replace(/ \(.*\)$/, "");
  if (context.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return `${text.slice(0, length)}…`;
}

function timelineChart(id, calls, seconds, reveal, says) {
  const starts = d3.cumsum([0, ...seconds]), whole = starts[calls.length];
  const box = element("div", { class: "chart low", id });
  let x = null;
  const chart = chartCanvas(box, `Timeline of ${calls.length} kernel calls, ${formatTime(whole)} together.`, (context, width, height) => {
    x = zoomed(d3.scaleLinear([0, whole], [12, width - 12]));
    const first = Math.max(0, firstIndex(starts, (start) => x(start) > 0) - 1), last = firstIndex(starts, (start) => x(start) > width);
    drawBoxes(context, x, 30, height - 60, d3.range(first, Math.min(last, calls.length)).map((i) => [starts[i], starts[i + 1], familyColour(calls[i].family), titled(calls[i])]));
    drawTimeAxis(context, x, 14, width - 8, width / 90);
  });
  const zoomed = zoomAlongX(chart, 2000, () => chart.redraw());
  const callAt = (event) => firstIndex(starts, (start) => start > x.invert(event.clientX - chart.canvas.getBoundingClientRect().left)) - 1;
  chart.canvas.addEventListener("pointermove", (event) => {
    const index = callAt(event), call = calls[index];
    if (!call) { tip.hide(); return; }
    tip.show(event, [titled(call), `${index} ${call.kernel}`, formatTime(seconds[index]), `${formatBytes(call.bytes)}, ${formatFlops(call.flops)}`]);
  });
  chart.canvas.addEventListener("pointerleave", tip.hide);
  chart.canvas.addEventListener("dblclick", (event) => { const index = callAt(event); if (calls[index]) reveal(index); });
  d3.select(chart.canvas).on("dblclick.zoom", null);
  return { page: [element("h2", {}, "Measured"), element("div", { class: "bar" }, element("span", { class: "note" }, `${says} A double click shows the call in the graph.`), zoomed.buttons), box], start() { chart.redraw(); } };
}
