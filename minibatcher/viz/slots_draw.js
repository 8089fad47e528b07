// How the slot animation draws a run, its queue and the strip of the whole run, in the colours of the page around it.

const LETTERED = 10;  // pixels: a row in which a name can be read
const HEAD = 16, KV = 30, FOOT = 20;  // pixels above and below the slots of a run

// The palette in the colours of the page around it.
function makeTheme(root, palette) {
  const theme = { ...pageColours(root), palette }, { bg } = theme;
  theme.fills = palette.states.map(state => palette.requests.map(c => mix(hex(c), bg, palette.strength[state])));
  theme.inks = theme.fills.map(row => row.map(c => light(c) > 125 ? "#000" : "#fff"));
  theme.padding = theme.soft(0.28);
  theme.patterns = {};
  for (const state in palette.hatches) theme.patterns[state] = makePattern(palette.hatches[state][0], theme.soft(0.62));
  return theme;
}

// Where things stand in a run's canvas, in CSS pixels.
function layout(width, run, row) {
  const roomy = width > 800, left = row >= LETTERED ? (roomy ? 104 : 82) : 58, right = roomy ? 132 : 84;
  const height = row * run.shown, plot = width - left - right - 12;
  const bottom = HEAD + height, whole = bottom + (run.kvBlocks ? KV : 0) + FOOT;
  return { width, height: whole, row, left, plot, top: HEAD, bottom, queue: left + plot + 12, queueWidth: right };
}

function drawRun(g, run, moment, place, view, theme, chosen) {
  const x = position => place.left + (position - view.from) / (view.to - view.from) * place.plot;
  drawHead(g, moment, place, theme);
  g.save();
  g.beginPath();
  g.rect(place.left, 0, place.plot, place.height);
  g.clip();
  const { canvas, from } = film(run, place, view, theme, chosen), scale = window.devicePixelRatio || 1;
  const offset = Math.round((view.from - from) / (view.to - view.from) * place.plot * scale) / scale;
  g.drawImage(canvas, place.left - offset, 0, canvas.width / scale, canvas.height / scale);
  drawFuture(g, run, place, view, x, theme);
  g.restore();
  drawAxis(g, run, place, view, x, theme);
  drawOccupants(g, run, moment, place, theme, chosen);
  drawQueue(g, moment, place, theme, chosen);
}

// What stays as it is while the moment moves, and half a window more, so that playing seldom draws it anew.
function film(run, place, view, theme, chosen) {
  const span = view.to - view.from, scale = window.devicePixelRatio || 1;
  const key = [view.axis, span, run.count, chosen, theme.key, place.plot, place.height, scale].join();
  const old = run.film;
  if (old && old.key === key && view.from >= old.from - 1e-9 && view.to <= old.to + 1e-9) return old;
  const isWhole = span >= run.extent(view.axis) * 0.999, share = isWhole ? 1 : 1.5;
  const from = isWhole ? view.from : Math.max(0, view.from - 0.1 * span);
  const part = { ...view, from, to: from + share * span }, own = { ...place, left: 0, plot: place.plot * share };
  const canvas = old ? old.canvas : document.createElement("canvas"), g = prepare(canvas, own.plot, place.height);
  const x = position => (position - from) / span * place.plot;
  drawRows(g, run, own, theme);
  drawCells(g, run, own, part, x, theme, chosen);
  if (view.axis === "seconds") drawGaps(g, run, own, part, x, theme);
  drawMarks(g, run, own, part, x, theme);
  if (run.kvBlocks) drawKv(g, run, own, part, x, theme);
  return run.film = { key, canvas, from, to: part.to };
}

function drawHead(g, moment, place, theme) {
  g.fillStyle = theme.soft(0.75);
  g.font = "11px system-ui, sans-serif";
  g.textAlign = "left";
  g.fillText(place.row >= LETTERED ? "slot · now" : "slot", 0, HEAD / 2);
  const more = place.queueWidth > 100 ? "queue, oldest first" : "queue";
  g.fillText(more, place.queue, HEAD / 2);
}

