// The chips of a sweep by two of their figures, with the Pareto front; two of them can be picked and compared.

const MEASURES = {
  latency_us: ["latency", (value) => formatTime(1e-6 * value), 1], energy_uj: ["energy", (value) => formatEnergy(1e-6 * value), 1],
  area_mm2: ["area", (value) => `${Number(value.toPrecision(4))} mm²`, 1], dram_bytes: ["DRAM traffic", formatBytes, 1],
  utilization: ["matrix peak in use", formatShare, -1],
};
const KNOB_FORMATS = { sram: formatBytes, bandwidth: (value) => `${value} GB/s`, clock: (value) => `${value} GHz`, latency: (value) => `${value} ns` };
const knobText = (knob, value) => (KNOB_FORMATS[knob] ?? String)(value);

// Whether no other point is as good in both figures and better in one; each figure is [key, 1 if less is better, else -1].
function onFront(point, points, figures) {
  const worse = (a, b) => figures.map(([key, sign]) => sign * (b[key] - a[key]));
  return !points.some((other) => { const by = worse(point, other); return by.every((d) => d <= 0) && by.some((d) => d < 0); });
}

function sweepPage(sweep) {
  const points = sweep.points.map((point, index) => ({ ...point, index })), drawn = points.filter((point) => !point.problem);
  const measures = Object.keys(MEASURES).filter((key) => drawn.some((point) => point[key] > 0));
  if (!drawn.length) return { page: [element("p", { class: "bad" }, "No chip of the sweep runs the program."), dataTable([{ title: "why", text: (row) => row.problem }], points)], start() {} };
  const names = (point) => sweep.knobs.map((knob) => `${knob} ${knobText(knob, point[knob])}`).join(", ");
  const said = (point) => [point.index === 0 ? `${sweep.chip}: ${names(point)}` : names(point), ...measures.map((key) => `${MEASURES[key][0]}: ${MEASURES[key][1](point[key])}`)];
  const choice = (id, title, options, value) => {
    const select = element("select", { id, onchange: () => { redraw(); list(); } }, options.map(([key, text]) => element("option", { value: key }, text)));
    select.value = value;
    return { select, label: element("label", {}, `${title} `, select) };
  };
  const axes = measures.map((key) => [key, MEASURES[key][0]]);
  const across = choice("sweep-x", "across", axes, measures.includes("area_mm2") ? "area_mm2" : measures[0]), up = choice("sweep-y", "up", axes, "latency_us");
  const colour = choice("sweep-colour", "colour", [...axes, ...sweep.knobs.map((knob) => [knob, knob])], measures.includes("energy_uj") ? "energy_uj" : measures[0]);
  const box = element("div", { class: "chart", id: "sweep" }), scaleLegend = element("div", {}), compared = element("div", { id: "sweep-compared", "aria-live": "polite" }), table = element("div", {});
  let picked = [0];
  const figures = () => [across, up].map(({ select }) => [select.value, MEASURES[select.value][2]]);
  const front = () => d3.sort(drawn.filter((point) => onFront(point, drawn, figures())), (point) => point[across.select.value]);

  function pick(index) {
    picked = picked.includes(index) ? picked.filter((each) => each !== index) : [...picked.slice(-1), index];
    redraw();
    compare();
  }

  const redraw = svgChart(box, "Chips of the sweep", 430, (svg, width, height) => {
    const margin = { left: 70, right: 16, top: 26, bottom: 44 }, best = front(), keys = figures().map(([key]) => key);
    const domain = (key) => { const [low, high] = d3.extent(drawn, (point) => point[key]); return low > 0 ? [low / 1.15, high * 1.15] : [0, high || 1]; };
    const scale = (key, range) => (domain(key)[0] > 0 ? d3.scaleLog : d3.scaleLinear)(domain(key), range);
    const x = scale(keys[0], [margin.left, width - margin.right]), y = scale(keys[1], [height - margin.bottom, margin.top]);
    const hue = d3.scaleSequential(d3.extent(drawn, (point) => Math.log(Math.max(point[colour.select.value], 1e-12))), d3.interpolateViridis);
    const told = colour.select.value, shades = d3.quantize(d3.interpolateViridis, 5), [least, largest] = d3.extent(drawn, (point) => point[told]);
    const text = MEASURES[told]?.[1] ?? ((value) => knobText(told, value));
    scaleLegend.replaceChildren(swatchList(shades.map((shade, at) => [at === 0 ? `${told in MEASURES ? MEASURES[told][0] : told} ${text(least)}` : at === 4 ? text(largest) : "", shade]), "Colours"));
    const ticks = (axis, key, count) => axis.tickValues(readable(domain(key), count)).tickFormat(onAxis(MEASURES[key][1]));
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - margin.bottom})`).call(ticks(d3.axisBottom(x), keys[0], Math.max(2, width / 130)));
    svg.append("g").attr("class", "axis").attr("transform", `translate(${margin.left},0)`).call(ticks(d3.axisLeft(y), keys[1], 6));
    svg.append("text").attr("class", "label end").attr("x", width - margin.right).attr("y", height - 8).text(MEASURES[keys[0]][0]);
    svg.append("text").attr("class", "label").attr("x", 8).attr("y", 14).text(MEASURES[keys[1]][0]);
    svg.append("path").attr("class", "front").attr("d", d3.line((p) => x(p[keys[0]]), (p) => y(p[keys[1]]))(best));
    svg.selectAll("circle").data(drawn).join("circle").attr("class", (p) => `point${best.includes(p) ? " best" : ""}${picked.includes(p.index) ? " picked" : ""}`)
      .attr("cx", (p) => x(p[keys[0]])).attr("cy", (p) => y(p[keys[1]])).attr("r", (p) => (picked.includes(p.index) ? 9 : best.includes(p) ? 6 : 4.5))
      .attr("fill", (p) => hue(Math.log(Math.max(p[colour.select.value], 1e-12)))).attr("tabindex", 0).attr("role", "button").attr("aria-label", (p) => said(p).join("; ")).attr("data-index", (p) => p.index)
      .on("pointermove", (event, p) => tip.show(event, said(p))).on("pointerleave", tip.hide).on("click", (_, p) => pick(p.index))
      .on("keydown", (event, p) => { if (event.key === "Enter" || event.key === " ") { pick(p.index); event.preventDefault(); box.querySelector(`[data-index="${p.index}"]`).focus(); } });
    picked.forEach((index, at) => { const p = points[index]; svg.append("text").attr("class", "pick").attr("x", x(p[keys[0]])).attr("y", y(p[keys[1]]) + 4).text("AB"[at]); });
  });

  // Ticks at 1, 2 and 5 times a power of ten on a logarithmic axis, no more than `count`.
  function readable([low, high], count) {
    if (!(low > 0)) return d3.ticks(low, high, count);
    const powers = d3.range(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)) + 1);
    for (const factors of [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
      const ticks = powers.flatMap((power) => factors.map((factor) => Number((factor * 10 ** power).toPrecision(2)))).filter((tick) => tick >= low && tick <= high);
      if (ticks.length <= count) return ticks.length > 1 ? ticks : d3.ticks(low, high, count);
    }
    return [];
  }

  function compare() {
    if (picked.length < 2) { compared.replaceChildren(element("p", { class: "note" }, "Click a second chip to compare it with A.")); return; }
    const [a, b] = picked.map((index) => points[index]);
    const rows = [...sweep.knobs.map((knob) => [knob, knobText(knob, a[knob]), knobText(knob, b[knob]), times(a[knob], b[knob])]),
      ...measures.map((key) => [MEASURES[key][0], MEASURES[key][1](a[key]), MEASURES[key][1](b[key]), times(a[key], b[key])])];
    const title = (point, letter) => (point.index === 0 ? `${letter}: ${sweep.chip}` : letter);
    compared.replaceChildren(dataTable([{ title: "", text: (row) => row[0] }, { title: title(a, "A"), text: (row) => row[1], number: true }, { title: title(b, "B"), text: (row) => row[2], number: true }, { title: "B / A", text: (row) => row[3], number: true }], rows, { caption: "The two that are picked" }));
  }
  const times = (a, b) => (a ? `× ${Number((b / a).toPrecision(3))}` : "–");

  function list() {
    const best = front();
    const figure = (key, [title, format]) => ({ title, value: (row) => row[key], text: (row) => (row.problem ? "–" : format(row[key])), number: true });
    const columns = [{ title: "chip", value: (row) => row.index, text: (row) => (row.index === 0 ? sweep.chip : `${row.index}`) },
      ...sweep.knobs.map((knob) => figure(knob, [knob, (value) => knobText(knob, value)])), ...measures.map((key) => figure(key, MEASURES[key])),
      { title: "on the front", value: (row) => (best.includes(row) ? 1 : 0), text: (row) => row.problem || (best.includes(row) ? "yes" : "") }];
    table.replaceChildren(dataTable(columns, points, { caption: `${counted(points.length, "chip")}; a click on one picks it`, filter: true, sort: columns.length - 1, onrow: (row) => { if (!row.problem) pick(row.index); } }));
  }

  const failed = points.length - drawn.length;
  const page = [
    element("p", { class: "note" }, `${sweep.program} on chips like ${sweep.chip}, each simulated. The line is the Pareto front of the two figures: no other chip is as good in both and better in one.${failed ? ` ${counted(failed, "chip")} cannot run the program; the table says why.` : ""}`),
    element("div", { class: "bar" }, across.label, up.label, colour.label), scaleLegend, box, compared, table,
  ];
  return { page, start() { redraw(); compare(); list(); } };
}
