// Who owns which part of the KV pool, played as a film: the pools of runs side by side on one clock.
// memory_pool.js knows what is held, memory_draw.js draws it, shared_film.js has the player; this file puts them together.
// State for tests is in data-* attributes: of the root (now, playing, request), and of each run (used, reserved, tables …).

const STYLE = filmStyle(".mb-memory") + `
.mb-memory .runs { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 4px 22px; }
.mb-memory .run { min-width: 0; }
.mb-memory .totals { display: flex; flex-wrap: wrap; gap: 2px 18px; margin-bottom: 4px; }
.mb-memory .title { flex-basis: 100%; }
.mb-memory .total { min-width: 62px; }
.mb-memory .overview { margin: 0 0 4px; cursor: pointer; }
.mb-memory .story { position: static; width: auto; max-width: none; min-height: 112px; box-sizing: border-box; box-shadow: none;
  border-color: color-mix(in srgb, currentColor 35%, transparent); margin: 4px 0; }
`;

const BODY = `
<div class="bar">${playerButtons("step")}</div>
<div class="runs"></div>
${PLAYER_SCRUB}
<canvas class="overview" role="img" aria-label="the whole run: reserved and used tokens of each pool; click to go there"
  title="the whole run: tokens used strong, reserved faint; click to go there"></canvas>
${PLAYER_FOOT}
<div class="legend" aria-label="what textures mean"></div>
<p class="note" hidden></p>
<details class="keys"><summary>Keys</summary>${PLAYER_KEYS("step")}
<kbd>↑</kbd> <kbd>↓</kbd> a request, with its block table and all its blocks · <kbd>esc</kbd> closes it.
Pointing at a piece, or tapping on it, does the same.</details>
`;

const INVITATION = "Point at a piece: whose it is, its block table, all its blocks.";

const TOTALS = [  // label, what it shows at a moment, what that means
  ["time", (pool, m, now) => seconds(Math.min(now, pool.duration), 2)],
  ["tokens used", (pool, m) => `${whole(m.used)} of ${whole(pool.pool)}`, "tokens of running requests that are in the pool"],
  ["reserved", (pool, m) => `${whole(m.reserved)} (${percent(m.reserved / pool.pool)})`, "tokens of the blocks or slices that have an owner"],
  ["of that wasted", (pool, m) => percent(m.wasted), "reserved but unused, or held for requests that have ended"],
  ["running", (pool, m) => whole(m.running), "requests that hold memory and have not ended"],
  ["waiting", (pool, m) => whole(m.waiting)],
];

