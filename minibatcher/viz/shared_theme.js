// Colours of the page around a picture, textures, and canvases that are crisp on every screen.

const parse = css => (css.match(/[\d.]+/g) || [0, 0, 0]).slice(0, 3).map(Number);
const hex = css => [1, 3, 5].map(i => parseInt(css.slice(i, i + 2), 16));
const mix = (a, b, share) => a.map((v, i) => Math.round(share * v + (1 - share) * b[i]));
const rgb = (c, alpha = 1) => `rgb(${c.join(" ")} / ${alpha})`;
const light = c => 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2];

function pageColours(root) {
  const style = getComputedStyle(root), fg = parse(style.color);
  // A transparent or unreadable background: whichever of white and black the text stands out from.
  const told = style.backgroundColor, isPlain = /rgba?\(/.test(told) && !/, 0\)$/.test(told);
  const bg = isPlain ? parse(told) : light(fg) < 128 ? [255, 255, 255] : [17, 17, 17];
  const soft = share => rgb(mix(fg, bg, share));
  return { bg, fg, soft, text: rgb(fg), back: rgb(bg), key: bg.join() + fg.join() };
}

function makePattern(kind, colour) {
  const size = 6, scale = window.devicePixelRatio || 1, canvas = document.createElement("canvas");
  canvas.width = canvas.height = Math.round(size * scale);
  const g = canvas.getContext("2d");
  g.scale(canvas.width / size, canvas.width / size);
  g.strokeStyle = g.fillStyle = colour;
  g.lineWidth = 1;
  const line = (...p) => { g.beginPath(); g.moveTo(p[0], p[1]); g.lineTo(p[2], p[3]); g.stroke(); };
  if (kind === ".") {  // on strong colours: a light dot and a dark one, so that one of them is seen
    g.fillStyle = "rgb(255 255 255 / 85%)";
    g.fillRect(1, 1, 1.5, 1.5);
    g.fillStyle = "rgb(0 0 0 / 60%)";
    g.fillRect(4, 4, 1.5, 1.5);
  }
  if (kind === "-") line(0, 3, 6, 3);
  if (kind === "/" || kind === "x") { line(-1, 7, 7, -1); line(-1, 1, 1, -1); line(5, 7, 7, 5); }
  if (kind === "\\") { line(-1, -1, 7, 7); line(-1, 5, 1, 7); line(5, -1, 7, 1); }
  if (kind === "x") { line(-1, -1, 7, 7); line(5, -1, 7, 1); line(-1, 5, 1, 7); }
  const pattern = g.createPattern(canvas, "repeat");
  pattern.setTransform(new DOMMatrix().scale(size / canvas.width));
  return pattern;
}

// Size a canvas for its place on the screen and clear it; drawing is in CSS pixels.
function prepare(canvas, width, height) {
  const scale = window.devicePixelRatio || 1, w = Math.round(width * scale), h = Math.round(height * scale);
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  g.textBaseline = "middle";
  return g;
}
