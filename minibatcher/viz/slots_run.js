// A run of the slot animation: its columns, slots and requests, and everything that is said of a moment.

const FULL = 255;  // run_share of a row without padding
const PAUSE = 0.002;  // seconds: a shorter time between two steps is the first one's
const MANY_SLOTS = 32;
const COUNTS = ["steps", "working", "held", "useful", "computed", "output", "places"];

const ratio = (part, all) => all > 0 ? part / all : null;

// Of what a slot did, in order: the position of the first that lies behind a column or in it.
function firstEndingAfter(row, column) {
  let low = 0, high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row[middle].last <= column) low = middle + 1; else high = middle;
  }
  return low;
}

class Run {
  constructor(data, arrays) { this.clear(); this.add(data, arrays); }

  clear() {
    this.columns = { start: [], end: [], waiting: [], kv: [] };
    this.sums = Object.fromEntries(COUNTS.map(name => [name, []]));  // running totals, by column
    this.total = Object.fromEntries(COUNTS.map(name => [name, 0]));
    this.edges = { steps: { left: [], right: [] }, seconds: { left: [], right: [] } };
    this.slots = Array.from({ length: this.numSlots || 0 }, () => []);
    this.marks = []; this.gaps = []; this.requests = []; this.order = [];
    this.steps = 0; this.kvBlocks = 0; this.film = this.strip = null;
  }

  // Slots to draw: of many, not those at the end that nobody ever used.
  get shown() {
    const used = this.slots.findLastIndex(row => row.length) + 1;
    return this.numSlots > MANY_SLOTS && used && used < 0.8 * this.numSlots ? used : this.numSlots;
  }

  get count() { return this.columns.start.length; }

  // Takes what follows the columns that are there already, and skips what is known. False where something is missing.
  add(data, arrays) {
    const old = this.count;
    if (data.first > old) return false;
    for (const name of ["name", "clock", "origin", "bin", "interrupted"]) this[name] = data[name];
    this.numSlots = data.slots;
    this.duration = data.end - data.origin;
    this.firstIndex = data.first_index;
    this.title = data.title || this.title || data.name;
    this.kvBlocks = Math.max(this.kvBlocks, data.kv_blocks);
    while (this.slots.length < data.slots) this.slots.push([]);
    this.addRequests(data);
    this.addColumns(arrays, old - data.first);
    this.addRuns(arrays, old);
    for (let i = 0; i < arrays.mark_column.length; i++)
      if (arrays.mark_column[i] >= old)
        this.marks.push({ column: arrays.mark_column[i], slot: arrays.mark_slot[i], request: arrays.mark_request[i] });
    this.setEdges(Math.max(0, old - 1));
    return true;
  }

  addRequests({ fields, requests }) {
    for (const values of requests) {
      const request = Object.fromEntries(fields.map((name, i) => [name, values[i]]));
      const known = this.requests[request.index];
      if (known && !request.why) request.why = known.why;
      this.requests[request.index] = request;
    }
    const told = this.requests.filter(r => r && r.arrival != null);
    this.order = told.sort((a, b) => a.arrival - b.arrival || a.index - b.index);
  }

  addColumns(arrays, skip) {
    for (let i = skip; i < arrays.start.length; i++) {
      for (const name in this.columns) this.columns[name].push(arrays[name][i]);
      for (const name of COUNTS) {
        this.total[name] += name === "places" ? arrays.steps[i] * this.numSlots : arrays[name][i];
        this.sums[name].push(this.total[name]);
      }
    }
    this.steps = this.total.steps;
  }

  addRuns(arrays, known) {
    for (let i = 0; i < arrays.run_slot.length; i++) {
      const first = Math.max(known, arrays.run_first[i]), last = arrays.run_last[i];
      if (first >= last) continue;
      const row = this.slots[arrays.run_slot[i]], before = row[row.length - 1];
      const request = arrays.run_request[i], state = arrays.run_state[i], share = arrays.run_share[i];
      const grows = before && before.last === first && before.request === request && before.state === state;
      if (grows && before.share === FULL && share === FULL) before.last = last;
      else row.push({ first, last, request, state, share });
    }
  }

  // Where each column begins and ends on either axis. The moments between two steps belong to the first one, unless the
  // engine was waiting for work: a gap.
  setEdges(from) {
    const { start, end } = this.columns, { steps, seconds } = this.edges;
    this.gaps = this.gaps.filter(column => column < from);
    for (let c = from; c < this.count; c++) {
      steps.left[c] = c ? this.sums.steps[c - 1] : 0;
      steps.right[c] = this.sums.steps[c];
      const next = c + 1 < this.count ? start[c + 1] : end[c], pause = next - end[c];
      const isGap = pause >= Math.max((end[c] - start[c]) / this.bin, PAUSE);
      seconds.left[c] = start[c] - this.origin;
      seconds.right[c] = (isGap ? end[c] : next) - this.origin;
      if (isGap) this.gaps.push(c);
    }
  }

  extent(axis) {
    if (axis === "steps") return this.steps;
    return Math.max(this.duration, this.edges.seconds.right[this.count - 1] || 0);
  }

  // The column that a position on the axis lies in (its right edge included), -1 before the first.
  columnAt(axis, position) { return countUpTo(this.edges[axis].left, position - 1e-9, true) - 1; }

  // In a pause of the engine, or behind the end.
  isBetween(axis, column, position) {
    const end = column === this.count - 1 ? this.extent(axis) : this.edges[axis].right[column];
    return column < 0 || position > end + 1e-9;
  }

  cell(slot, column) {
    const row = this.slots[slot], found = row[firstEndingAfter(row, column)];
    return found && found.first <= column ? found : null;
  }

  // Everything that is said of a position.
  moment(axis, position) {
    const column = this.columnAt(axis, position), done = column >= this.count - 1;
    const between = this.isBetween(axis, column, position);
    const sum = name => column < 0 ? 0 : this.sums[name][column];
    const cells = this.slots.map((_, slot) => between ? null : this.cell(slot, column));
    const ended = column < 0 ? 0 : this.columns.end[column] - this.origin;
    const bySeconds = axis === "seconds";
    const time = bySeconds ? Math.min(position, this.extent(axis)) : ended;
    const over = done && this.count ? this.duration : Math.max(ended, bySeconds ? position : 0);
    const begun = column < 0 ? -Infinity : this.columns.start[column];
    // Behind the end of a part of a run nobody knows who waits.
    const queue = this.count && done && between ? [] : this.queue(cells, bySeconds ? position + this.origin : begun);
    return {
      column, between, cells, queue, time, step: sum("steps"),
      useful: ratio(sum("working"), sum("places")), padding: ratio(sum("computed") - sum("useful"), sum("computed")),
      output: sum("output"), tokensPerSecond: ratio(sum("output"), over),
      waiting: bySeconds || column < 0 ? queue.length : this.columns.waiting[column],
      kv: column < 0 || (done && between) ? 0 : this.columns.kv[column],
    };
  }

  // Who has arrived, holds no slot and has not ended, oldest first.
  queue(cells, time) {
    const holding = new Set(cells.filter(Boolean).map(cell => cell.request)), waiting = [];
    for (const request of this.order) {
      if (request.arrival > time) break;
      if (!holding.has(request.index) && (request.finish == null || request.finish > time)) waiting.push(request);
    }
    return waiting;
  }
}
