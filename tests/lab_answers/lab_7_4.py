"""More answers to lab 7.4, right and wrong."""

from collections import deque
from itertools import count


def unused_by_formula(requests, max_model_len, block_size):
    steps = [p + i for p, a in requests for i in range(a)]
    blocks = sum((n + block_size - 1) // block_size for n in steps)
    return max_model_len * len(steps) - sum(steps), block_size * blocks - sum(steps)


def unused_by_walking(requests, max_model_len, block_size):
    slices = blocks = 0
    for prompt, answer in requests:
        owned = 0
        for made in range(answer):
            while owned < prompt + made:
                owned += block_size
            blocks += owned - prompt - made
            slices += max_model_len - prompt - made
    return [slices, blocks]


class DequePool:
    def __init__(self, num_blocks, block_size):
        self.queue, self.size, self.tables = deque(range(num_blocks)), block_size, {}

    def allocate(self, name, num_tokens):
        table = self.tables.setdefault(name, [])
        new = []
        while (len(table) + len(new)) * self.size < num_tokens:
            if not self.queue:
                self.queue.extendleft(reversed(new))
                return False
            new.append(self.queue.popleft())
        table += new
        return True

    def free(self, name):
        self.queue.extend(self.tables.pop(name, ()))

    def table(self, name):
        return self.tables.get(name, [])

    @property
    def num_free(self):
        return len(self.queue)


class SetPool:
    """Nothing is kept about the free ones: they are what no table has."""

    def __init__(self, num_blocks, block_size):
        self.all, self.size, self.tables = set(range(num_blocks)), block_size, {}

    def _free(self):
        return sorted(self.all.difference(*self.tables.values()), reverse=True)

    def allocate(self, name, num_tokens):
        table, free = self.table(name), self._free()
        missing = max(0, -(-num_tokens // self.size) - len(table))
        if len(free) < missing:
            return False
        self.tables[name] = (*table, *free[:missing])
        return True

    def free(self, name):
        if name in self.tables:
            del self.tables[name]

    def table(self, name):
        return self.tables.get(name, ())

    @property
    def num_free(self):
        return len(self._free())


class UnknownNamePool(DequePool):
    def table(self, name):
        return self.tables[name]


everybodys = {}


class SharedPool(DequePool):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.tables = everybodys
        self.tables.setdefault("c", [0])


class MethodPool(DequePool):
    def num_free(self):
        return len(self.queue)


class SilentPool(DequePool):
    def allocate(self, name, num_tokens):
        super().allocate(name, num_tokens)


class StrictPool(DequePool):
    def free(self, name):
        self.queue.extend(self.tables.pop(name))


class ForgetfulPool(DequePool):
    """New ids for ever."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.queue, self.ids = deque([0] * num_blocks), count()

    def allocate(self, name, num_tokens):
        before = len(self.tables.get(name, []))
        done = super().allocate(name, num_tokens)
        self.tables[name][before:] = [next(self.ids) for _ in self.tables[name][before:]]
        return done


class SameBlockPool(ForgetfulPool):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = iter(lambda: 0, None)


class LeakyPool(DequePool):
    """Loses what it took before it ran short."""

    def allocate(self, name, num_tokens):
        table = self.tables.setdefault(name, [])
        new = []
        while (len(table) + len(new)) * self.size < num_tokens:
            if not self.queue:
                return False
            new.append(self.queue.popleft())
        table += new
        return True


class LinkedCache:
    """Each block has a number, and is known by its parent's and its tokens."""

    def __init__(self, block_size):
        self.size, self.ids = block_size, {}

    def lookup(self, tokens):
        parent, i = 0, 0
        while i + self.size < len(tokens):
            parent = self.ids.get((parent, tuple(tokens[i : i + self.size])))
            if parent is None:
                break
            i += self.size
        return i

    def publish(self, tokens, num_computed):
        parent = 0
        for i in range(num_computed // self.size):
            key = (parent, tuple(tokens[i * self.size : (i + 1) * self.size]))
            parent = self.ids.setdefault(key, len(self.ids) + 1)


class ListCache:
    """Keeps whole prompts, and compares with each."""

    def __init__(self, block_size):
        self.size, self.known = block_size, []

    def lookup(self, tokens):
        most = (len(tokens) - 1) // self.size * self.size
        best = 0
        for old in self.known:
            same = 0
            while same < min(most, len(old)) and old[same] == tokens[same]:
                same += 1
            best = max(best, same // self.size * self.size)
        return best

    def publish(self, tokens, num_computed):
        self.known.append(tokens[: num_computed - num_computed % self.size])


class SameListCache(ListCache):
    """Keeps the caller's list."""

    def publish(self, tokens, num_computed):
        if num_computed == len(tokens):
            self.known.append(tokens)
        else:
            super().publish(tokens, num_computed)


class LatestCache(ListCache):
    def publish(self, tokens, num_computed):
        self.known = []
        super().publish(tokens, num_computed)


class EmptyCache(ListCache):
    def publish(self, tokens, num_computed):
        pass


class TextCache(ListCache):
    def lookup(self, tokens):
        return str(super().lookup(tokens))


class HeldCache(ListCache):
    def lookup(self, tokens):
        return super().lookup([*tokens, 0])


def grow_by_index(running, tokens, num_blocks, block_size):
    blocks = {name: (tokens[name] + block_size - 1) // block_size for name in running}
    end, i, gone = len(running), 0, []
    while i < end:
        name = running[i]
        need = tokens[name] // block_size + 1
        if sum(blocks[n] for n in running[:end]) - blocks[name] + need <= num_blocks:
            blocks[name] = need
            i += 1
        else:
            end -= 1
            gone.append(running[end])
    return running[:end], gone


def grow_by_prefix(running, tokens, num_blocks, block_size):
    """Who goes on is the longest head of the list that fits once all of it has grown."""
    needs = [tokens[name] // block_size + 1 for name in running]
    most = max(n for n in range(len(running) + 1) if sum(needs[:n]) <= num_blocks)
    return tuple(running[:most]), tuple(reversed(running[most:]))


def grow_in_place(running, tokens, num_blocks, block_size):
    going, gone = grow_by_index(list(running), tokens, num_blocks, block_size)
    running[:] = going
    return going, gone


def grow_and_count(running, tokens, num_blocks, block_size):
    going, gone = grow_by_index(running, tokens, num_blocks, block_size)
    for name in going:
        tokens[name] += 1
    return going, gone


def grow_nobody_leaves(running, tokens, num_blocks, block_size):
    return running, []


def grow_all_leave(running, tokens, num_blocks, block_size):
    return [], running[::-1]


def payload(model, prompt, output):
    return dict(stream=True, ignore_eos=True, max_tokens=output, prompt=prompt, model=model)


def replay_by_index(trace, model, speed_up, max_model_len):
    plan, left = [], 0
    for i in sorted(range(len(trace)), key=lambda i: (trace[i][0], i)):
        arrival, prompt, output = trace[i]
        if len(prompt) + output > max_model_len:
            left += 1
            continue
        since = arrival - min(row[0] for row in trace)
        plan.append((int(since / speed_up), payload(model, prompt, output)))
    return plan, left


def replay_in_place(trace, model, speed_up, max_model_len):
    trace.sort(key=lambda row: row[0])
    fits = [row for row in trace if len(row[1]) + row[2] <= max_model_len]
    return [[(t - trace[0][0]) // speed_up, payload(model, p, n)] for t, p, n in fits], len(trace) - len(fits)


def replay_sorted_whole(trace, model, speed_up, max_model_len):
    return replay_by_index(sorted(trace), model, speed_up, max_model_len)


def replay_floats(trace, model, speed_up, max_model_len):
    plan, left = replay_by_index(trace, model, 1, max_model_len)
    return [(time / speed_up, sent) for time, sent in plan], left


def replay_sum(trace, model, speed_up, max_model_len):
    plan, left = replay_by_index(trace, model, speed_up, max_model_len)
    return [(t, sent | {"max_tokens": len(sent["prompt"]) + sent["max_tokens"]}) for t, sent in plan], left


def replay_no_stream(trace, model, speed_up, max_model_len):
    plan, left = replay_by_index(trace, model, speed_up, max_model_len)
    return [(t, {key: sent[key] for key in sent if key != "stream"}) for t, sent in plan], left


def replay_one_as_true(trace, model, speed_up, max_model_len):
    plan, left = replay_by_index(trace, model, speed_up, max_model_len)
    return [(t, sent | {"stream": 1}) for t, sent in plan], left


RIGHT = {
    "7.4-reserved": [unused_by_formula, unused_by_walking],
    "7.4-block-pool": [DequePool, SetPool],
    "7.4-prefix-cache": [LinkedCache, ListCache],
    "7.4-preemption": [grow_by_index, grow_by_prefix],
    "7.4-replay": [replay_by_index, replay_in_place],
}
WRONG = {
    "7.4-reserved": [
        (lambda requests, longest, size: (12, 4), "unused in slices: expected"),
        (lambda requests, longest, size: unused_by_formula(requests, longest, size)[0], "expected 2 values"),
        (lambda requests, longest, size: unused_by_formula(requests[:1], longest, size), "unused in slices: expected"),
        (lambda requests, longest, size: (0.5, 0.5), "expected a whole number"),
        (lambda requests, longest, size: None, "expected 2 values"),
    ],
    "7.4-block-pool": [
        (UnknownNamePool, "table('a') of a new pool raised KeyError: 'a'"),
        (SharedPool, "what stands in the class is shared"),
        (MethodPool, "put @property above it"),
        (SilentPool, "expected True or False, got None"),
        (StrictPool, "raised KeyError"),
        (ForgetfulPool, "ids out of range: expected []"),
        (SameBlockPool, "blocks in two places: expected []"),
        (LeakyPool, "an allocate that fails takes none"),
        (lambda num_blocks, block_size: None, "raised AttributeError"),
    ],
    "7.4-prefix-cache": [
        (SameListCache, "tokens found: expected"),
        (LatestCache, "tokens found: expected"),
        (EmptyCache, "tokens found: expected 4, got 0"),
        (TextCache, "expected a whole number"),
        (HeldCache, "The last token is always computed"),
    ],
    "7.4-preemption": [
        (grow_in_place, "The caller's list was changed"),
        (grow_and_count, "The caller's dict was changed"),
        (grow_nobody_leaves, "those that go on: expected"),
        (grow_all_leave, "those that go on: expected"),
        (lambda *case: grow_by_index(*case)[0], "expected"),
        (lambda *case: (["a", "b"], ["c"]), "preempted: expected [], got ['c']"),
    ],
    "7.4-replay": [
        (replay_sorted_whole, "rows of the same arrival keep their order"),
        (replay_floats, "expected a whole number"),
        (replay_sum, "payload['max_tokens']: expected"),
        (replay_no_stream, "It has the five fields of the table"),
        (replay_one_as_true, "payload['stream']: expected True, got 1"),
        (lambda *case: replay_by_index(*case)[0], "expected two values"),
        (lambda *case: ([], 0), "requests to send: expected 2, got 0"),
    ],
}
