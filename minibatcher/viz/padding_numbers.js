// The padding picture's numbers and sentences: those of padding.py, computed here again, so that it needs no kernel.

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
