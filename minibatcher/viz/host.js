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

// anywidget's entry.
function render({ model, el }) {
  const source = () => ({ data: model.get("data"), arrays: unpack(model.get("layout"), aligned(model.get("packed"))) });
  let wanted = null, timer = 0;
  const save = () => {
    timer = 0;
    if (wanted) { model.set("state", { ...model.get("state"), ...wanted }); model.save_changes(); wanted = null; }
  };
  const notify = values => {  // a picture changes sixty times a second: the kernel hears four times
    wanted = { ...wanted, ...values };
    if (!timer) timer = setTimeout(save, 250);
  };
  const handle = mount(el, source(), notify);
  const onMessage = (message, buffers) => {
    if (handle.receive) handle.receive(message, unpack(message.layout || [], aligned(buffers && buffers[0])));
  };
  model.on("msg:custom", onMessage);
  return () => { clearTimeout(timer); save(); model.off("msg:custom", onMessage); handle.destroy && handle.destroy(); };
}

// Without a kernel: the picture takes the place of the still one inside `root`.
function mountInline(root, data, layout, base64) {
  const bytes = Uint8Array.from(atob(base64), c => c.charCodeAt(0));
  const el = document.createElement("div");
  try {
    const handle = mount(el, { data, arrays: unpack(layout, bytes) }, () => {});
    root.replaceChildren(el);
    return handle;
  } catch (error) {
    console.error(error);  // the still picture stays
  }
}
