// Who sat in which slot doing what, played as a film: rows are slots, columns iterations (or seconds), colour is the
// request, strength, texture and letter the state. Several runs stand above each other and move on one clock.
//
// A position on the axis is a number of iterations done, or seconds since the first arrival. State for tests is in
// data-* attributes: of the root (axis, now, playing, speed, shown, request), and of each run (iteration, useful, ...).

const FULL = 255;  // run_share of a row without padding
const SPEEDS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];  // iterations a second
const WHOLE_RUN_S = 15;  // the speed offered first plays a run in about this time
const MANY = 600;  // iterations: of a longer run, half as many are seen at first
const TALL = 640, MAX_ROW = 22, MIN_ROW = 2, LETTERED = 10;  // pixels: all rows together, and one row
const HEAD = 16, KV = 30, FOOT = 20;  // pixels above and below the slots of a run
const PAUSE = 0.002;  // seconds: a shorter time between two steps is the first one's
const COUNTS = ["steps", "working", "held", "useful", "computed", "output", "places"];

const STYLE = `
.mb-slots { --bg: var(--jp-layout-color0, Canvas); --fg: var(--jp-content-font-color1, CanvasText);
  position: relative; box-sizing: border-box; background: var(--bg); color: var(--fg); padding: 4px 6px 6px; margin-bottom: 6px;
  font: 13px/1.4 system-ui, sans-serif; border-radius: 4px; outline-offset: 1px; min-width: 0; container-type: inline-size; }
.mb-slots:focus-visible { outline: 2px solid currentColor; }
.mb-slots canvas { display: block; width: 100%; touch-action: pan-y; }
.mb-slots .bar { display: flex; flex-wrap: wrap; gap: 4px 6px; align-items: center; margin: 4px 0; }
.mb-slots button, .mb-slots select { font: inherit; color: inherit; background: transparent; padding: 2px 8px; height: 27px;
  box-sizing: border-box; border: 1px solid color-mix(in srgb, currentColor 35%, transparent); border-radius: 5px; }
.mb-slots select { padding: 0 2px; } .mb-slots option { color: CanvasText; background: Canvas; }
.mb-slots button:hover { background: color-mix(in srgb, currentColor 12%, transparent); }
.mb-slots button.play { min-width: 86px; font-weight: 600; }
.mb-slots label { display: inline-flex; gap: 4px; align-items: center; }
.mb-slots :is(button, select, input, summary):focus-visible { outline: 2px solid currentColor; outline-offset: 1px; }
.mb-slots .scrub { display: block; margin: 6px 0 2px; box-sizing: border-box; accent-color: var(--accent); }
.mb-slots .run { margin-top: 8px; }
.mb-slots .totals { display: grid; grid-template-columns: 104px repeat(7, minmax(96px, max-content)); gap: 0 10px; margin: 0; }
.mb-slots h4 { margin: 0; font-size: 15px; color: inherit; overflow: hidden; text-overflow: ellipsis; }
.mb-slots .totals div { display: flex; flex-direction: column-reverse; }
@container (max-width: 860px) {
  .mb-slots .totals { grid-template-columns: repeat(auto-fill, minmax(84px, 1fr)); gap: 0 6px; }
  .mb-slots h4 { grid-column: 1 / -1; }
}
.mb-slots dt { font-size: 11px; line-height: 1.2; opacity: .75; }
.mb-slots dd { margin: 0; font-variant-numeric: tabular-nums; font-weight: 600; line-height: 1.25; white-space: nowrap; }
.mb-slots .legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; margin: 4px 0 0; padding: 0; }
.mb-slots .legend span { display: inline-flex; align-items: center; gap: 5px; }
.mb-slots .legend canvas { width: 24px; height: 12px; }
.mb-slots .note, .mb-slots details { font-size: 12px; margin: 4px 0 0; }
.mb-slots kbd { font: inherit; border: 1px solid color-mix(in srgb, currentColor 40%, transparent); border-radius: 3px; padding: 0 4px; }
.mb-slots .story { position: absolute; z-index: 2; width: max-content; max-width: min(380px, 90%); padding: 6px 9px;
  font-size: 12px; background: var(--bg); border: 1px solid currentColor; border-radius: 5px; pointer-events: none;
  box-shadow: 0 2px 8px rgb(0 0 0 / 35%); }
.mb-slots .story b { font-size: 13px; } .mb-slots .story p { margin: 0; }
.mb-slots .spoken { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
`;

const BODY = `
<div class="bar">
  <button class="home" aria-label="to the first iteration" title="first iteration (Home)">|◀</button>
  <button class="back" aria-label="one iteration back" title="one iteration back (←)">−1</button>
  <button class="play" title="play or pause (space)">▶ Play</button>
  <button class="next" aria-label="one iteration on" title="one iteration on (→)">+1</button>
  <button class="end" aria-label="to the end" title="the end (End)">▶|</button>
  <label>speed <select class="speed" title="how fast it plays"></select></label>
  <label>axis <select class="axis"><option>iterations</option><option>seconds</option></select></label>
  <label>zoom <button class="out" aria-label="show more of the run" title="show more (−)">−</button>
  <button class="in" aria-label="show less of the run" title="show less (+)">+</button></label>
</div>
<div class="runs"></div>
<input class="scrub" type="range" min="0" step="any" aria-label="position in the run">
<canvas class="overview" role="img" aria-label="the whole run: share of slots doing useful work; click to go there"></canvas>
<div class="legend" aria-label="what textures and letters mean"></div>
<p class="note" hidden></p>
<details class="keys"><summary>Keys</summary><kbd>space</kbd> play or pause · <kbd>←</kbd> <kbd>→</kbd> one iteration ·
<kbd>page up</kbd> <kbd>page down</kbd> a tenth of the run · <kbd>home</kbd> <kbd>end</kbd> first and last iteration ·
<kbd>↑</kbd> <kbd>↓</kbd> a slot, and the story of the request in it · <kbd>esc</kbd> closes it · <kbd>+</kbd> <kbd>−</kbd>
zoom. Pointing at a slot or at the queue, or tapping on it, tells the same story.</details>
<div class="story" hidden></div>
<div class="spoken" role="status" aria-live="polite"></div>
`;

