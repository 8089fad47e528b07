"""Rules of scheduling and memory broken on purpose, one at a time: the state machine or a test must notice each."""

from __future__ import annotations

import inspect
import sys
import textwrap

import pytest
import test_admission
import test_ordering
import test_prefix_cache
from pressure_machine import COMBINATIONS, run_machine

from minibatcher.ahead import AheadEngine
from minibatcher.errors import PlanError
from minibatcher.kv import PrefixKV
from minibatcher.scheduling import ChunkedScheduler, Scheduler
from minibatcher.scheduling.admission import Admission, Optimistic
from minibatcher.scheduling.ordering import FairShare, FirstComeFirstServed, PriorityClasses, ShortestPromptFirst

EXAMPLES, STEPS = 60, 25

# What is broken: (class, {method: (old text, new text)}, the combinations in which it matters)
MUTANTS = {
    "an abort leaks its blocks": (
        Scheduler,
        {
            "_leave": (
                "self.kv.free(request.request_id)",
                "request.finish_reason == 'abort' or self.kv.free(request.request_id)",
            )
        },
        {},
    ),
    "a slot is never given back": (
        Scheduler,
        {"_leave": ("heapq.heappush(self._free_slots, slot)", "pass")},
        {},
    ),
    "an abort leaks blocks in host memory": (
        Scheduler,
        {"abort": ("self.host.free(request.request_id)", "pass")},
        {"preemption": "swap", "admission": "preempt", "prefix_caching": True, "strategy": "continuous"},
    ),
    "a prompt is published before it is computed": (
        Scheduler,
        {
            "_admit": (
                "self.running.append(request)",
                "self.running.append(request); "
                "self.kv.shares_prefixes and "
                "self.kv.publish(request.request_id, request.token_slice, request.num_tokens)",
            )
        },
        {"prefix_caching": True},
    ),
    "a block is published before it is full": (
        PrefixKV,
        {
            "publish": (
                "full = num_computed_tokens // size",
                "full = min(-(-num_computed_tokens // size), len(table or ()))",
            )
        },
        {"prefix_caching": True},
    ),
    "priority never ages": (
        PriorityClasses,
        {"rank": ("request.arrival_time + request.priority * self.ageing_s", "request.priority")},
        {"ordering": "priority"},
    ),
    "long prompts never age": (
        ShortestPromptFirst,
        {
            "rank": (
                "request.arrival_time + request.num_prompt_tokens / 1000 * self.ageing_s",
                "request.num_prompt_tokens",
            )
        },
        {"ordering": "shortest-prompt"},
    ),
    "who needs a block preempts itself": (
        Scheduler,
        {"_grow": ("self.waiting.in_order(self.running)[-1]", "request")},
        {"admission": "preempt"},
    ),
    "the first in order is preempted": (
        Scheduler,
        {"_grow": ("self.waiting.in_order(self.running)[-1]", "self.waiting.in_order(self.running)[0]")},
        {"admission": "preempt"},
    ),
    "who is preempted is not put back": (
        Scheduler,
        {"_preempt": ("self.waiting.put_back(request)", "pass")},
        {"admission": "preempt"},
    ),
    "who is preempted goes to the end of the queue": (
        FirstComeFirstServed,
        {"put_back": ("appendleft", "append")},
        {"admission": "preempt", "ordering": "fcfs"},
    ),
    "who comes back is dropped": (
        Scheduler,
        {
            "_admit": (
                "self.running.append(request)",
                "self.running.extend([] if request.num_preemptions else [request])",
            )
        },
        {"admission": "preempt"},
    ),
    "nobody makes way for the more urgent": (
        PriorityClasses,
        {"outranks": ("waiting.priority < running.priority", "False")},
        {"ordering": "priority", "admission": "preempt"},
    ),
    "a cached block is still cached once it is owned": (
        PrefixKV,
        {"_own": ("self._cached.pop(block, None)", "pass")},
        {"prefix_caching": True},
    ),
    "a shared block is given up by its first owner": (
        PrefixKV,
        {"_disown": ("if self._owners[block]:", "if False:")},
        {"prefix_caching": True},
    ),
    "an evicted block can still be found": (
        PrefixKV,
        {"_take": ("del self._block_of[self._key_of.pop(block)]", "self._key_of.pop(block)")},
        {"prefix_caching": True},
    ),
    "the key of a block leaves out its tokens": (
        PrefixKV,
        {
            "lookup": ("tuple(tokens(i * size, (i + 1) * size))", "size"),
            "publish": ("tuple(tokens(i * size, (i + 1) * size))", "size"),
        },
        {"prefix_caching": True},
    ),
    "the key of a block is a hash of its tokens that collides": (
        PrefixKV,
        {
            "lookup": ("tuple(tokens(i * size, (i + 1) * size))", "sum(tokens(i * size, (i + 1) * size)) % 8"),
            "publish": ("tuple(tokens(i * size, (i + 1) * size))", "sum(tokens(i * size, (i + 1) * size)) % 8"),
        },
        {"prefix_caching": True},
    ),
    "the key of a block leaves out what comes before it": (
        PrefixKV,
        {
            "lookup": ("get((parent, ", "get((ROOT, "),
            "publish": ("key = (table[i - 1] if i else ROOT, ", "key = (ROOT, "),
        },
        {"prefix_caching": True},
    ),
    "the last token is taken from the cache": (
        PrefixKV,
        {"lookup": ("(num_tokens - 1) // size", "num_tokens // size")},
        {"prefix_caching": True},
    ),
    "a block is evicted after the one that it stands under": (
        PrefixKV,
        {"free": ("reversed(self._tables.pop(request_id, ()))", "self._tables.pop(request_id, ())")},
        {"prefix_caching": True},
    ),
    "promises are forgotten": (
        Admission,
        {"promised": ("return sum(", "return 0 * sum(")},
        {"admission": "worst-case"},
    ),
    "who is alone is kept out by promises": (
        Scheduler,
        {"_obstacle": ("if len(self.running) == len(without):", "if False:")},
        {"admission": "preempt"},
    ),
    "host blocks are kept after they were copied back": (
        Scheduler,
        {"_give_kv": ("self.host.free(name)", "pass")},
        {"preemption": "swap", "admission": "preempt"},
    ),
    "copies that were never made are trusted": (
        Scheduler,
        {"abandon": ("self._forget_kv(swap.request)", "pass")},
        {"preemption": "swap", "admission": "preempt"},
    ),
    "the budget is ignored": (
        ChunkedScheduler,
        {"_serve": ("if num_tokens > budget:", "if False:")},
        {"strategy": "chunked"},
    ),
    "who has ended stays in the next plan": (
        AheadEngine,
        {"_strike": ("self._next.num_tokens.pop(request, None)", "pass")},
        {"engine_class": AheadEngine},
    ),
    "the copies of an empty plan are forgotten": (
        AheadEngine,
        {"_take_plan": ("fresh.swaps[:0] = plan.preempted, plan.swaps", "fresh.swaps[:0] = plan.preempted, []")},
        {"engine_class": AheadEngine, "preemption": "swap", "admission": "preempt"},
    ),
    "the copies of an empty plan are made after those of the next": (
        AheadEngine,
        {
            "_take_plan": (
                "fresh.preempted[:0], fresh.swaps[:0] = plan.preempted, plan.swaps",
                "fresh.preempted[:0] = plan.preempted; fresh.swaps += plan.swaps",
            )
        },
        {"engine_class": AheadEngine, "preemption": "swap", "admission": "preempt"},
    ),
}


