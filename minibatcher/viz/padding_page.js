// The padding picture's look, and the pieces that its page is made of.

const STYLE = `
.mb-padding { container-type: inline-size; font: 14px/1.45 system-ui, sans-serif; padding: 4px 2px;
  color: var(--jp-content-font-color1, inherit);
  background: var(--jp-layout-color0, var(--pst-color-background, Canvas));
  --soft: color-mix(in srgb, currentColor 12%, transparent); --line: color-mix(in srgb, currentColor 35%, transparent); }
.mb-padding * { box-sizing: border-box; }
.mb-padding .bar { display: flex; flex-wrap: wrap; gap: 8px 18px; align-items: center; margin: 4px 0 10px; }
.mb-padding .bar > * { display: flex; gap: 6px; align-items: center; }
.mb-padding [hidden] { display: none !important; }
.mb-padding button, .mb-padding select, .mb-padding input { font: inherit; color: inherit; accent-color: currentColor; }
.mb-padding button, .mb-padding select, .mb-padding input[type=number], .mb-padding input[type=text] {
  background: transparent; border: 1px solid var(--line); border-radius: 5px; padding: 2px 8px; }
.mb-padding select { max-width: min(22em, 100%); } .mb-padding option { color: CanvasText; background: Canvas; }
.mb-padding button { cursor: pointer; } .mb-padding button:hover { background: var(--soft); }
.mb-padding button:disabled { opacity: 0.45; cursor: default; }
.mb-padding .choice { gap: 0; } .mb-padding .choice span { margin-right: 6px; }
.mb-padding .choice button { border-radius: 0; margin-left: -1px; }
.mb-padding .choice button:first-of-type { border-radius: 5px 0 0 5px; }
.mb-padding .choice button:last-of-type { border-radius: 0 5px 5px 0; }
.mb-padding button[aria-pressed=true] { background: currentColor; }
.mb-padding button[aria-pressed=true] > span { color: var(--jp-layout-color0, var(--pst-color-background, Canvas)); margin: 0; }
.mb-padding .choice button > span { margin: 0; }
.mb-padding :focus-visible { outline: 2px solid currentColor; outline-offset: 2px; }
.mb-padding .panels { display: grid; grid-template-columns: 3fr 2fr; gap: 4px 26px; align-items: start; }
.mb-padding .panels.one { grid-template-columns: 1fr; }
.mb-padding section { min-width: 0; } .mb-padding .pic { position: relative; }
.mb-padding h3 { font-size: 15px; margin: 0; font-weight: 600; color: inherit; }
.mb-padding .big { font-size: 30px; font-weight: 700; line-height: 1.15; margin-right: 8px; }
.mb-padding p { margin: 2px 0; }
.mb-padding canvas { width: 100%; display: block; touch-action: pan-y; }
.mb-padding .end { position: absolute; width: 15px; margin-left: -8px; cursor: ew-resize; touch-action: none;
  border-radius: 4px; }
.mb-padding .end::after { content: ""; position: absolute; left: 6px; width: 3px; top: 0; bottom: 0; border-radius: 2px;
  background: currentColor; }
.mb-padding .end:hover::after { left: 5px; width: 5px; }
.mb-padding .thin .end::after { opacity: 0; }
.mb-padding .thin:hover .end::after, .mb-padding .thin .end:focus::after { opacity: 1; }
.mb-padding[data-moving=true] .end { opacity: 0; }
.mb-padding .hint, .mb-padding .status { opacity: 0.8; } .mb-padding .status { min-height: 1.5em; }
.mb-padding .alert { font-weight: 600; } .mb-padding .alert:not(:empty)::before { content: "⚠ "; }
.mb-padding table { border-collapse: collapse; margin: 8px 0; font-variant-numeric: tabular-nums; }
.mb-padding caption { text-align: left; opacity: 0.8; padding: 2px 0; }
.mb-padding th, .mb-padding td { padding: 2px 18px 2px 0; text-align: left; font-weight: 400; background: none; }
.mb-padding thead th { border-bottom: 1px solid var(--line); }
.mb-padding tr.now > * { font-weight: 700; }
.mb-padding .meter { display: inline-block; height: 9px; margin-right: 8px; background: currentColor; opacity: 0.55; }
.mb-padding input[type=number] { width: 7em; } .mb-padding input[type=text] { width: min(100%, 60em); }
@container (max-width: 820px) { .mb-padding .panels { grid-template-columns: 1fr; }
  .mb-padding .head.b { order: 1; } .mb-padding .pic.b { order: 2; } }
`;

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
