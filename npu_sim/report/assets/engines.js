// A simulated run over time: what each engine did, DRAM's traffic, and what lay where in the scratchpad.

const ROW = 26, AXIS = 24, RATE = 92, PAD = 190, SPACE = 30;
const SHADES = { loaded: 0.35, computed: 0.75, "handed on": 1, kept: 1 };
const isTransfer = (engine) => engine.startsWith("dma");

function engineChart(program, reveal) {
  const { calls, simulated } = program;
  const { tracks, scratchpad, clock_hz: clock } = simulated;
  const engines = d3.sort(Object.keys(tracks), (engine) => (isTransfer(engine) ? 1 : 0), (engine) => engine);
  const own = d3.cumsum([0, ...simulated.calls.map((call) => call.own)]);
  const rows = [["calls", simulated.calls.map((_, index) => [index, own[index], own[index + 1]])],
    ...engines.map((engine) => [engine, tracks[engine].map(([call, start, length]) => [call, start / clock, (start + length) / clock])])];
  const transfers = engines.filter(isTransfer).flatMap((engine) => tracks[engine].map(([call, start, length]) => [call, start / clock, length / clock]));
  const moving = d3.rollup(transfers, (spans) => d3.sum(spans, (span) => span[2]), (span) => span[0]);
  const areas = scratchpad.areas.map(([first, last, start, end, call, content]) => ({ first, last, start: start / clock, end: end / clock, call, content }));
  const rateTop = AXIS + rows.length * ROW + SPACE, padTop = rateTop + RATE + SPACE, height = padTop + PAD + 10;
  const box = element("div", { class: "chart", id: "engines" });
  box.style.height = `${height}px`;
  let x = null;
  const address = d3.scaleLinear([0, scratchpad.bytes], [padTop + PAD, padTop]);
  const chart = chartCanvas(box, `Engines of ${simulated.chip} over ${formatTime(simulated.run)}: ${engines.join(", ")}; DRAM's traffic; the scratchpad.`, (context, width) => {
    const left = width < 600 ? 58 : 74;
    x = zoomed(d3.scaleLinear([0, simulated.run], [left, width - 10])).range([left, width - 10]);
    drawTimeAxis(context, x, 12, width - 8, width / 90);
    rows.forEach(([name, spans], row) => {
      const top = AXIS + row * ROW;
      label(context, name, left, top + ROW / 2);
      drawBoxes(context, x, top + 2, ROW - 4, spans.map(([call, begin, end]) => [begin, end, familyColour(calls[call].family), titled(calls[call])]));
    });
    drawRate(context, width, left);
    drawScratchpad(context, width, left);
  });
  const zoomed = zoomAlongX(chart, 4000, () => chart.redraw());

  function label(context, text, left, y) {
    context.fillStyle = themeColour("ink");
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillText(text, left - 7, y);
    context.textAlign = "left";
  }

  function heading(context, text, left, top) {
    context.fillStyle = themeColour("soft");
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillText(text, left, top - 11);
  }

  // A call's bytes are spread evenly over its transfers.
  function drawRate(context, width, left) {
    const [low, high] = x.domain(), bins = new Float64Array(Math.max(1, Math.ceil((width - 10 - left) / 2)));
    const step = (high - low) / bins.length, roof = simulated.roof.bandwidth;
    for (const [call, start, length] of transfers) {
      if (start > high || start + length < low || !length) continue;
      const traffic = simulated.calls[call].traffic, rate = (traffic[`${simulated.outside}, read`] + traffic[`${simulated.outside}, written`]) / moving.get(call);
      const from = Math.max(0, Math.floor((start - low) / step)), to = Math.min(bins.length - 1, Math.floor((start + length - low) / step));
      for (let bin = from; bin <= to; bin += 1) bins[bin] += (rate * Math.max(0, Math.min(start + length, low + (bin + 1) * step) - Math.max(start, low + bin * step))) / step;
    }
    const y = d3.scaleLinear([0, roof * 1.05], [rateTop + RATE, rateTop]).clamp(true);
    heading(context, `${simulated.outside} traffic; the dashed line is its bandwidth`, left, rateTop);
    for (const rate of [0, roof]) label(context, onAxis(formatBandwidth)(rate), left, Math.max(y(rate), rateTop + 6));
    context.fillStyle = themeColour("accent");
    bins.forEach((rate, bin) => context.fillRect(left + 2 * bin, y(rate), 2, y(0) - y(rate)));
    line(context, left, width - 10, y(roof), themeColour("ink"));
  }

  function drawScratchpad(context, width, left) {
    heading(context, "Scratchpad by address", left, padTop);
    for (const tick of byteTicks([0, scratchpad.bytes], 5)) label(context, onAxis(formatBytes)(tick), left, address(tick));
    context.save();
    context.beginPath();
    context.rect(left, padTop, width - 10 - left, PAD);
    context.clip();
    for (const area of areas) {
      const a = x(area.start), b = x(area.end);
      if (b < left || a > width) continue;
      const top = address(area.last), size = Math.max(0.5, address(area.first) - top), wide = Math.max(0.5, b - a);
      context.globalAlpha = SHADES[area.content] ?? 1;
      context.fillStyle = area.content === "kept" ? themeColour("faint") : familyColour(calls[area.call].family);
      context.fillRect(a, top, wide, size);
      context.globalAlpha = 1;
      if (area.content === "handed on" && wide > 2) { context.strokeStyle = themeColour("ink"); context.lineWidth = 1; context.strokeRect(a, top, wide, size); }
    }
    context.restore();
    context.strokeStyle = themeColour("faint");
    context.lineWidth = 1;
    context.strokeRect(left, padTop, width - 10 - left, PAD);
  }

  function at(event) {
    const area = chart.canvas.getBoundingClientRect(), time = x.invert(event.clientX - area.left), y = event.clientY - area.top;
    const row = Math.floor((y - AXIS) / ROW);
    if (y >= AXIS && row < rows.length) {
      const [name, spans] = rows[row], near = 2 * (x.invert(1) - x.invert(0));
      const span = spans.find(([, begin, end]) => time >= begin && time <= end) ?? spans.find(([, begin, end]) => time >= begin - near && time <= end + near);
      return span ? { name, call: span[0], begin: span[1], end: span[2] } : null;
    }
    if (y < padTop || y > padTop + PAD) return null;
    const byte = address.invert(y);
    const hit = areas.filter((each) => time >= each.start && time <= each.end && byte >= each.first && byte < each.last).pop();
    return hit ? { name: "scratchpad", ...hit } : null;
  }

  chart.canvas.addEventListener("pointermove", (event) => {
    const hit = at(event);
    if (!hit) { tip.hide(); return; }
    const call = calls[hit.call], run = simulated.calls[hit.call];
    if (hit.name === "scratchpad") tip.show(event, [titled(call), `${formatBytes(hit.last - hit.first)} ${hit.content}, from byte ${formatCount(hit.first)}`, `for ${formatTime(hit.end - hit.start)}`]);
    else tip.show(event, [titled(call), `${hit.call} ${call.kernel}`, `${hit.name}: ${formatTime(hit.end - hit.begin)} at ${formatTime(hit.begin)}`, `adds ${formatTime(run.own)} to the run, ${formatCount(run.cycles)} cycles`, `tile ${run.tile || "–"}, ${formatCount(run.tiles)} of them`]);
  });
  chart.canvas.addEventListener("pointerleave", tip.hide);
  chart.canvas.addEventListener("dblclick", (event) => { const hit = at(event); if (hit) reveal(hit.call); });
  d3.select(chart.canvas).on("dblclick.zoom", null);
  const joined = simulated.gap ? ` Instructions of one call that are less than ${formatTime(simulated.gap)} apart are drawn as one.` : "";
  const says = `Simulated on the chip ${simulated.chip}. The line “calls” shows the part of the run that each call adds; engines work on several calls at once.${joined} A double click shows the call in the graph.`;
  return { page: [element("h2", {}, `Engines of ${simulated.chip}`), element("div", { class: "bar" }, element("span", { class: "note" }, says), zoomed.buttons), box, element("p", { class: "note" }, "In the scratchpad, light is what a call loads and dark is what it computes, taken from its first instruction to its last; a frame is what one call hands on to a later one, grey what stays from run to run.")], start() { chart.redraw(); } };
}
