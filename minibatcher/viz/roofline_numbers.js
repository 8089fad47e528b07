// A step on a machine: its bytes, FLOPs and seconds by the cost model (runners/roofline.py), computed here again, so
// that the picture needs no kernel; and the sentences of roofline_view.py.

// Seconds to multiply `rows` rows with weights that are streamed once: memory and arithmetic overlap, not wholly.
function productSeconds(m, parameters, rows) {
  const e = m.efficiency;
  if (!rows) return 0;
  if (rows > e.tile_tokens) rows = Math.ceil(rows / e.tile_tokens) * e.tile_tokens;
  return Math.hypot((parameters * m.bytes) / (m.bandwidth * e.bandwidth), (2 * parameters * rows) / (m.rate * e.compute));
}

// claims.step_intensity: `batch` decodes with `context` cached tokens each, `prefill` tokens of a prompt beside them.
function stepOn(m, { batch, context, prefill }) {
  const e = m.efficiency, tokens = batch + prefill, requests = batch + (prefill > 0);
  const kvRead = batch * context + prefill, pairs = batch * context + (prefill * (prefill + 1)) / 2;
  const flops = 2 * (m.layer_parameters * tokens + m.head_parameters * batch) + m.attention_flops * pairs;
  const bytes = (m.layer_parameters + m.head_parameters) * m.bytes + kvRead * m.kv_bytes;
  const terms = {
    linear: productSeconds(m, m.layer_parameters, tokens) + productSeconds(m, m.head_parameters, batch),
    attention: Math.max((kvRead * m.kv_bytes * m.kv_copies) / (m.bandwidth * e.attention_bandwidth),
      (m.attention_flops * pairs) / (m.rate * e.attention_compute)),
    all_reduce: m.all_reduce[0] + m.all_reduce[1] * tokens,
    overhead: e.step_s + e.request_s * requests + e.token_s * tokens + e.attention_call_s * requests * m.layers,
  };
  const seconds = sum(Object.keys(terms).map(name => m.switched_off.includes(name) ? 0 : terms[name]));
  const intensity = flops / bytes, ridge = m.rate / m.bandwidth;
  return { batch, flops, bytes, intensity, ridge, seconds, rate: flops / seconds, tokensPerS: batch / seconds,
    computeBound: intensity > ridge };
}

const maxBatch = (m, { context, prefill }) => Math.floor(Math.max(0, m.capacity - prefill) / context);

// The smallest batch up to `most` that lies on the other side of the ridge than a batch of one does; else null.
function turningBatch(m, setting, most) {
  const bound = batch => stepOn(m, { ...setting, batch }).computeBound, first = bound(1);
  for (let batch = 2; batch <= most; batch++) if (bound(batch) !== first) return batch;
  return null;
}

// Three digits, or all of those before the point.
const short = value => Math.abs(value) >= 100 ? thousands(Math.round(value)) : String(Number(value.toPrecision(3)));

function si(value, unit) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (value >= size) return `${short(value / size)} ${letter}${unit}`;
  return `${short(value)} ${unit}`;
}

const seconds = s => s >= 1 ? `${short(s)} s` : s >= 1e-3 ? `${short(1e3 * s)} ms` : `${short(1e6 * s)} µs`;
const percent = share => `${Math.floor(100 * share + 0.5)} %`;
const boundOf = step => step.computeBound ? "compute-bound" : "bandwidth-bound";

function sentencesOf(m, setting, most) {
  const { batch, context, prefill } = setting, step = stepOn(m, setting), fit = maxBatch(m, setting);
  const beside = prefill ? ` beside ${count(prefill, "prefill token", "prefill tokens")}` : "";
  const roof = Math.min(m.rate, m.bandwidth * step.intensity), turn = turningBatch(m, setting, most);
  return [
    `A step of ${count(batch, "decode", "decodes")} with ${count(context, "cached token", "cached tokens")} each${beside} ` +
      `reads ${si(step.bytes, "B")} and computes ${si(step.flops, "FLOP")}: ${short(step.intensity)} FLOPs per byte, ` +
      `${step.computeBound ? "above" : "below"} the ridge of ${short(step.ridge)}. At the machine's peak, reading takes ` +
      `${seconds(step.bytes / m.bandwidth)} and arithmetic ${seconds(step.flops / m.rate)}: the step is ${boundOf(step)}.`,
    `By the cost model it takes ${seconds(step.seconds)} and brings ${short(step.tokensPerS)} output tokens/s, ` +
      `at ${percent(step.rate / roof)} of the roof above it.`,
    `The memory holds ${count(fit, "such sequence", "such sequences")}${batch <= fit ? "" : ": this batch does not fit"}.`,
    turn === null ? `Batches from 1 to ${thousands(most)} are all ${boundOf(step)}.`
      : `From a batch of ${thousands(turn)} on, such a step is ${boundOf(stepOn(m, { ...setting, batch: turn }))}.`,
  ];
}
