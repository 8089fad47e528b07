// Requests as rows of padded batches: the prompts on the left, the answers on the right, what is wasted hatched.
// The numbers are those of padding.py, computed here again, so that the picture moves without a kernel.

const sum = values => values.reduce((a, b) => a + b, 0);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const count = (number, one, many) => `${thousands(number)} ${number === 1 ? one : many}`;
const thousands = number => number.toLocaleString("en-US");

// Whole percents; a little of something is not 0 %, nearly all of it not 100 %.
function percent(share) {
  if (share > 0 && share < 0.005) return "< 1 %";
  if (share >= 0.995 && share < 1) return "> 99 %";
  return `${Math.floor(100 * share + 0.5)} %`;
}

// Two digits or more: 80, 2.5, 1.
function short(number) {
  const tenths = Math.floor(10 * number + 0.5);
  if (tenths < 100 && tenths % 10) return `${Math.floor(tenths / 10)}.${tenths % 10}`;
  return thousands(Math.floor(number + 0.5));
}

// Which requests stand together, as indices into `lengths`. size 0: all in one batch.
function makeBatches(lengths, size, order) {
  let waiting = lengths.map((_, r) => r);
  const batches = [], most = size || lengths.length;
  if (order === "sorted") waiting.sort((a, b) => lengths[a] - lengths[b]);
  while (waiting.length) {
    const distance = r => Math.abs(lengths[r] - lengths[waiting[0]]);
    const near = order === "bucketed" ? [...waiting].sort((a, b) => distance(a) - distance(b)) : waiting;
    const batch = near.slice(0, most), chosen = new Set(batch);
    batches.push(batch);
    waiting = waiting.filter(r => !chosen.has(r));
  }
  return batches;
}

function paddingNumbers(lengths, size, order) {
  const batches = makeBatches(lengths, size, order), widths = [];
  for (const batch of batches) {
    const width = Math.max(...batch.map(r => lengths[r]));
    for (const r of batch) widths[r] = width;
  }
  const computed = sum(widths), useful = sum(lengths);
  const factors = widths.map((width, r) => width / lengths[r]);
  const factor = Math.max(...factors);
  return {
    batches, widths, computed, useful, share: 1 - useful / computed, factors, factor, worst: factors.indexOf(factor),
  };
}

function endedNumbers(outputs, batches) {
  let steps = 0, computed = 0, mostEnded = 0, stepsWithMost = 0;
  const widths = [];
  for (const batch of batches) {
    const ends = batch.map(r => outputs[r]), last = Math.max(...ends);
    const early = ends.filter(end => end < last);
    for (const r of batch) widths[r] = last;
    steps += last;
    computed += last * batch.length;
    if (early.length > mostEnded) [mostEnded, stepsWithMost] = [early.length, 0];
    if (early.length && early.length === mostEnded) stepsWithMost += last - Math.max(...early);
  }
  const useful = sum(outputs);
  return {
    steps, computed, useful, share: 1 - useful / computed, widths, mostEnded, shareOfSteps: stepsWithMost / steps,
  };
}

// Steps of the chunked scheduler: decodes first, then pieces of prompts. All are counted, the first `keep` are kept.
function budgetSteps(lengths, outputs, queue, budget, seats, keep) {
  const left = [...lengths], toMake = [...outputs], waiting = [...queue], steps = [];
  let running = [], numSteps = 0, promptSteps = 0, tokens = 0, largest = 0;
  while (waiting.length || running.length) {
    const decodes = running.filter(r => !left[r]).slice(0, budget), chunks = [];
    const prompts = running.filter(r => left[r]);
    let room = budget - decodes.length;
    while (room && (prompts.length || (waiting.length && running.length < seats))) {
      const r = prompts.length ? prompts.shift() : waiting.shift();
      if (!running.includes(r)) running.push(r);
      const taken = Math.min(left[r], room);
      chunks.push([r, taken]);
      room -= taken;
    }
    for (const [r, taken] of chunks) left[r] -= taken;
    for (const r of decodes) toMake[r] -= 1;
    for (const [r] of chunks) if (!left[r]) toMake[r] -= 1;  // the end of a prompt makes the first token
    running = running.filter(r => toMake[r]);
    numSteps += 1;
    if (chunks.length) promptSteps = numSteps;
    tokens += budget - room;
    largest = Math.max(largest, budget - room);
    if (steps.length < keep) steps.push({ decodes, chunks });
  }
  return { steps, numSteps, promptSteps, tokens, largest };
}