const TOTALS = [  // label, what it shows at a moment
  ["iteration", (run, m) => `${whole(m.iteration)} of ${whole(run.iterations)}`],
  ["time", (run, m) => seconds(m.time)],
  ["useful slots", (run, m) => percent(m.useful)],
  ["padding tokens", (run, m) => percent(m.padding)],
  ["output tokens/s", (run, m) => run.total.output ? whole(m.tokensPerSecond) : "–"],
  ["waiting", (run, m) => whole(m.waiting)],
  ["KV blocks", (run, m) => run.kvBlocks ? `${whole(m.kv)} of ${whole(run.kvBlocks)}` : "–"],
];

const whole = x => x == null ? "–" : Math.round(x).toLocaleString("en-US");
const percent = share => share == null ? "–" : `${Math.round(100 * share)} %`;
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
const ratio = (part, all) => all > 0 ? part / all : null;

function seconds(s) {
  if (s == null) return "–";
  if (Math.abs(s) < 0.9995) return `${(1000 * s).toFixed(s < 0.01 && s > 0 ? 1 : 0)} ms`;
  return `${s < 100 ? s.toFixed(2) : whole(s)} s`;
}

// The number of sorted values that are <= x (or < x).
function countUpTo(values, x, below = false) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (below ? values[middle] < x : values[middle] <= x) low = middle + 1; else high = middle;
  }
  return low;
}

// ---------------------------------------------------------------- a run: what happened

class Run {
  constructor(data, arrays) { this.clear(); this.add(data, arrays); }

  clear() {
    this.columns = { start: [], end: [], waiting: [], kv: [] };
    this.sums = Object.fromEntries(COUNTS.map(name => [name, []]));  // running totals, by column
    this.total = Object.fromEntries(COUNTS.map(name => [name, 0]));
    this.edges = { iterations: { left: [], right: [] }, seconds: { left: [], right: [] } };
    this.slots = []; this.marks = []; this.gaps = []; this.requests = []; this.order = [];
    this.iterations = 0; this.kvBlocks = 0; this.film = this.strip = null;
  }

  get count() { return this.columns.start.length; }

  // Takes what follows the columns that are there already, and skips what is known. False where something is missing.
  add(data, arrays) {
    const old = this.count;
    if (data.first > old) return false;
    for (const name of ["name", "clock", "origin", "bin"]) this[name] = data[name];
    this.numSlots = data.slots;
    this.duration = data.end - data.origin;
    this.firstIndex = data.first_index;
    this.title = data.title || this.title || data.name;
    this.kvBlocks = Math.max(this.kvBlocks, data.kv_blocks);
    while (this.slots.length < data.slots) this.slots.push([]);
    this.addRequests(data);
    this.addColumns(arrays, old - data.first);
    this.addRuns(arrays, old);
    for (let i = 0; i < arrays.mark_column.length; i++)
      if (arrays.mark_column[i] >= old)
        this.marks.push({ column: arrays.mark_column[i], slot: arrays.mark_slot[i], request: arrays.mark_request[i] });
    this.setEdges(Math.max(0, old - 1));
    return true;
  }

  addRequests({ fields, requests }) {
    for (const values of requests) {
      const request = Object.fromEntries(fields.map((name, i) => [name, values[i]])), known = this.requests[request.index];
      if (known && !request.why) request.why = known.why;
      this.requests[request.index] = request;
    }
    this.order = this.requests.filter(r => r && r.arrival != null).sort((a, b) => a.arrival - b.arrival || a.index - b.index);
  }

  addColumns(arrays, skip) {
    for (let i = skip; i < arrays.start.length; i++) {
      for (const name in this.columns) this.columns[name].push(arrays[name][i]);
      for (const name of COUNTS) {
        this.total[name] += name === "places" ? arrays.steps[i] * this.numSlots : arrays[name][i];
        this.sums[name].push(this.total[name]);
      }
    }
    this.iterations = this.total.steps;
  }

  addRuns(arrays, known) {
    for (let i = 0; i < arrays.run_slot.length; i++) {
      const first = Math.max(known, arrays.run_first[i]), last = arrays.run_last[i];
      if (first >= last) continue;
      const row = this.slots[arrays.run_slot[i]], before = row[row.length - 1];
      const request = arrays.run_request[i], state = arrays.run_state[i], share = arrays.run_share[i];
      if (before && before.last === first && before.request === request && before.state === state && before.share === share
        && share === FULL) before.last = last;
      else row.push({ first, last, request, state, share });
    }
  }

  // Where each column begins and ends on either axis. The moments between two steps belong to the first one, unless the
  // engine was waiting for work: a gap.
  setEdges(from) {
    const { start, end } = this.columns, { iterations, seconds } = this.edges;
    this.gaps = this.gaps.filter(column => column < from);
    for (let c = from; c < this.count; c++) {
      iterations.left[c] = c ? this.sums.steps[c - 1] : 0;
      iterations.right[c] = this.sums.steps[c];
      const next = c + 1 < this.count ? start[c + 1] : end[c], pause = next - end[c];
      const isGap = pause >= Math.max((end[c] - start[c]) / this.bin, PAUSE);
      seconds.left[c] = start[c] - this.origin;
      seconds.right[c] = (isGap ? end[c] : next) - this.origin;
      if (isGap) this.gaps.push(c);
    }
  }

  extent(axis) { return axis === "seconds" ? Math.max(this.duration, this.edges.seconds.right[this.count - 1] || 0) : this.iterations; }

