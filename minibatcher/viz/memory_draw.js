// How the memory film draws a pool, and the strip of the whole run below it.

const LEFT = 48, HEAD = 15, FOOT = 18;  // pixels: beside the rows of a pool, above and below them
const TALL = 380, MAX_ROW = 24, MIN_ROW = 6, STRIP = 26;

function makeMemoryTheme(root, palette) {
  const theme = { ...pageColours(root), palette }, kinds = Object.keys(palette.strength);
  theme.fills = Object.fromEntries(kinds.map(kind => [kind, palette.requests.map(c => mix(hex(c), theme.bg, palette.strength[kind]))]));
  theme.inks = palette.requests.map((_, i) => light(theme.fills.used[i]) > 125 ? "#000" : "#fff");
  theme.patterns = Object.fromEntries(Object.entries(palette.hatches).map(([kind, hatch]) => [kind, makePattern(hatch, theme.soft(0.5))]));
  return theme;
}

// Where things stand in a pool's canvas. rows: of the largest pool, so that equal areas are equal numbers of tokens.
function poolLayout(width, wide, rows) {
  const row = clamp(Math.floor(TALL / rows), MIN_ROW, MAX_ROW);
  return { width, wide, rows, row, left: LEFT, plot: width - LEFT - 2, top: HEAD, height: HEAD + rows * row + FOOT };
}

// Tokens from start to stop as boxes, broken where a drawn row ends.
function boxes(start, stop, { wide, row, left, plot, top }) {
  const found = [], gap = row >= 8 ? 1 : 0;
  for (let at = start; at < stop;) {
    const line = Math.floor(at / wide), end = Math.min(stop, (line + 1) * wide), x = left + ((at - line * wide) / wide) * plot;
    found.push([x, top + line * row + gap, ((end - at) / wide) * plot, row - 2 * gap]);
    at = end;
  }
  return found;
}

function drawPool(g, pool, moment, place, theme, chosen) {
  const { row, left, plot, top, wide } = place, block = (pool.size / wide) * plot, seam = block > 5 ? 0.75 : 0;
  g.font = "11px system-ui, sans-serif";
  g.fillStyle = theme.soft(0.07);
  for (const box of boxes(0, pool.pool, place)) g.fillRect(...box);
  if (seam) {  // free blocks stand apart too
    g.fillStyle = theme.back;
    for (let start = 0; start < pool.pool; start += pool.size)
      if (start % wide) { const [x, y, , height] = boxes(start, start + 1, place)[0]; g.fillRect(x - seam, y, seam, height); }
  }
  const outlined = new Path2D(), names = [];
  for (const { start, stop, owner, kind } of pool.pieces(moment)) {
    const { request } = owner, others = chosen && request.id !== chosen;
    g.globalAlpha = others ? 0.3 : 1;
    for (const [x, y, width, height] of boxes(start, stop, place)) {
      const edge = stop % pool.size ? 0 : seam;
      g.fillStyle = rgb(theme.fills[kind][request.colour]);
      g.fillRect(x, y, Math.max(width - edge, 0.5), height);
      if (theme.patterns[kind] && width > 2) { g.fillStyle = theme.patterns[kind]; g.fillRect(x, y, width - edge, height); }
      if (request.id === chosen) outlined.rect(x, y, Math.max(width - edge, 1), height);
      if (kind !== "unused" && row >= 11 && width > 6 * request.id.length + 4) names.push([request, kind, x + (width - edge) / 2, y + height / 2]);
    }
  }
  g.textAlign = "center";
  for (const [request, kind, x, y] of names) {
    g.globalAlpha = chosen && request.id !== chosen ? 0.3 : 1;
    g.fillStyle = kind === "used" ? theme.inks[request.colour] : theme.text;
    g.fillText(request.id, x, y + 0.5);
  }
  g.globalAlpha = 1;
  g.strokeStyle = theme.text;
  g.lineWidth = 2;
  g.stroke(outlined);
  labelRows(g, pool, place, theme);
}

// Beside the rows the number of the first slot or block in each.
function labelRows(g, pool, { wide, row, left, plot, top, rows }, theme) {
  g.fillStyle = theme.soft(0.75);
  g.textAlign = "right";
  const each = wide / pool.size, every = Math.max(1, Math.ceil(13 / row));
  for (let line = 0; line * wide < pool.pool; line += every)
    if (Number.isInteger(line * each)) g.fillText(thousands(line * each), left - 6, top + (line + 0.5) * row + 0.5);
  g.fillText(pool.slots ? "slot" : "block", left - 6, HEAD / 2);
  g.textAlign = "left";
  g.fillText(`rows of ${thousands(wide)} tokens`, left, HEAD / 2);
  const bottom = top + rows * row + FOOT / 2 + 1, unit = pool.slots ? "a slice a slot" : `blocks of ${thousands(pool.size)} tokens`;
  g.fillText(unit, left, bottom);
}

// The whole run: what is reserved faint, what running requests use strong. Returns where time 0 and the end stand.
function drawStrips(g, pools, now, width, extent, theme) {
  const left = Math.min(110, width * 0.2), plot = width - left - 4, x = time => left + (time / extent) * plot;
  pools.forEach((pool, i) => {
    const top = i * STRIP + 2, tall = STRIP - 5, { reserved, used } = pool.sums, { time } = pool;
    g.fillStyle = theme.soft(0.75);
    g.font = "11px system-ui, sans-serif";
    g.textAlign = "left";
    g.fillText(pool.title, 0, top + tall / 2, left - 8);
    g.fillStyle = theme.soft(0.07);
    g.fillRect(left, top, x(pool.duration) - left, tall);
    for (const [sums, shade] of [[reserved, 0.28], [used, 0.75]]) {
      g.fillStyle = theme.soft(shade);
      g.beginPath();
      g.moveTo(x(time[0]), top + tall);
      for (let c = 0; c < time.length; c++) {
        const y = top + tall * (1 - sums[c] / pool.pool);
        g.lineTo(x(time[c]), y);
        g.lineTo(x(c + 1 < time.length ? time[c + 1] : time[c]), y);
      }
      g.lineTo(x(time[time.length - 1]), top + tall);
      g.fill();
    }
  });
  g.fillStyle = theme.text;
  g.fillRect(clamp(x(now) - 1, left, left + plot - 2), 0, 2, pools.length * STRIP);
  return { left, plot };
}
