"""Definitions of utilisation, against counts made another way."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from minibatcher.clock import VirtualClock
from minibatcher.engine import Engine
from minibatcher.hardware import device, model_spec
from minibatcher.kv import make_kv
from minibatcher.request import Request, SamplingParams
from minibatcher.runners.roofline import CostModel, RooflineRunner, step_work
from minibatcher.scheduling import SchedulerConfig, make_scheduler, strategy
from minibatcher.simulate import run_simulation
from minibatcher.utilisation import UTILISATIONS, model_flops, utilisation, work_of
from minibatcher.workload import Workload, WorkloadRequest, load_workload, uniform

COST = CostModel(device("h100"), model_spec("llama-3.1-8b"))
STRATEGIES = ("solo", "static", "dynamic", "continuous", "chunked")


class Spy(RooflineRunner):
    """Keeps the work of every plan, as the cost model saw it."""

    def __init__(self, cost):
        super().__init__(cost)
        self.works = []

    def run(self, plan):
        num_sampled = sum(n > 0 and n == r.num_pending_tokens for r, n in plan.num_tokens.items())
        self.works.append(step_work(plan, num_sampled))
        return super().run(plan)


def spied_run(name, kv_tokens):
    workload = uniform(40, prompt_min=1, prompt_max=90, output_min=1, output_max=40, seed=5, request_rate=30.0)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64)
    kv = make_kv(strategy(name).kv_layout, kv_tokens, max_num_seqs=6, max_model_len=130, block_size=16)
    runner = Spy(COST)
    engine = Engine(make_scheduler(name, kv, config), runner, VirtualClock(), max_model_len=130)
    requests = [
        Request(
            row.request_id, range(row.prompt_tokens), SamplingParams(max_tokens=row.output_tokens), row.arrival_time
        )
        for row in workload
    ]
    return engine.run(requests), runner.works


@pytest.mark.parametrize("name", STRATEGIES)
def test_work_read_from_the_record_is_the_work_of_the_plan(name):
    timeline, works = spied_run(name, 6 * 130)
    assert not any(step.preempted for step in timeline.steps)
    assert [work_of(step, timeline.requests) for step in timeline.steps] == works
    assert len(works) > 40


def test_tokens_computed_again_after_a_preemption_count_in_hfu_alone():
    timeline, works = spied_run("chunked", 160)
    assert any(step.preempted for step in timeline.steps)
    recorded = [work_of(step, timeline.requests) for step in timeline.steps]
    assert [replace(work, num_sampled=0) for work in recorded] == [replace(work, num_sampled=0) for work in works]
    found = utilisation(timeline, COST)
    assert found["hfu"] > 1.02 * found["mfu"]


def test_tokens_found_in_the_prefix_cache_are_nobodys_work():
    workload = load_workload("shared-prefix:prefix_tokens=400", num_requests=30, request_rate=9.0)
    timeline = run_simulation(workload, COST, strategies=["chunked"], enable_prefix_caching=True)["chunked"]
    assert sum(record.num_cached_tokens for record in timeline.requests.values()) > 5_000
    found = utilisation(timeline, COST)
    assert found["mfu"] == pytest.approx(found["hfu"], rel=1e-9)  # nothing was computed twice


def one_request(prompt, output):
    workload = Workload("one", (WorkloadRequest("r", 0.0, prompt, output),), "Made up.")
    return run_simulation(workload, COST, strategies=["chunked"], max_num_seqs=4)["chunked"]


def test_model_flops_of_one_request_are_those_of_its_tokens():
    prompt, output = 37, 5
    model, tokens = COST.model, prompt + output - 1  # the last token is never computed
    by_hand = 2 * (tokens * model.num_layers * model.layer_matrix_parameters + output * model.head_parameters)
    pairs = sum(position + 1 for position in range(tokens))
    by_hand += 4 * model.num_layers * model.num_heads * model.head_dim * pairs
    assert model_flops(one_request(prompt, output), COST) == pytest.approx(by_hand, rel=1e-12)


def test_shares_of_a_run_whose_time_is_known():
    """One request alone in four slots: one decode after the other, no waiting."""
    timeline = one_request(100, 50)
    found = utilisation(timeline, COST)
    assert set(found) == set(UTILISATIONS)
    assert found["busy_share"] == pytest.approx(1.0)
    assert found["useful_slot_share"] == pytest.approx(0.25)
    assert found["mfu"] == pytest.approx(found["hfu"])
    bytes_read = 50 * COST.model.linear_bytes("bfloat16")
    bytes_read += sum(range(100, 150)) * COST.model.kv_bytes_per_token("bfloat16")
    assert found["bandwidth_utilisation"] == pytest.approx(bytes_read / 3.35e12 / timeline.duration)


def test_waiting_lowers_every_share_and_padding_only_mfu():
    rows = tuple(WorkloadRequest(f"r{i}", 0.0, 20 + 400 * i, 10 + 60 * i) for i in range(3))
    together = Workload("three", rows, "Made up.")
    apart = Workload("three", tuple(WorkloadRequest(f"r{i}", 9.0 * i, 20, 10) for i in range(3)), "Made up.")
    padded, packed = (
        utilisation(run_simulation(together, COST, strategies=[s], max_num_seqs=3)[s], COST)
        for s in ("static", "continuous")
    )
    assert packed["hfu"] == pytest.approx(packed["mfu"])
    assert padded["hfu"] > 1.5 * padded["mfu"]
    assert padded["busy_share"] == packed["busy_share"] == 1
    sparse = utilisation(run_simulation(apart, COST, strategies=["chunked"], max_num_seqs=3)["chunked"], COST)
    assert all(value < 0.02 for value in sparse.values())


def test_slices_add_up_to_the_run():
    workload = uniform(30, prompt_min=1, prompt_max=90, output_min=1, output_max=40, seed=2)
    timeline = run_simulation(workload, COST, strategies=["chunked"], max_num_seqs=4)["chunked"]
    whole, cuts = utilisation(timeline, COST), [0, 7, 60, len(timeline.steps)]
    parts = [timeline.slice(first, stop) for first, stop in pairwise(cuts)]
    for name in UTILISATIONS:
        summed = sum(utilisation(part, COST)[name] * part.duration for part in parts)
        assert math.isclose(summed, whole[name] * timeline.duration, rel_tol=1e-9), name
    assert sum(model_flops(part, COST) for part in parts) == pytest.approx(model_flops(timeline, COST))