  // The column that a position on the axis lies in (its right edge included), -1 before the first.
  columnAt(axis, position) { return countUpTo(this.edges[axis].left, position - 1e-9, true) - 1; }

  // In a pause of the engine, or behind the end.
  isBetween(axis, column, position) { return column < 0 || position > this.edges[axis].right[column] + 1e-9; }

  cell(slot, column) {
    const row = this.slots[slot];
    let low = 0, high = row.length;
    while (low < high) { const middle = (low + high) >> 1; if (row[middle].last <= column) low = middle + 1; else high = middle; }
    return low < row.length && row[low].first <= column ? row[low] : null;
  }

  // Everything that is said of a position.
  moment(axis, position) {
    const column = this.columnAt(axis, position), done = column >= this.count - 1, between = this.isBetween(axis, column, position);
    const sum = name => column < 0 ? 0 : this.sums[name][column];
    const cells = this.slots.map((_, slot) => between ? null : this.cell(slot, column));
    const ended = column < 0 ? 0 : this.columns.end[column] - this.origin;
    const bySeconds = axis === "seconds";
    const time = bySeconds ? Math.min(position, this.extent(axis)) : ended;
    const over = done && this.count ? this.duration : Math.max(ended, bySeconds ? position : 0);
    const queue = this.queue(cells, bySeconds ? position + this.origin : column < 0 ? -Infinity : this.columns.start[column]);
    return {
      column, between, cells, queue, time, iteration: sum("steps"),
      useful: ratio(sum("working"), sum("places")), padding: ratio(sum("computed") - sum("useful"), sum("computed")),
      output: sum("output"), tokensPerSecond: ratio(sum("output"), over),
      waiting: bySeconds || column < 0 ? queue.length : this.columns.waiting[column],
      kv: column < 0 || (done && between) ? 0 : this.columns.kv[column],
    };
  }

  // Who has arrived, holds no slot and has not ended, oldest first.
  queue(cells, time) {
    const holding = new Set(cells.filter(Boolean).map(cell => cell.request)), waiting = [];
    for (const request of this.order) {
      if (request.arrival > time) break;
      if (!holding.has(request.index) && (request.finish == null || request.finish > time)) waiting.push(request);
    }
    return waiting;
  }
}

// ---------------------------------------------------------------- colours and textures

const parse = css => (css.match(/[\d.]+/g) || [0, 0, 0]).slice(0, 3).map(Number);
const hex = css => [1, 3, 5].map(i => parseInt(css.slice(i, i + 2), 16));
const mix = (a, b, share) => a.map((v, i) => Math.round(share * v + (1 - share) * b[i]));
const rgb = (c, alpha = 1) => `rgb(${c.join(" ")} / ${alpha})`;
const light = c => 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2];

// The palette in the colours of the page around it.
function makeTheme(root, palette) {
  const style = getComputedStyle(root), fg = parse(style.color);
  // A transparent or unreadable background: whichever of white and black the text stands out from.
  const told = style.backgroundColor, bg = /rgba?\(/.test(told) && !/, 0\)$/.test(told) ? parse(told) : light(fg) < 128 ? [255, 255, 255] : [17, 17, 17];
  const theme = { bg, fg, palette, text: rgb(fg), back: rgb(bg), key: bg.join() + fg.join() };
  theme.soft = share => rgb(mix(fg, bg, share));
  theme.fills = palette.states.map(state => palette.requests.map(c => mix(hex(c), bg, palette.strength[state])));
  theme.inks = theme.fills.map(row => row.map(c => light(c) > 125 ? "#000" : "#fff"));
  theme.padding = theme.soft(0.28);
  theme.patterns = {};
  for (const [state, lines] of Object.entries(palette.hatches)) theme.patterns[state] = makePattern(lines[0], theme.soft(0.62));
  return theme;
}

function makePattern(kind, colour) {
  const size = 6, scale = window.devicePixelRatio || 1, canvas = document.createElement("canvas");
  canvas.width = canvas.height = Math.round(size * scale);
  const g = canvas.getContext("2d");
  g.scale(canvas.width / size, canvas.width / size);
  g.strokeStyle = g.fillStyle = colour;
  g.lineWidth = 1;
  const line = (...p) => { g.beginPath(); g.moveTo(p[0], p[1]); g.lineTo(p[2], p[3]); g.stroke(); };
  if (kind === ".") {  // on strong colours: a light dot and a dark one, so that one of them is seen
    g.fillStyle = "rgb(255 255 255 / 85%)";
    g.fillRect(1, 1, 1.5, 1.5);
    g.fillStyle = "rgb(0 0 0 / 60%)";
    g.fillRect(4, 4, 1.5, 1.5);
  }
  if (kind === "-") line(0, 3, 6, 3);
  if (kind === "/" || kind === "x") { line(-1, 7, 7, -1); line(-1, 1, 1, -1); line(5, 7, 7, 5); }
  if (kind === "x") { line(-1, -1, 7, 7); line(5, -1, 7, 1); line(-1, 5, 1, 7); }
  const pattern = g.createPattern(canvas, "repeat");
  pattern.setTransform(new DOMMatrix().scale(size / canvas.width));
  return pattern;
}

// Size a canvas for its place on the screen and clear it; drawing is in CSS pixels.
function prepare(canvas, width, height) {
  const scale = window.devicePixelRatio || 1, w = Math.round(width * scale), h = Math.round(height * scale);
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; canvas.style.height = `${height}px`; }
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  g.textBaseline = "middle";
  return g;
}

// ---------------------------------------------------------------- drawing a run

