"""The claims of the chapters, as numbers."""

import random

import pytest

from minibatcher.claims import ended_rows, padding_factors


def test_a_short_prompt_beside_a_long_one_pays_80_times_its_prefill():
    assert padding_factors([50, 4_000]) == [80, 1]


def test_31_of_32_rows_are_thrown_away_in_99_percent_of_the_steps():
    ended = ended_rows([20] * 31 + [2_000])
    assert len(ended) == 2_000
    assert ended.count(31) / len(ended) == 0.99
    assert set(ended) == {0, 31}


def test_ended_rows_are_those_of_the_static_scheduler():
    """The formula against the scheduler itself, driven by hand with one token a step."""
    from minibatcher.kv import SlotKV
    from minibatcher.request import Request, SamplingParams
    from minibatcher.scheduling import SchedulerConfig, StaticScheduler

    rng = random.Random(3)
    for _ in range(20):
        lengths = [rng.randint(1, 30) for _ in range(rng.randint(1, 7))]
        scheduler = StaticScheduler(SlotKV(8, 64), SchedulerConfig(max_num_seqs=len(lengths)))
        for i, length in enumerate(lengths):
            scheduler.add(Request(f"r{i}", range(rng.randint(1, 9)), SamplingParams(max_tokens=length)))
        seen = []
        while scheduler.has_work():
            plan = scheduler.schedule(now=0.0)
            seen.append(list(plan.num_tokens.values()).count(0))
            for request, num_tokens in plan.num_tokens.items():
                request.num_computed_tokens += num_tokens
                if num_tokens:
                    request.append(7, 0.0)
            scheduler.update([])
        assert seen == ended_rows(lengths)


def test_equal_lengths_waste_nothing():
    assert set(ended_rows([17] * 5)) == {0}
    assert padding_factors([9] * 3) == pytest.approx([1, 1, 1])


def test_with_equal_lengths_static_and_continuous_take_the_same_steps():
    from fakes import fake_engine

    from minibatcher.request import Request, SamplingParams

    steps = {}
    for name in ("static", "continuous"):
        engine = fake_engine(name, max_num_seqs=4, max_num_batched_tokens=24)
        requests = [Request(f"r{i}", list(range(6)), SamplingParams(max_tokens=11)) for i in range(8)]
        steps[name] = len(engine.run(requests).steps)
    assert steps == {"static": 22, "continuous": 22}
