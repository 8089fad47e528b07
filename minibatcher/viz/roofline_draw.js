// How the roofline picture draws the roof with the path of batch sizes under it, and tokens/s against batch size.

const FOOT = 36, TOP = 14, RIGHT = 12;  // pixels around a plot

const logScale = (low, high, from, to) => {
  const a = Math.log10(low), b = Math.log10(high);
  return { low, high, at: value => from + ((Math.log10(value) - a) / (b - a)) * (to - from),
    value: place => 10 ** (a + ((place - from) / (to - from)) * (b - a)) };
};

function text(g, words, x, y, { align = "left", colour, weight = "", back } = {}) {
  g.font = `${weight} 12px system-ui, sans-serif`;
  g.textAlign = align;
  if (back) {
    const width = g.measureText(words).width, left = x - { left: 0, center: width / 2, right: width }[align];
    g.fillStyle = back;
    g.fillRect(left - 3, y - 8, width + 6, 16);
  }
  g.fillStyle = colour;
  g.fillText(words, x, y);
}

function path(g, points, colour, { width = 1, dash = [] } = {}) {
  g.beginPath();
  points.forEach(([x, y], i) => i ? g.lineTo(x, y) : g.moveTo(x, y));
  g.strokeStyle = colour;
  g.lineWidth = width;
  g.setLineDash(dash);
  g.stroke();
  g.setLineDash([]);
}

// Marks at the powers of ten, or at every one that there is room for.
function axes(g, { x, y, width, height, left, theme, xName, yName, xTicks }) {
  const bottom = height - FOOT, faint = theme.soft(0.14), dim = theme.soft(0.72);
  const tens = ({ low, high }) => {
    const found = [];
    for (let k = Math.ceil(Math.log10(low)); 10 ** k <= high * 1.0001; k++) found.push(10 ** k);
    return found;
  };
  for (const value of tens(y)) {
    path(g, [[left, y.at(value)], [width - RIGHT, y.at(value)]], faint);
    text(g, short(value), left - 6, y.at(value), { align: "right", colour: dim });
  }
  let last = -Infinity;
  for (const value of xTicks || tens(x)) {
    const at = x.at(value), words = short(value);
    path(g, [[at, TOP], [at, bottom]], faint);
    if (at - last < 8 + 7 * words.length) continue;
    last = at;
    text(g, words, at, bottom + 10, { align: "center", colour: dim });
  }
  path(g, [[left, TOP], [left, bottom], [width - RIGHT, bottom]], theme.soft(0.5));
  text(g, xName, width - RIGHT, bottom + 27, { align: "right", colour: dim });
  text(g, yName, left + 5, TOP - 6, { colour: dim });
}

// One step: a disc for decodes alone, a square with prefill beside them; hollow where it does not fit the memory.
function dot(g, [x, y], radius, look, fits, theme, ring) {
  g.beginPath();
  if (look.square) g.rect(x - radius, y - radius, 2 * radius, 2 * radius); else g.arc(x, y, radius, 0, 2 * Math.PI);
  g.fillStyle = fits ? look.colour : theme.back;
  g.fill();
  g.strokeStyle = ring ? theme.text : look.colour;
  g.lineWidth = ring ? 2 : 1.5;
  g.stroke();
}

// What both plots show: the path of the trail's steps, faint, and the present step, strong. Returns the trail's places.
function drawPath(g, place, { trail, step, fit, look, theme }) {
  const places = trail.map(s => [s.batch, ...place(s)]);
  g.globalAlpha = 0.55;
  path(g, places.map(([, x, y]) => [x, y]), theme.soft(0.8));
  g.globalAlpha = 0.75;
  for (const [batch, x, y] of places) dot(g, [x, y], 3.5, look, batch <= fit, theme);
  g.globalAlpha = 1;
  dot(g, place(step), 7, look, step.batch <= fit, theme, true);
  return places;
}

// Limits of the axes: those of the machine, so that they stay as they are while a step moves.
function limitsOf(m, most) {
  const alone = context => stepOn(m, { batch: 1, context, prefill: 0 }), ridge = m.rate / m.bandwidth;
  const lowest = [alone(1), alone(m.max_context)];
  const highest = stepOn(m, { batch: most.batch, context: 1, prefill: most.prefill });
  const left = Math.min(...lowest.map(s => s.intensity)) / 2.2, right = Math.max(8 * ridge, 1.3 * highest.intensity);
  return { left, right, bottom: Math.min(m.bandwidth * left, ...lowest.map(s => s.rate)) / 2, top: m.rate * 3.5 };
}

