// One step as a point under the roof of its machine, and its output tokens/s against the batch size. The reader sets
// the batch, the tokens in each one's cache and the prefill tokens beside them, and chooses the machine.
// roofline_numbers.js computes, roofline_draw.js draws.

const STYLE = pageStyle(".mb-roofline") + `
.mb-roofline .panels { display: grid; grid-template-columns: 5fr 4fr; gap: 6px 20px; align-items: start; }
.mb-roofline .panels > * { min-width: 0; }
.mb-roofline canvas { width: 100%; display: block; touch-action: pan-y; cursor: crosshair; }
.mb-roofline .sets { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 4px 22px; margin: 4px 0 8px; }
.mb-roofline .set { display: grid; grid-template-columns: 1fr auto; align-items: center; gap: 2px 8px; margin: 0; }
.mb-roofline .set input[type=range] { grid-column: 1 / 3; width: 100%; margin: 0; padding: 0; border: 0; }
.mb-roofline .set input[type=number] { width: 7.5em; }
.mb-roofline select { max-width: 100%; }
.mb-roofline .figures { display: flex; flex-wrap: wrap; gap: 4px 24px; margin: 2px 0 6px; }
.mb-roofline .figures > div { display: flex; flex-direction: column; }
.mb-roofline .name { font-size: 12px; opacity: .8; }
.mb-roofline .value { font-size: 17px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.mb-roofline p { margin: 2px 0; } .mb-roofline .hint { opacity: .8; }
.mb-roofline .alert { font-weight: 600; } .mb-roofline .alert:not(:empty)::before { content: "⚠ "; }
@container (max-width: 820px) { .mb-roofline .panels { grid-template-columns: 1fr; }
  .mb-roofline .sets { grid-template-columns: 1fr; } .mb-roofline .figures { gap: 4px 18px; } }
`;

const FIGURES = {  // what is read out of a step
  bytes: ["bytes read", ({ step }) => si(step.bytes, "B")],
  flops: ["computed", ({ step }) => si(step.flops, "FLOP")],
  intensity: ["arithmetic intensity", ({ step }) => `${short(step.intensity)} FLOPs/byte`],
  seconds: ["time of a step", ({ step }) => seconds(step.seconds)],
  tokens: ["output tokens/s", ({ step }) => short(step.tokensPerS)],
  bound: ["the step is", ({ step }) => boundOf(step)],
  fit: ["such sequences that fit", ({ step, fit }) => thousands(fit) + (step.batch > fit ? ": B is too large" : "")],
};

// Positions of a slider: finer where numbers are small.
function notches(low, most) {
  const found = [low, most];
  for (let ten = 1; ten <= most; ten *= 10) for (const part of [1, 1.5, 2, 3, 5, 7]) found.push(part * ten);
  for (let two = 1; two <= most; two *= 2) if (most <= 4096) found.push(two);
  return [...new Set(found.filter(n => Number.isInteger(n) && n >= low && n <= most))].sort((a, b) => a - b);
}

