// Requests as rows of padded batches: the prompts on the left, the answers on the right, what is wasted hatched.
// Its parts: padding_numbers.js counts, padding_draw.js draws, padding_page.js has the style sheet.

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
  const stopRestyling = onRestyle(panels, () => (root.isConnected ? draw(null) : destroy()));

  function destroy() {
    cancelAnimationFrame(frame);
    stopRestyling();
  }

  choose("given", 0);
  // From the kernel: {lengths, outputs, batch_size}, and order, view, budget if they change.
  const receive = ({ lengths, outputs, batch_size, order = state.order, view = state.view, budget = state.budget }) =>
    update({ ...fromDraw({ lengths, outputs, batch_size }), order, view, budget, workload: "own" });
  return { receive, destroy };
}