// Everything that the page shows, from the state alone.
function compute({ requests, batchSize, order, view, budget }) {
  const lengths = requests.map(r => r.prompt), outputs = requests.map(r => r.output);
  const prefill = paddingNumbers(lengths, batchSize, order), ended = endedNumbers(outputs, prefill.batches);
  const numbers = { lengths, outputs, prefill, ended };
  // A padded batch computes its prefill, and a token a row in each of the steps that follow.
  numbers.fixedTokens = prefill.computed + ended.computed - requests.length;
  if (view === "chunked")
    numbers.chunked = budgetSteps(lengths, outputs, prefill.batches.flat(), budget, batchSize || requests.length, 400);
  return numbers;
}

function prefillSentence({ lengths, prefill }) {
  const first = `${count(lengths.length, "prompt", "prompts")} in ${count(prefill.batches.length, "batch", "batches")}: ` +
    `${thousands(prefill.computed)} tokens computed, ${thousands(prefill.useful)} useful, ${percent(prefill.share)} wasted.`;
  return prefill.share ? `${first} ${worstSentence(lengths, prefill)}` : first;
}

function worstSentence(lengths, prefill) {
  return `The ${thousands(lengths[prefill.worst])}-token prompt pays ${short(prefill.factor)} × the work it needs.`;
}

function endedSentence({ outputs, prefill, ended }) {
  const first = `${count(ended.steps, "step", "steps")} in ${count(prefill.batches.length, "batch", "batches")}: ` +
    `${thousands(ended.computed)} rows computed, ${thousands(ended.useful)} useful, ${percent(ended.share)} wasted.`;
  if (!ended.mostEnded) return first;
  const thrown = ended.mostEnded === 1 ? "makes a token that is" : "make tokens that are";
  if (prefill.batches.length === 1)
    return `${first} In ${percent(ended.shareOfSteps)} of the steps, ${ended.mostEnded} of ${outputs.length} rows ` +
      `${thrown} thrown away.`;
  const mean = short(ended.useful / ended.steps), rows = short(ended.computed / ended.steps);
  return `${first} In an average step ${mean} of ${rows} rows make a token that is kept.`;
}

function packedSentence({ prefill }) {
  const more = prefill.share ? `, ${short(prefill.computed / prefill.useful)} × as many` : ", just as many";
  return `End to end, a row a batch: ${thousands(prefill.useful)} tokens computed, none of them padding. ` +
    `Padded they are ${thousands(prefill.computed)}${more}.`;
}

function chunkedSentence({ chunked, fixedTokens }, budget) {
  return `${count(chunked.numSteps, "step", "steps")} of at most ${thousands(budget)} tokens; the prompts are in after ` +
    `${thousands(chunked.promptSteps)}. ${thousands(chunked.tokens)} tokens computed, all useful: fixed padded batches ` +
    `compute ${thousands(fixedTokens)} for the same answers.`;
}

// --- drawing -----------------------------------------------------------------------------------------------------

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

// --- the page ----------------------------------------------------------------------------------------------------

