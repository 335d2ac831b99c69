// Drawing a scene of `layOut` on a canvas: only what is in sight, and texts only where they can be read.

const TEXT_SCALE = 0.4;
const SHAPE_SCALE = 0.12; // below this, boxes are spots of colour and edges straight
const FAR = 600; // an edge longer than this is drawn faintly: inputs such as masks have one to every layer

// marks: {selected, related (set of vertices), fresh, gone (sets of node names), colour(vertex), tint(vertex)}
function drawScene(context, scene, transform, width, height, marks) {
  const ink = themeColour("ink"), faint = themeColour("faint"), ground = themeColour("card"), accent = themeColour("accent");
  const left = -transform.x / transform.k, top = -transform.y / transform.k;
  const right = left + width / transform.k, bottom = top + height / transform.k;
  context.translate(transform.x, transform.y);
  context.scale(transform.k, transform.k);
  context.lineWidth = 1 / Math.min(1, transform.k);
  for (const frame of scene.frames) {
    if (frame.y > bottom || frame.y + frame.height < top) continue;
    context.strokeStyle = faint;
    context.strokeRect(frame.x, frame.y, frame.width, frame.height);
    if (transform.k > TEXT_SCALE) {
      context.fillStyle = ink;
      context.font = "600 12px system-ui, sans-serif";
      context.fillText(`▾ ${frame.label}`, frame.x + 8, frame.y + 15);
    }
  }
  drawEdges(context, scene, marks, transform.k, { ink, faint, accent, top, bottom });
  context.textBaseline = "middle";
  for (const vertex of scene.vertices) {
    if (vertex.y > bottom || vertex.y + vertex.height < top || vertex.x > right || vertex.x + vertex.width < left) continue;
    drawVertex(context, vertex, marks, transform.k, { ink, faint, ground, accent });
  }
}

const curve = d3.line().curve(d3.curveBasis);

function drawEdges(context, scene, marks, scale, { ink, faint, accent, top, bottom }) {
  if (scale < SHAPE_SCALE) {
    context.strokeStyle = faint;
    context.globalAlpha = 0.5;
    context.beginPath();
    for (const [a, b] of scene.edges) {
      const from = scene.vertices[a], to = scene.vertices[b];
      if (Math.abs(to.y - from.y) > FAR || from.y > bottom || to.y + LINE < top) continue;
      context.moveTo(from.x + from.width / 2, from.y + LINE);
      context.lineTo(to.x + to.width / 2, to.y);
    }
    context.stroke();
    context.globalAlpha = 1;
    return;
  }
  scene.edges.forEach(([a, b], index) => {
    const from = scene.vertices[a], to = scene.vertices[b];
    if (Math.min(from.y, to.y) > bottom || Math.max(from.y, to.y) + LINE < top) return;
    const isMarked = marks.selected !== null && (a === marks.selected || b === marks.selected);
    const points = scene.lines[index];
    context.strokeStyle = isMarked ? accent : points ? ink : faint;
    context.globalAlpha = isMarked ? 1 : points ? 0.55 : Math.abs(to.y - from.y) > FAR ? 0.12 : 0.5;
    context.beginPath();
    if (points) curve.context(context)(points);
    else {
      const x1 = from.x + from.width / 2, y1 = from.y + LINE, x2 = to.x + to.width / 2, y2 = to.y;
      const bend = Math.min(60, Math.abs(y2 - y1) / 2);
      context.moveTo(x1, y1);
      context.bezierCurveTo(x1, y1 + bend, x2, y2 - bend, x2, y2);
    }
    context.stroke();
  });
  context.globalAlpha = 1;
}

function drawVertex(context, vertex, marks, scale, { ink, faint, ground, accent }) {
  const index = vertex.index;
  if (scale < SHAPE_SCALE) {
    context.fillStyle = index === marks.selected ? accent : marks.badge(vertex)?.colour ?? marks.colour(vertex) ?? ink;
    context.fillRect(vertex.x, vertex.y, vertex.width, vertex.height);
    return;
  }
  context.fillStyle = ground;
  context.strokeStyle = index === marks.selected ? accent : faint;
  context.lineWidth = (index === marks.selected ? 3 : 1) / Math.min(1, scale);
  context.beginPath();
  context.roundRect(vertex.x, vertex.y, vertex.width, vertex.height, vertex.kind === "inputs" ? 18 : 5);
  const tint = marks.tint(vertex);
  if (tint) { context.fillStyle = tint; }
  context.fill();
  context.stroke();
  if (vertex.kind === "group") context.strokeRect(vertex.x + 3, vertex.y + 3, vertex.width - 6, vertex.height - 6);
  const colour = marks.colour(vertex);
  if (colour) {
    context.fillStyle = colour;
    context.fillRect(vertex.x + 1, vertex.y + 3, 5, vertex.height - 6);
  }
  const badge = marks.badge(vertex);
  if (badge) {
    context.setLineDash(badge.dashed ? [4, 3] : []);
    context.strokeStyle = badge.colour;
    context.lineWidth = 2 / Math.min(1, scale);
    context.strokeRect(vertex.x - 3, vertex.y - 3, vertex.width + 6, vertex.height + 6);
    context.setLineDash([]);
  }
  context.lineWidth = 1 / Math.min(1, scale);
  if (scale < TEXT_SCALE) return;
  context.fillStyle = ink;
  context.font = "600 12px system-ui, sans-serif";
  const room = vertex.width - 16;
  const lines = vertex.detail ? [vertex.y + 12, vertex.y + 26] : [vertex.y + LINE / 2];
  context.fillText(vertex.label, vertex.x + 10, lines[0], room);
  if (vertex.detail) {
    context.font = "11px system-ui, sans-serif";
    context.fillText(vertex.detail, vertex.x + 10, lines[1], room);
  }
}
