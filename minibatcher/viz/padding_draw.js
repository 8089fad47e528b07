// How the padding picture draws rows, packed rows and steps, in the colours of the page around it.

const LEFT = 50, AXIS = 36, LABEL = 18;

// Where the rows stand, for both pictures alike: a request's answer lies beside its prompt.
function layoutRows(batches) {
  const rows = sum(batches.map(batch => batch.length)), step = clamp(Math.floor(340 / rows), 5, 56);
  const labelled = batches.length <= 16, gap = labelled ? LABEL : 4;
  const layout = { y: [], blocks: [], step, labelled, bar: step >= 10 ? step - 2 : step };
  let y = 0;
  for (const batch of batches) {
    y += gap;
    layout.blocks.push({ batch, y, height: batch.length * step });
    for (const r of batch) { layout.y[r] = y; y += step; }
    if (labelled) y += 4;
  }
  layout.height = y + 4;
  return layout;
}

function niceStep(range, parts) {
  const rough = Math.max(range / parts, 1), power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find(m => m * power >= rough);
}

// A canvas for crisp drawing in CSS pixels, and the colours that the page has now.
function prepare(canvas, width, height, root) {
  const ratio = window.devicePixelRatio || 1, style = getComputedStyle(root);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  g.font = `12px ${style.fontFamily}`;
  g.textBaseline = "middle";
  const dark = sum(style.backgroundColor.match(/[\d.]+/g).slice(0, 3).map(Number)) < 384;
  return { g, ratio, ink: style.color, paper: style.backgroundColor, dark };
}

function hatch(pen, colour, crossed) {
  const size = 7, tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(size * pen.ratio);
  const g = tile.getContext("2d");
  g.scale(tile.width / size, tile.width / size);
  g.strokeStyle = colour;
  g.lineWidth = 1;
  for (const shift of [-size, 0, size]) {
    g.moveTo(shift, size); g.lineTo(shift + size, 0);
    if (crossed) { g.moveTo(shift, 0); g.lineTo(shift + size, size); }
  }
  g.stroke();
  const pattern = pen.g.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(size / tile.width));
  return pattern;
}

function box(g, x, y, width, height, fill, alpha = 1) {
  g.globalAlpha = alpha;
  g.fillStyle = fill;
  g.fillRect(x, y, width, height);
  g.globalAlpha = 1;
}

// Mixed with white a colour is pale, mixed with black it is dull: there it takes more of it.
const usefulStrength = (pen, look) => (pen.dark ? (1 + look.useful_strength) / 2 : look.useful_strength);

function words(pen, text, x, y, { align = "left", alpha = 1, pill = false, bold = false } = {}) {
  const { g, ink, paper } = pen, plain = g.font;
  if (bold) g.font = `600 ${plain}`;
  const width = g.measureText(text).width, start = x - { left: 0, center: width / 2, right: width }[align];
  if (pill) box(g, start - 5, y - 9, width + 10, 18, paper);
  g.globalAlpha = alpha;
  g.fillStyle = ink;
  g.fillText(text, start, y + 0.5);
  g.globalAlpha = 1;
  g.font = plain;
}

function axis(pen, y, width, most, title) {
  const { g, ink } = pen, every = niceStep(most, width / 75);
  box(g, LEFT, y, width, 1, ink, 0.4);
  for (let tick = 0; tick <= most; tick += every) {
    const x = LEFT + (tick / most) * width;
    box(g, x, y, 1, 4, ink, 0.4);
    words(pen, thousands(tick), x, y + 12, { align: "center", alpha: 0.75 });
  }
  words(pen, title, LEFT + width, y + 27, { align: "right", alpha: 0.75 });
}

// One picture of rows. rows: {r, y, value, width} in tokens or steps.
function drawRows(pen, { rows, layout, plot, scale, colours, crossed, look, selected, notes }) {
  const { g, ink } = pen, grey = hatch(pen, look.hatch, crossed), k = plot / scale, strength = usefulStrength(pen, look);
  for (const { r, y, value, width, id } of rows) {
    const x = LEFT + value * k, wasted = (width - value) * k;
    box(g, LEFT, y, value * k, layout.bar, colours(id), strength);
    if (wasted > 0) {
      box(g, x, y, wasted, layout.bar, crossed ? look.hatch : colours(id), crossed ? 0.18 : look.ended_strength);
      box(g, x, y, wasted, layout.bar, grey);
    }
    if (r === selected) { g.strokeStyle = ink; g.lineWidth = 1.5; g.strokeRect(LEFT, y, Math.max(width * k, 1), layout.bar); }
    if (layout.step < 12) continue;
    const middle = y + layout.bar / 2;
    words(pen, thousands(value), LEFT - 6, middle, { align: "right" });
    const note = notes(r);
    if (note && layout.step >= 20 && wasted > g.measureText(note).width + 30)
      words(pen, note, x + wasted / 2, middle, { align: "center", pill: true });
  }
}