export function mount(el, { data }, notify) {
  const state = { machine: data.machine, batch: data.start.num_decodes, context: data.start.context_tokens, prefill: data.start.prefill_tokens };
  const machine = () => data.machines[state.machine];
  const machines = make("select", { "aria-label": "model and machine", class: "machine", onchange: () =>
    update({ machine: Number(machines.value) }) }, ...data.machines.map((m, i) => make("option", { value: i }, m.name)));
  const sets = [
    setter("batch", "decodes in the batch, B", 1, () => data.max_decodes),
    setter("context", "tokens in each one's cache", 1, () => machine().max_context),
    setter("prefill", "prefill tokens beside them", 0, () => data.max_prefill),
  ];
  const values = Object.fromEntries(Object.keys(FIGURES).map(name => [name, make("span", { class: `value ${name}` })]));
  const figures = make("div", { class: "figures" }, ...Object.entries(FIGURES).map(([name, [label]]) =>
    make("div", {}, make("span", { class: "name" }, label), values[name])));
  const sentence = make("p", { class: "sentence", role: "status", "aria-live": "polite" });
  const alert = make("p", { class: "alert", role: "alert" });
  const canvases = ["roof", "rates"].map(name => make("canvas", { role: "img", class: name }));
  const hint = make("p", { class: "hint" }, "Small marks: the same step with B = 1, 2, 4, …; hollow: it does not fit the memory. " +
    "Drag in a plot to move B. Dashed on the right: tokens/s if they grew as the batch does.");
  const root = make("div", { class: "mb-roofline", role: "group", "aria-label": "a step under the roof of its machine" },
    make("style", {}, STYLE), make("div", { class: "bar" }, make("label", {}, "model and machine", machines)),
    make("div", { class: "sets" }, ...sets.map(s => s.box)), alert, figures,
    make("div", { class: "panels" }, ...canvases), sentence, hint);
  el.append(root);
  let shown = null, drawn = [];

  // A number that is dragged or typed. most(): its limit, which is the machine's.
  function setter(name, label, low, most) {
    let places = [];
    const slider = make("input", { type: "range", min: 0, class: name, "aria-label": label, oninput: () => update({ [name]: places[slider.value] }) });
    const typed = make("input", { type: "number", min: low, class: name, "aria-label": `${label}, typed`, onchange: take,
      onkeydown: event => event.key === "Enter" && take() });  // JupyterLab keeps the browser from seeing a change here
    function take() {
      const value = Number(typed.value);
      if (typed.value.trim() && Number.isInteger(value) && value >= low && value <= most()) return update({ [name]: value });
      show();
      alert.textContent = `${label}: a whole number from ${thousands(low)} to ${thousands(most())}.`;
    }
    function show() {
      places = notches(low, most());
      slider.max = places.length - 1;
      slider.value = places.filter(place => place <= state[name]).length - 1;
      slider.setAttribute("aria-valuetext", thousands(state[name]));
      typed.max = most();
      typed.value = state[name];
    }
    return { box: make("div", { class: "set" }, make("span", {}, label), typed, slider), show };
  }

  function update(changes) {
    Object.assign(state, changes);
    const m = machine();
    state.context = Math.min(state.context, m.max_context);
    const setting = { batch: state.batch, context: state.context, prefill: state.prefill };
    const step = stepOn(m, setting);
    shown = { step, fit: maxBatch(m, setting), turn: turningBatch(m, setting, data.max_decodes), most: data.max_decodes,
      trail: data.trail.map(batch => stepOn(m, { ...setting, batch })), colours: data.colours,
      limits: { batch: data.max_decodes, prefill: data.max_prefill },
      look: { colour: state.prefill ? data.colours.mixed : data.colours.decode, square: state.prefill > 0 } };
    alert.textContent = "";
    machines.value = state.machine;
    sets.forEach(set => set.show());
    for (const [name, [, value]] of Object.entries(FIGURES)) values[name].textContent = value(shown).replace(/ /g, "\u00a0");
    const sentences = sentencesOf(m, setting, data.max_decodes);
    sentence.textContent = sentences.join(" ");
    canvases[0].setAttribute("aria-label", `${m.name}, roofline. ${sentences[0]}`);
    canvases[1].setAttribute("aria-label", `Output tokens per second against batch size. ${sentences.slice(1).join(" ")}`);
    Object.assign(root.dataset, { ...setting, machine: state.machine, flops: step.flops, bytes: step.bytes, intensity: step.intensity,
      ridge: step.ridge, seconds: step.seconds, tokensPerS: step.tokensPerS, computeBound: step.computeBound, fit: shown.fit,
      turn: shown.turn ?? "" });
    draw();
    notify({ machine: state.machine, num_decodes: state.batch, context_tokens: state.context, prefill_tokens: state.prefill });
  }

  function draw() {
    const width = canvases.map(canvas => canvas.parentElement.clientWidth && canvas.clientWidth);
    if (!width[0]) return;
    shown.theme = pageColours(root);
    const height = i => Math.round(clamp(width[i] * 0.68, 250, 370));
    const tall = width[0] === width[1] ? height : () => height(0);  // side by side they are as tall as each other
    drawn = [
      drawRoof(prepare(canvases[0], width[0], tall(0)), machine(), shown, width[0], tall(0)),
      drawRates(prepare(canvases[1], width[1], tall(1)), shown, width[1], tall(1)),
    ];
  }

  // On the right the batch size below the pointer, on the left that of the nearest mark.
  function pick(i, event) {
    const { places, batchAt } = drawn[i];
    if (batchAt) return update({ batch: batchAt(event.offsetX) });
    const far = ([, x, y]) => Math.hypot(x - event.offsetX, y - event.offsetY);
    update({ batch: places.reduce((best, place) => far(place) < far(best) ? place : best)[0] });
  }

  canvases.forEach((canvas, i) => {
    canvas.onpointerdown = event => { canvas.setPointerCapture(event.pointerId); pick(i, event); };
    canvas.onpointermove = event => { if (event.buttons) pick(i, event); };
  });
  const stopRestyling = onRestyle(el, draw);
  update({});

  // From the kernel: any of machine, num_decodes, context_tokens, prefill_tokens.
  const receive = message => update({
    machine: message.machine ?? state.machine, batch: message.num_decodes ?? state.batch,
    context: message.context_tokens ?? state.context, prefill: message.prefill_tokens ?? state.prefill,
  });
  return { receive, destroy: stopRestyling };
}
