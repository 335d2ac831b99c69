// The page: tabs over one report, whose data is compressed in the element `data`.
//
// A report is {kind: "report", title, made_by, notes, stages, partition, reasons, programs, roof, numerics, sweep}; its
// programs are what `npu_sim/report/facts.py` makes, with `simulated` of `npu_sim/report/simulated.py`. A comparison is
// {kind: "diff", labels, totals, kernels, nodes, layers, is_measured, is_simulated, programs}.

async function readData() {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function tabsOf(report, program, open) {
  const graph = graphPage(report, program);
  const reveal = (index) => { open("graph"); graph.reveal(index); };
  const tabs = [];
  if (program.measured || program.simulated) tabs.push(["timeline", "Timeline", () => timelinePage(program, reveal)]);
  if (program.simulated) tabs.push(["layers", "Layers", () => layersPage(program, reveal)], ["traffic", "Traffic", () => trafficPage(program, reveal)]);
  tabs.push(["roofline", "Roofline", () => rooflinePage(program, report.roof ?? null)]);
  if (report.sweep) tabs.push(["sweep", "Sweep", () => sweepPage(report.sweep)]);
  tabs.push(["graph", "Graph", () => graph], ["memory", "Memory", () => memoryPage(program)], ["kernels", "Kernels", () => kernelsPage(program, reveal)], ["padding", "Padding", () => paddingPage(program)]);
  if (report.numerics) tabs.push(["numerics", "Numerics", () => numericsPage(report.numerics)]);
  const first = report.kind === "diff" ? ["compare", "Comparison", () => comparePage(report)]
    : ["overview", "Overview", () => ({ page: overviewPage(report, program, open), start() {} })];
  return [first, ...tabs];
}

function build(report) {
  for (const { calls, simulated } of report.programs) calls.forEach((call, index) => { call.simulated = simulated ? simulated.calls[index] : null; });
  const root = document.getElementById("report");
  const names = report.programs.map((program, index) => (report.labels ? report.labels[index] : program.name));
  const choose = report.programs.length > 1 ? element("select", { id: "program", "aria-label": "Program", onchange: () => fill(Number(choose.value)) },
    names.map((name, index) => element("option", { value: index }, name))) : null;
  const bar = element("div", { role: "tablist", class: "tabs", "aria-label": "Pages of the report" });
  const panels = element("div", {});
  root.append(element("header", {}, element("h1", {}, report.title), choose, element("span", { class: "note" }, report.made_by),
    element("button", { type: "button", id: "theme", onclick: switchTheme }, "Light / dark")), bar, panels);
  let current = location.hash.slice(1) || null;

  function fill(index) {
    const tabs = tabsOf(report, report.programs[index], open);
    bar.replaceChildren(...tabs.map(([id, title]) => element("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}`, onclick: () => open(id), onkeydown: move }, title)));
    panels.replaceChildren(...tabs.map(([id]) => element("section", { role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}`, hidden: true })));
    pages = new Map(tabs.map(([id, , make]) => [id, { make, made: null }]));
    open(pages.has(current) ? current : tabs[0][0]);
  }

  let pages = new Map();
  function open(id) {
    current = id;
    tip.hide();
    for (const [name, page] of pages) {
      const panel = document.getElementById(`panel-${name}`), tab = document.getElementById(`tab-${name}`);
      tab.setAttribute("aria-selected", name === id);
      tab.tabIndex = name === id ? 0 : -1;
      panel.hidden = name !== id;
      if (name === id) {
        if (!page.made) { page.made = page.make(); panel.append(...page.made.page.flat(Infinity)); }
        page.made.start();
      }
    }
    history.replaceState(null, "", `#${id}`);
  }

  function move(event) {
    const ids = [...pages.keys()], at = ids.indexOf(current);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: ids.length - 1 }[event.key];
    if (next === undefined) return;
    open(ids[(next + ids.length) % ids.length]);
    document.getElementById(`tab-${current}`).focus();
    event.preventDefault();
  }

  fill(0);
  root.setAttribute("aria-busy", "false");
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  window.dispatchEvent(new Event("themechange"));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("themechange")));

readData().then((report) => { window.reportData = report; build(report); }).catch((error) => {
  document.getElementById("report").append(element("p", { class: "bad" }, `This report cannot be shown: ${error.message}`));
  throw error;
});
