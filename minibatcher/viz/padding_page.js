// The padding picture's look.

const STYLE = pageStyle(".mb-padding") + `
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
