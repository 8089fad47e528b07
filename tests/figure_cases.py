"""Every figure maker of the package, with inputs small and large. A new one gets its lines here; a test sees to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from fakes import fake_engine, fake_requests, fake_run
from matplotlib.figure import Figure
from test_metrics import by_hand

from minibatcher import viz
from minibatcher.claims.common import machine
from minibatcher.hardware import Device, model_spec
from minibatcher.runners.roofline import CostModel
from minibatcher.simulate import run_simulation
from minibatcher.timeline import Timeline
from minibatcher.viz.padding import plot_padding
from minibatcher.viz.roofline_view import roofline_view
from minibatcher.viz.slots import animate
from minibatcher.workload import load_workload

STRATEGIES = ("static", "dynamic", "continuous", "chunked")
BARD = str(Path(viz.__file__).parents[1] / "model" / "bard")
LAPTOP = Device("laptop", 16 << 30, 25e9, {"float32": 120e9}, source="made up", measured=True)


@cache
def small() -> dict[str, Timeline]:
    return {name: fake_run(name, fake_requests(12, seed=3, longest=40)) for name in STRATEGIES}


@cache
def preempting() -> Timeline:
    """More requests than the pool has blocks for."""
    engine = fake_engine(
        "chunked", num_blocks=24, block_size=4, max_model_len=90, max_num_seqs=6, max_num_batched_tokens=48,
        seconds_per_token=0.0001, seconds_per_step=0.008,
    )  # fmt: skip
    return engine.run(fake_requests(16, seed=2, rate=200.0, longest=30))


@cache
def one_pool() -> dict[str, Timeline]:
    """A pool of 640 tokens: four slices of 160, or forty blocks of 16 for up to 16 requests."""
    found = {}
    for name, slots in (("static", 4), ("continuous", 16)):
        engine = fake_engine(
            name, num_blocks=40, block_size=16, max_model_len=160, max_num_seqs=slots, seconds_per_step=0.008,
        )  # fmt: skip
        found[name] = engine.run(fake_requests(30, seed=5, rate=50.0, longest=100))
    return found


@cache
def small_blocks() -> Timeline:
    """Blocks that hardly have room for their owners' names."""
    engine = fake_engine("chunked", num_blocks=512, block_size=4, max_model_len=160, max_num_seqs=40)
    return engine.run(fake_requests(120, seed=5, rate=400.0, longest=100))


@cache
def large() -> dict[str, Timeline]:
    workload = load_workload(
        "longtail:prompt_mean=400,output_min=16,output_max=900,alpha=0.9", num_requests=400, seed=1
    )
    workload = workload.fit_to_context(4096)
    return run_simulation(workload, machine(), strategies=STRATEGIES, max_num_seqs=64)


@cache
def budgets() -> dict[float, Timeline]:
    workload = load_workload("longtail:prompt_mean=900,output_min=16,output_max=300,alpha=0.9", num_requests=60, seed=1)
    workload = workload.fit_to_context(4096)
    found = {}
    for budget in (128, 256, 512, 1024, 2048, 8192):
        options = {"max_num_seqs": 32, "max_num_batched_tokens": budget}
        found[budget] = run_simulation(workload, machine(), strategies=["chunked"], **options)["chunked"]
    return found


@cache
def delays() -> dict[float, Timeline]:
    todo = {delay: fake_requests(20, seed=i, rate=5 + 20 * i) for i, delay in enumerate((0, 0.01, 0.1, 1.0))}
    return {delay: fake_run("dynamic", requests) for delay, requests in todo.items()}


def many() -> dict[str, Timeline]:
    """Eight runs with long names."""
    return {f"chunked prefill, variant number {i}": small()["chunked"] for i in range(8)}


@cache
def many_slots() -> Timeline:
    return fake_run("chunked", fake_requests(300, seed=1, rate=4000), max_num_seqs=128, num_blocks=4000)


def one_step() -> Timeline:
    return by_hand().slice(0, 1)


def laptop_cost(model: str = BARD) -> CostModel:
    return CostModel(LAPTOP, model_spec(model), dtype="float32")


def repeats(n: int) -> dict[str, list[Timeline]]:
    todo = [fake_requests(10, seed=seed, longest=40) for seed in range(n)]
    return {
        name: [fake_run(name, list(fake_requests(10, seed=s, longest=40))) for s in range(len(todo))]
        for name in STRATEGIES
    }


BATCHES = {1: 31.0, 2: 60.5, 4: 118.0, 8: 221.0, 16: 380.0, 32: 540.0, 64: 640.0}
CLOSE = {batch: 100.0 * batch for batch in range(1, 40)}
MANY_BATCHES = {2**i: 9_000 * 2**i / (1 + 2**i / 190) for i in range(11)}

