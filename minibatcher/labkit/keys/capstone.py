"""Right answers to the capstone, and wrong ones; and who else enters the tournament."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..judging import Key, Mistake, Seen
from ..tasks.capstone import STEP_US, TOKEN_US, Arrival, BadPlan, play_requests


def _serve(
    requests: dict,
    parts: Any,
    forward: Callable,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    *,
    fault: str = "",
) -> dict[str, list[int]]:
    pool = parts.BlockPool(num_blocks, block_size)
    answers: dict[str, list[int]] = {name: [] for name in requests}
    done = dict.fromkeys(requests, 0)

    def worst(name: str) -> int:
        prompt, limit, _ = requests[name]
        return len(prompt) + limit

    def ended(name: str) -> bool:
        _, limit, eos = requests[name]
        eos = -1 if fault == "no eos" else eos
        limit += fault == "one more"
        return parts.finish_reason(answers[name], "", limit, eos, [], False) is not None

    waiting = [n for n in requests if fault == "all wait" or -(-worst(n) // block_size) <= num_blocks]
    running: list[str] = []
    finished: set[str] = set()
    while True:
        for name in finished if fault != "leak" else ():
            pool.free(name)
        before = set(running) - finished
        running, waiting = parts.next_batch(running, finished, waiting, max_num_seqs)
        entered, back = [name for name in running if name in before], []
        for name in running[len(entered) :]:
            if (back and fault != "overtake") or not pool.allocate(name, worst(name)):
                back.append(name)
            else:
                entered.append(name)
        running, waiting = entered, waiting + back if fault == "behind" else back + waiting
        if not running:
            if fault == "no eos in answer":
                return {n: [t for t in tokens if t != requests[n][2]] for n, tokens in answers.items()}
            return answers
        known = {name: requests[name][0] + answers[name] for name in running}
        plan = parts.plan_step({name: len(known[name]) - done[name] for name in running}, budget)
        pieces = []
        for name, count in plan.items():
            start = 0 if fault == "no cache" else done[name]
            pieces.append((name, known[name][start : done[name] + count], start, pool.table(name)))
            done[name] += count
        for (name, *_), token in zip(pieces, forward(pieces)):
            if done[name] == len(known[name]) or fault == "early":
                answers[name].append(token)
        finished = {name for name in plan if ended(name)}


def _faulty(fault: str) -> Callable:
    return lambda *arguments: _serve(*arguments, fault=fault)


LOOP = Key(
    answer=_serve,
    mistakes=(
        Mistake(_faulty("leak"), "Whoever ends returns its blocks: call pool.free for each, before newcomers enter."),
        Mistake(
            _faulty("early"),
            "A piece that does not reach the end of its prompt gets no token. Take one only from who has caught up.",
        ),
        Mistake(_faulty("no eos"), "The end token ends a request too; give finish_reason the request's eos."),
        Mistake(_faulty("one more"), "A request gets one token too many; it ends as soon as it has max_tokens."),
        Mistake(
            _faulty("overtake"),
            "A younger request enters past an older one that did not fit. Where one waits, all behind it wait too.",
        ),
        Mistake(_faulty("behind"), "Who did not fit is older than those who wait: put it back before them."),
        Mistake(_faulty("no eos in answer"), "The end token belongs to the answer; leave it in."),
        Mistake(
            _faulty("all wait"),
            "A request that fits in no empty pool stands first and waits for ever. Refuse it before it waits.",
        ),
        Mistake(
            _faulty("no cache"),
            "You compute all tokens again in each step. What is in the cache stays there; a piece starts behind it.",
        ),
    ),
)


# Policies


def best_known(running: list[dict], waiting: list[dict], free_blocks: int, budget: int, now_ms: int) -> dict[str, int]:
    """One token for whoever decodes; then prompts, most urgent first, as far as no decoder's deadline is missed."""
    decoding = [r for r in running if r["made"]]
    plan = {r["name"]: 1 for r in decoding[:budget]}
    slack = [r["due_ms"] - now_ms - 1 for r in decoding if not r["late"]]
    room = min([budget, *((ms * 1000 - STEP_US) // TOKEN_US for ms in slack)])
    prompts = [r for r in running if not r["made"]]
    for r in sorted(prompts + waiting, key=lambda r: (r["late"], r["due_ms"])):
        left = (room if plan else budget) - sum(plan.values())
        new = r not in prompts
        if left > 0 and not (new and r["blocks"] > free_blocks):
            plan[r["name"]] = min(left, r["behind"])
            free_blocks -= r["blocks"] if new else 0
    return plan


def prefill_first(running: list[dict], waiting: list[dict], free_blocks: int, budget: int, now_ms: int) -> dict:
    """Prompts first, in order of arrival; decoding with what is left."""
    plan: dict[str, int] = {}
    entering = []
    for r in waiting:
        if r["blocks"] > free_blocks:
            break
        free_blocks -= r["blocks"]
        entering.append(r)
    for r in [r for r in running if not r["made"]] + entering + [r for r in running if r["made"]]:
        if tokens := min(r["behind"], budget - sum(plan.values())):
            plan[r["name"]] = tokens
    return plan


def static(running: list[dict], waiting: list[dict], free_blocks: int, budget: int, now_ms: int) -> dict[str, int]:
    """Nobody enters before everybody has left; eight at a time."""
    return prefill_first(running, [] if running else waiting[:8], free_blocks, budget, now_ms)


def decode_first(running: list[dict], waiting: list[dict], free_blocks: int, budget: int, now_ms: int) -> dict:
    """Decoding first, then prompts in order of arrival, always up to the whole budget."""
    plan = {r["name"]: 1 for r in running if r["made"]}
    return plan | prefill_first([r for r in running if not r["made"]], waiting, free_blocks, budget - len(plan), now_ms)


NAIVE = {"prefill first": prefill_first, "static": static}


def _goodput(arguments: tuple, policy: Callable) -> int:
    return len(play_requests(*arguments, policy))


def _assess(arguments: tuple[list[Arrival], int, int], seen: list[Seen]) -> str | None:
    """Carries out the plans that were written down, and counts for itself."""
    steps = 0
    plans: Iterator[Any] = iter([each.value for each in seen])

    def decide(*_: Any) -> Any:
        nonlocal steps
        steps += 1
        plan = next(plans, None)
        if plan is None:
            raise BadPlan("expected a plan, got none")
        return plan

    try:
        good = len(play_requests(*arguments, decide))
    except BadPlan as error:
        return f"step {steps}: {error}"
    best = max(NAIVE, key=lambda name: _goodput(arguments, NAIVE[name]))
    most = _goodput(arguments, NAIVE[best])
    wanted = max(most + 1, _goodput(arguments, best_known) // 2)  # a lucky naive policy is not enough
    if good >= wanted:
        return None
    return f"expected at least {wanted} requests in time, got {good}; of the naive policies «{best}» has most, {most}"


def _greedy(running, waiting, free_blocks, budget, now_ms):
    return {r["name"]: r["behind"] for r in running + waiting}


def _boundless(running, waiting, free_blocks, budget, now_ms):
    return best_known(running, waiting, 10**6, budget, now_ms)


def _closed(running, waiting, free_blocks, budget, now_ms):
    return best_known(running, [], free_blocks, budget, now_ms)


def _one_by_one(running, waiting, free_blocks, budget, now_ms):
    first = (running + waiting)[0]
    return {first["name"]: min(first["behind"], budget)}


POLICY = Key(
    answer=best_known,
    assess=_assess,
    mistakes=(
        Mistake(
            prefill_first,
            "This is prefill first: while a long prompt is computed, whoever decodes misses the next deadline.",
        ),
        Mistake(static, "This is static batching: newcomers wait until the last of the batch has ended."),
        Mistake(_greedy, "You plan all that anybody is behind. A step has a budget: keep count of what is left."),
        Mistake(_boundless, "A newcomer needs free blocks; subtract those of each that you let in."),
        Mistake(_closed, "Nobody who waits is ever let in. Put a waiting request's name into the plan."),
        Mistake(_one_by_one, "A step with one request costs nearly as much as one with twenty. Batch them."),
    ),
)

KEYS = {"capstone-loop": LOOP, "capstone-policy": POLICY}