function drawRows(g, run, place, theme) {
  g.fillStyle = theme.soft(0.05);
  g.fillRect(place.left, place.top, place.plot, place.bottom - place.top);
  if (place.row < 5) return;
  g.fillStyle = theme.back;
  for (let slot = 1; slot < run.shown; slot++)
    g.fillRect(place.left, place.top + slot * place.row - 0.5, place.plot, 1);
}

function drawCells(g, run, place, view, x, theme, chosen) {
  const { left, right } = run.edges[view.axis];
  const first = Math.max(0, run.columnAt(view.axis, view.from)), last = run.columnAt(view.axis, view.to);
  const gap = place.row >= 5 ? 1 : 0, hatched = {}, outlined = new Path2D(), labels = [];
  const hatch = (state, x0, width, y) => {
    if (width < 3 || (place.row < 4 && state !== "finished") || !theme.patterns[state]) return;
    (hatched[state] ||= new Path2D()).rect(x0, y, width, place.row - gap);
  };
  for (let slot = 0; slot < run.shown; slot++) {
    const row = run.slots[slot], y = place.top + slot * place.row + gap / 2;
    let drawn = -1;  // right end of what is drawn: parts of a pixel are left out
    let named = -1, namedAt = -Infinity;  // whose name was written last, and where: it is not repeated at every stall
    for (let i = firstEndingAfter(row, first); i < row.length && row[i].first <= last; i++) {
      const cell = row[i], x0 = x(left[cell.first]), x2 = x(right[cell.last - 1]);
      if (x2 - Math.max(drawn, x0) < 0.3) continue;
      drawn = x2;
      const state = theme.palette.states[cell.state], request = run.requests[cell.request];
      const seam = x2 - x0 > 3 ? 0.75 : 0, x1 = x0 + (x2 - x0 - seam) * cell.share / FULL;
      g.fillStyle = rgb(theme.fills[cell.state][request.colour]);
      g.fillRect(x0, y, Math.max(x1 - x0, 0.5), place.row - gap);
      hatch(state, x0, x1 - x0, y);
      if (cell.share < FULL) {
        g.fillStyle = theme.padding;
        g.fillRect(x1, y, x2 - seam - x1, place.row - gap);
        hatch("padding", x1, x2 - seam - x1, y);
      }
      if (request.id === chosen) outlined.rect(x0, y, Math.max(x2 - x0 - seam, 1), place.row - gap);
      const a = Math.max(x0, place.left), b = Math.min(x1, place.left + place.plot);
      if (place.row < LETTERED || b - a < 10) continue;
      const again = named === cell.request && a - namedAt < 160 && b - a < 60;
      const text = nameIn(again ? "" : request.id, state === "decode" ? "" : theme.palette.letters[state], b - a - 4);
      if (text) labels.push([text, cell, request, (a + b) / 2, y]);
      if (!again && text.startsWith(request.id)) { named = cell.request; namedAt = a; }
    }
  }
  for (const state in hatched) { g.fillStyle = theme.patterns[state]; g.fill(hatched[state]); }
  drawLabels(g, place, labels, theme);
  g.strokeStyle = theme.text;
  g.lineWidth = 2;
  g.stroke(outlined);
}

// The request's name and the letter of the state, as far as there is room. Decode, the usual state, goes without.
const nameIn = (id, letter, room) =>
  [`${id} ${letter}`.trim(), id, letter].find(text => text && text.length * 6 < room) || "";

function drawLabels(g, place, labels, theme) {
  g.font = `${clamp(place.row - 4, 8, 11)}px system-ui, sans-serif`;
  g.textAlign = "center";
  for (const [text, cell, request, x, y] of labels) {
    const middle = y + (place.row - 1) / 2 + 0.5;
    if (theme.patterns[theme.palette.states[cell.state]]) {  // a name on a texture needs a clean ground
      const width = g.measureText(text).width + 4;
      g.fillStyle = rgb(theme.fills[cell.state][request.colour]);
      g.fillRect(x - width / 2, y + 1, width, place.row - 3);
    }
    g.fillStyle = theme.inks[cell.state][request.colour];
    g.fillText(text, x, middle);
  }
}

