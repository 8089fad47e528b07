// A run of the memory film: what is held at each of its moments.

// Rows of `width` numbers, which came as one array.
const table = (array, width) => Array.from({ length: array.length / width }, (_, i) => array.subarray(i * width, (i + 1) * width));

class Pool {
  constructor(data, { time, rows, holds }) {
    Object.assign(this, data);
    this.time = time;
    this.requests = data.requests.map(([id, colour, arrival, end, prompt], index) => ({ index, id, colour, arrival, end, prompt }));
    this.rows = table(rows, 6);
    this.holds = table(holds, 6);
    this.sums = { used: [], ended: [], reserved: [], running: [] };
    for (const name in this.sums) this.sums[name] = new Float64Array(time.length);
    const { used, ended, reserved, running } = this.sums;
    for (const [, first, last, tokens, growth, hasEnded] of this.rows)
      for (let c = first; c < last; c++) {
        (hasEnded ? ended : used)[c] += tokens + growth * (c - first);
        if (!hasEnded) running[c] += 1;
      }
    for (const [, first, last, , blocks] of this.holds) for (let c = first; c < last; c++) reserved[c] += blocks * this.size;
  }

  columnAt(time) { return countUpTo(this.time, time + 1e-9) - 1; }

  // Owners at a moment: request index → its blocks in the order of its table, its tokens, whether it has ended.
  owners(column) {
    if (this.known && this.known.column === column) return this.known.owners;
    const owners = new Map(), holds = ([, first, last]) => first <= column && column < last;
    for (const [request, first, , tokens, growth, ended] of this.rows.filter(holds))
      owners.set(request, { request: this.requests[request], blocks: [], tokens: tokens + growth * (column - first), ended: ended === 1 });
    for (const [request, , , block, blocks, place] of this.holds.filter(holds))
      for (let i = 0; i < blocks; i++) owners.get(request).blocks[place + i] = block + i;
    this.known = { column, owners };
    return owners;
  }

  // Everything that is said of a moment.
  moment(now) {
    const column = this.columnAt(now), sum = name => column < 0 ? 0 : this.sums[name][column];
    const owners = column < 0 ? new Map() : this.owners(column), [used, ended, reserved] = ["used", "ended", "reserved"].map(sum);
    const waiting = this.requests.filter(r => r.arrival != null && r.arrival <= now + 1e-9 && !owners.has(r.index) &&
      (r.end == null || r.end > now + 1e-9)).length;
    return { column, owners, used, ended, reserved, running: sum("running"), waiting, wasted: reserved ? 1 - used / reserved : null };
  }

  // Pieces of the pool: tokens from start to stop, all of one owner and one kind.
  pieces({ owners }) {
    const found = [];
    for (const owner of owners.values())
      owner.blocks.forEach((block, place) => {
        const start = block * this.size, full = start + clamp(owner.tokens - place * this.size, 0, this.size);
        if (full > start) found.push({ start, stop: full, owner, kind: owner.ended ? "ended" : "used" });
        if (full < start + this.size) found.push({ start: full, stop: start + this.size, owner, kind: "unused" });
      });
    return found;
  }

  ownerOf({ owners }, block) { return [...owners.values()].find(owner => owner.blocks.includes(block)); }
}

// What an owner has: "87 tokens in 6 blocks of 16, 9 reserved but unused".
function holding(pool, { blocks, tokens, ended }) {
  const reserved = blocks.length * pool.size, unused = `${whole(reserved - tokens)} reserved but unused`;
  const held = pool.slots ? `slot ${blocks[0]}: ${count(tokens, "token", "tokens")} in a slice of ${whole(pool.size)}`
    : `${count(tokens, "token", "tokens")} in ${count(blocks.length, "block", "blocks")} of ${whole(pool.size)}`;
  return `${held}, ${unused}${ended ? "; it has ended and keeps its slot until the batch is done" : ""}`;
}

const blockTable = (blocks, most = 40) =>
  `block table: ${blocks.slice(0, most).join(", ")}${blocks.length > most ? `, … ${whole(blocks.length)} in all` : ""}`;

// The story of a request, of all runs: first of the one pointed at.
function memoryStory(pools, pool, owner, now) {
  const { request } = owner, p = make("div"), line = text => p.append(make("p", {}, text));
  p.append(make("p", {}, make("b", {}, request.id), pools.length > 1 ? ` · ${pool.title}` : ""));
  line(holding(pool, owner));
  if (!pool.slots) line(blockTable(owner.blocks));
  if (request.arrival != null) line(`prompt of ${count(request.prompt, "token", "tokens")}, arrived at ${seconds(request.arrival, 2)}`);
  for (const other of pools) {
    const same = other !== pool && other.requests.find(r => r.id === request.id);
    if (!same) continue;
    const there = other.moment(now).owners.get(same.index);
    if (there) line(`${other.title}: ${holding(other, there)}`);
    else line(`${other.title}: ${same.end != null && same.end <= now ? `ended at ${seconds(same.end, 2)}` : same.arrival > now ? "has not arrived" : "waits"}`);
    if (there && !other.slots) line(blockTable(there.blocks));
  }
  return p;
}
