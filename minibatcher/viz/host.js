// What every moving picture shares: how its data reaches it, with a kernel behind it or without one.
// A picture is a module with mount(el, {data, arrays}, notify) -> {receive(message, arrays), destroy()}.

function unpack(layout, bytes) {
  const types = { int32: Int32Array, float32: Float32Array, float64: Float64Array, uint8: Uint8Array };
  const arrays = {};
  for (const { name, dtype, offset, length } of layout)
    arrays[name] = new types[dtype](bytes.buffer, bytes.byteOffset + offset, length);
  return arrays;
}

// Bytes of a message may begin anywhere in their buffer, and typed arrays want aligned ones.
const aligned = view => new Uint8Array(view ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : 0);

// JupyterLab's shortcuts (b: a new cell, d d: this one goes) leave an element alone that says so itself; that an element
// around it says so is not enough.
function keepKeys(el) {
  el.addEventListener("focusin", event => { event.target.dataset.lmSuppressShortcuts = "true"; });
}

// A canvas is drawn for a size and for colours: draw it anew when el's size, the page's theme or the system's changes.
// Returns what ends it.
function onRestyle(el, redraw) {
  const sizes = new ResizeObserver(() => redraw()), themes = new MutationObserver(() => redraw());
  const dark = matchMedia("(prefers-color-scheme: dark)"), changed = () => redraw();
  sizes.observe(el);
  for (const node of [document.documentElement, document.body])
    themes.observe(node, { attributeFilter: ["class", "style", "data-theme", "data-jp-theme-name"] });
  dark.addEventListener("change", changed);
  return () => { sizes.disconnect(); themes.disconnect(); dark.removeEventListener("change", changed); };
}

// anywidget's entry.
function render({ model, el }) {
  const source = () => ({ data: model.get("data"), arrays: unpack(model.get("parts"), aligned(model.get("packed"))) });
  let wanted = null, timer = 0;
  const save = () => {
    timer = 0;
    if (wanted) { model.set("state", { ...model.get("state"), ...wanted }); model.save_changes(); wanted = null; }
  };
  const notify = values => {  // a picture changes sixty times a second: the kernel hears four times
    wanted = { ...wanted, ...values };
    if (!timer) timer = setTimeout(save, 250);
  };
  keepKeys(el);
  const handle = mount(el, source(), notify);
  const onMessage = (message, buffers) => {
    if (handle.receive) handle.receive(message, unpack(message.layout || [], aligned(buffers && buffers[0])));
  };
  model.on("msg:custom", onMessage);
  return () => { clearTimeout(timer); save(); model.off("msg:custom", onMessage); handle.destroy && handle.destroy(); };
}

// Without a kernel: the picture takes the place of the still one inside its root. A notebook may hold the same id twice
// (an output shown in a second view, or left from an earlier session): each script takes a root that is still free.
function mountInline(id, data, layout, base64) {
  const root = [...document.querySelectorAll(`[id="${id}"]`)].find(element => !element.dataset.mounted);
  if (!root) return;
  root.dataset.mounted = "true";
  const still = [...root.children], el = document.createElement("div");
  keepKeys(el);
  root.append(el);
  try {
    const bytes = Uint8Array.from(atob(base64), c => c.charCodeAt(0));
    mount(el, { data, arrays: unpack(layout, bytes) }, () => {});
    still.forEach(element => element.remove());
  } catch (error) {
    console.error(error);
    el.remove();  // the still picture stays
  }
}