function drawGaps(g, run, place, view, x, theme) {
  const { left, right } = run.edges.seconds;
  for (const c of run.count && left[0] > PAUSE ? [-1, ...run.gaps] : run.gaps) {
    const x0 = x(c < 0 ? 0 : right[c]), x1 = x(left[c + 1]);
    if (x1 < place.left || x0 > place.left + place.plot || x1 - x0 < 1) continue;
    g.fillStyle = theme.soft(0.05);
    g.fillRect(x0, place.top, x1 - x0, place.bottom - place.top);
    g.fillStyle = theme.soft(0.5);
    for (const edge of [x0, x1]) g.fillRect(edge - 0.5, place.top, 1, place.bottom - place.top);
    if (x1 - x0 > 84) note(g, "engine waiting", (x0 + x1) / 2, (place.top + place.bottom) / 2, theme);
  }
}

function note(g, text, x, y, theme) {
  g.font = "italic 12px system-ui, sans-serif";
  g.textAlign = "center";
  const width = g.measureText(text).width + 10;
  g.fillStyle = theme.back;
  g.fillRect(x - width / 2, y - 9, width, 18);
  g.fillStyle = theme.text;
  g.fillText(text, x, y);
}

// A request lost its slot here: a triangle that points out of the row.
function drawMarks(g, run, place, view, x, theme) {
  for (const mark of run.marks) {
    const at = x(run.edges[view.axis].left[mark.column]);
    if (at < place.left || at > place.left + place.plot) continue;
    triangle(g, at, place.top + (mark.slot + 0.5) * place.row, clamp(place.row * 0.4, 3.5, 7), theme);
  }
}

function triangle(g, x, y, size, theme) {
  g.beginPath();
  g.moveTo(x - size, y - size);
  g.lineTo(x + size, y - size);
  g.lineTo(x, y + size);
  g.closePath();
  g.fillStyle = theme.palette.alarm;
  g.fill();
  g.strokeStyle = theme.back;
  g.lineWidth = 1.5;
  g.stroke();
  g.strokeStyle = theme.text;
  g.lineWidth = 0.75;
  g.stroke();
}

function drawKv(g, run, place, view, x, theme) {
  const { left, right } = run.edges[view.axis], bottom = place.bottom + KV, height = KV - 7;
  const first = Math.max(0, run.columnAt(view.axis, view.from)), last = run.columnAt(view.axis, view.to);
  g.fillStyle = theme.soft(0.05);
  g.fillRect(place.left, bottom - height, place.plot, height);
  g.fillStyle = theme.soft(0.42);
  for (let c = first; c <= last; c++) {
    const x0 = x(left[c]);
    let x1 = x(right[c]), kv = run.columns.kv[c];
    while (c < last && x1 - x0 < 0.7 && x(left[c + 1]) - x1 < 0.7) {  // several columns in one pixel: the fullest
      c++;
      kv = Math.max(kv, run.columns.kv[c]);
      x1 = x(right[c]);
    }
    const tall = height * kv / run.kvBlocks;
    g.fillRect(x0, bottom - tall, x1 - x0 + 0.3, tall);
  }
}

