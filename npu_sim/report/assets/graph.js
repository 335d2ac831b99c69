// The graph after each compiler stage, and the kernels that it became.

function graphPage(report, program) {
  const views = report.stages ? report.stages.graphs.map((graph, index) => ({
    title: graph.stages.length > 1 ? `${graph.name} (+${graph.stages.length - 1} without effect)` : graph.name,
    make: () => stageModel(report.stages, index), index,
  })) : [];
  views.push({ title: "kernels of the program", make: () => programModel(program), index: null });
  const families = familiesByStage(report);
  const callsOf = d3.group(program.calls.map((call, index) => ({ ...call, index })), (call) => call.node);
  const state = { view: null, model: null, scene: null, expanded: new Set(), selected: null, transform: d3.zoomIdentity };

  const stage = element("select", { id: "stage", onchange: (event) => show(Number(event.target.value)) },
    views.map((view, index) => element("option", { value: index }, view.title)));
  const search = element("input", { type: "search", id: "search", placeholder: "Search nodes, ops, tensors", "aria-label": "Search the graph", "aria-controls": "found", oninput: find });
  const found = element("ul", { id: "found", class: "found", "aria-label": "Nodes found" });
  const count = element("span", { class: "note", id: "node-count", role: "status" });
  const side = element("aside", { class: "details", "aria-live": "polite", "aria-label": "Selected node" });
  const frame = element("div", { class: "canvas" });
  const button = (text, title, action) => element("button", { type: "button", title, onclick: action }, text);
  const { canvas, redraw } = chartCanvas(frame, "Graph. Arrow keys follow the edges or move, plus and minus zoom, 0 shows all, Enter opens and closes a group.", draw);
  canvas.id = "graph-canvas";
  canvas.setAttribute("role", "application");
  const zoom = d3.zoom().scaleExtent([0.01, 4]).on("zoom", (event) => { state.transform = event.transform; redraw(); });
  d3.select(canvas).call(zoom).on("dblclick.zoom", null);
  canvas.addEventListener("click", (event) => {
    const hit = vertexAt(event) ?? frameAt(event);
    if (hit?.kind === "frame") return toggle(hit.frame.id);
    select(hit ? hit.vertex.index : null);
    if (hit && hit.vertex.kind === "group") toggle(hit.vertex.id);
  });
  canvas.addEventListener("keydown", onKey);

  function show(index) {
    const anchor = state.selected !== null && state.scene ? nodeName(state.scene.vertices[state.selected]) : null;
    state.view = views[index];
    state.model = state.view.make();
    state.expanded = new Set();
    state.marks = stageMarks(report, state.view.index, state.model);
    stage.value = index;
    count.textContent = counted(state.model.nodes.length, "node");
    relayout();
    const same = anchor === null ? -1 : state.model.nodes.findIndex((node) => node.name === anchor);
    if (same >= 0) reveal(same); else { select(null); home(); }
    find();
  }

  function relayout() {
    state.scene = layOut(state.model, state.expanded);
    state.scene.vertices.forEach((vertex, index) => { vertex.index = index; });
    window.reportScene = state.scene; // for tests and the curious
  }

  function toggle(id) {
    if (state.expanded.has(id)) state.expanded.delete(id); else state.expanded.add(id);
    if (id.startsWith("run:") && !state.expanded.has(id)) closeParts();
    const before = state.selected === null ? null : state.scene.vertices[state.selected];
    relayout();
    const next = before ? state.scene.vertices.find((v) => v.id ? v.id === before.id : v.node === before.node && before.kind === "node") : null;
    select(next ? next.index : null);
    const first = Number(id.split(":")[1]);
    const vertex = state.scene.vertices[state.scene.owner.get(first)];
    if (vertex) centre(vertex, state.transform.k);
  }

  function closeParts() {
    for (const id of state.expanded) if (id.startsWith("part:")) state.expanded.delete(id);
    for (const [start, period, times] of state.model.runs) {
      if (state.expanded.has(`run:${start}`)) continue;
      for (let part = start; part < start + period * times; part += period) state.expanded.delete(`part:${part}`);
    }
  }

  function setAll(open) {
    state.expanded = new Set(open ? state.model.runs.flatMap(([start, period, times]) =>
      [`run:${start}`, ...d3.range(times).map((i) => `part:${start + i * period}`)]) : []);
    relayout();
    select(null);
    home();
  }

  function reveal(node) {
    for (const [start, period, times] of state.model.runs) {
      if (node >= start && node < start + period * times) {
        state.expanded.add(`run:${start}`).add(`part:${start + period * Math.floor((node - start) / period)}`);
      }
    }
    relayout();
    const vertex = state.scene.vertices[state.scene.owner.get(node)];
    select(vertex.index);
    centre(vertex, Math.max(0.8, state.transform.k));
  }

  const size = () => frame.getBoundingClientRect();
  const setTransform = (transform) => d3.select(canvas).call(zoom.transform, transform);
  function centre(vertex, scale) {
    const { width, height } = size();
    setTransform(d3.zoomIdentity.translate(width / 2 - scale * (vertex.x + vertex.width / 2), height / 2 - scale * (vertex.y + LINE / 2)).scale(scale));
  }
  function home() {
    const { width } = size();
    const scale = Math.min(1, Math.max(0.45, width / (state.scene.width + 40)));
    setTransform(d3.zoomIdentity.translate(width / 2 - scale * (state.scene.left + state.scene.width / 2), 24).scale(scale));
  }
  function fit() {
    const { width, height } = size();
    const scale = Math.min(1.5, width / (state.scene.width + 40), height / (state.scene.height + 40));
    setTransform(d3.zoomIdentity.translate(width / 2 - scale * (state.scene.left + state.scene.width / 2), 20).scale(scale));
  }

  function place(event) {
    const area = canvas.getBoundingClientRect();
    return state.transform.invert([event.clientX - area.left, event.clientY - area.top]);
  }
  function vertexAt(event) {
    const [x, y] = place(event);
    const vertex = state.scene.vertices.find((v) => x >= v.x && x <= v.x + v.width && y >= v.y && y <= v.y + v.height);
    return vertex ? { kind: "vertex", vertex } : null;
  }
  function frameAt(event) {
    const [x, y] = place(event);
    const hit = state.scene.frames.find((f) => x >= f.x && x <= f.x + f.width && y >= f.y && y <= f.y + FRAME);
    return hit ? { kind: "frame", frame: hit } : null;
  }

  function onKey(event) {
    const { key } = event;
    const step = { ArrowUp: [0, 80], ArrowDown: [0, -80], ArrowLeft: [80, 0], ArrowRight: [-80, 0] }[key];
    if (step && state.selected !== null) {
      const { edges } = state.scene;
      const at = state.selected;
      const next = key === "ArrowUp" ? edges.find(([, b]) => b === at)?.[0] : key === "ArrowDown" ? edges.find(([a]) => a === at)?.[1]
        : at + (key === "ArrowRight" ? 1 : -1);
      if (next !== undefined && state.scene.vertices[next]) { select(next); centre(state.scene.vertices[next], state.transform.k); }
    } else if (step) d3.select(canvas).call(zoom.translateBy, step[0] / state.transform.k, step[1] / state.transform.k);
    else if (key === "+" || key === "=") d3.select(canvas).call(zoom.scaleBy, 1.3);
    else if (key === "-") d3.select(canvas).call(zoom.scaleBy, 1 / 1.3);
    else if (key === "0") fit();
    else if (key === "Home") { select(0); home(); }
    else if (key === "Escape") select(null);
    else if (key === "Enter" && state.selected !== null) {
      const vertex = state.scene.vertices[state.selected];
      if (vertex.kind === "group") toggle(vertex.id);
      else {
        const frameOf = state.scene.blocks.find((b) => b.frame && state.selected >= b.first && state.selected < b.first + b.count)?.frame;
        if (frameOf) toggle(frameOf.id);
      }
    } else return;
    event.preventDefault();
  }

  function nodeName(vertex) { return vertex.kind === "node" ? state.model.nodes[vertex.node].name : null; }

  function find() {
    const words = search.value.trim().toLowerCase();
    if (!words) { found.replaceChildren(); return; }
    const hits = [];
    state.model.nodes.forEach((node, index) => {
      const text = [node.name, node.op, node.note, ...node.outputs, ...node.inputs.filter((x) => Object.hasOwn(state.model.weights, x)).map((x) => state.model.weights[x])];
      if (text.some((part) => part.toLowerCase().includes(words))) hits.push(index);
    });
    found.replaceChildren(...hits.slice(0, 100).map((index) => element("li", {},
      element("button", { type: "button", class: "link", onclick: () => reveal(index) }, `${state.model.nodes[index].name}: ${state.model.nodes[index].op}`))),
    element("li", { class: "note" }, hits.length > 100 ? `100 of ${formatCount(hits.length)} nodes` : counted(hits.length, "node")));
  }
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") found.querySelector("button")?.click(); });

  function select(index) {
    state.selected = index;
    side.replaceChildren(...(index === null ? [element("p", { class: "note" }, "Select a node to see what it reads and writes.")] : details(state.scene.vertices[index])));
    redraw();
  }

  function details(vertex) {
    if (vertex.kind === "inputs") return [element("h3", {}, "Inputs"), facts(state.model.inputs.slice(0, 200).map((name) => [name, state.model.type(name)]))];
    if (vertex.kind === "group") {
      const ops = d3.rollups(state.model.nodes.slice(vertex.start, vertex.stop), (nodes) => nodes.length, (node) => node.op);
      return [element("h3", {}, vertex.label), facts(d3.sort(ops, (a, b) => b[1] - a[1]).map(([op, n]) => [op, formatCount(n)]))];
    }
    return nodeDetails(report, state, vertex, { reveal, callsOf });
  }

  function draw(context, width, height) {
    if (!state.scene) return;
    const familyOf = (node) => (state.view.index === null ? node.family : families[state.view.index].get(node.name));
    const { fresh, gone, partition } = state.marks;
    const [cpu, fused, isGone, isFresh] = ["cpu", "fused", "gone", "fresh"].map(themeColour);
    drawScene(context, state.scene, state.transform, width, height, {
      selected: state.selected,
      colour(vertex) {
        const family = vertex.kind === "node" ? familyOf(state.model.nodes[vertex.node]) : null;
        return family ? familyColour(family) : null;
      },
      tint: (vertex) => (vertex.kind !== "node" ? null : partition.get(state.model.nodes[vertex.node].name) === "cpu" ? cpu
        : state.model.nodes[vertex.node].op.startsWith("npu.") ? fused : null),
      badge(vertex) {
        const names = vertex.kind === "node" ? [state.model.nodes[vertex.node].name]
          : vertex.kind === "group" ? state.model.nodes.slice(vertex.start, vertex.stop).map((node) => node.name) : [];
        if (names.some((name) => gone.has(name))) return { colour: isGone, dashed: true };
        return names.some((name) => fresh.has(name)) ? { colour: isFresh, dashed: false } : null;
      },
    });
  }

  const page = [
    element("div", { class: "bar" },
      element("label", { for: "stage" }, "After stage "), stage, count,
      button("◀", "Stage before", () => show(Math.max(0, Number(stage.value) - 1))), button("▶", "Next stage", () => show(Math.min(views.length - 1, Number(stage.value) + 1))),
      search, button("Open all", "Show every node", () => setAll(true)), button("Fold all", "Fold what repeats", () => setAll(false)),
      button("+", "Zoom in", () => d3.select(canvas).call(zoom.scaleBy, 1.3)), button("−", "Zoom out", () => d3.select(canvas).call(zoom.scaleBy, 1 / 1.3)), button("Fit", "Show all", fit)),
    element("ul", { class: "legend" },
      report.stages ? [element("li", {}, element("span", { class: "swatch fused" }), "fused"),
        element("li", {}, element("span", { class: "swatch fresh" }), "new or changed in this stage"),
        element("li", {}, element("span", { class: "swatch gone" }), "gone after the next stage")] : [],
      report.partition ? element("li", {}, element("span", { class: "swatch cpu" }), "on the CPU") : []),
    legend(new Set(report.programs.flatMap((each) => each.calls.map((call) => call.family)))),
    element("div", { class: "split" }, frame, element("div", { class: "column" }, found, side)),
  ];
  return { page, start() { if (!state.model) show(0); else redraw(); }, reveal: (name) => revealKernel(name) };

  function revealKernel(index) {
    show(views.length - 1);
    reveal(index);
  }
}

