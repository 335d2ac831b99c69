// Every kernel by its arithmetic intensity, under the roof of the device that measured it or of the chip that simulated
// it. Without times: work over bytes.

// Equal calls are one point, whose `calls` are their indices. `figures(call)` gives {bytes, seconds}; seconds may be null.
function rooflinePoints(calls, figures) {
  const rows = calls.map((call, index) => ({ ...call, ...figures(call), index }));
  const groups = d3.groups(rows, (call) => [call.kernel, call.flops, call.bytes, call.family].join("|"));
  return groups.map(([, members]) => ({
    kernel: members[0].kernel, node: titled(members[0]), family: members[0].family, flops: members[0].flops, bytes: members[0].bytes,
    intensity: members[0].flops / Math.max(1, members[0].bytes), calls: members.map((call) => call.index),
    seconds: members[0].seconds === null ? null : d3.median(members, (call) => call.seconds),
    total: members[0].seconds === null ? null : d3.sum(members, (call) => call.seconds),
  }));
}

// A simulated call's bytes from and to DRAM or, on a chip without, over the link, and the time that it takes of the chip:
// its part of the run or, where other calls hide it, the time of the engine that works longest for it.
const onChip = (outside) => ({ simulated: run }) => {
  const transfers = d3.sum(Object.entries(run.busy).filter(([engine]) => isTransfer(engine)), ([, time]) => time);
  return { bytes: run.traffic[`${outside}, read`] + run.traffic[`${outside}, written`], seconds: Math.max(run.own, transfers, ...Object.values(run.busy)) };
};

function rooflinePage(program, given) {
  const { simulated, measured } = program;
  const shown = [];
  if (simulated) {
    const peaks = Object.entries(simulated.roof.flops);
    shown.push(rooflineSection(rooflinePoints(program.calls, onChip(simulated.outside)), {
      id: "chip-roofline", title: `Roofline of ${simulated.chip}`, bytes: `${simulated.outside} bytes`, time: "simulated",
      roof: peaks.length ? { bandwidth: simulated.roof.bandwidth, flops: d3.max(peaks, ([, rate]) => rate), peaks } : { bandwidth: simulated.roof.bandwidth, flops: Infinity, peaks },
      says: `The roof is the chip's: the bandwidth of its ${simulated.outside}, and the peak of its matrix engine for each dtype that the program multiplies. Bytes are those that the call moves ${simulated.outside === "link" ? "over the link" : "from and to DRAM"}; one that moves none stands at the right edge. Time is what the call adds to the run or, where other calls hide it, that of its busiest engine.`,
    }));
  }
  if (measured || given || !simulated) {
    const points = rooflinePoints(program.calls, (call) => ({ bytes: call.bytes, seconds: call.seconds }));
    const timed = points.filter((point) => point.seconds > 0 && point.flops > 0 && point.bytes > 0);
    const seen = { bandwidth: d3.max(points, (p) => (p.seconds > 0 ? p.bytes / p.seconds : 0)), flops: d3.max(timed, (p) => p.flops / p.seconds) };
    const roof = given ?? (measured && timed.length ? seen : null);
    const says = given?.of_device ? "The roof is what the device says of itself. Data that its caches hold may be above it."
      : given ? `The roof is what was given with --bandwidth and --flops.${measured ? "" : " Nothing was measured, so each kernel is on it."}` : roof
      ? "The roof is the highest rate that a kernel of this program reached; give the device's own with --bandwidth and --flops."
      : "Nothing was measured, so the chart shows work over bytes; the lines are equal intensity. Give --weights to measure, or --npu to simulate.";
    shown.push(rooflineSection(points, { id: "roofline", title: measured ? "Measured" : "Work and bytes", bytes: "bytes", time: "measured", roof, says }));
  }
  return { page: shown.map((section) => section.page), start() { for (const section of shown) section.start(); } };
}