// What is still to come is veiled; behind the end of a run there is nothing.
function drawFuture(g, run, place, view, x, theme) {
  const now = x(view.now), end = x(run.extent(view.axis)), edge = place.left + place.plot, bottom = place.height - FOOT;
  if (now < edge) {
    g.fillStyle = rgb(theme.bg, 0.72);
    g.fillRect(Math.max(now, place.left), place.top, edge - now, bottom - place.top);
  }
  if (end < edge - 1 && run.count) {
    g.fillStyle = theme.soft(0.12);
    g.fillRect(end, place.top, edge - end, bottom - place.top);
  }
  g.fillStyle = theme.text;
  g.fillRect(Math.min(now, edge - 1) - 1, place.top, 2, bottom - place.top);
  if (run.count && edge - end > 150 && view.now >= run.extent(view.axis) - 1e-9) {
    const after = view.axis === "seconds" ? seconds(run.duration) : `${whole(run.steps)} steps`;
    note(g, `done after ${after}`, (end + edge) / 2, (place.top + place.bottom) / 2, theme);
  }
}

function drawAxis(g, run, place, view, x, theme) {
  g.font = "11px system-ui, sans-serif";
  g.fillStyle = theme.soft(0.75);
  g.textAlign = "left";
  if (run.kvBlocks) g.fillText("KV blocks", 0, place.bottom + KV / 2 + 3);
  const y = place.height - FOOT / 2 + 1, offset = view.axis === "steps" ? run.firstIndex : 0;
  g.fillText(view.axis === "seconds" ? "seconds" : "step", 0, y);
  g.textAlign = "center";
  const step = niceStep((view.to - view.from) * 80 / place.plot, view.axis === "steps");
  const digits = clamp(-Math.floor(Math.log10(step)), 0, 6), last = view.to + offset + 1e-9;
  const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  for (let tick = Math.max(0, Math.ceil((view.from + offset) / step - 1e-9) * step); tick <= last; tick += step) {
    const at = x(tick - offset);
    g.fillRect(at - 0.5, place.height - FOOT, 1, 4);
    g.fillText(tick.toLocaleString("en-US", format), clamp(at, place.left + 4, place.left + place.plot - 8), y);
  }
}

function niceStep(least, isWhole) {
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map(k => k * power).find(s => s >= least * 0.999);
  return isWhole ? Math.max(1, Math.round(step)) : step;
}

// Beside each row its number and who sits there now; of thin rows the colour alone.
function drawOccupants(g, run, moment, place, theme, chosen) {
  const every = Math.max(1, Math.ceil(12 / place.row)), thin = place.row < LETTERED;
  g.font = `${thin ? 10 : clamp(place.row - 3, 9, 11)}px system-ui, sans-serif`;
  for (let slot = 0; slot < run.shown; slot++) {
    const y = place.top + slot * place.row, cell = moment.cells[slot];
    if (slot % every === 0) {
      g.fillStyle = theme.soft(0.75);
      g.textAlign = "right";
      g.fillText(slot, 22, y + (thin ? Math.max(place.row / 2, 4) : place.row / 2 + 0.5));
    }
    if (!cell) continue;
    const width = thin ? 22 : place.left - 36, request = run.requests[cell.request];
    g.fillStyle = rgb(theme.fills[cell.state][request.colour]);
    g.fillRect(28, y, width, place.row - (place.row >= 5 ? 1 : 0));
    if (request.id === chosen) frame(g, 28, y, width, place.row - 1, theme);
    if (thin) continue;
    g.textAlign = "left";
    g.fillStyle = theme.inks[cell.state][request.colour];
    const name = shorten(request.id, Math.floor(width / 6.5) - 3);
    const letter = theme.palette.letters[theme.palette.states[cell.state]];
    g.fillText(`${name} ${letter}`, 32, y + place.row / 2 + 0.5);
  }
}

function frame(g, x, y, width, height, theme) {
  g.strokeStyle = theme.text;
  g.lineWidth = 2;
  g.strokeRect(x, y, width, height);
}

const shorten = (text, length) => text.length > length ? text.slice(0, length - 1) + "…" : text;