// Where things stand in a run's canvas, in CSS pixels.
function layout(width, run, row) {
  const roomy = width > 800, left = row >= LETTERED ? (roomy ? 104 : 82) : 58, right = roomy ? 132 : 84;
  const height = row * run.numSlots, plot = width - left - right - 12;
  return { width, row, left, plot, queue: left + plot + 12, queueWidth: right, top: HEAD, bottom: HEAD + height, height: HEAD + height + (run.kvBlocks ? KV : 0) + FOOT };
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

// What stays as it is while the moment moves, and half a window more: playing draws it anew twice a window, not each frame.
function film(run, place, view, theme, chosen) {
  const span = view.to - view.from, scale = window.devicePixelRatio || 1, key = [view.axis, span, run.count, chosen, theme.key, place.plot, place.height, scale].join();
  const old = run.film;
  if (old && old.key === key && view.from >= old.from - 1e-9 && view.to <= old.to + 1e-9) return old;
  const isWhole = span >= run.extent(view.axis) * 0.999, from = isWhole ? view.from : Math.max(0, view.from - 0.1 * span);
  const share = isWhole ? 1 : 1.5, part = { ...view, from, to: from + share * span }, own = { ...place, left: 0, plot: place.plot * share };
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
  for (let slot = 1; slot < run.numSlots; slot++) g.fillRect(place.left, place.top + slot * place.row - 0.5, place.plot, 1);
}

function drawCells(g, run, place, view, x, theme, chosen) {
  const { left, right } = run.edges[view.axis];
  const first = Math.max(0, run.columnAt(view.axis, view.from)), last = run.columnAt(view.axis, view.to);
  const gap = place.row >= 5 ? 1 : 0, hatched = {}, outlined = new Path2D(), labels = [];
  const hatch = (state, x0, width, y) => {
    if (width > 3 && place.row > 3 && theme.patterns[state]) (hatched[state] ||= new Path2D()).rect(x0, y, width, place.row - gap);
  };
  for (let slot = 0; slot < run.numSlots; slot++) {
    const row = run.slots[slot], y = place.top + slot * place.row + gap / 2;
    let drawn = -1;  // right end of what is drawn: parts of a pixel are left out
    let named = -1, namedAt = -Infinity;  // whose name was written last, and where: it is not repeated at every stall
    for (let i = firstAfter(row, first); i < row.length && row[i].first <= last; i++) {
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

function firstAfter(row, column) {
  let low = 0, high = row.length;
  while (low < high) { const middle = (low + high) >> 1; if (row[middle].last <= column) low = middle + 1; else high = middle; }
  return low;
}

// The request's name and the letter of the state, as far as there is room. Decode, the usual state, goes without.
const nameIn = (id, letter, room) => [`${id} ${letter}`.trim(), id, letter].find(text => text && text.length * 6 < room) || "";

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
    if (x1 - x0 > 84 && place.bottom - place.top > 12) note(g, "engine waiting", (x0 + x1) / 2, (place.top + place.bottom) / 2, theme);
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
    while (c < last && x1 - x0 < 0.7 && x(left[c + 1]) - x1 < 0.7) { c++; kv = Math.max(kv, run.columns.kv[c]); x1 = x(right[c]); }
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
    const text = view.axis === "seconds" ? `done after ${seconds(run.duration)}` : `done after ${whole(run.iterations)} iterations`;
    if (edge - end > 150 && view.now >= run.extent(view.axis) - 1e-9) note(g, text, (end + edge) / 2, (place.top + place.bottom) / 2, theme);
  }
  g.fillStyle = theme.text;
  g.fillRect(Math.min(now, edge - 1) - 1, place.top, 2, bottom - place.top);
}

function drawAxis(g, run, place, view, x, theme) {
  g.font = "11px system-ui, sans-serif";
  g.fillStyle = theme.soft(0.75);
  g.textAlign = "left";
  if (run.kvBlocks) g.fillText("KV blocks", 0, place.bottom + KV / 2 + 3);
  const y = place.height - FOOT / 2 + 1, offset = view.axis === "iterations" ? run.firstIndex : 0;
  g.fillText(view.axis === "seconds" ? "seconds" : "iteration", 0, y);
  g.textAlign = "center";
  const step = niceStep((view.to - view.from) * 80 / place.plot, view.axis === "iterations");
  for (let tick = Math.max(0, Math.ceil((view.from + offset) / step - 1e-9) * step); tick <= view.to + offset + 1e-9; tick += step) {
    const at = x(tick - offset);
    g.fillRect(at - 0.5, place.height - FOOT, 1, 4);
    const digits = clamp(-Math.floor(Math.log10(step)), 0, 6);
    g.fillText((tick + 0).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }), clamp(at, place.left + 4, place.left + place.plot - 8), y);
  }
}

function niceStep(least, isWhole) {
  const power = 10 ** Math.floor(Math.log10(least)), step = [1, 2, 5, 10].map(k => k * power).find(s => s >= least * 0.999);
  return isWhole ? Math.max(1, Math.round(step)) : step;
}

// Beside each row its number and who sits there now; of thin rows the colour alone.
function drawOccupants(g, run, moment, place, theme, chosen) {
  const every = Math.max(1, Math.ceil(12 / place.row)), thin = place.row < LETTERED;
  g.font = `${thin ? 10 : clamp(place.row - 3, 9, 11)}px system-ui, sans-serif`;
  for (let slot = 0; slot < run.numSlots; slot++) {
    const y = place.top + slot * place.row, cell = moment.cells[slot];
    if (slot % every === 0) {
      g.fillStyle = theme.soft(0.75);
      g.textAlign = "right";
      g.fillText(slot, 22, y + (thin ? Math.max(place.row / 2, 4) : place.row / 2 + 0.5));
    }
    if (!cell) continue;
    const width = thin ? 22 : place.left - 36, state = theme.palette.states[cell.state], request = run.requests[cell.request];
    g.fillStyle = rgb(theme.fills[cell.state][request.colour]);
    g.fillRect(28, y, width, place.row - (place.row >= 5 ? 1 : 0));
    if (request.id === chosen) { g.strokeStyle = theme.text; g.lineWidth = 2; g.strokeRect(28, y, width, place.row - 1); }
    if (thin) continue;
    g.textAlign = "left";
    g.fillStyle = theme.inks[cell.state][request.colour];
    g.fillText(`${shorten(request.id, Math.floor(width / 6.5) - 3)} ${theme.palette.letters[state]}`, 32, y + place.row / 2 + 0.5);
  }
}