// For each stage, node → family of the kernel that computes it in the end; views and what is folded away have none.
function familiesByStage(report) {
  if (!report.stages) return [];
  const { graphs, nodes } = report.stages;
  const final = new Map();
  for (const program of report.programs) for (const call of d3.sort(program.calls, (each) => each.flops)) final.set(call.node, call.family);
  let later = final;
  const stages = new Array(graphs.length);
  for (let at = graphs.length - 1; at >= 0; at -= 1) {
    const computing = new Map(), after = at + 1 < graphs.length ? graphs[at + 1] : null;
    for (const name of after ? Object.keys(after.made) : []) for (const each of after.made[name]) if (later.has(name)) computing.set(each, later.get(name));
    stages[at] = new Map(graphs[at].nodes.map((number) => nodes[number][0]).map((name) => [name, later.get(name) ?? computing.get(name)]).filter(([, family]) => family));
    later = stages[at];
  }
  return stages;
}

// Names of the nodes that are new in a stage, that the next stage removes, and their partitions.
function stageMarks(report, index, model) {
  const partition = new Map();
  const fresh = new Set(), gone = new Set();
  if (index !== null) {
    for (const [device, names] of model.parts) for (const name of names) partition.set(name, device);
    const { graphs, nodes } = report.stages;
    const numbers = new Set(model.nodes.map((_, i) => graphs[index].nodes[i]));
    const before = index > 0 ? new Set(graphs[index - 1].nodes) : null;
    if (before) for (const number of numbers) if (!before.has(number)) fresh.add(nodes[number][0]);
    const next = graphs[index + 1];
    if (next) {
      const names = new Set(next.nodes.map((number) => nodes[number][0]));
      for (const number of numbers) if (!names.has(nodes[number][0])) gone.add(nodes[number][0]);
    }
  }
  return { partition, fresh, gone };
}

