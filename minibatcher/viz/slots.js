// Who sat in which slot doing what, played as a film: rows are slots, columns steps (or seconds), colour is the
// request, strength, texture and letter the state. Several runs stand above each other and move on one clock.
//
// slots_run.js knows what happened, slots_draw.js draws it; this file holds the controls.
// A position on the axis is a number of steps done, or seconds since the first arrival. State for tests is in
// data-* attributes: of the root (axis, now, playing, speed, shown, request), and of each run (step, useful, ...).

const MANY = 600;  // columns: of a longer run, half as many are seen at first
const TALL = 640, MAX_ROW = 22, MIN_ROW = 2;  // pixels: all rows together, and one row

const STYLE = filmStyle(".mb-slots") + `
.mb-slots .totals { display: grid; grid-template-columns: 104px repeat(7, minmax(96px, max-content)); gap: 0 10px; }
@container (max-width: 860px) {
  .mb-slots .totals { display: flex; flex-wrap: wrap; gap: 2px 16px; }
  .mb-slots .title { flex-basis: 100%; }
  .mb-slots .total { min-width: 56px; } .mb-slots .name { width: min-content; min-width: 100%; }
}
`;

const BODY = `
<div class="bar">${playerButtons("step")}
  <label>axis <select class="axis"><option>steps</option><option>seconds</option></select></label>
  <span>zoom <button class="out" aria-label="show more of the run" title="show more (−)">−</button>
  <button class="in" aria-label="show less of the run" title="show less (+)">+</button></span>
</div>
<div class="runs"></div>
${PLAYER_SCRUB}
<canvas class="overview" role="img" aria-label="the whole run: share of useful slots; click to go there"
  title="the whole run: slots at useful work are dark, those held without it lighter; click to go there"></canvas>
<div class="legend" aria-label="what textures and letters mean"></div>
<p class="note" hidden></p>
<details class="keys"><summary>Keys</summary>${PLAYER_KEYS("step")}
<kbd>↑</kbd> <kbd>↓</kbd> a slot, and the story of the request in it · <kbd>esc</kbd> closes it · <kbd>+</kbd> <kbd>−</kbd>
zoom. Pointing at a slot or at the queue, or tapping on it, tells the same story.</details>
${PLAYER_FOOT}
`;