export function mount(el, { data, arrays }, notify) {
  const pools = data.runs.map((run, i) => new Pool(run, { time: arrays[`${i}.time`], rows: arrays[`${i}.rows`], holds: arrays[`${i}.holds`] }));
  const root = make("div", { class: "mb-memory", tabindex: 0, role: "group", "aria-label": data.alt });
  root.style.setProperty("--accent", data.palette.accent);
  root.innerHTML = `<style>${STYLE}</style>${BODY}`;
  el.append(root);
  const find = name => root.querySelector(`.${name}`), overview = find("overview");
  const rows = Math.max(...pools.map(pool => Math.ceil(pool.pool / data.wide)));
  const sections = pools.map(() => {
    const canvas = make("canvas", { role: "img" }), { head, title, values } = makeTotals(TOTALS);
    const section = make("section", { class: "run" }, head, canvas);
    find("runs").append(section);
    return { section, title, values, canvas };
  });
  let theme = null, places = [], strips = null, chosen = null;

  const extent = () => Math.max(...pools.map(pool => pool.duration), 1e-9);
  const steps = () => Math.max(...pools.map(pool => pool.time.length));
  const player = makePlayer(root, {
    extent, steps, pace: speed => speed * extent() / steps(), ends: () => pools.map(pool => pool.time), isWhole: () => false,
    draw, tell, follow,
  });

  // -- what is shown

  function measure() {
    if (root.clientWidth <= 12) return;
    theme = makeMemoryTheme(root, data.palette);
    places = sections.map(({ section }) => poolLayout(section.clientWidth, data.wide, rows));
    drawLegend();
    draw();
  }

  function draw() {
    if (!theme) return;
    const { now } = player;
    pools.forEach((pool, i) => {
      const place = places[i], moment = pool.moment(now);
      drawPool(prepare(sections[i].canvas, place.width, place.height), pool, moment, place, theme, chosen && chosen.id);
      showTotals(pool, moment, sections[i]);
    });
    const width = root.clientWidth - 12;
    strips = drawStrips(prepare(overview, width, pools.length * STRIP), pools, now, width, extent(), theme);
    Object.assign(find("scrub").style, { marginLeft: `${strips.left - 8}px`, width: `${strips.plot + 16}px` });
    player.showScrub(seconds(now, 2));
    const speed = player.speed();
    find("pace").textContent = `= ${Number((speed * extent() / steps()).toPrecision(2))} × real time`;
    Object.assign(root.dataset, { now: now.toFixed(6), playing: player.playing, extent: extent().toFixed(6), request: chosen ? chosen.id : "" });
  }

  function showTotals(pool, moment, { section, title, values }) {
    title.textContent = title.title = pool.title;
    TOTALS.forEach(([, value], i) => {
      const text = value(pool, moment, player.now);
      if (values[i].value.textContent !== text) values[i].value.textContent = text;
    });
    values[0].name.textContent = `time, ${pool.clock}`;
    const { dataset } = section, { column, used, ended, reserved, running, waiting, wasted } = moment;
    Object.assign(dataset, { waiting });
    if (dataset.column === String(column)) return;
    const tables = Object.fromEntries([...moment.owners.values()].map(owner => [owner.request.id, owner.blocks]));
    Object.assign(dataset, { run: pool.title, column, used, ended, reserved, running, wasted: wasted ?? "", tables: JSON.stringify(tables) });
  }

  function drawLegend() {
    const legend = find("legend"), { labels } = data.palette;
    const item = (label, fill, pattern) => legend.append(legendItem(label, g => {
      for (const style of [fill, pattern].filter(Boolean)) { g.fillStyle = style; g.fillRect(0, 0, 24, 12); }
      g.strokeStyle = theme.soft(0.5);
      g.strokeRect(0.5, 0.5, 23, 11);
    }));
    legend.replaceChildren();
    for (const kind in labels)
      if (kind !== "ended" || pools.some(pool => pool.sums.ended.some(Boolean)))
        item(`${labels[kind]}${kind === "used" ? " (a colour a request)" : ""}`, rgb(theme.fills[kind][4]), theme.patterns[kind]);
    item("free", theme.soft(0.07));
    legend.append(make("span", {}, "strips: the whole run, tokens used strong, reserved faint"));
    const notes = pools.flatMap(pool => {
      const whose = pools.length > 1 ? `In ${pool.title}, ` : "Here ", said = [];
      if (pool.bin > 1) said.push(`${whose}one moment of every ${pool.bin} is shown.`);
      if (pool.wrong) said.push(`${whose}the record counts another number of blocks than are drawn in ${whole(pool.wrong)} of ${whole(pool.num_steps)} steps.`);
      return said;
    });
    find("note").hidden = !notes.length;
    find("note").textContent = notes.join(" ");
  }

  // -- moving

  const report = () => notify({ time: player.now, playing: player.playing, request: chosen ? chosen.id : null });

  function tell() {
    report();
    player.say(describe);
  }

  // The moment in words, for who can't see it.
  const describe = () => pools.map((pool, i) => {
    const m = pool.moment(player.now);
    const words = `${pool.title}, ${seconds(player.now, 2)}: ${whole(m.used)} of ${whole(pool.pool)} tokens used, ${whole(m.reserved)} reserved, ` +
      `${percent(m.wasted)} of that wasted, ${whole(m.running)} running, ${whole(m.waiting)} waiting`;
    sections[i].canvas.setAttribute("aria-label", words);
    return words;
  }).join(". ");

  // -- pointing and choosing

  // The story stands below the pools, for it must not hide the blocks that it tells of.
  function show(i, owner) {
    chosen = { run: i, id: owner.request.id };
    player.showStory(memoryStory(pools, pools[i], owner, player.now), 0, 0);
    report();
  }

  function hide(words = INVITATION) {
    chosen = null;
    player.showStory(words, 0, 0);
    report();
  }

  function point(i, event) {
    const pool = pools[i], { left, plot, top, row, wide } = places[i], line = Math.floor((event.offsetY - top) / row);
    const token = line * wide + Math.floor(((event.offsetX - left) / plot) * wide), block = Math.floor(token / pool.size);
    if (event.offsetX < left || event.offsetX >= left + plot || line < 0 || token >= pool.pool) return hide();
    const owner = pool.ownerOf(pool.moment(player.now), block);
    if (owner) show(i, owner); else hide(`${pool.slots ? "slot" : "block"} ${thousands(block)}: free`);
  }

  const owners = (pool, i) => [...pool.moment(player.now).owners.values()].map(owner => [i, owner]);
  const isChosen = ([i, owner]) => chosen && chosen.run === i && owner.request.id === chosen.id;

  // In the order of their first blocks, run by run.
  function chooseRequest(direction) {
    const all = pools.flatMap((pool, i) => owners(pool, i).sort(([, a], [, b]) => a.blocks[0] - b.blocks[0]));
    if (!all.length) return hide();
    const old = all.findIndex(isChosen);
    show(...all[(Math.max(old, direction > 0 ? -1 : 0) + direction + all.length) % all.length]);
    player.say(player.storyWords, 0);
  }

  // The chosen request's story as it goes on; it closes when the request is gone.
  function follow() {
    const found = chosen && owners(pools[chosen.run], chosen.run).find(isChosen);
    if (found) show(...found); else if (chosen) hide();
  }

  function overviewSeek(event) {
    player.go(clamp((event.offsetX - strips.left) / strips.plot, 0, 1) * extent());
  }

  // -- wiring

  const keys = { ...player.keys, ArrowDown: () => chooseRequest(1), ArrowUp: () => chooseRequest(-1), Escape: () => hide() };
  player.listen(keys, PLAYER_BUTTONS);
  overview.onpointerdown = event => { overview.setPointerCapture(event.pointerId); overviewSeek(event); };
  overview.onpointermove = event => { if (event.buttons) overviewSeek(event); };
  sections.forEach(({ canvas }, i) => {
    canvas.onpointermove = canvas.onpointerdown = event => point(i, event);
    canvas.onpointerleave = event => { if (event.pointerType === "mouse") hide(); };
  });
  hide();
  const stopRestyling = onRestyle(el, measure);
  player.fitSpeed();
  player.now = data.start;
  measure();
  tell();

  // From the kernel: {time}, in seconds.
  const receive = ({ time }) => { if (time != null) player.go(time); };

  function destroy() {
    player.destroy();
    stopRestyling();
    root.remove();
  }

  return { receive, destroy };
}
