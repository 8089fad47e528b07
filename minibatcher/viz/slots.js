// Who sat in which slot doing what, played as a film: rows are slots, columns iterations (or seconds), colour is the
// request, strength, texture and letter the state. Several runs stand above each other and move on one clock.
//
// slots_run.js knows what happened, slots_draw.js draws it; this file holds the controls.
// A position on the axis is a number of iterations done, or seconds since the first arrival. State for tests is in
// data-* attributes: of the root (axis, now, playing, speed, shown, request), and of each run (iteration, useful, ...).

const SPEEDS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];  // iterations a second
const WHOLE_RUN_S = 15;  // the speed offered first plays a run in about this time
const MANY = 600;  // columns: of a longer run, half as many are seen at first
const TALL = 640, MAX_ROW = 22, MIN_ROW = 2;  // pixels: all rows together, and one row

const STYLE = `
.mb-slots { --bg: var(--jp-layout-color0, Canvas); --fg: var(--jp-content-font-color1, CanvasText);
  position: relative; box-sizing: border-box; min-width: 0; container-type: inline-size; padding: 4px 6px 6px;
  margin-bottom: 6px; background: var(--bg); color: var(--fg); font: 13px/1.4 system-ui, sans-serif;
  border-radius: 4px; outline-offset: -2px; }
.mb-slots:focus-visible { outline: 2px solid currentColor; }
.mb-slots canvas { display: block; width: 100%; touch-action: pan-y; }
.mb-slots .bar { display: flex; flex-wrap: wrap; gap: 4px 6px; align-items: center; margin: 4px 0; }
.mb-slots button, .mb-slots select { font: inherit; color: inherit; background: transparent; padding: 2px 8px;
  height: 27px; box-sizing: border-box; border: 1px solid color-mix(in srgb, currentColor 35%, transparent);
  border-radius: 5px; }
.mb-slots select { padding: 0 2px; } .mb-slots option { color: CanvasText; background: Canvas; }
.mb-slots button:hover { background: color-mix(in srgb, currentColor 12%, transparent); }
.mb-slots button.play { min-width: 86px; font-weight: 600; }
.mb-slots label { display: inline-flex; gap: 4px; align-items: center; }
.mb-slots :is(button, select, input, summary):focus-visible { outline: 2px solid currentColor; outline-offset: 1px; }
.mb-slots .scrub { display: block; margin: 6px 0 2px; box-sizing: border-box; accent-color: var(--accent); }
.mb-slots .pace { font-size: 12px; opacity: .75; }
.mb-slots .run { margin-top: 8px; }
.mb-slots .totals { display: grid; grid-template-columns: 104px repeat(7, minmax(96px, max-content)); gap: 0 10px; }
.mb-slots .title { font-size: 15px; font-weight: 700; line-height: 1.2; overflow: hidden; overflow-wrap: anywhere;
  display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; }
.mb-slots .total { display: flex; flex-direction: column-reverse; justify-content: flex-end; }
@container (max-width: 860px) {
  .mb-slots .totals { display: flex; flex-wrap: wrap; gap: 2px 16px; }
  .mb-slots .title { flex-basis: 100%; }
  .mb-slots .total { min-width: 56px; } .mb-slots .name { width: min-content; min-width: 100%; }
}
.mb-slots .name { font-size: 11px; line-height: 1.2; opacity: .75; }
.mb-slots .value { font-variant-numeric: tabular-nums; font-weight: 600; line-height: 1.25; white-space: nowrap; }
.mb-slots .legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; margin: 4px 0 0; padding: 0; }
.mb-slots .legend span { display: inline-flex; align-items: center; gap: 5px; }
.mb-slots .legend canvas { width: 24px; height: 12px; }
.mb-slots .note, .mb-slots details { font-size: 12px; margin: 4px 0 0; }
.mb-slots kbd { font: inherit; border: 1px solid color-mix(in srgb, currentColor 40%, transparent); padding: 0 4px;
  border-radius: 3px; }
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
  <label>speed <select class="speed" title="iterations a second"></select></label><span class="pace"></span>
  <label>axis <select class="axis"><option>iterations</option><option>seconds</option></select></label>
  <span>zoom <button class="out" aria-label="show more of the run" title="show more (−)">−</button>
  <button class="in" aria-label="show less of the run" title="show less (+)">+</button></span>
</div>
<div class="runs"></div>
<input class="scrub" type="range" min="0" step="any" aria-label="position in the run">
<canvas class="overview" role="img" aria-label="the whole run: share of useful slots; click to go there"
  title="the whole run: slots at useful work are dark, those held without it lighter; click to go there"></canvas>
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
  ["useful slots", (run, m) => percent(m.useful), "slot occupancy: of all slots in all iterations so far"],
  ["padding", (run, m) => percent(m.padding), "of the tokens computed so far"],
  ["output tokens/s", (run, m) => run.total.output ? whole(m.tokensPerSecond) : "–"],
  ["waiting", (run, m) => whole(m.waiting)],
  ["KV blocks", (run, m) => run.kvBlocks ? `${whole(m.kv)} of ${whole(run.kvBlocks)}` : "–"],
];

function tellStory(runs, run, request, where) {
  const p = document.createElement("div");
  // A part of a run begins where its requests' stories may have been going on for long.
  const when = t => t < run.origin - 1e-9 ? "before this part of the run" : `at ${seconds(t - run.origin, 2)}`;
  const line = text => { const e = document.createElement("p"); e.textContent = text; p.append(e); return e; };
  const head = line([where, runs.length > 1 && run.title].filter(Boolean).map(text => ` · ${text}`).join(""));
  const name = document.createElement("b");
  name.textContent = request.id;
  head.prepend(name);
  if (request.arrival == null) { line("The run has no record of this request beyond its rows."); return p; }
  line(`${whole(request.prompt_tokens)} prompt tokens, arrived ${when(request.arrival)}`);
  if (request.scheduled == null) line(`has not started${request.why ? `: ${request.why}` : ""}`);
  else {
    const wait = request.scheduled - request.arrival;
    line(wait > 5e-4 ? `waited ${seconds(wait)}${request.why ? `: ${request.why}` : ""}` : "did not wait");
    const first = request.first_token, ttft = first == null ? "" : seconds(first - request.arrival);
    line(`started ${when(request.scheduled)}${ttft && `, first token ${when(first)} (TTFT ${ttft})`}`);
  }
  const gaps = request.output_tokens - 1;
  const each = gaps > 0 && request.first_token != null && seconds((request.last_token - request.first_token) / gaps);
  line(`${whole(request.output_tokens)} output tokens${each ? `, ${each} for each after the first` : ""}`);
  if (request.finish != null) line(`ended ${when(request.finish)}: ${request.reason || "no reason recorded"}`);
  if (request.preemptions) line(`preempted ${request.preemptions === 1 ? "once" : `${request.preemptions} times`}`);
  for (const other of runs) {
    const same = other !== run && other.order.find(r => r.id === request.id);
    if (!same || same.finish == null || same.first_token == null) continue;
    const first = seconds(same.first_token - other.origin, 2), last = seconds(same.finish - other.origin, 2);
    line(`under ${other.title}: first token at ${first}, ended at ${last}`);
  }
  return p;
}

export function mount(el, { data, arrays }, notify) {
  const runs = data.runs.map((run, i) => {
    const prefix = `${i}.`, own = Object.entries(arrays).filter(([name]) => name.startsWith(prefix));
    return new Run(run, Object.fromEntries(own.map(([name, array]) => [name.slice(prefix.length), array])));
  });
  const root = document.createElement("div");
  root.className = "mb-slots";
  root.tabIndex = 0;
  root.style.setProperty("--accent", data.palette.accent);
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", data.alt);
  root.innerHTML = `<style>${STYLE}</style>${BODY}`;
  el.append(root);
  const find = name => root.querySelector(`.${name}`), buttons = {};
  for (const name of ["home", "back", "play", "next", "end", "out", "in"]) buttons[name] = find(name);
  const scrub = find("scrub"), speed = find("speed"), axisChoice = find("axis");
  const overview = find("overview"), story = find("story");
  const sections = runs.map(makeSection);
  let axis = data.axis, now = 0, zoom = 1, from = 0, playing = false, frame = 0, before = 0, frames = 0;
  let theme = null, places = [], chosen = null, slotChosen = null, spoken = 0, drawPending = 0, zoomed = false;

  const extent = () => Math.max(...runs.map(run => run.extent(axis)), 1e-9);
  const steps = () => Math.max(...runs.map(run => run.iterations), 1);
  // On the axis of seconds time passes evenly, at the pace that shows so many iterations a second of the longest run.
  const pace = () => Number(speed.value) * (axis === "seconds" ? extent() / steps() : 1);

  function makeSection(run) {
    // No lists and no headings: each page around us has a style of its own for those.
    const make = (kind, name) => { const e = document.createElement(kind); e.className = name; return e; };
    const section = make("section", "run"), head = make("div", "totals"), title = make("div", "title");
    title.setAttribute("role", "heading");
    title.setAttribute("aria-level", "4");
    const values = TOTALS.map(([label, , meaning]) => {
      const box = make("div", "total"), name = make("span", "name"), value = make("span", "value");
      name.textContent = label;
      if (meaning) box.title = meaning;
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
    const width = root.clientWidth - 12, rows = runs.reduce((sum, run) => sum + run.shown, 0);
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
    const v = view(), moments = runs.map(run => run.moment(axis, now));
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
    Object.assign(root.dataset, {
      axis, playing, now: now.toFixed(6), extent: extent().toFixed(6), shown: (v.to - v.from).toFixed(6),
      speed: speed.value, request: chosen || "", frames: ++frames,
    });
    find("pace").textContent = axis === "seconds" ? `= ${Number(pace().toPrecision(2))} × real time` : "";
  }

  const drawSoon = () => { if (!drawPending) drawPending = requestAnimationFrame(() => { drawPending = 0; draw(); }); };

  function emptySentence(run) {
    const n = run.order.length;
    return `No step has run; requests submitted: ${n ? whole(n) : "none"}`;
  }

  function showTotals(run, moment, { section, title, values }) {
    title.textContent = title.title = run.title;
    TOTALS.forEach(([label, value], i) => {
      const text = value(run, moment);
      if (values[i].value.textContent !== text) values[i].value.textContent = text;
    });
    values[1].name.textContent = `time, ${run.clock}`;
    values[2].name.textContent = `useful, of ${whole(run.numSlots)} slot${run.numSlots > 1 ? "s" : ""}`;  // a share of few may be more work
    values[0].box.title = run.firstIndex ? `a part of a run: its first iteration has number ${run.firstIndex}` : "";
    const told = section.dataset, letters = data.palette.letters;
    if (told.column === String(moment.column) && told.at === now.toFixed(6) && told.count === String(run.count)) return;
    Object.assign(told, {
      run: run.title, clock: run.clock, at: now.toFixed(6), column: moment.column, count: run.count,
      iteration: moment.iteration, iterations: run.iterations, time: moment.time.toFixed(6),
      useful: moment.useful ?? "", padding: moment.padding ?? "", kv: moment.kv, waiting: moment.waiting,
      outputTokens: moment.output, tokensPerS: moment.tokensPerSecond ?? "",
      queue: moment.queue.map(request => request.id).join(" "),
      slots: moment.cells.map(cell => cell ? inLetters(run, cell) : letters.idle).join(" "),
    });
  }

  const letterOf = cell => data.palette.letters[data.palette.states[cell.state]];
  const inLetters = (run, cell) => `${run.requests[cell.request].id}:${letterOf(cell)}`;

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
    showNotes();
  }

  function showNotes() {
    const notes = runs.flatMap(run => {
      const whose = runs.length > 1 ? `In ${run.title}, ` : "Here ", said = [];
      if (run.interrupted) said.push(`${whose}the run was stopped before its end.`);
      if (run.bin > 1)
        said.push(`${whose}each column stands for ${run.bin} iterations and shows what a slot did in most; totals are exact.`);
      if (run.shown < run.numSlots) said.push(`${whose}slots from ${run.shown} on were never used and are not drawn.`);
      return said;
    });
    find("note").hidden = !notes.length;
    find("note").textContent = notes.join(" ");
  }

  // -- moving

  function seek(position) {
    now = clamp(axis === "iterations" && !playing ? Math.round(position) : position, 0, extent());
    drawSoon();
    tell();
  }

  function tell() {
    const first = runs[0].moment(axis, now);
    notify({ iteration: first.iteration, time: first.time, axis, playing, request: chosen });
    if (playing) return;
    clearTimeout(spoken);
    spoken = setTimeout(() => { find("spoken").textContent = describe(); }, 400);
  }

  // The moment in words, for who can't see it.
  const describe = () => runs.map((run, i) => {
    const m = run.moment(axis, now);
    const words = `${run.title}: iteration ${whole(m.iteration)} of ${whole(run.iterations)}, ${seconds(m.time)}, ` +
      `useful slots ${percent(m.useful)}, ${whole(m.waiting)} waiting`;
    sections[i].canvas.setAttribute("aria-label", words);
    return words;
  }).join(". ");

  // To the next or previous end of an iteration in any of the runs.
  function step(direction) {
    pause();
    const ends = runs.flatMap(run => {
      const { right } = run.edges[axis];
      const i = direction > 0 ? countUpTo(right, now + 1e-9) : countUpTo(right, now - 1e-9, true) - 1;
      return i >= 0 && i < right.length ? [right[i]] : [];
    });
    if (ends.length) seek(direction > 0 ? Math.min(...ends) : Math.max(...ends));
    follow();
  }

  const go = position => { pause(); seek(position); follow(); };
  const home = () => go(Math.min(...runs.filter(run => run.count).map(run => run.edges[axis].right[0]), extent()));
  const end = () => go(extent());
  const jump = share => go(now + share * extent());

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
    follow();
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
    const old = axis, longest = runs.reduce((a, b) => b.iterations > a.iterations ? b : a);
    const atEnd = now >= extent() - 1e-9;
    const column = longest.columnAt(old, now);
    axis = axisChoice.value = name;
    seek(atEnd ? extent() : column < 0 ? 0 : longest.edges[axis].right[column]);
    from = 0;
  }

  // As many iterations as were asked for; of a long run, and of one that grows, a part.
  function setFirstZoom() {
    const many = MANY * Math.max(...runs.map(run => run.bin));
    const few = data.live || (axis === "iterations" && steps() > many);
    zoom = clamp((data.columns || (few ? many / 2 : steps())) / steps(), 0, 1);
  }

  function setZoom(factor) {
    zoomed = true;
    zoom = clamp(zoom * factor, Math.min(1, 10 / steps()), 1);
    drawSoon();
  }

  // -- pointing and choosing

  function show(run, request, where, x, y) {
    chosen = request ? request.id : null;
    story.replaceChildren(request ? tellStory(runs, run, request, where) : where);
    story.hidden = false;
    story.style.left = `${clamp(x + 14, 0, Math.max(0, root.clientWidth - story.offsetWidth - 4))}px`;
    const below = y + 16 + story.offsetHeight < root.clientHeight;
    story.style.top = `${below ? y + 16 : Math.max(0, y - story.offsetHeight - 8)}px`;
    drawSoon();
  }

  function hide() {
    chosen = slotChosen = null;
    story.hidden = true;
    drawSoon();
  }

  const stateLabel = cell => data.palette.labels[data.palette.states[cell.state]];

  function point(i, event) {
    const run = runs[i], place = places[i];
    const box = sections[i].canvas.getBoundingClientRect(), outer = root.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const at = [event.clientX - outer.left, event.clientY - outer.top];
    const slot = Math.floor((y - place.top) / place.row), moment = run.moment(axis, now);
    slotChosen = null;
    const queued = queueBoxes(moment, place).boxes.find(b => x >= b.x && x < b.x + b.width && y >= b.y && y < b.y + 16);
    if (queued) return show(run, queued.request, "waiting", ...at);
    if (slot < 0 || slot >= run.shown || x >= place.left + place.plot) return hide();
    let cell = moment.cells[slot];
    if (x >= place.left) {
      const v = view(), position = v.from + (x - place.left) / place.plot * (v.to - v.from);
      const column = run.columnAt(axis, position);
      cell = run.isBetween(axis, column, position) ? null : run.cell(slot, column);
    }
    if (cell) show(run, run.requests[cell.request], `slot ${slot} · ${stateLabel(cell)}`, ...at);
    else show(run, null, `slot ${slot}: idle`, ...at);
  }

  function chooseSlot(direction) {
    const all = runs.flatMap((run, i) => run.slots.slice(0, run.shown).map((_, slot) => [i, slot]));
    const old = all.findIndex(place => slotChosen && place.join() === slotChosen.join());
    slotChosen = all[(Math.max(old, direction > 0 ? -1 : 0) + direction + all.length) % all.length];
    follow();
  }

  // A slot chosen with the keyboard: whoever sits there now.
  function follow() {
    if (!slotChosen || !places.length) return;
    const [i, slot] = slotChosen, run = runs[i], cell = run.moment(axis, now).cells[slot];
    const top = sections[i].canvas.offsetTop + places[i].top + slot * places[i].row;
    const where = cell ? `slot ${slot} · ${stateLabel(cell)}` : `slot ${slot}: idle`;
    show(run, cell && run.requests[cell.request], where, places[i].left - 14, top);
    if (playing) return;
    clearTimeout(spoken);
    const lines = [...story.querySelectorAll("p")].map(line => line.textContent);
    find("spoken").textContent = lines.join(". ") || story.textContent;
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
    const { target, key } = event, isTheirs = target.matches("select") || (key === " " && target.matches("button, summary"));
    if (event.ctrlKey || event.metaKey || event.altKey || isTheirs || !KEYS[key]) return;
    event.preventDefault();
    event.stopPropagation();
    KEYS[key]();
  }

  // -- wiring

  const onClick = { home: "Home", back: "ArrowLeft", play: " ", next: "ArrowRight", end: "End", out: "-", in: "+" };
  for (const name in onClick) buttons[name].onclick = KEYS[onClick[name]];  // a button does what its key does
  for (const value of SPEEDS) speed.add(new Option(`${value}/s`, value));
  speed.onchange = drawSoon;
  axisChoice.onchange = () => setAxis(axisChoice.value);
  scrub.oninput = () => go(Number(scrub.value));
  root.addEventListener("keydown", onKey);
  overview.onpointerdown = event => { overview.setPointerCapture(event.pointerId); overviewSeek(event); };
  overview.onpointermove = event => { if (event.buttons) overviewSeek(event); };
  sections.forEach(({ canvas }, i) => {
    canvas.onpointermove = canvas.onpointerdown = event => point(i, event);
    canvas.onpointerleave = event => { if (event.pointerType === "mouse") hide(); };
  });
  const stopRestyling = onRestyle(el, measure);

  axisChoice.value = axis;
  speed.value = SPEEDS.find(s => s * WHOLE_RUN_S >= steps()) || SPEEDS[SPEEDS.length - 1];
  setFirstZoom();
  now = extent();
  measure();
  tell();

  function receive(message, arrays) {
    const run = runs[message.run || 0], atEnd = now >= extent() - 1e-9;
    if (message.kind === "clear") run.clear();
    else if (message.kind !== "append") return;
    else if (!run.add(message, arrays)) { notify({ wanted: run.count }); return; }  // columns in between were missed
    notify({ wanted: null });  // so that asking for the same again, from another view, is news to the kernel
    if (!zoomed) setFirstZoom();
    if (atEnd || now > extent()) now = extent();
    measure();
    tell();
  }

  function destroy() {
    pause();
    clearTimeout(spoken);
    cancelAnimationFrame(drawPending);
    stopRestyling();
    root.remove();
  }

  return { receive, destroy };
}