# What no order of events shows, but a test of its own: (class, method, old text, new text, the test)
TESTED = {
    "a newcomer is not lifted": (
        FairShare,
        "_lift",
        "max(self.counters.get(tenant, 0.0), floor)",
        "self.counters.get(tenant, 0.0)",
        test_ordering.test_who_comes_later_has_no_claim_on_the_past,
    ),
    "who was away is not lifted": (
        FairShare,
        "_lift",
        "max(self.counters.get(tenant, 0.0), floor)",
        "self.counters.get(tenant, floor)",
        test_ordering.test_who_was_away_has_no_claim_on_the_time_away,
    ),
    "newcomers are lifted to the lowest only": (
        FairShare,
        "_lift",
        "min(max(self.fair_counter, min(waiting)), max(waiting))",
        "min(waiting)",
        test_ordering.test_ever_new_tenants_do_not_keep_an_old_one_out,
    ),
    "prompts are not charged": (
        FairShare,
        "take",
        "PROMPT_WEIGHT * request.num_prompt_tokens",
        "0",
        lambda: test_ordering.test_two_saturating_tenants_share_within_five_per_cent(
            "chunked", (9000, 5, 4), (900, 400, 30)
        ),
    ),
    "answers are not charged": (
        FairShare,
        "served",
        "OUTPUT_WEIGHT",
        "0",
        lambda: test_ordering.test_two_saturating_tenants_share_within_five_per_cent(
            "chunked", (9000, 20, 2), (900, 20, 150)
        ),
    ),
    "the tenant that came first is served first": (
        FairShare,
        "_standing",
        "self.counters[tenant], ",
        "",
        test_ordering.test_ten_times_the_requests_buy_nothing,
    ),
    "more urgent is enough to push out": (
        PriorityClasses,
        "outranks",
        " and self.rank(waiting) < self.rank(running)",
        "",
        test_ordering.test_equals_do_not_push_each_other_out,
    ),
    "the watermark is ignored": (
        Scheduler,
        "_obstacle",
        "int(self.config.watermark * self.kv.num_blocks)",
        "0",
        lambda: test_admission.test_the_watermark_keeps_its_blocks(0.25, 5),
    ),
    "the optimist does not learn": (
        Optimistic,
        "ran_short",
        "self.ratio += (1 - self.ratio) / 2",
        "pass",
        test_admission.test_the_optimist_falls_step_by_step_and_rises_when_it_hurts,
    ),
    "the block used last is evicted first": (
        PrefixKV,
        "_take",
        "popitem(last=False)",
        "popitem(last=True)",
        test_prefix_cache.test_the_longest_unused_is_evicted_first,
    ),
    "the tokens found again still count as lost": (
        Scheduler,
        "_give_kv",
        "request.num_lost_tokens -= min(found, request.num_lost_tokens)",
        "pass",
        test_prefix_cache.test_a_preempted_request_finds_its_own_blocks_again,
    ),
    "what is found by a request that comes back counts as saved": (
        Scheduler,
        "_give_kv",
        "if request.num_preemptions:",
        "if False:",
        test_prefix_cache.test_a_preempted_request_finds_its_own_blocks_again,
    ),
}