function drawRoof(g, m, shown, width, height) {
  const { step, look, theme, colours } = shown, ridge = m.rate / m.bandwidth, unit = m.rate >= 1e12 ? 1e12 : 1e9;
  const { left: low, right: high, bottom, top } = limitsOf(m, shown.limits), left = 50;
  const x = logScale(low, high, left, width - RIGHT), y = logScale(bottom / unit, top / unit, height - FOOT, TOP);
  const roof = value => Math.min(m.bandwidth * value, m.rate) / unit, floor = height - FOOT;
  const tint = (from, to, colour) => {  // what each limit rules over
    g.beginPath();
    [[from, floor], [from, y.at(roof(x.value(from)))], [to, y.at(roof(x.value(to)))], [to, floor]]
      .forEach(([px, py], i) => i ? g.lineTo(px, py) : g.moveTo(px, py));
    g.globalAlpha = 0.13;
    g.fillStyle = colour;
    g.fill();
    g.globalAlpha = 1;
  };
  tint(left, x.at(ridge), colours.decode);
  tint(x.at(ridge), width - RIGHT, colours.compute);
  const name = `${unit === 1e12 ? "T" : "G"}FLOP/s, by the cost model`;
  axes(g, { x, y, width, height, left, theme, xName: "arithmetic intensity, FLOPs per byte read", yName: name });
  path(g, [[x.at(ridge), floor], [x.at(ridge), TOP + 12]], theme.soft(0.6), { dash: [2, 3] });
  path(g, [low, ridge, high].map(value => [x.at(value), y.at(roof(value))]), theme.text, { width: 2 });
  text(g, x.at(ridge) - left > 110 ? "bandwidth-bound" : "bandwidth", x.at(ridge) - 8, TOP + 18, { align: "right", colour: theme.text });
  const roomy = width - RIGHT - x.at(ridge) > 100;
  text(g, roomy ? "compute-bound" : "compute", x.at(ridge) + 8, TOP + 18, { colour: theme.text });
  text(g, `ridge ${short(ridge)}`, x.at(ridge) + (roomy ? 6 : -6), floor - 10, { align: roomy ? "left" : "right", colour: theme.soft(0.8) });
  const place = s => [x.at(s.intensity), clamp(y.at(s.rate / unit), TOP, floor)];
  const [px, py] = place(step), peak = y.at(roof(step.intensity));
  path(g, [[px, peak], [px, floor]], theme.soft(0.75), { dash: [4, 3] });
  path(g, [[px - 5, peak], [px + 5, peak]], theme.text, { width: 2 });
  const places = drawPath(g, place, shown);
  label(g, `B = ${thousands(step.batch)}`, px, py, width, look, theme);
  return { places };
}

function label(g, words, x, y, width, look, theme) {
  const right = x < width - 110;
  text(g, words, x + (right ? 13 : -13), y + 12, { align: right ? "left" : "right", colour: theme.text, weight: "600", back: theme.back });
}

function drawRates(g, shown, width, height) {
  const { step, trail, fit, turn, look, theme, most, colours } = shown, left = 58, floor = height - FOOT;
  const x = logScale(0.85, most * 1.18, left, width - RIGHT), rates = trail.map(s => s.tokensPerS);
  const y = logScale(Math.min(...rates) / 1.6, Math.max(...rates) * 2.2, floor, TOP);
  const edge = clamp(x.at(Math.max(fit + 0.5, 0.85)), left, width - RIGHT);
  if (fit < most) {
    g.globalAlpha = 0.13;
    g.fillStyle = colours.alarm;
    g.fillRect(edge, TOP, width - RIGHT - edge, floor - TOP);
    g.globalAlpha = 1;
    g.fillStyle = makePattern("/", theme.soft(0.22));
    g.fillRect(edge, TOP, width - RIGHT - edge, floor - TOP);
  }
  axes(g, { x, y, width, height, left, theme, xName: "B: batch size, decodes in a step", yName: "output tokens/s, by the cost model",
    xTicks: trail.map(s => s.batch) });
  // Where tokens/s would go if they grew as the batch does.
  const end = Math.min(most, (y.high / rates[0]) * 0.98);
  path(g, [[x.at(1), y.at(rates[0])], [x.at(end), y.at(rates[0] * end)]], theme.soft(0.55), { dash: [5, 4] });
  const place = s => [x.at(s.batch), y.at(s.tokensPerS)], [px, py] = place(step);
  if (turn !== null) {
    const at = x.at(turn), side = at > (left + width) / 2 ? "right" : "left";
    path(g, [[at, TOP], [at, floor]], theme.soft(0.75), { dash: [2, 3] });
    const line = py > floor - 40 ? py - 16 : floor - 10;  // the step's own label is below its dot
    text(g, `ridge: B = ${thousands(turn)}`, at + (side === "left" ? 5 : -5), line, { align: side, colour: theme.text, back: theme.back });
  }
  path(g, [[left, py], [px, py], [px, floor]], theme.soft(0.6), { dash: [4, 3] });
  const places = drawPath(g, place, shown);
  label(g, `${short(step.tokensPerS)} tokens/s`, px, Math.min(py, floor - 20), width, look, theme);
  if (fit < most) {
    const wide = width - RIGHT - edge > 90;
    text(g, "does not fit", wide ? edge + 6 : width - RIGHT - 4, TOP + 12, { align: wide ? "left" : "right", colour: theme.text, back: theme.back });
  }
  return { places, batchAt: at => clamp(Math.round(x.value(at)), 1, most) };
}
