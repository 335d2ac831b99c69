// Every kernel by its arithmetic intensity. Measured: FLOP/s under the roof. Not measured: work over bytes.

// Equal calls are one point, whose `calls` are their indices.
function rooflinePoints(calls) {
  const groups = d3.groups(calls.map((call, index) => ({ ...call, index })), (call) => [call.kernel, call.flops, call.bytes, call.family].join("|"));
  return groups.map(([, members]) => ({
    kernel: members[0].kernel, family: members[0].family, flops: members[0].flops, bytes: members[0].bytes,
    intensity: members[0].flops / Math.max(1, members[0].bytes), calls: members.map((call) => call.index),
    seconds: members[0].seconds === null ? null : d3.median(members, (call) => call.seconds),
    total: members[0].seconds === null ? null : d3.sum(members, (call) => call.seconds),
  }));
}

function rooflinePage(program, given) {
  const points = rooflinePoints(program.calls);
  const working = points.filter((point) => point.flops > 0 && point.bytes > 0);
  const isMeasured = Boolean(program.measured);
  const timed = working.filter((point) => point.seconds > 0);
  const seen = { bandwidth: d3.max(points, (p) => (p.seconds > 0 ? p.bytes / p.seconds : 0)), flops: d3.max(timed, (p) => p.flops / p.seconds) };
  const roof = given ?? (isMeasured && timed.length ? seen : null);
  const bound = (point) => (roof ? Math.max(point.bytes / roof.bandwidth, point.flops / roof.flops) : null);
  const says = given?.of_device ? "The roof is what the device says of itself. Data that its caches hold may be above it."
    : given ? `The roof is what was given with --bandwidth and --flops.${isMeasured ? "" : " Nothing was measured, so each kernel is on it."}` : roof
    ? "The roof is the highest rate that a kernel of this program reached; give the device's own with --bandwidth and --flops."
    : "Nothing was measured, so the chart shows work over bytes; the lines are equal intensity. Give --weights to measure.";
  const page = [element("p", { class: "note" }, says), legend(new Set(working.map((point) => point.family)))];
  if (roof) page.unshift(facts([["bandwidth", formatBandwidth(roof.bandwidth)], ["compute", formatRate(roof.flops)], ["ridge", `${(roof.flops / roof.bandwidth).toFixed(1)} FLOP per byte`]]));
  const box = element("div", { class: "chart" });
  if (working.length) { box.append(drawRoofline(box, isMeasured ? timed : working, roof, (point) => point.seconds ?? bound(point))); page.push(box); }
  const columns = [
    { title: "kernel", text: (row) => row.kernel },
    { title: "family", text: (row) => row.family },
    { title: "calls", value: (row) => row.calls.length, text: (row) => formatCount(row.calls.length), number: true },
    { title: "FLOP per call", value: (row) => row.flops, text: (row) => formatFlops(row.flops), number: true },
    { title: "bytes per call", value: (row) => row.bytes, text: (row) => formatBytes(row.bytes), number: true },
    { title: "FLOP per byte", value: (row) => row.intensity, text: (row) => row.intensity.toFixed(2), number: true },
  ];
  if (roof) columns.push({ title: "time at the roof", value: bound, text: (row) => formatTime(bound(row)), number: true });
  if (isMeasured) {
    columns.push({ title: "measured", value: (row) => row.seconds, text: (row) => formatTime(row.seconds), number: true });
    columns.push({ title: "bandwidth", value: (row) => row.bytes / row.seconds, text: (row) => formatBandwidth(row.bytes / row.seconds), number: true });
    if (roof) columns.push({ title: "share of the roof", value: (row) => bound(row) / row.seconds, text: (row) => formatShare(bound(row) / row.seconds), number: true });
  }
  page.push(dataTable(columns, points, { caption: "Equal calls are one row; those without FLOP are in the table only", sort: isMeasured ? columns.length - (roof ? 3 : 2) : 4, filter: true }));
  return { page, start() {} };
}