const shorten = (text, length) => text.length > length ? text.slice(0, length - 1) + "…" : text;

// Boxes of the queue: which request is where. Used for drawing and for pointing.
function queueBoxes(moment, place) {
  const perColumn = Math.max(1, Math.floor((place.bottom - place.top) / 16)), columns = place.queueWidth > 100 ? 2 : 1;
  const width = (place.queueWidth - 4 * (columns - 1)) / columns, room = perColumn * columns;
  const shown = moment.queue.length > room ? moment.queue.slice(0, room - 1) : moment.queue;
  const box = i => ({ x: place.queue + Math.floor(i / perColumn) * (width + 4), y: place.top + (i % perColumn) * 16, width, height: 14 });
  return { boxes: shown.map((request, i) => ({ request, ...box(i) })), more: moment.queue.length - shown.length, last: box(shown.length) };
}

function drawQueue(g, moment, place, theme, chosen) {
  const { boxes, more, last } = queueBoxes(moment, place), decode = theme.palette.states.indexOf("decode");
  g.font = "10px system-ui, sans-serif";
  g.textAlign = "left";
  for (const { request, x, y, width, height } of boxes) {
    g.fillStyle = rgb(theme.fills[decode][request.colour]);
    g.fillRect(x, y, width, height);
    if (request.id === chosen) { g.strokeStyle = theme.text; g.lineWidth = 2; g.strokeRect(x, y, width, height); }
    g.fillStyle = theme.inks[decode][request.colour];
    g.fillText(shorten(request.id, 10), x + 4, y + height / 2 + 0.5);
  }
  g.fillStyle = theme.text;
  if (more > 0) g.fillText(`+ ${whole(more)} more`, last.x, last.y + 7);
  if (!moment.queue.length) { g.fillStyle = theme.soft(0.6); g.fillText("nobody waits", place.queue, place.top + 7); }
}

// ---------------------------------------------------------------- the whole run as a strip

function drawOverview(canvas, runs, view, place, theme, extent) {
  const tall = 15, height = runs.length * tall + 4, g = prepare(canvas, place.width, height);
  const x = position => place.left + position / extent * place.plot;
  runs.forEach((run, i) => {
    g.fillStyle = theme.soft(0.75);
    g.font = "11px system-ui, sans-serif";
    g.textAlign = "left";
    g.fillText(shorten(run.title, place.left > 90 ? 14 : 8), 0, i * tall + 9);
    g.drawImage(strip(run, view.axis, place.plot, tall - 3, theme, extent), place.left, i * tall + 2, place.plot, tall - 3);
  });
  g.strokeStyle = theme.text;
  g.lineWidth = 1.5;
  if (view.to - view.from < extent * 0.999) g.strokeRect(x(view.from), 1, x(view.to) - x(view.from), height - 2);
  g.fillStyle = theme.text;
  g.fillRect(clamp(x(view.now) - 1, place.left, place.left + place.plot - 2), 0, 2, height);
}

// Dark: slots doing useful work; lighter on top: slots held without. Drawn once for each size, axis and theme.
function strip(run, axis, width, height, theme, extent) {
  const scale = window.devicePixelRatio || 1, w = Math.max(1, Math.round(width * scale)), h = Math.round(height * scale);
  const key = [axis, w, h, run.count, extent, theme.key].join();
  if (run.strip && run.strip.key === key) return run.strip.canvas;
  const canvas = document.createElement("canvas");
  canvas.width = w;
  canvas.height = h;
  const g = canvas.getContext("2d");
  g.fillStyle = theme.soft(0.07);
  g.fillRect(0, 0, w, h);
  for (let i = 0; i < w; i++) {
    const b = run.columnAt(axis, (i + 1) / w * extent), a = Math.min(run.columnAt(axis, i / w * extent), b - 1);
    if (b < 0 || (run.isBetween(axis, b, (i + 0.5) / w * extent) && run.columnAt(axis, i / w * extent) === b)) continue;
    const share = name => (run.sums[name][b] - (a < 0 ? 0 : run.sums[name][a])) / (run.sums.places[b] - (a < 0 ? 0 : run.sums.places[a]));
    const working = h * share("working"), held = h * share("held");
    g.fillStyle = theme.soft(0.25);
    g.fillRect(i, h - held, 1, held);
    g.fillStyle = theme.soft(0.7);
    g.fillRect(i, h - working, 1, working);
  }
  run.strip = { key, canvas };
  return canvas;
}

// ---------------------------------------------------------------- a request's story