// The nodes of the graph as read that a node of a later graph computes.
function originsOf(report, index, name) {
  let names = new Set([name]);
  for (let at = index; at > 0; at -= 1) {
    const { made } = report.stages.graphs[at];
    names = new Set([...names].flatMap((each) => (Object.hasOwn(made, each) ? made[each] : [each])));
  }
  return [...names];
}

function nodeDetails(report, state, vertex, { reveal, callsOf }) {
  const { model, view } = state;
  const node = model.nodes[vertex.node];
  const link = (name) => {
    const at = model.nodes.findIndex((other) => other.outputs.includes(name));
    const text = view.index === null ? name : `${name}  ${model.type(name)}`;
    if (at >= 0 && at !== vertex.node && view.index !== null) return element("li", {}, element("button", { type: "button", class: "link", onclick: () => reveal(at) }, text));
    const weight = Object.hasOwn(model.weights, name) ? ` = ${model.weights[name]}` : "";
    return element("li", {}, text + weight);
  };
  const parts = [element("h3", { id: "selected-name" }, node.name), facts([["op", node.op], ...(node.note ? [[view.index === null ? "node" : "attributes", node.note]] : [])]),
    element("h4", {}, "Reads"), element("ul", {}, node.inputs.map(link)), element("h4", {}, "Writes"), element("ul", {}, node.outputs.map(link))];
  const partition = state.marks.partition.get(node.name);
  if (partition) parts.push(facts([["partition", partition], ...(Object.hasOwn(report.reasons, node.name) ? [["why", report.reasons[node.name]]] : [])]));
  if (view.index) {
    const origins = originsOf(report, view.index, node.name);
    if (origins.length > 1 || origins[0] !== node.name) {
      parts.push(element("h4", {}, `Computes ${counted(origins.length, "node")} of the model`), element("ul", { class: "origins" }, origins.map((name) => element("li", {}, name))));
    }
  }
  const calls = view.index === null ? [node.call] : callsOf.get(node.name) ?? [];
  for (const call of calls) {
    parts.push(element("h4", {}, view.index === null ? "Cost" : `Kernel ${call.index}: ${call.kernel}`), facts([["work", formatFlops(call.flops)],
      ["bytes", formatBytes(call.bytes)], ...(call.seconds === null ? [] : [["measured", formatTime(call.seconds)]])]), call.simulated ? simulatedFacts(call.simulated) : "");
  }
  return parts;
}

// What a simulated run says of a call.
function simulatedFacts(run) {
  const listed = (parts, format) => Object.entries(parts).filter(([, value]) => value > 0).map(([name, value]) => `${name} ${format(value)}`).join(", ") || "none";
  return facts([
    ["simulated", `adds ${formatTime(run.own)} to the run, ${counted(run.cycles, "cycle")}`], ["engine", `${run.engine || "none"}${run.dtype ? `, multiplies ${run.dtype}` : ""}`],
    ["engines work", listed(run.busy, formatTime)], ["stalls", listed(run.stalls, formatTime)], ["moves", listed(run.traffic, formatBytes)],
    ["scratchpad", `${formatBytes(run.used)} in use`], ["tiles", `${formatCount(run.tiles)} of ${run.tile || "–"}`],
    ...(run.energy ? [["energy", formatEnergy(d3.sum(Object.values(run.energy)))]] : []),
  ]);
}