const STYLE = `
.mb-padding { container-type: inline-size; font: 14px/1.45 system-ui, sans-serif; padding: 4px 2px;
  color: var(--jp-content-font-color1, inherit);
  background: var(--jp-layout-color0, var(--pst-color-background, Canvas));
  --soft: color-mix(in srgb, currentColor 12%, transparent); --line: color-mix(in srgb, currentColor 35%, transparent); }
.mb-padding * { box-sizing: border-box; }
.mb-padding .bar { display: flex; flex-wrap: wrap; gap: 8px 18px; align-items: center; margin: 4px 0 10px; }
.mb-padding .bar > * { display: flex; gap: 6px; align-items: center; }
.mb-padding [hidden] { display: none !important; }
.mb-padding button, .mb-padding select, .mb-padding input { font: inherit; color: inherit; accent-color: currentColor; }
.mb-padding button, .mb-padding select, .mb-padding input[type=number], .mb-padding input[type=text] {
  background: transparent; border: 1px solid var(--line); border-radius: 5px; padding: 2px 8px; }
.mb-padding select { max-width: min(22em, 100%); } .mb-padding option { color: CanvasText; background: Canvas; }
.mb-padding button { cursor: pointer; } .mb-padding button:hover { background: var(--soft); }
.mb-padding button:disabled { opacity: 0.45; cursor: default; }
.mb-padding .choice { gap: 0; } .mb-padding .choice span { margin-right: 6px; }
.mb-padding .choice button { border-radius: 0; margin-left: -1px; }
.mb-padding .choice button:first-of-type { border-radius: 5px 0 0 5px; }
.mb-padding .choice button:last-of-type { border-radius: 0 5px 5px 0; }
.mb-padding button[aria-pressed=true] { background: currentColor; }
.mb-padding button[aria-pressed=true] > span { color: var(--jp-layout-color0, var(--pst-color-background, Canvas)); margin: 0; }
.mb-padding .choice button > span { margin: 0; }
.mb-padding :focus-visible { outline: 2px solid currentColor; outline-offset: 2px; }
.mb-padding .panels { display: grid; grid-template-columns: 3fr 2fr; gap: 4px 26px; align-items: start; }
.mb-padding .panels.one { grid-template-columns: 1fr; }
.mb-padding section { min-width: 0; } .mb-padding .pic { position: relative; }
.mb-padding h3 { font-size: 15px; margin: 0; font-weight: 600; color: inherit; }
.mb-padding .big { font-size: 30px; font-weight: 700; line-height: 1.15; margin-right: 8px; }
.mb-padding p { margin: 2px 0; }
.mb-padding canvas { width: 100%; display: block; touch-action: pan-y; }
.mb-padding .end { position: absolute; width: 15px; margin-left: -8px; cursor: ew-resize; touch-action: none;
  border-radius: 4px; }
.mb-padding .end::after { content: ""; position: absolute; left: 6px; width: 3px; top: 0; bottom: 0; border-radius: 2px;
  background: currentColor; }
.mb-padding .end:hover::after { left: 5px; width: 5px; }
.mb-padding .thin .end::after { opacity: 0; }
.mb-padding .thin:hover .end::after, .mb-padding .thin .end:focus::after { opacity: 1; }
.mb-padding[data-moving=true] .end { opacity: 0; }
.mb-padding .hint, .mb-padding .status { opacity: 0.8; } .mb-padding .status { min-height: 1.5em; }
.mb-padding .alert { font-weight: 600; } .mb-padding .alert:not(:empty)::before { content: "⚠ "; }
.mb-padding table { border-collapse: collapse; margin: 8px 0; font-variant-numeric: tabular-nums; }
.mb-padding caption { text-align: left; opacity: 0.8; padding: 2px 0; }
.mb-padding th, .mb-padding td { padding: 2px 18px 2px 0; text-align: left; font-weight: 400; background: none; }
.mb-padding thead th { border-bottom: 1px solid var(--line); }
.mb-padding tr.now > * { font-weight: 700; }
.mb-padding .meter { display: inline-block; height: 9px; margin-right: 8px; background: currentColor; opacity: 0.55; }
.mb-padding input[type=number] { width: 7em; } .mb-padding input[type=text] { width: min(100%, 60em); }
@container (max-width: 820px) { .mb-padding .panels { grid-template-columns: 1fr; }
  .mb-padding .head.b { order: 1; } .mb-padding .pic.b { order: 2; } }
`;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function choice(label, options, set) {
  const buttons = Object.entries(options).map(([name, text]) =>
    make("button", { type: "button", "data-value": name, onclick: () => set(name) }, make("span", {}, text)));
  const group = make("div", { class: "choice", role: "group", "aria-label": label }, make("span", {}, label), ...buttons);
  const show = name => buttons.forEach(b => b.setAttribute("aria-pressed", String(b.dataset.value === name)));
  return { group, show };
}

// Lengths that a reader typed, or a sentence about the first that is none.
function parseLengths(text, most) {
  const parts = text.split(/[\s,;]+/).filter(Boolean);
  const bad = parts.find(part => !/^\d+$/.test(part) || Number(part) < 1 || Number(part) > most);
  if (bad !== undefined) throw new RangeError(`“${bad}” is not a length: a whole number of tokens from 1 to ${thousands(most)}.`);
  return parts.map(Number);
}