function tellStory(runs, run, request, where) {
  const p = document.createElement("div"), since = t => seconds(t - run.origin);
  const line = text => { const e = document.createElement("p"); e.textContent = text; p.append(e); return e; };
  const head = line(`${where ? ` · ${where}` : ""}${runs.length > 1 ? ` · ${run.title}` : ""}`), name = document.createElement("b");
  name.textContent = request.id;
  head.prepend(name);
  if (request.arrival == null) { line("The run has no record of this request beyond its rows."); return p; }
  line(`${whole(request.prompt_tokens)} prompt tokens, arrived at ${since(request.arrival)}`);
  if (request.scheduled == null) line(`has not started${request.why ? `: ${request.why}` : ""}`);
  else {
    const wait = request.scheduled - request.arrival;
    line(wait > 5e-4 ? `waited ${seconds(wait)}${request.why ? `: ${request.why}` : ""}` : "did not wait");
    line(`started at ${since(request.scheduled)}${request.first_token == null ? "" : `, first token at ${since(request.first_token)} (TTFT ${seconds(request.first_token - request.arrival)})`}`);
  }
  const gaps = request.output_tokens - 1;
  const pace = gaps > 0 && request.first_token != null ? `, ${seconds((request.last_token - request.first_token) / gaps)} for each after the first` : "";
  line(`${whole(request.output_tokens)} output tokens${pace}`);
  if (request.finish != null) line(`ended at ${since(request.finish)}: ${request.reason || "no reason recorded"}`);
  if (request.preemptions) line(`preempted ${request.preemptions === 1 ? "once" : `${request.preemptions} times`}`);
  for (const other of runs) {
    const same = other !== run && other.order.find(r => r.id === request.id);
    if (same && same.finish != null) line(`under ${other.title}: first token at ${seconds(same.first_token == null ? null : same.first_token - other.origin)}, ended at ${seconds(same.finish - other.origin)}`);
  }
  return p;
}

// ---------------------------------------------------------------- the picture

