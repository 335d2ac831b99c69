// The arena over the calls of a run: where each buffer is and when, the peak, and what would lower it.

function memoryPage(program) {
  const { arena, calls } = program;
  if (!arena.buffers.length) return { page: [element("p", { class: "note" }, "This program keeps nothing in the arena.")], start() {} };
  const producer = (buffer) => calls[buffer.first];
  const live = element("div", { class: "chart low" }), map = element("div", { class: "chart" });
  const margin = { left: 70, right: 12, top: 10, bottom: 26 };
  const whole = [0, calls.length];
  let x = null, y = null;
  const scales = (width, height, top) => {
    x = zoomed(d3.scaleLinear(whole, [margin.left, width - margin.right]));
    return d3.scaleLinear([0, top], [height - margin.bottom, margin.top]);
  };
  const liveChart = chartCanvas(live, `Bytes in use over ${calls.length} calls; the peak is ${formatBytes(arena.peak_bytes)} at call ${arena.peak}.`, (context, width, height) => {
    const up = scales(width, height, Math.max(arena.bytes, arena.peak_bytes));
    drawAxes(context, x, up, width, height, margin);
    clipped(context, width, height, margin, () => {
      context.fillStyle = themeColour("accent");
      arena.live.forEach((bytes, call) => context.fillRect(x(call), up(bytes), Math.max(1, x(call + 1) - x(call)), up(0) - up(bytes)));
      line(context, margin.left, width - margin.right, up(arena.bytes), themeColour("ink"));
    });
  });
  const chart = chartCanvas(map, `Map of the arena: ${arena.buffers.length} buffers by address and call. The table below lists those of the peak.`, (context, width, height) => {
    y = scales(width, height, arena.bytes);
    drawAxes(context, x, y, width, height, margin);
    clipped(context, width, height, margin, () => {
      for (const buffer of arena.buffers) {
        const left = x(buffer.first), top = y(buffer.offset + buffer.size);
        const w = Math.max(1, x(buffer.last + 1) - left), h = Math.max(0.5, y(buffer.offset) - top);
        if (left > width || left + w < margin.left) continue;
        context.fillStyle = familyColour(producer(buffer).family);
        context.globalAlpha = 0.75;
        context.fillRect(left, top, w, h);
        context.globalAlpha = 1;
        if (w > 3 && h > 3) { context.strokeStyle = themeColour("card"); context.lineWidth = 1; context.strokeRect(left, top, w, h); }
      }
      context.strokeStyle = themeColour("gone");
      context.lineWidth = 2;
      context.strokeRect(x(arena.peak), margin.top, Math.max(2, x(arena.peak + 1) - x(arena.peak)), height - margin.top - margin.bottom);
    });
  });
  map.id = "arena-map";
  const zoomed = zoomAlongX(chart, Math.max(1, calls.length / 8), () => { chart.redraw(); liveChart.redraw(); });
  chart.canvas.addEventListener("pointermove", (event) => {
    const area = chart.canvas.getBoundingClientRect();
    const call = x.invert(event.clientX - area.left), address = y.invert(event.clientY - area.top);
    const buffer = arena.buffers.find((b) => call >= b.first && call < b.last + 1 && address >= b.offset && address < b.offset + b.size);
    if (!buffer) { tip.hide(); return; }
    tip.show(event, [buffer.name, `${formatBytes(buffer.size)} at ${buffer.offset}`, `calls ${buffer.first} to ${buffer.last}, made by ${producer(buffer).node}`]);
  });
  chart.canvas.addEventListener("pointerleave", tip.hide);

  const gap = arena.bytes - arena.peak_bytes;
  const page = [
    facts([
      ["arena", formatBytes(arena.bytes)],
      ["peak", `${formatBytes(arena.peak_bytes)} in use during call ${arena.peak}, ${calls[arena.peak].kernel} (${calls[arena.peak].node})`],
      ["lost to placement", gap ? `${formatBytes(gap)}: the arena is larger than what is in use at the peak, by alignment and by gaps between buffers` : "nothing"],
    ]),
    element("h2", {}, "Bytes in use"), live,
    element("h2", {}, "Address × time"),
    element("div", { class: "bar" }, element("span", { class: "note" }, "Across: calls of a run. Up: addresses. A rectangle is a buffer, coloured by the kernel that makes it; the frame is the peak."), zoomed.buttons),
    legend(new Set(arena.buffers.map((buffer) => producer(buffer).family))), map,
    element("h2", {}, "What makes the peak, and what would lower it"),
    dataTable([
      { title: "buffer", text: (row) => row.name },
      { title: "bytes", value: (row) => row.size, text: (row) => formatBytes(row.size), number: true },
      { title: "calls", value: (row) => row.first, text: (row) => `${row.first} – ${row.last}` },
      { title: "made by", text: (row) => calls[row.first].kernel },
      { title: "peak without it", value: (row) => row.remaining, text: (row) => `${formatBytes(row.remaining)}, at call ${row.next_peak}`, number: true },
      { title: "how", text: (row) => advice(row, arena.peak_bytes) },
    ], arena.holders, { caption: `The buffers in use during call ${arena.peak}`, sort: 1 }),
  ];
  return { page, start() { chart.redraw(); liveChart.redraw(); } };
}

function advice(holder, peak) {
  const saved = peak - holder.remaining;
  const how = holder.idle ? `no call from ${holder.idle[0]} to ${holder.idle[1]} touches it: compute it again, move its reader forward, or keep it elsewhere meanwhile`
    : "used at the peak: fuse the kernels that write and read it, or work on it in pieces";
  return saved > 0 ? `${how} (saves ${formatBytes(saved)})` : "alone it would not help: another call needs as much";
}

function clipped(context, width, height, margin, draw) {
  context.save();
  context.beginPath();
  context.rect(margin.left, margin.top, width - margin.left - margin.right, height - margin.top - margin.bottom);
  context.clip();
  draw();
  context.restore();
}

function line(context, left, right, y, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.setLineDash([5, 4]);
  context.beginPath();
  context.moveTo(left, y);
  context.lineTo(right, y);
  context.stroke();
  context.setLineDash([]);
}

function drawAxes(context, x, y, width, height, margin) {
  context.fillStyle = themeColour("ink");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const tick of byteTicks(y.domain(), 5)) context.fillText(formatBytes(tick), margin.left - 6, y(tick));
  context.textAlign = "center";
  for (const tick of x.ticks(8)) if (Number.isInteger(tick)) context.fillText(tick, x(tick), height - margin.bottom / 2);
  context.textAlign = "left";
}