// `time` is a point's seconds, measured or at the roof.
function drawRoofline(box, points, roof, time) {
  const width = 920, height = 460, margin = { left: 78, right: 16, top: 16, bottom: 46 };
  const across = roof ? (p) => p.intensity : (p) => p.bytes, up = roof ? (p) => p.flops / time(p) : (p) => p.flops;
  const padded = ([low, high], more = []) => [Math.min(low, ...more) / 2, Math.max(high, ...more) * 2];
  const x = d3.scaleLog(padded(d3.extent(points, across), roof ? [roof.flops / roof.bandwidth] : []), [margin.left, width - margin.right]);
  const y = d3.scaleLog(padded(d3.extent(points, up), roof ? [roof.flops] : []), [height - margin.bottom, margin.top]);
  const svg = d3.create("svg").attr("viewBox", [0, 0, width, height]).attr("role", "group").attr("aria-label", "Roofline");
  const xFormat = roof ? (value) => d3.format("~g")(value) : formatBytes, yFormat = roof ? formatRate : formatFlops;
  svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - margin.bottom})`).call(roof ? d3.axisBottom(x).ticks(6, xFormat) : d3.axisBottom(x).tickValues(d3.range(0, 5).flatMap((unit) => [1, 32].map((n) => n * 1024 ** unit)).filter((b) => b >= x.domain()[0] && b <= x.domain()[1])).tickFormat(formatBytes));
  svg.append("g").attr("class", "axis").attr("transform", `translate(${margin.left},0)`).call(d3.axisLeft(y).ticks(5, yFormat));
  svg.append("text").attr("class", "label").attr("x", width / 2).attr("y", height - 8).text(roof ? "FLOP per byte" : "bytes per call");
  svg.append("text").attr("class", "label").attr("x", 8).attr("y", 12).text(roof ? "FLOP/s" : "FLOP per call");
  const [left, right] = x.domain(), path = (at) => d3.line()(at.map(([a, b]) => [x(a), y(b)]));
  svg.append("clipPath").attr("id", "plot").append("rect").attr("x", margin.left).attr("y", margin.top).attr("width", width - margin.left - margin.right).attr("height", height - margin.top - margin.bottom);
  const plot = svg.append("g").attr("clip-path", "url(#plot)");
  if (roof) {
    const ridge = roof.flops / roof.bandwidth;
    const turn = Math.min(Math.max(ridge, left), right);
    plot.append("path").attr("class", "roof").attr("d", path([[left, left * roof.bandwidth], [turn, Math.min(roof.flops, turn * roof.bandwidth)], [right, Math.min(roof.flops, right * roof.bandwidth)]]));
  } else {
    for (const intensity of [0.1, 1, 10, 100, 1000]) {
      plot.append("path").attr("class", "equal").attr("d", path([[left, left * intensity], [right, right * intensity]]));
      const top = Math.min(right, y.domain()[1] / intensity); // where the line leaves the plot
      if (top > left) plot.append("text").attr("class", "label end").attr("x", x(top) - 6).attr("y", Math.max(y(top * intensity) + 14, margin.top + 14)).text(`${intensity} FLOP/B`);
    }
  }
  const tip = tooltip(box);
  const most = d3.max(points, (p) => p.total ?? p.bytes * p.calls.length), radius = d3.scaleSqrt([0, most], [3.5, 18]);
  const lines = (p) => [p.kernel, counted(p.calls.length, "call"), `${formatFlops(p.flops)}, ${formatBytes(p.bytes)} each`, `${p.intensity.toFixed(2)} FLOP per byte`, ...(p.seconds === null ? [] : [`${formatTime(p.seconds)} each, ${formatRate(p.flops / p.seconds)}`])];
  plot.selectAll("circle").data(d3.sort(points, (p) => -(p.total ?? p.bytes * p.calls.length))).join("circle").attr("class", "kernel").attr("cx", (p) => x(across(p))).attr("cy", (p) => y(up(p)))
    .attr("r", (p) => radius(p.total ?? p.bytes * p.calls.length)).attr("fill", (p) => familyColour(p.family)).attr("data-calls", (p) => p.calls.length)
    .on("pointermove", (event, p) => tip.show(event, lines(p))).on("pointerleave", tip.hide).append("title").text((p) => lines(p).join("\n"));
  return svg.node();
}