def broken(method, old: str, new: str):
    """The same method with another piece of text."""
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(old) == 1, f"{old!r} is in {method.__qualname__} {source.count(old)} times"
    source = source.replace(
        "super()", f"super({method.__qualname__.split('.')[0]}, self)"
    )  # there is no class around it
    made: dict = {}
    exec(source.replace(old, new), sys.modules[method.__module__].__dict__, made)
    return made[method.__name__]


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, monkeypatch):
    cls, edits, where = MUTANTS[name]
    for method, (old, new) in edits.items():
        monkeypatch.setattr(cls, method, broken(getattr(cls, method), old, new))
    places = [c for c in COMBINATIONS if all(getattr(c, key) == value for key, value in where.items())]
    with pytest.raises(Exception) as caught:
        for combination in sorted(places, key=lambda c: c.strategy):  # chunked and continuous first
            run_machine(combination, EXAMPLES, STEPS, shrink=False)
    # A RuntimeWarning is how an engine that goes on tells of a step that failed; the tests make it an error.
    kinds = (AssertionError, RuntimeError, LookupError, ValueError, PlanError, RuntimeWarning)
    assert isinstance(caught.value, kinds), caught.value


@pytest.mark.parametrize("name", TESTED)
def test_mutant_fails_its_test(name, monkeypatch):
    cls, method, old, new, test = TESTED[name]
    monkeypatch.setattr(cls, method, broken(getattr(cls, method), old, new))
    with pytest.raises((AssertionError, RuntimeError)):
        test()