// Boxes of the queue: which request is where. Used for drawing and for pointing.
function queueBoxes(moment, place) {
  const perColumn = Math.max(1, Math.floor((place.bottom - place.top) / 16));
  const columns = place.queueWidth > 100 ? 2 : 1;
  const width = (place.queueWidth - 4 * (columns - 1)) / columns, room = perColumn * columns;
  const shown = moment.queue.length > room ? moment.queue.slice(0, room - 1) : moment.queue;
  const box = i => {
    const x = place.queue + Math.floor(i / perColumn) * (width + 4);
    return { x, y: place.top + (i % perColumn) * 16, width, height: 14 };
  };
  const boxes = shown.map((request, i) => ({ request, ...box(i) }));
  return { boxes, more: moment.queue.length - shown.length, last: box(shown.length) };
}

function drawQueue(g, moment, place, theme, chosen) {
  const { boxes, more, last } = queueBoxes(moment, place), decode = theme.palette.states.indexOf("decode");
  g.font = "10px system-ui, sans-serif";
  g.textAlign = "left";
  for (const { request, x, y, width, height } of boxes) {
    g.fillStyle = rgb(theme.fills[decode][request.colour]);
    g.fillRect(x, y, width, height);
    if (request.id === chosen) frame(g, x, y, width, height, theme);
    g.fillStyle = theme.inks[decode][request.colour];
    g.fillText(shorten(request.id, 10), x + 4, y + height / 2 + 0.5);
  }
  g.fillStyle = theme.text;
  if (more > 0) g.fillText(`+ ${whole(more)} more`, last.x, last.y + 7, last.width);
  if (!moment.queue.length) { g.fillStyle = theme.soft(0.6); g.fillText("nobody waits", place.queue, place.top + 7); }
}

function drawOverview(canvas, runs, view, place, theme, extent) {
  const tall = 15, height = runs.length * tall + 4, g = prepare(canvas, place.width, height);
  const x = position => place.left + position / extent * place.plot;
  runs.forEach((run, i) => {
    g.fillStyle = theme.soft(0.75);
    g.font = "11px system-ui, sans-serif";
    g.textAlign = "left";
    g.fillText(shorten(run.title, place.left > 90 ? 14 : 8), 0, i * tall + 9);
    const picture = strip(run, view.axis, place.plot, tall - 3, theme, extent);
    g.drawImage(picture, place.left, i * tall + 2, place.plot, tall - 3);
  });
  g.strokeStyle = theme.text;
  g.lineWidth = 1.5;
  if (view.to - view.from < extent * 0.999) g.strokeRect(x(view.from), 1, x(view.to) - x(view.from), height - 2);
  g.fillStyle = theme.text;
  g.fillRect(clamp(x(view.now) - 1, place.left, place.left + place.plot - 2), 0, 2, height);
}

// Dark: slots doing useful work; lighter on top: slots held without. Drawn once for each size, axis and theme.
function strip(run, axis, width, height, theme, extent) {
  const scale = window.devicePixelRatio || 1;
  const w = Math.max(1, Math.round(width * scale)), h = Math.round(height * scale);
  const key = [axis, w, h, run.count, extent, theme.key].join();
  if (run.strip && run.strip.key === key) return run.strip.canvas;
  const canvas = document.createElement("canvas");
  canvas.width = w;
  canvas.height = h;
  const g = canvas.getContext("2d");
  g.fillStyle = theme.soft(0.07);
  g.fillRect(0, 0, w, h);
  for (let i = 0; i < w; i++) {
    const before = run.columnAt(axis, i / w * extent), b = run.columnAt(axis, (i + 1) / w * extent);
    if (b < 0 || (before === b && run.isBetween(axis, b, (i + 0.5) / w * extent))) continue;
    const a = Math.min(before, b - 1), sum = name => run.sums[name][b] - (a < 0 ? 0 : run.sums[name][a]);
    const working = h * sum("working") / sum("places"), held = h * sum("held") / sum("places");
    g.fillStyle = theme.soft(0.25);
    g.fillRect(i, h - held, 1, held);
    g.fillStyle = theme.soft(0.7);
    g.fillRect(i, h - working, 1, working);
  }
  run.strip = { key, canvas };
  return canvas;
}