const TOTALS = [  // label, what it shows at a moment
  ["step", (run, m) => `${whole(m.step)} of ${whole(run.steps)}`],
  ["time", (run, m) => seconds(m.time)],
  ["useful slots", (run, m) => percent(m.useful), "slot occupancy: of all slots in all steps so far"],
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
  const find = name => root.querySelector(`.${name}`);
  const scrub = find("scrub"), axisChoice = find("axis"), overview = find("overview");
  const sections = runs.map(makeSection);
  let axis = data.axis, zoom = 1, from = 0, frames = 0;
  let theme = null, places = [], chosen = null, slotChosen = null, zoomed = false;

  const extent = () => Math.max(...runs.map(run => run.extent(axis)), 1e-9);
  const steps = () => Math.max(...runs.map(run => run.steps), 1);
  // On the axis of seconds time passes evenly, at the pace that shows so many steps a second of the longest run.
  const pace = speed => speed * (axis === "seconds" ? extent() / steps() : 1);
  const ends = () => runs.map(run => run.edges[axis].right);
  const player = makePlayer(root, { extent, steps, pace, ends, draw, tell, follow, isWhole: () => axis === "steps" });
  const { drawSoon } = player;

  function makeSection() {
    const canvas = make("canvas", { role: "img" }), { head, title, values } = makeTotals(TOTALS);
    const section = make("section", { class: "run" }, head, canvas);
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
    const whole = extent(), width = whole * zoom, { now } = player;
    if (now < from + 0.05 * width) from = now - 0.05 * width;
    if (now > from + 0.92 * width) from = now - 0.92 * width;
    from = clamp(from, 0, whole - width);
    return { axis, now, from, to: from + width };
  }

  function draw() {
    if (!theme || !places.length) return;
    const v = view(), moments = runs.map(run => run.moment(axis, player.now));
    runs.forEach((run, i) => {
      const place = places[i], g = prepare(sections[i].canvas, place.width, place.height);
      drawRun(g, run, moments[i], place, v, theme, chosen);
      if (!run.count) note(g, emptySentence(run), place.left + place.plot / 2, (place.top + place.bottom) / 2, theme);
      showTotals(run, moments[i], sections[i]);
    });
    drawOverview(overview, runs, v, places[0], theme, extent());
    player.showScrub(axis === "seconds" ? seconds(player.now) : `step ${whole(player.now)}`);
    const speed = player.speed();
    Object.assign(root.dataset, {
      axis, playing: player.playing, now: player.now.toFixed(6), extent: extent().toFixed(6),
      shown: (v.to - v.from).toFixed(6), speed, request: chosen || "", frames: ++frames,
    });
    find("pace").textContent = axis === "seconds" ? `= ${Number(pace(speed).toPrecision(2))} × real time` : "";
  }

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
    values[0].box.title = run.firstIndex ? `a part of a run: its first step has number ${run.firstIndex}` : "";
    const told = section.dataset, letters = data.palette.letters, at = player.now.toFixed(6);
    if (told.column === String(moment.column) && told.at === at && told.count === String(run.count)) return;
    Object.assign(told, {
      run: run.title, clock: run.clock, at, column: moment.column, count: run.count,
      step: moment.step, steps: run.steps, time: moment.time.toFixed(6),
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
    const item = (label, paint) => legend.append(legendItem(label, paint));
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
        said.push(`${whose}each column stands for ${run.bin} steps and shows what a slot did in most; totals are exact.`);
      if (run.shown < run.numSlots) said.push(`${whose}slots from ${run.shown} on were never used and are not drawn.`);
      return said;
    });
    find("note").hidden = !notes.length;
    find("note").textContent = notes.join(" ");
  }

  // -- moving

  function tell() {
    const first = runs[0].moment(axis, player.now);
    notify({ step: first.step, time: first.time, axis, playing: player.playing, request: chosen });
    player.say(describe);
  }

  // The moment in words, for who can't see it.
  const describe = () => runs.map((run, i) => {
    const m = run.moment(axis, player.now);
    const words = `${run.title}: step ${whole(m.step)} of ${whole(run.steps)}, ${seconds(m.time)}, ` +
      `useful slots ${percent(m.useful)}, ${whole(m.waiting)} waiting`;
    sections[i].canvas.setAttribute("aria-label", words);
    return words;
  }).join(". ");

  function setAxis(name) {
    const old = axis, longest = runs.reduce((a, b) => b.steps > a.steps ? b : a);
    const atEnd = player.now >= extent() - 1e-9;
    const column = longest.columnAt(old, player.now);
    axis = axisChoice.value = name;
    player.seek(atEnd ? extent() : column < 0 ? 0 : longest.edges[axis].right[column]);
    from = 0;
  }

  // As many steps as were asked for; of a long run, and of one that grows, a part.
  function setFirstZoom() {
    const many = MANY * Math.max(...runs.map(run => run.bin));
    const few = data.live || (axis === "steps" && steps() > many);
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
    player.showStory(request ? tellStory(runs, run, request, where) : where, x, y);
  }

  function hide() {
    chosen = slotChosen = null;
    player.hideStory();
  }

  const stateLabel = cell => data.palette.labels[data.palette.states[cell.state]];

  function point(i, event) {
    const run = runs[i], place = places[i];
    const box = sections[i].canvas.getBoundingClientRect(), outer = root.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const at = [event.clientX - outer.left, event.clientY - outer.top];
    const slot = Math.floor((y - place.top) / place.row), moment = run.moment(axis, player.now);
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
    const [i, slot] = slotChosen, run = runs[i], cell = run.moment(axis, player.now).cells[slot];
    const top = sections[i].canvas.offsetTop + places[i].top + slot * places[i].row;
    const where = cell ? `slot ${slot} · ${stateLabel(cell)}` : `slot ${slot}: idle`;
    show(run, cell && run.requests[cell.request], where, places[i].left - 14, top);
    player.say(player.storyWords, 0);
  }

  function overviewSeek(event) {
    const x = event.clientX - overview.getBoundingClientRect().left - places[0].left;
    player.pause();
    player.seek(x / places[0].plot * extent());
  }

  const keys = {
    ...player.keys, ArrowDown: () => chooseSlot(1), ArrowUp: () => chooseSlot(-1), Escape: hide,
    "+": () => setZoom(0.5), "=": () => setZoom(0.5), "-": () => setZoom(2),
  };

  // -- wiring

  player.listen(keys, { ...PLAYER_BUTTONS, out: "-", in: "+" });
  axisChoice.onchange = () => setAxis(axisChoice.value);
  overview.onpointerdown = event => { overview.setPointerCapture(event.pointerId); overviewSeek(event); };
  overview.onpointermove = event => { if (event.buttons) overviewSeek(event); };
  sections.forEach(({ canvas }, i) => {
    canvas.onpointermove = canvas.onpointerdown = event => point(i, event);
    canvas.onpointerleave = event => { if (event.pointerType === "mouse") hide(); };
  });
  const stopRestyling = onRestyle(el, measure);

  axisChoice.value = axis;
  player.fitSpeed();
  setFirstZoom();
  player.now = extent();
  measure();
  tell();

  function receive(message, arrays) {
    const run = runs[message.run || 0], atEnd = player.now >= extent() - 1e-9;
    if (message.kind === "clear") run.clear();
    else if (message.kind !== "append") return;
    else if (!run.add(message, arrays)) { notify({ wanted: run.count }); return; }  // columns in between were missed
    notify({ wanted: null });  // so that asking for the same again, from another view, is news to the kernel
    if (!zoomed) setFirstZoom();
    if (atEnd || player.now > extent()) player.now = extent();
    measure();
    tell();
  }

  function destroy() {
    player.destroy();
    stopRestyling();
    root.remove();
  }

  return { receive, destroy };
}
