// From a graph to places on a plane: what repeats is folded, and the rest is laid out in blocks of limited size, by dagre
// as far as that is fast, else by a simpler layout in layers. Equal blocks (a network's layers) are laid out once.

const BLOCK = 100; // vertices that are laid out at once
const DAGRE_LIMIT = 250; // vertices that dagre may lay out per picture: its time grows faster than their number
const LONGEST_SPAN = 40; // an edge past so many vertices does not influence the layout
const LINE = 36, GAP = 34, FRAME = 22;

// The report's graph → {nodes: [{name, op, inputs, outputs, note}], inputs, outputs, runs, edges: [from, to]}; a node
// that reads an input of the graph has an edge from -1 - (number of the input).
function stageModel(stages, index) {
  const graph = stages.graphs[index];
  const types = Object.create(null); // a tensor may be called `constructor`
  for (const earlier of stages.graphs.slice(0, index + 1)) Object.assign(types, earlier.types);
  const type = (name) => (name in types ? stages.types[types[name]] : "");
  const nodes = graph.nodes.map((number) => {
    const [name, op, inputs, outputs, note] = stages.nodes[number];
    return { name, op, inputs, outputs, note, detail: outputs.length ? type(outputs[0]) : "" };
  });
  return { ...graph, nodes, type, edges: edgesOf(nodes, graph.inputs) };
}

function programModel(program) {
  const nodes = program.calls.map((call, index) => ({
    name: `${index} ${call.kernel}`, op: call.kernel, family: call.family, inputs: call.in, outputs: call.out,
    note: call.node, detail: call.out.length ? call.out[0].split(": ").slice(1).join(": ") : "", call,
  }));
  const edges = program.flow.flatMap((sources, index) => sources.map((source) => [source, index]));
  return { name: "kernels", nodes, edges, inputs: [], outputs: [], weights: {}, constants: [], made: {}, parts: [], runs: program.runs, type: () => "" };
}

function edgesOf(nodes, inputs) {
  const makers = new Map(inputs.map((name, index) => [name, -1 - index]));
  const edges = [];
  nodes.forEach((node, index) => {
    for (const name of new Set(node.inputs)) if (makers.has(name)) edges.push([makers.get(name), index]);
    for (const name of node.outputs) makers.set(name, index);
  });
  return edges;
}

// Vertices in order and in blocks. `expanded` has "run:START" and "part:START" of what is shown in full.
function foldModel(model, expanded) {
  const vertices = [], blocks = [], owner = new Map();
  let block = null;
  const begin = (frame) => { block = { first: vertices.length, count: 0, frame }; blocks.push(block); };
  const put = (vertex, members) => {
    if (block === null || block.count >= BLOCK) begin(block?.frame ?? null);
    members.forEach((member) => owner.set(member, vertices.length));
    vertices.push(vertex);
    block.count += 1;
  };
  const putNodes = (start, stop) => { for (let i = start; i < stop; i += 1) put({ kind: "node", node: i }, [i]); };
  const range = (start, stop) => d3.range(start, stop);
  if (model.inputs.length > 6) put({ kind: "inputs", label: counted(model.inputs.length, "input") }, model.inputs.map((_, i) => -1 - i));
  else model.inputs.forEach((name, i) => put({ kind: "inputs", label: name }, [-1 - i]));
  let at = 0;
  for (const [start, period, count, labels] of model.runs) {
    putNodes(at, start);
    at = start + period * count;
    const title = labels.length ? `${labels[0]} … ${labels[count - 1]}` : "repeated";
    if (!expanded.has(`run:${start}`)) {
      put({ kind: "group", id: `run:${start}`, label: `${title} × ${count}`, detail: `${counted(period, "node")} each`, start, stop: at }, range(start, at));
      continue;
    }
    for (let part = start; part < at; part += period) {
      const time = (part - start) / period;
      const name = labels[time] || `${time + 1} of ${count}`;
      if (expanded.has(`part:${part}`)) {
        begin({ id: `part:${part}`, run: `run:${start}`, label: name });
        putNodes(part, part + period);
        block = null;
      } else {
        put({ kind: "group", id: `part:${part}`, run: `run:${start}`, label: name, detail: counted(period, "node"), start: part, stop: part + period }, range(part, part + period));
      }
    }
  }
  putNodes(at, model.nodes.length);
  const edges = new Map();
  for (const [from, to] of model.edges) {
    const a = owner.get(from), b = owner.get(to);
    if (a !== b) edges.set(a * vertices.length + b, [a, b]);
  }
  return { vertices, blocks, owner, edges: [...edges.values()] };
}

const layouts = new Map(); // what a block looks like → its layout