export function mount(el, { data, arrays }, notify) {
  const pick = i => Object.fromEntries(Object.entries(arrays).filter(([name]) => name.startsWith(`${i}.`)).map(([name, a]) => [name.slice(`${i}.`.length), a]));
  const runs = data.runs.map((run, i) => new Run({ ...run, first: 0 }, pick(i)));
  const root = document.createElement("div");
  root.className = "mb-slots";
  root.tabIndex = 0;
  root.style.setProperty("--accent", data.palette.accent);
  root.dataset.lmSuppressShortcuts = "true";  // JupyterLab keeps its own keys to itself while this has the focus
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", data.alt);
  root.innerHTML = `<style>${STYLE}</style>${BODY}`;
  el.append(root);
  const find = name => root.querySelector(`.${name}`), buttons = {};
  for (const name of ["home", "back", "play", "next", "end", "out", "in"]) buttons[name] = find(name);
  const scrub = find("scrub"), speed = find("speed"), axisChoice = find("axis"), overview = find("overview"), story = find("story");
  const sections = runs.map(makeSection);
  let axis = data.axis, now = 0, zoom = 1, from = 0, playing = false, frame = 0, before = 0, frames = 0;
  let theme = null, places = [], chosen = null, slotChosen = null, spoken = 0, drawPending = 0;

  const extent = () => Math.max(...runs.map(run => run.extent(axis)), 1e-9);
  const steps = () => Math.max(...runs.map(run => run.iterations), 1);
  // On the axis of seconds time passes evenly, at the pace that shows so many iterations a second of the longest run.
  const pace = () => Number(speed.value) * (axis === "seconds" ? extent() / steps() : 1);

  function makeSection(run) {
    const section = document.createElement("section"), head = document.createElement("dl");
    section.className = "run";
    head.className = "totals";
    const title = document.createElement("h4"), values = TOTALS.map(([label]) => {
      const box = document.createElement("div"), name = document.createElement("dt"), value = document.createElement("dd");
      name.textContent = label;
      box.append(name, value);
      return { box, name, value };
    });
    head.append(title, ...values.map(v => v.box));
    const canvas = document.createElement("canvas");
    canvas.setAttribute("role", "img");
    section.append(head, canvas);
    find("runs").append(section);
    return { section, title, values, canvas };
  }

  // -- what is shown

  function measure() {
    const width = root.clientWidth - 12, rows = runs.reduce((sum, run) => sum + run.numSlots, 0);
    if (width <= 0) return;
    const row = clamp(Math.floor(TALL / rows), MIN_ROW, MAX_ROW);
    theme = makeTheme(root, data.palette);
    places = runs.map(run => layout(width, run, row));
    scrub.style.marginLeft = `${places[0].left - 8}px`;  // its thumb stands under the moment it shows
    scrub.style.width = `${places[0].plot + 16}px`;
    drawLegend();
    draw();
  }

  function view() {
    const whole = extent(), width = whole * zoom;
    if (now < from + 0.05 * width) from = now - 0.05 * width;
    if (now > from + 0.92 * width) from = now - 0.92 * width;
    from = clamp(from, 0, whole - width);
    return { axis, now, from, to: from + width };
  }

  function draw() {
    if (!theme || !places.length) return;
    const v = view(), moments = runs.map(run => run.moment(axis, Math.min(now, run.extent(axis))));
    runs.forEach((run, i) => {
      const place = places[i], g = prepare(sections[i].canvas, place.width, place.height);
      drawRun(g, run, moments[i], place, v, theme, chosen);
      if (!run.count) note(g, emptySentence(run), place.left + place.plot / 2, (place.top + place.bottom) / 2, theme);
      showTotals(run, moments[i], sections[i]);
    });
    drawOverview(overview, runs, v, places[0], theme, extent());
    scrub.max = extent();
    scrub.value = now;
    scrub.setAttribute("aria-valuetext", axis === "seconds" ? seconds(now) : `iteration ${whole(now)}`);
    Object.assign(root.dataset, { axis, now: now.toFixed(6), playing, speed: speed.value, shown: (v.to - v.from).toFixed(6), extent: extent().toFixed(6), request: chosen || "", frames: ++frames });
    speed.title = axis === "seconds" ? `a second of the run takes ${seconds(1 / pace())}` : "iterations a second";
  }

  const drawSoon = () => { if (!drawPending) drawPending = requestAnimationFrame(() => { drawPending = 0; draw(); }); };

  function emptySentence(run) {
    const n = run.order.length;
    return n ? `No step has run; ${whole(n)} request${n === 1 ? "" : "s"} submitted` : "No step has run, and nothing was submitted";
  }

  function showTotals(run, moment, { section, title, values }) {
    title.textContent = run.title;
    TOTALS.forEach(([label, value], i) => {
      const text = value(run, moment);
      if (values[i].value.textContent !== text) values[i].value.textContent = text;
    });
    values[1].name.textContent = `time, ${run.clock}`;
    values[0].box.title = run.firstIndex ? `this is a part of a run: its first iteration has number ${run.firstIndex}` : "";
    const told = section.dataset, letters = data.palette.letters;
    if (told.column === String(moment.column) && told.at === now.toFixed(6) && told.count === String(run.count)) return;
    Object.assign(told, {
      run: run.title, clock: run.clock, column: moment.column, at: now.toFixed(6), count: run.count, iteration: moment.iteration, iterations: run.iterations,
      time: moment.time.toFixed(6), useful: moment.useful ?? "", padding: moment.padding ?? "", outputTokens: moment.output,
      tokensPerS: moment.tokensPerSecond ?? "", waiting: moment.waiting, kv: moment.kv, queue: moment.queue.map(r => r.id).join(" "),
      slots: moment.cells.map(c => c ? `${run.requests[c.request].id}:${letters[data.palette.states[c.state]]}` : letters.idle).join(" "),
    });
  }

  function drawLegend() {
    const legend = find("legend"), { states, labels, letters } = data.palette;
    legend.replaceChildren();
    const item = (label, paint) => {
      const box = document.createElement("span"), canvas = document.createElement("canvas");
      paint(prepare(canvas, 24, 12));
      box.append(canvas, label);
      legend.append(box);
    };
    for (const state of [...states, "padding", "idle"])
      item(`${letters[state]} ${labels[state]}`, g => {
        const i = states.indexOf(state);
        g.fillStyle = i >= 0 ? rgb(theme.fills[i][4]) : state === "padding" ? theme.padding : theme.soft(0.05);
        g.fillRect(0, 0, 24, 12);
        if (theme.patterns[state]) { g.fillStyle = theme.patterns[state]; g.fillRect(0, 0, 24, 12); }
        g.strokeStyle = theme.soft(0.5);
        g.strokeRect(0.5, 0.5, 23, 11);
      });
    if (runs.some(run => run.marks.length)) item("preempted: lost its slot", g => triangle(g, 12, 6, 5, theme));
    const bin = Math.max(...runs.map(run => run.bin)), hint = find("note");
    hint.hidden = bin < 2;
    hint.textContent = `A long run: each column stands for ${bin} iterations, and a slot shows what it did in most of them. Totals are exact.`;
  }

  // -- moving

  function seek(position) {
    now = clamp(axis === "iterations" && !playing ? Math.round(position) : position, 0, extent());
    drawSoon();
    tell();
  }

  function tell() {
    const first = runs[0].moment(axis, Math.min(now, runs[0].extent(axis)));
    notify({ iteration: first.iteration, time: first.time, axis, playing, request: chosen });
    if (playing) return;
    clearTimeout(spoken);
    spoken = setTimeout(() => { find("spoken").textContent = sentence(); }, 400);
  }

  const sentence = () => runs.map(run => {
    const m = run.moment(axis, Math.min(now, run.extent(axis)));
    return `${run.title}: iteration ${whole(m.iteration)} of ${whole(run.iterations)}, ${seconds(m.time)}, useful slots ${percent(m.useful)}, ${whole(m.waiting)} waiting`;
  }).join(". ");

  // To the next or previous end of an iteration in any of the runs.
  function step(direction) {
    pause();
    const ends = runs.flatMap(run => {
      const right = run.edges[axis].right, i = direction > 0 ? countUpTo(right, now + 1e-9) : countUpTo(right, now - 1e-9, true) - 1;
      return i >= 0 && i < right.length ? [right[i]] : [];
    });
    if (ends.length) seek(direction > 0 ? Math.min(...ends) : Math.max(...ends));
    follow();
  }

  const home = () => { pause(); seek(Math.min(...runs.filter(run => run.count).map(run => run.edges[axis].right[0]), extent())); follow(); };
  const end = () => { pause(); seek(extent()); follow(); };
  const jump = share => { pause(); seek(now + share * extent()); follow(); };

  function play() {
    if (now >= extent() - 1e-9) now = 0;
    playing = true;
    before = 0;
    showPlaying();
    frame = requestAnimationFrame(advance);
  }

  function advance(time) {
    if (!root.isConnected) playing = false;
    if (!playing) return;
    const passed = before ? Math.min((time - before) / 1000, 0.25) : 0;
    before = time;
    now = Math.min(now + passed * pace(), extent());
    draw();
    if (now >= extent()) { pause(); return; }
    tell();
    frame = requestAnimationFrame(advance);
  }

  function pause() {
    if (!playing) return;
    playing = false;
    cancelAnimationFrame(frame);
    if (axis === "iterations") now = Math.ceil(now - 1e-9);
    showPlaying();
    tell();
  }

  function showPlaying() {
    buttons.play.textContent = playing ? "❚❚ Pause" : "▶ Play";
    root.dataset.playing = playing;
    drawSoon();
  }

  function setAxis(name) {
    const old = axis, longest = runs.reduce((a, b) => b.iterations > a.iterations ? b : a), atEnd = now >= extent() - 1e-9;
    const column = longest.columnAt(old, now);
    axis = axisChoice.value = name;
    seek(atEnd ? extent() : column < 0 ? 0 : longest.edges[axis].right[column]);
    from = 0;
  }

  function setZoom(factor) {
    zoom = clamp(zoom * factor, Math.min(1, 10 / steps()), 1);
    drawSoon();
  }

  // -- pointing and choosing

  function show(run, request, where, x, y) {
    chosen = request ? request.id : null;
    story.replaceChildren(request ? tellStory(runs, run, request, where) : where);
    story.hidden = false;
    story.style.left = `${clamp(x + 14, 0, Math.max(0, root.clientWidth - story.offsetWidth - 4))}px`;
    story.style.top = `${y + 16}px`;
    drawSoon();
  }

  function hide() {
    chosen = slotChosen = null;
    story.hidden = true;
    drawSoon();
  }

  const stateLabel = cell => data.palette.labels[data.palette.states[cell.state]];

  function point(i, event) {
    const run = runs[i], place = places[i], box = sections[i].canvas.getBoundingClientRect(), outer = root.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top, at = [event.clientX - outer.left, event.clientY - outer.top];
    const slot = Math.floor((y - place.top) / place.row), moment = run.moment(axis, Math.min(now, run.extent(axis)));
    slotChosen = null;
    const queued = queueBoxes(moment, place).boxes.find(b => x >= b.x && x < b.x + b.width && y >= b.y && y < b.y + 16);
    if (queued) return show(run, queued.request, "waiting", ...at);
    if (slot < 0 || slot >= run.numSlots || x >= place.left + place.plot) return hide();
    let cell = moment.cells[slot];
    if (x >= place.left) {
      const v = view(), position = v.from + (x - place.left) / place.plot * (v.to - v.from), column = run.columnAt(axis, position);
      cell = run.isBetween(axis, column, position) ? null : run.cell(slot, column);
    }
    if (cell) show(run, run.requests[cell.request], `slot ${slot} · ${stateLabel(cell)}`, ...at);
    else show(run, null, `slot ${slot}: idle`, ...at);
  }

  function chooseSlot(direction) {
    const all = runs.flatMap((run, i) => run.slots.map((_, slot) => [i, slot]));
    const old = slotChosen ? all.findIndex(([i, slot]) => i === slotChosen[0] && slot === slotChosen[1]) : direction > 0 ? -1 : 0;
    slotChosen = all[(old + direction + all.length) % all.length];
    follow();
  }

  // A slot chosen with the keyboard: whoever sits there now.
  function follow() {
    if (!slotChosen || !places.length) return;
    const [i, slot] = slotChosen, run = runs[i], cell = run.moment(axis, Math.min(now, run.extent(axis))).cells[slot];
    const top = sections[i].canvas.offsetTop + places[i].top + slot * places[i].row;
    const where = cell ? `slot ${slot} · ${stateLabel(cell)}` : `slot ${slot}: idle`;
    show(run, cell && run.requests[cell.request], where, places[i].left - 14, top);
    clearTimeout(spoken);
    find("spoken").textContent = [...story.querySelectorAll("p")].map(p => p.textContent).join(". ") || story.textContent;
  }

  function overviewSeek(event) {
    const x = event.clientX - overview.getBoundingClientRect().left - places[0].left;
    pause();
    seek(x / places[0].plot * extent());
  }

  const KEYS = {
    " ": () => playing ? pause() : play(), ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: home, End: end,
    PageDown: () => jump(0.1), PageUp: () => jump(-0.1), ArrowDown: () => chooseSlot(1), ArrowUp: () => chooseSlot(-1),
    Escape: hide, "+": () => setZoom(0.5), "=": () => setZoom(0.5), "-": () => setZoom(2),
  };

  function onKey(event) {
    const target = event.target, pressed = [" ", "Enter"].includes(event.key) && target.closest("button, summary");
    if (event.ctrlKey || event.metaKey || event.altKey || target.tagName === "SELECT" || pressed || !KEYS[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    KEYS[event.key]();
  }

  // -- wiring

  const onClick = { home, end, back: () => step(-1), next: () => step(1), play: () => playing ? pause() : play(), in: () => setZoom(0.5), out: () => setZoom(2) };
  for (const name in onClick) buttons[name].onclick = onClick[name];
  for (const value of SPEEDS) speed.add(new Option(`${value}/s`, value));
  speed.onchange = drawSoon;
  axisChoice.onchange = () => setAxis(axisChoice.value);
  scrub.oninput = () => { const wanted = Number(scrub.value); pause(); seek(wanted); follow(); };
  root.addEventListener("keydown", onKey);
  overview.onpointerdown = event => { overview.setPointerCapture(event.pointerId); overviewSeek(event); };
  overview.onpointermove = event => { if (event.buttons) overviewSeek(event); };
  sections.forEach(({ canvas }, i) => {
    canvas.onpointermove = canvas.onpointerdown = event => point(i, event);
    canvas.onpointerleave = event => { if (event.pointerType === "mouse") hide(); };
  });
  const observer = new ResizeObserver(() => measure()), dark = matchMedia("(prefers-color-scheme: dark)");
  const restyled = new MutationObserver(measure);
  observer.observe(el);
  dark.addEventListener("change", measure);
  for (const element of [document.documentElement, document.body])
    restyled.observe(element, { attributes: true, attributeFilter: ["class", "style", "data-theme", "data-jp-theme-name"] });

  axisChoice.value = axis;
  speed.value = SPEEDS.find(s => s * WHOLE_RUN_S >= steps()) || SPEEDS[SPEEDS.length - 1];
  const wished = data.columns || (axis === "iterations" && steps() > MANY ? MANY / 2 : steps());
  zoom = clamp(wished / steps(), 0, 1);
  now = extent();
  measure();
  tell();

  function receive(message, arrays) {
    const run = runs[message.run || 0], atEnd = now >= extent() - 1e-9;
    if (message.kind === "clear") run.clear();
    else if (message.kind !== "append") return;
    else if (!run.add(message, arrays)) { notify({ wanted: run.count }); return; }  // columns in between were missed
    if (atEnd || now > extent()) now = extent();
    if (places.length) measure();
    tell();
  }

  function destroy() {
    pause();
    clearTimeout(spoken);
    cancelAnimationFrame(drawPending);
    observer.disconnect();
    restyled.disconnect();
    dark.removeEventListener("change", measure);
    root.remove();
  }

  return { receive, destroy };
}