function rooflineSection(points, { id, title, bytes, time, roof, says }) {
  const bound = (point) => (roof ? Math.max(point.bytes / roof.bandwidth, point.flops / roof.flops) : null);
  const isTimed = points.some((point) => point.seconds > 0);
  const working = points.filter((point) => point.flops > 0 && (isTimed ? point.seconds > 0 : point.bytes > 0));
  const page = [element("h2", {}, title)];
  if (roof) {
    const peaks = roof.peaks?.map(([dtype, rate]) => [`compute, ${dtype}`, formatRate(rate)]) ?? [["compute", formatRate(roof.flops)]];
    const ridge = Number.isFinite(roof.flops) ? [["ridge", `${(roof.flops / roof.bandwidth).toFixed(1)} FLOP per byte`]] : [];
    page.push(facts([["bandwidth", formatBandwidth(roof.bandwidth)], ...peaks, ...ridge]));
  }
  page.push(element("p", { class: "note" }, says), legend(new Set(working.map((point) => point.family))));
  const box = element("div", { class: "chart", id });
  const start = working.length ? svgChart(box, title, 440, (svg, width, height) => drawRoofline(svg, width, height, working, roof, (point) => point.seconds ?? bound(point), id)) : () => {};
  if (working.length) page.push(box);
  const columns = [
    { title: "kernel", text: (row) => row.kernel },
    { title: "first node", text: (row) => row.node },
    { title: "family", text: (row) => row.family },
    { title: "calls", value: (row) => row.calls.length, text: (row) => formatCount(row.calls.length), number: true },
    { title: "FLOP per call", value: (row) => row.flops, text: (row) => formatFlops(row.flops), number: true },
    { title: `${bytes} per call`, value: (row) => row.bytes, text: (row) => formatBytes(row.bytes), number: true },
    { title: "FLOP per byte", value: (row) => row.intensity, text: (row) => (row.bytes ? row.intensity.toFixed(2) : "–"), number: true },
  ];
  if (roof) columns.push({ title: "time at the roof", value: bound, text: (row) => formatTime(bound(row)), number: true });
  if (isTimed) {
    columns.push({ title: time, value: (row) => row.seconds, text: (row) => formatTime(row.seconds), number: true });
    columns.push({ title: "bandwidth", value: (row) => row.bytes / row.seconds, text: (row) => (row.seconds ? formatBandwidth(row.bytes / row.seconds) : "–"), number: true });
    if (roof) columns.push({ title: "share of the roof", value: (row) => bound(row) / row.seconds, text: (row) => (row.seconds ? formatShare(bound(row) / row.seconds) : "–"), number: true });
  }
  page.push(dataTable(columns, points, { caption: "Equal calls are one row; those without FLOP are in the table only", sort: isTimed ? columns.findIndex((column) => column.title === time) : 5, filter: true }));
  return { page, start };
}

