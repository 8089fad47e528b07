// What pages of pictures are made of: elements, groups of buttons, numbers as text.

const sum = values => values.reduce((a, b) => a + b, 0);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const thousands = number => number.toLocaleString("en-US");
const count = (number, one, many) => `${thousands(number)} ${number === 1 ? one : many}`;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function choice(label, options, set) {
  const buttons = Object.entries(options).map(([name, text]) =>
    make("button", { type: "button", "data-value": name, onclick: () => set(name) }, make("span", {}, text)));
  const group = make("div", { class: "choice", role: "group", "aria-label": label }, make("span", {}, label), ...buttons);
  const show = name => buttons.forEach(b => b.setAttribute("aria-pressed", String(b.dataset.value === name)));
  return { group, show };
}

// The look of controls, for everything within the selector r.
const pageStyle = r => `
${r} { container-type: inline-size; font: 14px/1.45 system-ui, sans-serif; padding: 4px 2px;
  color: var(--jp-content-font-color1, inherit);
  background: var(--jp-layout-color0, var(--pst-color-background, Canvas));
  --soft: color-mix(in srgb, currentColor 12%, transparent); --line: color-mix(in srgb, currentColor 35%, transparent); }
${r} * { box-sizing: border-box; }
${r} .bar { display: flex; flex-wrap: wrap; gap: 8px 18px; align-items: center; margin: 4px 0 10px; }
${r} .bar > * { display: flex; gap: 6px; align-items: center; }
${r} [hidden] { display: none !important; }
${r} button, ${r} select, ${r} input { font: inherit; color: inherit; accent-color: currentColor; }
${r} button, ${r} select, ${r} input[type=number], ${r} input[type=text] {
  background: transparent; border: 1px solid var(--line); border-radius: 5px; padding: 2px 8px; }
${r} select { max-width: min(22em, 100%); } ${r} option { color: CanvasText; background: Canvas; }
${r} button { cursor: pointer; } ${r} button:hover { background: var(--soft); }
${r} button:disabled { opacity: 0.45; cursor: default; }
${r} .choice { gap: 0; } ${r} .choice span { margin-right: 6px; }
${r} .choice button { border-radius: 0; margin-left: -1px; }
${r} .choice button:first-of-type { border-radius: 5px 0 0 5px; }
${r} .choice button:last-of-type { border-radius: 0 5px 5px 0; }
${r} button[aria-pressed=true] { background: currentColor; }
${r} button[aria-pressed=true] > span { color: var(--jp-layout-color0, var(--pst-color-background, Canvas)); margin: 0; }
${r} .choice button > span { margin: 0; }
${r} :focus-visible { outline: 2px solid currentColor; outline-offset: 2px; }
`;