export function mount(el, { data }, notify) {
  let serial = 0, numbers, drag = null, frame = 0, shown = null, hovered = null, stepsDrawn = null;
  const more = data.more.lengths.map((prompt, i) => ({ prompt, output: data.more.outputs[i] }));
  const newRequest = (prompt, output) => ({ id: serial++, prompt, output });
  const fresh = (lengths, outputs) => {
    serial = 0;  // a request's colour is that of its number, as in the still picture
    return lengths.map((prompt, i) => newRequest(prompt, outputs[i]));
  };
  const fromDraw = draw => ({ requests: fresh(draw.lengths, draw.outputs), batchSize: draw.batch_size || 0, selected: 0 });
  const budgets = [...new Set([16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, data.budget])].sort((a, b) => a - b);
  const state = { order: data.order, view: data.view, budget: data.budget, workload: "given", draw: 0 };

  const workloads = make("select", { "aria-label": "workload", onchange: () => choose(workloads.value, 0) },
    ...data.workloads.map(w => make("option", { value: w.name }, w.label)), make("option", { value: "own", disabled: "" }, "your own"));
  const again = make("button", { type: "button", class: "again", onclick: () => choose(state.workload, state.draw + 1) }, "draw again");
  const batch = make("input", { type: "range", min: 1, "aria-label": "batch size", class: "batch", oninput: () =>
    update({ batchSize: Number(batch.value) >= state.requests.length ? 0 : Number(batch.value) }) });
  const batchText = make("output"), budgetText = make("output");
  const budget = make("input", { type: "range", min: 0, max: budgets.length - 1, "aria-label": "token budget", class: "budget",
    oninput: () => update({ budget: budgets[budget.value] }) });
  const budgetBox = make("label", {}, "token budget", budget, budgetText);
  const orders = choice("order", data.orders, order => update({ order }));
  const views = choice("view", data.views, view => update({ view }));

  const heads = ["a", "b"].map(name => {
    const title = make("h3"), big = make("span", { class: "big" }), what = make("span"), sentence = make("p", { class: "sentence" });
    return { section: make("section", { class: `head ${name}` }, title, make("div", {}, big, what), sentence), title, big, what, sentence };
  });
  const pics = ["prompt", "output"].map((kind, i) => {
    const canvas = make("canvas", { role: "img" });
    const pic = make("section", { class: `pic ${"ab"[i]}`, "data-kind": kind }, canvas);
    return { kind, pic, canvas, handles: new Map(), scale: 1, plot: 1 };
  });
  const panels = make("div", { class: "panels" }, heads[0].section, heads[1].section, pics[0].pic, pics[1].pic);
  const status = make("p", { class: "status" });
  const who = make("select", { "aria-label": "request", class: "who", onchange: () => update({ selected: Number(who.value) }) });
  const number = (kind, label) => make("input", { type: "number", min: 1, max: data.max_length, "aria-label": label, class: kind,
    onchange: event => setLength(state.selected, kind, event.target.value),
    // JupyterLab keeps the browser from seeing a change in this key.
    onkeydown: event => event.key === "Enter" && setLength(state.selected, kind, event.target.value) });
  const promptInput = number("prompt", "prompt, tokens"), outputInput = number("output", "answer, tokens");
  const add = make("button", { type: "button", class: "add", onclick: addRequest }, "add a request");
  const remove = make("button", { type: "button", class: "remove", onclick: () => removeRequest(state.selected) }, "remove");
  const editor = make("div", { class: "bar editor" }, make("label", {}, "request", who), make("label", {}, "prompt", promptInput),
    make("label", {}, "answer", outputInput), make("div", {}, remove, add));
  const alert = make("p", { class: "alert", role: "alert" });
  const typed = ["prompts", "answers"].map(name => make("input", { type: "text", class: name, onkeydown: event =>
    event.key === "Enter" && applyTyped() }));
  const details = make("details", {}, make("summary", {}, "Type the lengths"),
    make("p", {}, make("label", {}, "prompts, tokens ", typed[0])),
    make("p", {}, make("label", {}, "answers, tokens (may be left empty) ", typed[1])),
    make("button", { type: "button", class: "apply", onclick: applyTyped }, "show these"));
  const hint = make("p", { class: "hint" });
  const body = make("tbody");
  const table = make("table", { class: "orders" }, make("caption"), make("thead", {}, make("tr", {},
    ...["order of the requests", "padding of prompts", "rows that have ended"].map(t => make("th", { scope: "col" }, t)))), body);
  const root = make("div", { class: "mb-padding", role: "group", "aria-label": "what a fixed batch computes for nobody" },
    make("style", {}, STYLE),
    make("div", { class: "bar" }, make("label", {}, "requests", workloads), again, make("label", {}, "batch size", batch, batchText)),
    make("div", { class: "bar" }, orders.group, views.group, budgetBox),
    panels, status, editor, alert, table, hint, details);
  el.append(root);

  function choose(name, draw) {
    const { draws } = data.workloads.find(w => w.name === name);
    update({ ...fromDraw(draws[draw % draws.length]), workload: name, draw: draw % draws.length });
  }

  function setLength(index, kind, value) {
    try {
      const [length] = parseLengths(String(value).trim() || "nothing", data.max_length);
      const requests = state.requests.map((r, i) => (i === index ? { ...r, [kind]: length } : r));
      update({ requests, workload: "own", selected: index });
    } catch (error) { complain(error); }
  }

  function addRequest() {
    if (state.requests.length >= data.max_requests)
      return complain(new RangeError(`the picture shows at most ${data.max_requests} requests.`));
    const { prompt, output } = more[serial % more.length];
    const requests = [...state.requests, newRequest(prompt, output)];
    update({ requests, workload: "own", selected: requests.length - 1 });
  }

  function removeRequest(index) {
    if (state.requests.length === 1) return complain(new RangeError("one request must stay."));
    const requests = state.requests.filter((_, i) => i !== index);
    const batchSize = state.batchSize >= requests.length ? 0 : state.batchSize;
    update({ requests, batchSize, workload: "own", selected: Math.min(index, requests.length - 1) });
  }

  function applyTyped() {
    try {
      const [prompts, given] = typed.map(input => parseLengths(input.value, data.max_length));
      if (!prompts.length) throw new RangeError("at least one prompt length is needed.");
      if (prompts.length > data.max_requests)
        throw new RangeError(`the picture shows at most ${data.max_requests} requests, not ${prompts.length}.`);
      if (given.length && given.length !== prompts.length)
        throw new RangeError(`${count(prompts.length, "prompt needs", "prompts need")} as many answers, not ${given.length}.`);
      const requests = fresh(prompts, prompts.map((_, i) => given[i] ?? more[i % more.length].output));
      const batchSize = state.batchSize >= requests.length ? 0 : state.batchSize;
      update({ requests, batchSize, workload: "own", selected: 0 });
    } catch (error) { complain(error); }
  }

  function complain(error) {
    alert.textContent = error.message;
    showEditor();
  }

  function update(changes) {
    const before = shown && !drag && !matchMedia("(prefers-reduced-motion: reduce)").matches ? shown : null;
    Object.assign(state, changes);
    numbers = compute(state);
    alert.textContent = "";
    hovered = null;
    showControls();
    showHeads();
    showTable();
    showEditor();
    showData();
    draw(before);
    const { lengths, outputs } = numbers;
    notify({ lengths, outputs, batch_size: state.batchSize || null, order: state.order, view: state.view, budget: state.budget });
  }

  function showControls() {
    const n = state.requests.length, workload = data.workloads.find(w => w.name === state.workload);
    workloads.value = state.workload;
    again.hidden = !workload || workload.draws.length < 2;
    if (!again.hidden) again.title = `seed ${workload.draws[state.draw].seed}`;
    batch.max = n;
    batch.disabled = n === 1;
    batch.value = state.batchSize || n;
    batchText.textContent = state.batchSize && state.batchSize < n ? state.batchSize : `${n} (all)`;
    budgetBox.hidden = state.view !== "chunked";
    budget.value = budgets.indexOf(state.budget);
    budget.setAttribute("aria-valuetext", `${state.budget} tokens`);
    budgetText.textContent = thousands(state.budget);
    orders.show(state.order);
    views.show(state.view);
  }

  function showHeads() {
    const { prefill, ended } = numbers, [a, b] = heads, chunked = state.view === "chunked";
    const fill = (head, title, big, what, sentence) => {
      head.title.textContent = title;
      head.big.textContent = big;
      head.what.textContent = what;
      head.sentence.textContent = sentence.replace(/ %/g, "\u00a0%").replace(/ × /g, "\u00a0×\u00a0");
    };
    if (chunked)
      fill(a, "Steps: decodes first, then pieces of prompts", "0 %", "padding, no row waits for another",
        chunkedSentence(numbers, state.budget));
    else if (state.view === "packed")
      fill(a, "Prefill: the prompts end to end", "0 %", "padding", packedSentence(numbers));
    else
      fill(a, "Prefill: every row as wide as the longest prompt", percent(prefill.share), "of the tokens computed are padding",
        prefillSentence(numbers));
    fill(b, "Answers: every row stays until the longest is done", percent(ended.share), "of rows × steps are for nobody",
      endedSentence(numbers));
    panels.classList.toggle("one", chunked);
    b.section.hidden = pics[1].pic.hidden = chunked;
    pics[0].canvas.setAttribute("aria-label", a.sentence.textContent);
    pics[1].canvas.setAttribute("aria-label", b.sentence.textContent);
    hint.textContent = chunked
      ? "A colour a request: strong is a piece of its prompt, pale one decoded token. Point at a step."
      : `${state.view === "packed" ? "Lines break where the padded rows would end. " : "Crossed: padding. "}Striped: ended but still in the batch. Drag a row's end; ` +
        "or with the keyboard: ← → length, Shift for one token, ↑ ↓ row, Delete removes it.";
  }

  function showTable() {
    const size = state.batchSize, n = state.requests.length;
    table.caption.textContent = `The two wastes side by side, in fixed batches of ${size && size < n ? size : `${n}, all in one`}. ` +
      "Bucketed: the oldest request goes, with those nearest to it in length.";
    body.replaceChildren(...Object.entries(data.orders).map(([name, label]) => {
      const prefill = paddingNumbers(numbers.lengths, size, name), ended = endedNumbers(numbers.outputs, prefill.batches);
      const cell = share => make("td", {}, make("span", { class: "meter", style: `width: ${Math.round(90 * share)}px` }), percent(share));
      const row = make("tr", { "data-order": name }, make("th", { scope: "row" }, label), cell(prefill.share), cell(ended.share));
      if (name === state.order) { row.className = "now"; row.setAttribute("aria-current", "true"); }
      return row;
    }));
  }

  function showEditor() {
    who.replaceChildren(...state.requests.map((r, i) => make("option", { value: i }, String(i + 1))));
    who.value = state.selected;
    promptInput.value = state.requests[state.selected].prompt;
    outputInput.value = state.requests[state.selected].output;
    remove.disabled = state.requests.length === 1;
    showStatus();
  }

  function showStatus() {
    if (typeof hovered === "string") { status.textContent = hovered; return; }
    const r = hovered ?? state.selected, { prompt, output } = state.requests[r], { prefill, ended } = numbers;
    status.textContent = `Request ${r + 1}: prompt ${thousands(prompt)}, its padded row computes ` +
      `${count(prefill.widths[r], "token", "tokens")} (${short(prefill.factors[r])} ×); answer ${thousands(output)}, ` +
      `its row runs ${count(ended.widths[r], "step", "steps")}.`;
  }

  function showData() {
    const { lengths, outputs, prefill, ended, chunked } = numbers;
    Object.assign(root.dataset, {
      view: state.view, order: state.order, workload: state.workload, selected: state.selected, requests: lengths.length,
      batchSize: Math.min(state.batchSize || Infinity, lengths.length), lengths: JSON.stringify(lengths), outputs: JSON.stringify(outputs),
      batches: JSON.stringify(prefill.batches), computed: prefill.computed, useful: prefill.useful, wastedShare: prefill.share,
      factors: JSON.stringify(prefill.factors), endedSteps: ended.steps, endedComputed: ended.computed,
      endedUseful: ended.useful, endedShare: ended.share, mostEnded: ended.mostEnded, shareOfSteps: ended.shareOfSteps,
      budget: state.budget, budgetSteps: chunked ? chunked.numSteps : "", promptSteps: chunked ? chunked.promptSteps : "",
      budgetTokens: chunked ? chunked.tokens : "", largestStep: chunked ? chunked.largest : "", fixedTokens: numbers.fixedTokens,
    });
  }

  // Where each row should be drawn, by request: pictures glide from one such set to the next.
  function targets(layout) {
    const result = new Map();
    state.requests.forEach(({ id, prompt, output }, r) => result.set(id, {
      y: layout.y[r], prompt, promptWidth: numbers.prefill.widths[r], output, outputWidth: numbers.ended.widths[r],
    }));
    return result;
  }

  function draw(before) {
    cancelAnimationFrame(frame);
    frame = 0;
    if (!root.isConnected && root.clientWidth === 0) return;
    const layout = layoutRows(numbers.prefill.batches), goal = targets(layout), begin = performance.now();
    const tick = now => {
      const t = before ? clamp((now - begin) / 350, 0, 1) : 1, eased = t * t * (3 - 2 * t);
      shown = t === 1 ? goal : between(before, goal, eased);
      paint(layout, shown);
      root.dataset.moving = String(t < 1);
      if (t < 1 && root.isConnected) frame = requestAnimationFrame(tick);
    };
    tick(begin);
    placeHandles(layout);
  }

  function paint(layout, rows) {
    if (state.view === "chunked") return paintSteps();
    pics.forEach((picture, i) => {
      const prompts = i === 0, { canvas, kind } = picture, width = canvas.parentElement.clientWidth;
      if (!width) return;
      const packed = prompts && state.view === "packed", right = prompts ? 52 : 16;
      const pen = prepare(canvas, width, layout.height + AXIS, root);
      const widths = prompts ? numbers.prefill.widths : numbers.ended.widths;
      picture.plot = width - LEFT - right;
      picture.scale = Math.max(...widths, drag && drag.kind === kind ? drag.scale : 1);
      const colours = id => data.colours[id % data.colours.length];
      const common = { layout, plot: picture.plot, scale: picture.scale, colours, look: data };
      const of = r => rows.get(state.requests[r].id);
      if (packed) {
        const ids = state.requests.map(r => r.id);
        drawPacked(pen, { ...common, blocks: layout.blocks, lengths: numbers.lengths, widths, ids });
      } else {
        const notes = r => prompts ? `${thousands(widths[r] - numbers.lengths[r])} padding` : `ended, ${thousands(widths[r] - numbers.outputs[r])} steps more`;
        drawRows(pen, { ...common, crossed: prompts, selected: state.selected, notes, rows: state.requests.map(({ id }, r) =>
          ({ r, id, y: of(r).y, value: Math.round(of(r)[kind]), width: of(r)[`${kind}Width`] })) });
        if (prompts && layout.step >= 12) state.requests.forEach((_, r) => {
          const factor = numbers.prefill.factors[r];
          if (factor > 1) words(pen, `× ${short(factor)}`, LEFT + (of(r).promptWidth / picture.scale) * picture.plot + 6,
            of(r).y + layout.bar / 2, { bold: r === numbers.prefill.worst });
        });
      }
      if (layout.labelled) layout.blocks.forEach((block, number) => labelBlock(pen, block, number, widths, prompts, packed));
      axis(pen, layout.height, picture.plot, picture.scale, prompts ? "tokens in a row" : "steps");
    });
  }

  function labelBlock(pen, { batch, y }, number, widths, prompts, packed) {
    const width = widths[batch[0]], area = thousands(width * batch.length), own = thousands(sum(batch.map(r => numbers.lengths[r])));
    const name = numbers.prefill.batches.length > 1 ? `batch ${number + 1}: ` : "";
    const rows = count(batch.length, "row", "rows");
    const text = packed ? `${own} tokens in place of ${area}` : prompts ? `${rows} × ${thousands(width)} = ${area} tokens`
      : `${rows} × ${count(width, "step", "steps")}`;
    words(pen, name + text, LEFT, y - 9, { alpha: 0.75 });
  }

  function paintSteps() {
    const { canvas } = pics[0], width = canvas.parentElement.clientWidth, height = 340;
    if (!width) return;
    const pen = prepare(canvas, width, height, root), colours = id => data.colours[id % data.colours.length];
    stepsDrawn = drawSteps(pen, { chunked: numbers.chunked, budget: state.budget, plot: width - LEFT - 16, height, colours,
      look: data, ids: state.requests.map(r => r.id) });
  }

  // The rows' ends are elements of the page, so that the keyboard and a screen reader have them too.
  function placeHandles(layout) {
    for (const picture of pics) {
      const { kind, pic, handles } = picture, visible = state.view === "padded" || (state.view === "packed" && kind === "output");
      const wanted = new Set(visible ? state.requests.map(r => r.id) : []);
      for (const [id, handle] of handles) if (!wanted.has(id)) { handle.remove(); handles.delete(id); }
      pic.classList.toggle("thin", layout.bar < 14);  // a mark on each of many rows would hide short ones
      if (!visible) continue;
      state.requests.forEach((request, r) => {
        const handle = handles.get(request.id) || newHandle(picture, request.id);
        const { style } = handle;
        style.left = `${LEFT + (request[kind] / picture.scale) * picture.plot}px`;
        style.top = `${layout.y[r]}px`;
        style.height = `${layout.bar}px`;
        handle.tabIndex = r === state.selected ? 0 : -1;
        handle.setAttribute("aria-label", `${kind === "prompt" ? "prompt" : "answer"} of request ${r + 1}`);
        handle.setAttribute("aria-valuenow", request[kind]);
        handle.setAttribute("aria-valuetext", count(request[kind], "token", "tokens"));
        handle.dataset.request = r;
      });
    }
  }

  function newHandle(picture, id) {
    const { kind, handles } = picture, index = () => state.requests.findIndex(r => r.id === id);
    const handle = make("div", { class: "end", role: "slider", "aria-valuemin": 1, "aria-valuemax": data.max_length,
      "aria-orientation": "horizontal",
      onfocus: () => state.selected !== index() && update({ selected: index() }),
      onkeydown: event => onKey(event, picture, index()),
      onpointerdown: event => {
        event.preventDefault();
        handle.focus();
        handle.setPointerCapture(event.pointerId);
        drag = { kind, scale: picture.scale };
      },
      onpointermove: event => {
        if (!drag || !handle.hasPointerCapture(event.pointerId)) return;
        const x = event.clientX - picture.pic.getBoundingClientRect().left - LEFT, snap = niceStep(drag.scale, 500);
        const length = Math.round(((x / picture.plot) * drag.scale) / snap) * snap;
        setLength(index(), kind, clamp(length, 1, data.max_length));
      },
      onpointerup: endDrag, onpointercancel: endDrag,
    });
    handles.set(id, handle);
    picture.pic.append(handle);  // once: an element that moves in the page loses focus and pointer
    return handle;
  }

  function endDrag() {
    if (drag) { drag = null; draw(null); }
  }

  function onKey(event, { kind, scale, handles }, index) {
    const row = layoutOrder().indexOf(index), length = state.requests[index][kind], big = niceStep(scale, 100);
    const step = event.shiftKey ? 1 : big, to = value => setLength(index, kind, clamp(value, 1, data.max_length));
    const go = place => {
      const next = layoutOrder()[place];
      if (next === undefined) return;
      update({ selected: next });
      handles.get(state.requests[next].id).focus();
    };
    const actions = {
      ArrowRight: () => to(length + step), ArrowLeft: () => to(length - step), PageUp: () => to(length + 10 * big),
      PageDown: () => to(length - 10 * big), Home: () => to(1), ArrowUp: () => go(row - 1), ArrowDown: () => go(row + 1),
      Delete: () => {
        removeRequest(index);
        handles.get(state.requests[state.selected].id)?.focus();
      },
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  const layoutOrder = () => numbers.prefill.batches.flat();

  function hover(event) {
    const y = event.offsetY, x = event.offsetX - LEFT;
    if (state.view === "chunked") {
      const i = stepsDrawn ? Math.floor(x / stepsDrawn.wide) : -1;
      hovered = i >= 0 && i < stepsDrawn.shown ? stepSentence(i) : null;
    } else {
      const layout = layoutRows(numbers.prefill.batches);
      const r = layout.y.findIndex(top => y >= top && y < top + layout.step);
      hovered = r >= 0 && x > 0 ? r : null;
    }
    showStatus();
  }

  function stepSentence(i) {
    const { decodes, chunks } = numbers.chunked.steps[i];
    const parts = chunks.map(([r, tokens]) => `${count(tokens, "token", "tokens")} of prompt ${r + 1}`);
    if (decodes.length) parts.unshift(count(decodes.length, "decode", "decodes"));
    return `Step ${i + 1}: ${parts.join(", ")}.`;
  }

  function pick(event) {
    hover(event);
    if (typeof hovered === "number") update({ selected: hovered });
  }

  for (const { canvas } of pics) {
    canvas.addEventListener("pointermove", hover);
    canvas.addEventListener("pointerleave", () => { hovered = null; showStatus(); });
    canvas.addEventListener("click", pick);
  }
  const redraw = () => (root.isConnected ? draw(null) : destroy());
  const sizes = new ResizeObserver(redraw), themes = new MutationObserver(redraw);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  sizes.observe(panels);
  for (const node of [document.documentElement, document.body])
    themes.observe(node, { attributes: true, attributeFilter: ["class", "data-theme", "data-jp-theme-name"] });
  dark.addEventListener("change", redraw);

  function destroy() {
    cancelAnimationFrame(frame);
    sizes.disconnect();
    themes.disconnect();
    dark.removeEventListener("change", redraw);
  }

  choose("given", 0);
  // From the kernel: {lengths, outputs, batch_size}, and order, view, budget if they change.
  const receive = ({ lengths, outputs, batch_size, order = state.order, view = state.view, budget = state.budget }) =>
    update({ ...fromDraw({ lengths, outputs, batch_size }), order, view, budget, workload: "own" });
  return { receive, destroy };
}

function between(from, to, t) {
  const result = new Map();
  for (const [id, goal] of to) {
    const start = from.get(id) || goal, row = {};
    for (const key in goal) row[key] = start[key] + (goal[key] - start[key]) * t;
    result.set(id, row);
  }
  return result;
}