// `time` is a point's seconds, timed or at the roof.
function drawRoofline(svg, width, height, points, roof, time, id) {
  const margin = { left: 84, right: 16, top: 26, bottom: 46 };
  const across = roof ? (p) => p.intensity : (p) => p.bytes, up = roof ? (p) => p.flops / time(p) : (p) => p.flops;
  const padded = ([low, high], more = []) => [Math.min(low, ...more) / 2, Math.max(high, ...more) * 2];
  const isFinite = roof && Number.isFinite(roof.flops);
  const x = d3.scaleLog(padded(d3.extent(points.filter((p) => p.bytes > 0), across).map((value) => value ?? 1), isFinite ? [roof.flops / roof.bandwidth] : []), [margin.left, width - margin.right]);
  const y = d3.scaleLog(padded(d3.extent(points, up), isFinite ? [roof.flops] : []), [height - margin.bottom, margin.top]);
  const place = (p) => (p.bytes > 0 ? x(across(p)) : width - margin.right - 6);
  const most = Math.max(2, Math.floor(width / 110));
  const bottom = roof ? d3.axisBottom(x).tickValues(decades(x.domain(), most)).tickFormat(d3.format("~g")) : d3.axisBottom(x).tickValues(d3.range(0, 5).flatMap((unit) => (width < 600 ? [1] : [1, 32]).map((n) => n * 1024 ** unit)).filter((b) => b >= x.domain()[0] && b <= x.domain()[1])).tickFormat(onAxis(formatBytes));
  svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - margin.bottom})`).call(bottom);
  svg.append("g").attr("class", "axis").attr("transform", `translate(${margin.left},0)`).call(d3.axisLeft(y).tickValues(decades(y.domain(), 8)).tickFormat(onAxis(roof ? formatRate : formatFlops)));
  svg.append("text").attr("class", "label end").attr("x", width - margin.right).attr("y", height - 8).text(roof ? "FLOP per byte" : "bytes per call");
  svg.append("text").attr("class", "label").attr("x", 8).attr("y", 14).text(roof ? "FLOP/s" : "FLOP per call");
  const [left, right] = x.domain(), path = (at) => d3.line()(at.map(([a, b]) => [x(a), y(b)]));
  svg.append("clipPath").attr("id", `plot-${id}`).append("rect").attr("x", margin.left).attr("y", margin.top).attr("width", width - margin.left - margin.right).attr("height", height - margin.top - margin.bottom);
  const plot = svg.append("g").attr("clip-path", `url(#plot-${id})`);
  if (roof) {
    for (const [dtype, flops] of roof.peaks ?? [[null, roof.flops]]) {
      const turn = Math.min(Math.max(flops / roof.bandwidth, left), right);
      plot.append("path").attr("class", "roof").attr("d", path([[left, left * roof.bandwidth], [turn, Math.min(flops, turn * roof.bandwidth)], [right, Math.min(flops, right * roof.bandwidth)]]));
      if (dtype) plot.append("text").attr("class", "label end").attr("x", width - margin.right - 6).attr("y", y(flops) - 6).text(dtype);
    }
    if (!isFinite) plot.append("path").attr("class", "roof").attr("d", path([[left, left * roof.bandwidth], [right, right * roof.bandwidth]]));
  } else {
    for (const intensity of [0.1, 1, 10, 100, 1000]) {
      plot.append("path").attr("class", "equal").attr("d", path([[left, left * intensity], [right, right * intensity]]));
      const top = Math.min(right, y.domain()[1] / intensity); // where the line leaves the plot
      if (top > left) plot.append("text").attr("class", "label end").attr("x", x(top) - 6).attr("y", Math.max(y(top * intensity) + 14, margin.top + 14)).text(`${intensity} FLOP/B`);
    }
  }
  const size = (p) => p.total ?? p.bytes * p.calls.length, radius = d3.scaleSqrt([0, d3.max(points, size)], [3.5, width < 600 ? 12 : 18]);
  const lines = (p) => [p.calls.length > 1 ? `${p.node} and ${counted(p.calls.length - 1, "call")} like it` : p.node, p.kernel, `${formatFlops(p.flops)}, ${formatBytes(p.bytes)} each`, `${p.bytes ? p.intensity.toFixed(2) : "∞"} FLOP per byte`, ...(p.seconds === null ? [] : [`${formatTime(p.seconds)} each, ${formatRate(p.flops / p.seconds)}`])];
  plot.selectAll("circle").data(d3.sort(points, (p) => -size(p))).join("circle").attr("class", "kernel").attr("cx", place).attr("cy", (p) => y(up(p)))
    .attr("r", (p) => radius(size(p))).attr("fill", (p) => familyColour(p.family)).attr("data-calls", (p) => p.calls.length).attr("aria-label", (p) => lines(p).join("; "))
    .on("pointermove", (event, p) => tip.show(event, lines(p))).on("pointerleave", tip.hide);
}

// Powers of ten in a domain, every nth of them so that there are no more than `most`.
function decades([low, high], most) {
  const powers = d3.range(Math.ceil(Math.log10(low)), Math.floor(Math.log10(high)) + 1);
  const step = Math.ceil(powers.length / most);
  return powers.filter((_, index) => index % step === 0).map((power) => Number(`1e${power}`));
}