# The figure maker's name, what it is given, the figure.
FIGURES: list[tuple[str, str, Callable[[], Figure]]] = [
    ("plot_slots", "small", lambda: viz.plot_slots(small()["static"]).figure),
    ("plot_slots", "by hand", lambda: viz.plot_slots(by_hand(), x="time").figure),
    ("plot_slots", "large", lambda: viz.plot_slots(large()["chunked"]).figure),
    ("plot_comparison", "small", lambda: viz.plot_comparison(small())),
    ("plot_comparison", "one", lambda: viz.plot_comparison({"by hand": by_hand()})),
    ("plot_comparison", "large", lambda: viz.plot_comparison(large())),
    ("plot_latency_cdf", "small", lambda: viz.plot_latency_cdf(small())),
    ("plot_latency_cdf", "one step", lambda: viz.plot_latency_cdf(one_step())),
    ("plot_latency_cdf", "large", lambda: viz.plot_latency_cdf(large())),
    ("plot_latency_sweep", "budgets", lambda: viz.plot_latency_sweep(budgets(), "max_num_batched_tokens")),
    ("plot_latency_sweep", "delays", lambda: viz.plot_latency_sweep(delays(), "max_queue_delay_s")),
    ("plot_latency_sweep", "one", lambda: viz.plot_latency_sweep({0.5: by_hand()}, "hurry, requests/s")),
    ("plot_roofline", "cache", lambda: viz.plot_roofline(small()["chunked"], laptop_cost("qwen2.5-0.5b"))),
    ("plot_roofline", "one step", lambda: viz.plot_roofline(one_step(), laptop_cost())),
    ("plot_roofline", "laptop", lambda: viz.plot_roofline(small()["chunked"], laptop_cost())),
    ("plot_roofline", "large", lambda: viz.plot_roofline(large()["chunked"], machine())),
    ("plot_batch_throughput", "laptop", lambda: viz.plot_batch_throughput(BATCHES, ridge=12.4, clock="measured")),
    ("plot_batch_throughput", "large", lambda: viz.plot_batch_throughput(MANY_BATCHES, ridge=310, clock="simulated")),
    ("plot_batch_throughput", "runs", lambda: viz.plot_batch_throughput({4: small()["static"]})),
    ("plot_gantt", "small", lambda: viz.plot_gantt(small()["static"])),
    ("plot_gantt", "by hand", lambda: viz.plot_gantt(by_hand())),
    ("plot_gantt", "preempting", lambda: viz.plot_gantt(preempting())),
    ("plot_gantt", "large", lambda: viz.plot_gantt(large()["chunked"])),
    ("plot_kv_occupancy", "small", lambda: viz.plot_kv_occupancy(one_pool())),
    ("plot_kv_occupancy", "one step", lambda: viz.plot_kv_occupancy(one_step())),
    ("plot_kv_occupancy", "large", lambda: viz.plot_kv_occupancy({n: large()[n] for n in ("static", "chunked")})),
    ("plot_memory_map", "small", lambda: viz.plot_memory_map(one_pool())),
    ("plot_memory_map", "names", lambda: viz.plot_memory_map(small_blocks())),
    ("plot_memory_map", "one step", lambda: viz.plot_memory_map(one_step())),
    ("plot_memory_map", "large", lambda: viz.plot_memory_map({n: large()[n] for n in ("static", "chunked")})),
    ("plot_strategy_spread", "small", lambda: viz.plot_strategy_spread(repeats(1))),
    ("plot_strategy_spread", "large", lambda: viz.plot_strategy_spread(repeats(5))),
    ("plot_comparison", "many", lambda: viz.plot_comparison(many())),
    ("plot_latency_cdf", "many", lambda: viz.plot_latency_cdf(many())),
    ("plot_latency_sweep", "many", lambda: viz.plot_latency_sweep(dict(enumerate(many().values())), "arrival_rate")),
    ("plot_batch_throughput", "many", lambda: viz.plot_batch_throughput(CLOSE, ridge=1000, clock="measured")),
    ("plot_kv_occupancy", "many", lambda: viz.plot_kv_occupancy(many())),
    ("plot_memory_map", "many", lambda: viz.plot_memory_map(many())),
    ("plot_strategy_spread", "many", lambda: viz.plot_strategy_spread({name: [run] for name, run in many().items()})),
    ("_still", "small", lambda: animate(small()["static"]).still),
    ("_still", "large", lambda: animate(large()["chunked"]).still),
    ("_still", "two", lambda: animate({n: small()[n] for n in ("static", "chunked")}).still),
    ("_still", "slots", lambda: animate(many_slots()).still),
    ("_still", "roofline", lambda: roofline_view().still),
    ("_still", "roofline, mixed", lambda: roofline_view(num_decodes=700, prefill_tokens=4_096).still),
    ("_still", "roofline, laptop", lambda: roofline_view(laptop_cost(), num_decodes=3, context_tokens=1).still),
    ("_still", "roofline, full", lambda: roofline_view(context_tokens=131_072, num_decodes=1_024).still),
    ("plot_padding", "two", plot_padding),
    ("plot_padding", "many", lambda: plot_padding(list(range(10, 3000, 40)), batch_size=8, order="sorted")),
    ("plot_rooms", "only", viz.plot_rooms),
]  # fmt: skip