// The same tokens end to end, in lines as wide as the batch's padded rows; what is left of the rectangle is saved.
function drawPacked(pen, { blocks, layout, plot, scale, colours, look, lengths, widths, ids }) {
  const { g, ink } = pen, k = plot / scale, strength = usefulStrength(pen, look);
  for (const { batch, y, height } of blocks) {
    const width = widths[batch[0]];
    let at = 0;
    for (const r of batch) {
      for (let left = lengths[r]; left > 0;) {
        const line = Math.floor(at / width), start = at % width, length = Math.min(left, width - start);
        const x = LEFT + start * k;
        box(g, x, y + line * layout.step, length * k, layout.bar, colours(ids[r]), strength);
        if (left === lengths[r]) box(g, x, y + line * layout.step, 1, layout.bar, ink, 0.5);
        at += length;
        left -= length;
      }
    }
    g.strokeStyle = ink;
    g.globalAlpha = 0.5;
    g.setLineDash([4, 4]);
    g.strokeRect(LEFT + 0.5, y + 0.5, width * k - 1, height - 1);
    g.setLineDash([]);
    g.globalAlpha = 1;
    const free = Math.floor((batch.length * width - at) / width) * layout.step;
    if (free > 22 && width * k > 100) words(pen, "not computed", LEFT + (width * k) / 2, y + height - free / 2, { align: "center", alpha: 0.75 });
  }
}

// Steps as columns: decodes at the bottom, pieces of prompts above them, up to the budget.
function drawSteps(pen, { chunked, budget, plot, height, colours, look, ids }) {
  const { g, ink, paper } = pen, top = 12, tall = height - AXIS - top, bottom = top + tall;
  const strength = usefulStrength(pen, look);
  const shown = Math.min(chunked.steps.length, chunked.promptSteps + 8, Math.floor(plot / 8));
  const wide = Math.min(plot / shown, 64), k = tall / budget;
  let taller = false;
  for (let i = 0; i < shown; i++) {
    const { decodes, chunks } = chunked.steps[i], x = LEFT + i * wide, inner = wide > 12 ? wide - 1.5 : wide;
    const each = decodes.length ? Math.max(k, Math.min(5, (0.35 * tall) / decodes.length)) : 0;
    taller ||= each > k;
    let y = bottom;
    for (const r of decodes) box(g, x, (y -= each), inner, Math.max(each - 0.75, 0.5), colours(ids[r]), strength);
    const room = (y - top) / Math.max(budget - decodes.length, 1);
    for (const [r, tokens] of chunks) {
      y -= tokens * room;
      box(g, x, y, inner, tokens * room, colours(ids[r]));
      if (tokens * room > 3) box(g, x, y, inner, 1, paper);
      if (inner > 32 && tokens * room > 16) {
        g.fillStyle = "#000";  // on the request's colour, in every theme
        g.textAlign = "center";
        g.fillText(thousands(tokens), x + inner / 2, y + (tokens * room) / 2 + 1);
        g.textAlign = "left";
      }
    }
  }
  g.setLineDash([5, 4]);
  g.strokeStyle = ink;
  g.strokeRect(LEFT, top - 0.5, plot, 0);
  g.setLineDash([]);
  words(pen, thousands(budget), LEFT - 6, top, { align: "right" });
  words(pen, "0", LEFT - 6, bottom, { align: "right" });
  words(pen, "tokens", LEFT - 6, (top + bottom) / 2, { align: "right", alpha: 0.75 });
  box(g, LEFT, bottom, plot, 1, ink, 0.4);
  const every = niceStep(shown, Math.max(Math.floor((shown * wide) / 45), 1));
  for (let step = every; step <= shown; step += every)
    words(pen, thousands(step), LEFT + (step - 0.5) * wide, bottom + 12, { align: "center", alpha: 0.75 });
  words(pen, `step${taller ? "; a decode is one token and drawn taller than it is" : ""}`, LEFT, bottom + 27, { alpha: 0.75 });
  const rest = chunked.numSteps - shown;
  if (rest) words(pen, `… ${count(rest, "more step", "more steps")}`, LEFT + plot - 6, top + 16, { align: "right", pill: true });
  return { shown, wide };
}

// Rows on their way from where they stood to where they will stand; t from 0 to 1.
function between(from, to, t) {
  const result = new Map();
  for (const [id, goal] of to) {
    const start = from.get(id) || goal, row = {};
    for (const key in goal) row[key] = start[key] + (goal[key] - start[key]) * t;
    result.set(id, row);
  }
  return result;
}
