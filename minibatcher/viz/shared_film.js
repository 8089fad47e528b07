// What films share: a clock that a reader plays, stops, steps and drags, the boxes of figures above a run, the story of
// what is pointed at, and numbers as text. A film lays out its page with filmStyle, playerButtons and PLAYER_FOOT.

const SPEEDS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];  // steps a second
const WHOLE_RUN_S = 15;  // the speed offered first plays a run in about this time

const whole = x => x == null ? "–" : Math.round(x).toLocaleString("en-US");
const percent = share => share == null ? "–" : `${Math.round(100 * share)} %`;

// digits: behind the point from 100 s on.
function seconds(s, digits = 0) {
  if (s == null) return "–";
  if (Math.abs(s) < 0.9995) return `${(1000 * s).toFixed(s < 0.01 && s > 0 ? 1 : 0)} ms`;
  return `${s < 100 ? s.toFixed(2) : digits ? s.toFixed(digits) : whole(s)} s`;
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

// The look of everything within the selector r.
const filmStyle = r => `
${r} { --bg: var(--jp-layout-color0, Canvas); --fg: var(--jp-content-font-color1, CanvasText);
  position: relative; box-sizing: border-box; min-width: 0; container-type: inline-size; padding: 4px 6px 6px;
  margin-bottom: 6px; background: var(--bg); color: var(--fg); font: 13px/1.4 system-ui, sans-serif;
  border-radius: 4px; outline-offset: -2px; }
${r}:focus-visible { outline: 2px solid currentColor; }
${r} canvas { display: block; width: 100%; touch-action: pan-y; }
${r} .bar { display: flex; flex-wrap: wrap; gap: 4px 6px; align-items: center; margin: 4px 0; }
${r} button, ${r} select { font: inherit; color: inherit; background: transparent; padding: 2px 8px;
  height: 27px; box-sizing: border-box; border: 1px solid color-mix(in srgb, currentColor 35%, transparent);
  border-radius: 5px; }
${r} select { padding: 0 2px; } ${r} option { color: CanvasText; background: Canvas; }
${r} button:hover { background: color-mix(in srgb, currentColor 12%, transparent); }
${r} button.play { min-width: 86px; font-weight: 600; }
${r} label { display: inline-flex; gap: 4px; align-items: center; }
${r} :is(button, select, input, summary):focus-visible { outline: 2px solid currentColor; outline-offset: 1px; }
${r} .scrub { display: block; margin: 6px 0 2px; box-sizing: border-box; accent-color: var(--accent); }
${r} .pace { font-size: 12px; opacity: .75; }
${r} .run { margin-top: 8px; }
${r} .title { font-size: 15px; font-weight: 700; line-height: 1.2; overflow: hidden; overflow-wrap: anywhere;
  display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2; }
${r} .total { display: flex; flex-direction: column-reverse; justify-content: flex-end; }
${r} .name { font-size: 11px; line-height: 1.2; opacity: .75; }
${r} .value { font-variant-numeric: tabular-nums; font-weight: 600; line-height: 1.25; white-space: nowrap; }
${r} .legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; margin: 4px 0 0; padding: 0; }
${r} .legend span { display: inline-flex; align-items: center; gap: 5px; }
${r} .legend canvas { width: 24px; height: 12px; }
${r} .note, ${r} details { font-size: 12px; margin: 4px 0 0; }
${r} kbd { font: inherit; border: 1px solid color-mix(in srgb, currentColor 40%, transparent); padding: 0 4px;
  border-radius: 3px; }
${r} .story { position: absolute; z-index: 2; width: max-content; max-width: min(380px, 90%); padding: 6px 9px;
  font-size: 12px; background: var(--bg); border: 1px solid currentColor; border-radius: 5px; pointer-events: none;
  box-shadow: 0 2px 8px rgb(0 0 0 / 35%); }
${r} .story b { font-size: 13px; } ${r} .story p { margin: 0; }
${r} .spoken { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
`;

// unit: what one press of the arrow keys passes.
const playerButtons = unit => `
  <button class="home" aria-label="to the first ${unit}" title="first ${unit} (Home)">|◀</button>
  <button class="back" aria-label="one ${unit} back" title="one ${unit} back (←)">−1</button>
  <button class="play" title="play or pause (space)">▶ Play</button>
  <button class="next" aria-label="one ${unit} on" title="one ${unit} on (→)">+1</button>
  <button class="end" aria-label="to the end" title="the end (End)">▶|</button>
  <label>speed <select class="speed" title="${unit}s a second"></select></label><span class="pace"></span>`;

const PLAYER_SCRUB = `<input class="scrub" type="range" min="0" step="any" aria-label="position in the run">`;
const PLAYER_FOOT = `<div class="story" hidden></div>
<div class="spoken" role="status" aria-live="polite"></div>`;

// The player of a film whose page stands in root. film: extent(), where it ends; pace(speed), positions a second;
// ends(), for each run the sorted positions at which its steps end; isWhole(), whether it rests on whole positions only;
// draw(); tell(), the position has changed; follow(), the reader or the clock has moved it; steps(), of the longest run.
function makePlayer(root, film) {
  const find = name => root.querySelector(`.${name}`), scrub = find("scrub"), speed = find("speed"), story = find("story");
  let frame = 0, before = 0, pending = 0, spoken = 0;
  const player = { now: 0, playing: false };

  player.drawSoon = () => { if (!pending) pending = requestAnimationFrame(() => { pending = 0; film.draw(); }); };
  player.speed = () => Number(speed.value);
  player.fitSpeed = () => { speed.value = SPEEDS.find(s => s * WHOLE_RUN_S >= film.steps()) || SPEEDS[SPEEDS.length - 1]; };

  player.seek = position => {
    player.now = clamp(film.isWhole() && !player.playing ? Math.round(position) : position, 0, film.extent());
    player.drawSoon();
    film.tell();
  };

  player.go = position => { player.pause(); player.seek(position); film.follow(); };

  // To the next or previous end of a step in any of the runs.
  player.step = direction => {
    player.pause();
    const ends = film.ends().flatMap(sorted => {
      const i = direction > 0 ? countUpTo(sorted, player.now + 1e-9) : countUpTo(sorted, player.now - 1e-9, true) - 1;
      return i >= 0 && i < sorted.length ? [sorted[i]] : [];
    });
    if (ends.length) player.seek(direction > 0 ? Math.min(...ends) : Math.max(...ends));
    film.follow();
  };

  const home = () => player.go(Math.min(...film.ends().filter(sorted => sorted.length).map(sorted => sorted[0]), film.extent()));
  const jump = share => player.go(player.now + share * film.extent());

  player.play = () => {
    if (player.now >= film.extent() - 1e-9) player.now = 0;
    player.playing = true;
    before = 0;
    showPlaying();
    frame = requestAnimationFrame(advance);
  };

  function advance(time) {
    if (!root.isConnected) player.playing = false;
    if (!player.playing) return;
    const passed = before ? Math.min((time - before) / 1000, 0.25) : 0;
    before = time;
    player.now = Math.min(player.now + passed * film.pace(player.speed()), film.extent());
    film.draw();
    film.follow();
    if (player.now >= film.extent()) { player.pause(); return; }
    film.tell();
    frame = requestAnimationFrame(advance);
  }

  player.pause = () => {
    if (!player.playing) return;
    player.playing = false;
    cancelAnimationFrame(frame);
    if (film.isWhole()) player.now = Math.ceil(player.now - 1e-9);
    showPlaying();
    film.tell();
  };

  function showPlaying() {
    find("play").textContent = player.playing ? "❚❚ Pause" : "▶ Play";
    root.dataset.playing = player.playing;
    player.drawSoon();
  }

  player.keys = {
    " ": () => player.playing ? player.pause() : player.play(), ArrowRight: () => player.step(1), ArrowLeft: () => player.step(-1),
    Home: home, End: () => player.go(film.extent()), PageDown: () => jump(0.1), PageUp: () => jump(-0.1),
  };

  // Keys, which are the player's and the film's, and buttons by class: each does what its key does.
  player.listen = (keys, buttons) => {
    root.addEventListener("keydown", event => {
      const { target, key } = event, isTheirs = target.matches("select") || (key === " " && target.matches("button, summary"));
      if (event.ctrlKey || event.metaKey || event.altKey || isTheirs || !keys[key]) return;
      event.preventDefault();
      event.stopPropagation();
      keys[key]();
    });
    for (const name in buttons) find(name).onclick = keys[buttons[name]];
  };

  // Where the scrub stands, and what it says of that.
  player.showScrub = words => {
    scrub.max = film.extent();
    scrub.value = player.now;
    scrub.setAttribute("aria-valuetext", words);
  };

  // Tell who can't see it, once it stands still.
  player.say = (words, delay = 400) => {
    clearTimeout(spoken);
    if (!player.playing) spoken = setTimeout(() => { find("spoken").textContent = words(); }, delay);
  };

  // What is pointed at, beside the place x, y of the root.
  player.showStory = (content, x, y) => {
    story.replaceChildren(content);
    story.hidden = false;
    story.style.left = `${clamp(x + 14, 0, Math.max(0, root.clientWidth - story.offsetWidth - 4))}px`;
    const below = y + 16 + story.offsetHeight < root.clientHeight;
    story.style.top = `${below ? y + 16 : Math.max(0, y - story.offsetHeight - 8)}px`;
    player.drawSoon();
  };

  player.hideStory = () => {
    story.hidden = true;
    player.drawSoon();
  };

  player.storyWords = () => [...story.querySelectorAll("p")].map(line => line.textContent).join(". ") || story.textContent;

  player.destroy = () => {
    player.pause();
    clearTimeout(spoken);
    cancelAnimationFrame(pending);
  };

  for (const value of SPEEDS) speed.add(new Option(`${value}/s`, value));
  speed.onchange = player.drawSoon;
  scrub.oninput = () => player.go(Number(scrub.value));
  return player;
}

const PLAYER_BUTTONS = { home: "Home", back: "ArrowLeft", play: " ", next: "ArrowRight", end: "End" };
const PLAYER_KEYS = unit => `<kbd>space</kbd> play or pause · <kbd>←</kbd> <kbd>→</kbd> one ${unit} ·
<kbd>page up</kbd> <kbd>page down</kbd> a tenth of the run · <kbd>home</kbd> <kbd>end</kbd> first and last ${unit} ·`;

// A run's title and boxes of figures. totals: [label, …, meaning] each.
function makeTotals(totals) {
  // No lists and no headings: each page around us has a style of its own for those.
  const title = make("div", { class: "title", role: "heading", "aria-level": "4" });
  const values = totals.map(([label, , meaning]) => {
    const name = make("span", { class: "name" }, label), value = make("span", { class: "value" });
    return { box: make("div", { class: "total", ...(meaning && { title: meaning }) }, name, value), name, value };
  });
  return { head: make("div", { class: "totals" }, title, ...values.map(v => v.box)), title, values };
}

function legendItem(label, paint) {
  const canvas = make("canvas"), box = make("span", {}, canvas, label);
  paint(prepare(canvas, 24, 12));
  return box;
}