function layOut(model, expanded) {
  const scene = foldModel(model, expanded);
  const { vertices, blocks, edges } = scene;
  for (const vertex of vertices) describeVertex(model, vertex);
  const blockOf = new Int32Array(vertices.length);
  blocks.forEach((block, index) => blockOf.fill(index, block.first, block.first + block.count));
  const inside = blocks.map(() => []);
  edges.forEach(([a, b], index) => {
    if (blockOf[a] === blockOf[b] && b > a && b - a <= LONGEST_SPAN) inside[blockOf[a]].push(index);
  });
  scene.lines = new Array(edges.length);
  scene.frames = [];
  let top = 0, budget = vertices.length > 2 * DAGRE_LIMIT ? BLOCK : DAGRE_LIMIT;
  blocks.forEach((block, index) => {
    const own = vertices.slice(block.first, block.first + block.count);
    const local = inside[index].map((edge) => [edges[edge][0] - block.first, edges[edge][1] - block.first]);
    const placed = layOutBlock(own, local, () => { budget -= own.length; return budget >= 0; });
    const { frame } = block;
    const same = frame && blocks[index - 1]?.frame === frame;
    top += frame && !same ? FRAME : 0;
    own.forEach((vertex, i) => { vertex.x = placed.places[i][0] - placed.width / 2; vertex.y = placed.places[i][1] + top; });
    inside[index].forEach((edge, i) => {
      scene.lines[edge] = placed.lines[i].map(([x, y]) => [x - placed.width / 2, y + top]);
    });
    if (frame) {
      const box = { ...frame, x: -placed.width / 2 - 14, y: top - FRAME, width: placed.width + 28, height: placed.height + FRAME + 10 };
      if (same) {
        const last = scene.frames[scene.frames.length - 1];
        const left = Math.min(last.x, box.x);
        Object.assign(last, { x: left, width: Math.max(last.x + last.width, box.x + box.width) - left, height: box.y + box.height - last.y });
      } else scene.frames.push(box);
    }
    top += placed.height + GAP;
  });
  scene.width = d3.max(vertices, (vertex) => vertex.x + vertex.width) - d3.min(vertices, (vertex) => vertex.x) || 1;
  scene.left = d3.min(vertices, (vertex) => vertex.x) || 0;
  scene.height = top || 1;
  return scene;
}

function describeVertex(model, vertex) {
  if (vertex.kind === "node") {
    const node = model.nodes[vertex.node];
    vertex.label = node.op.replace(/^aten\./, "");
    vertex.detail = node.detail;
  }
  const longest = Math.max(vertex.label.length, (vertex.detail ?? "").length * 0.86);
  vertex.width = Math.min(250, Math.max(70, 7.1 * longest + 18));
  vertex.height = LINE;
}

// Places relative to the block's top left corner: {places: [x, y], lines: [points], width, height}.
function layOutBlock(vertices, edges, mayUseDagre) {
  const key = JSON.stringify([vertices.map((vertex) => vertex.width), edges]);
  if (!layouts.has(key)) layouts.set(key, mayUseDagre() ? runDagre(vertices, edges) : layers(vertices, edges));
  return layouts.get(key);
}

// Each vertex a layer below the lowest that it reads from, and as near to those as its neighbours allow.
function layers(vertices, edges) {
  const readers = vertices.map(() => []), sources = vertices.map(() => []);
  edges.forEach(([a, b]) => { readers[a].push(b); sources[b].push(a); });
  const depth = [], rows = [];
  vertices.forEach((_, index) => {
    depth[index] = sources[index].length ? 1 + d3.max(sources[index], (source) => depth[source]) : 0;
    (rows[depth[index]] ??= []).push(index);
  });
  const x = vertices.map(() => 0); // of the middle
  const settle = (row, neighbours) => {
    const wanted = new Map(row.map((index) => [index, neighbours[index].length ? d3.mean(neighbours[index], (other) => x[other]) : x[index]]));
    row.sort((a, b) => wanted.get(a) - wanted.get(b) || a - b);
    let edge = -Infinity, moved = 0;
    for (const index of row) {
      x[index] = Math.max(wanted.get(index), edge + vertices[index].width / 2);
      edge = x[index] + vertices[index].width / 2 + 16;
      moved += x[index] - wanted.get(index);
    }
    for (const index of row) x[index] -= moved / row.length;
  };
  for (let sweep = 0; sweep < 4; sweep += 1) {
    rows.forEach((row) => settle(row, sources));
    if (sweep < 3) [...rows].reverse().forEach((row) => settle(row, readers));
  }
  const left = d3.min(vertices, (vertex, index) => x[index] - vertex.width / 2) - 4, step = LINE + 24;
  const places = vertices.map((vertex, index) => [x[index] - vertex.width / 2 - left, 4 + step * depth[index]]);
  const line = ([a, b]) => {
    const [from, to] = [x[a] - left, x[b] - left], [top, bottom] = [4 + step * depth[a] + LINE, 4 + step * depth[b]];
    return [[from, top], [from, top + 12], [to, bottom - 12], [to, bottom]];
  };
  return {
    width: d3.max(vertices, (vertex, index) => places[index][0] + vertex.width) + 4, height: step * rows.length - 24 + 8,
    places, lines: edges.map(line),
  };
}

function runDagre(vertices, edges) {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 24, ranker: "longest-path", marginx: 4, marginy: 4 });
  vertices.forEach((vertex, index) => graph.setNode(index, { width: vertex.width, height: vertex.height }));
  edges.forEach(([a, b]) => graph.setEdge(a, b, {}));
  const touched = new Set(edges.flat());
  const alone = vertices.map((_, index) => index).filter((index) => !touched.has(index));
  alone.forEach((index, i) => { if (i >= 6) graph.setEdge(alone[i - 6], index, {}); }); // six columns rather than one row
  dagre.layout(graph);
  const { width, height } = graph.graph();
  return {
    width, height,
    places: vertices.map((vertex, index) => [graph.node(index).x - vertex.width / 2, graph.node(index).y - vertex.height / 2]),
    lines: edges.map(([a, b]) => graph.edge(a, b).points.map(({ x, y }) => [x, y])),
  };
}
