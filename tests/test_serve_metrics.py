"""What /metrics shows is what the whole record of the same run amounts to; and it takes no memory for each request."""

import gc
import tracemalloc

import pytest

pytest.importorskip("prometheus_client")

from fakes import fake_engine, stub_engine
from prometheus_client.parser import text_string_to_metric_families

from minibatcher.ahead import AheadEngine
from minibatcher.metrics import summarize
from minibatcher.recorder import TimelineRecorder
from minibatcher.request import Request, SamplingParams
from minibatcher.serve.metrics import COUNTERS, GAUGES, HISTOGRAMS, ServerMetrics, token_bounds
from minibatcher.serve.recorder import ServeRecorder

MODEL = {"model_name": "fake"}


def watched(engine, metrics=None, inner=True):
    """The engine with a ServeRecorder, and the metrics that it fills."""
    metrics = metrics or ServerMetrics(longest=1000)
    engine.recorder = ServeRecorder(metrics, "fake", engine.scheduler, TimelineRecorder() if inner else None)
    engine.reset()
    return engine, metrics


def todo(n=30):
    """Requests that share heads of prompts, of two tenants; memory is short for them."""
    made = []
    for i in range(n):
        prompt = [i % 3] * (8 + i % 5) + [i]
        params = SamplingParams(max_tokens=1 + 5 * i % 23, ignore_eos=True)
        made.append(Request(f"r{i}", prompt, params, arrival_time=0.002 * i, tenant="ab"[i % 2]))
    return made


def read(metrics: ServerMetrics, accept: str | None = None) -> dict[tuple, float]:
    body, content_type = metrics.exposition(accept)
    assert content_type.startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.documentation or family.name.startswith("process")
        for sample in family.samples:
            place = (sample.name, *sorted(sample.labels.items()))
            assert place not in samples, "twice the same"
            samples[place] = sample.value
    return samples


def of(samples, name, **labels) -> float:
    return samples[(name, *sorted((MODEL | labels).items()))]


ENGINES = {
    "continuous": {"num_blocks": 13},
    "chunked": {"num_blocks": 13, "enable_prefix_caching": True, "max_num_batched_tokens": 12},
    "static": {},
    "ahead": {"engine_class": AheadEngine, "num_blocks": 13, "enable_prefix_caching": True},
}


@pytest.mark.parametrize("kind", ENGINES)
def test_metrics_of_a_run_are_those_of_its_whole_record(kind):
    name = "continuous" if kind == "ahead" else kind
    engine, metrics = watched(fake_engine(name, max_num_seqs=4, seconds_per_step=0.01, **ENGINES[kind]))
    whole = summarize(engine.run(todo()))
    seen = read(metrics)
    assert whole["num_finished"]["length"] == 30 and whole["num_output_tokens"] > 200
    assert of(seen, "vllm:generation_tokens_total") == whole["num_output_tokens"]
    assert of(seen, "vllm:prompt_tokens_total") == whole["num_prompt_tokens"]
    assert of(seen, "vllm:num_preemptions_total") == whole["num_preemptions"]
    assert (whole["num_preemptions"] > 0) == (kind != "static"), "else little is seen"
    assert of(seen, "minibatcher:steps_total") == whole["num_steps"]
    assert of(seen, "minibatcher:computed_tokens_total") == whole["num_computed_tokens"]
    assert of(seen, "minibatcher:padding_tokens_total") == whole["num_padding_tokens"]
    assert of(seen, "minibatcher:step_seconds_total") == pytest.approx(whole["busy_share"] * whole["makespan_s"])
    caching = engine.scheduler.kv.shares_prefixes
    assert of(seen, "vllm:prefix_cache_hits_total") == whole["num_cached_tokens"]
    assert of(seen, "vllm:prefix_cache_queries_total") == (whole["num_prompt_tokens"] if caching else 0)
    assert of(seen, "vllm:prompt_tokens_cached_total") == whole["num_cached_tokens"] and caching == (
        whole["num_cached_tokens"] > 0
    )
    for metric, figure in {
        "vllm:time_to_first_token_seconds": "ttft_ms",
        "vllm:inter_token_latency_seconds": "itl_ms",
        "vllm:request_time_per_output_token_seconds": "tpot_ms",
        "vllm:e2e_request_latency_seconds": "e2el_ms",
        "vllm:request_queue_time_seconds": "queue_ms",
    }.items():
        assert of(seen, f"{metric}_count") == whole[figure]["n"], metric
        assert of(seen, f"{metric}_sum") * 1e3 == pytest.approx(whole[figure]["mean"] * whole[figure]["n"]), metric
        assert of(seen, f"{metric}_bucket", le="+Inf") == whole[figure]["n"]
    tokens = "vllm:iteration_tokens_total"
    assert of(seen, f"{tokens}_count") == whole["num_steps"]
    assert of(seen, f"{tokens}_sum") == whole["num_computed_tokens"] - whole["num_padding_tokens"]
    assert of(seen, "vllm:request_generation_tokens_sum") == whole["num_output_tokens"]
    assert of(seen, "vllm:request_num_preemptions_sum") == whole["num_preemptions"]
    assert of(seen, "vllm:request_success_total", finished_reason="length") == 30
    assert of(seen, "vllm:request_success_total", finished_reason="stop") == 0
    by_tenant = [of(seen, "minibatcher:tenant_generation_tokens_total", tenant=tenant) for tenant in "ab"]
    assert sum(by_tenant) == whole["num_output_tokens"] and min(by_tenant) > 0
    phases = ("prefill", "decode", "inference")
    prefill, decode, inference = (of(seen, f"vllm:request_{phase}_time_seconds_sum") for phase in phases)
    assert prefill + decode == pytest.approx(inference) and decode > 0


def test_buckets_count_what_is_at_most_their_bound():
    engine, metrics = watched(fake_engine("continuous", seconds_per_token=0.0, seconds_per_step=0.01))
    params = SamplingParams(max_tokens=11, ignore_eos=True)
    engine.run([Request("r", [1, 2, 3], params)])
    seen = read(metrics)
    name = "vllm:inter_token_latency_seconds_bucket"
    assert of(seen, name, le="0.005") == 0 and of(seen, name, le="0.025") == of(seen, name, le="+Inf") == 10
    name = "vllm:request_generation_tokens_bucket"
    assert of(seen, name, le="10.0") == 0 and of(seen, name, le="20.0") == 1
    name = "vllm:request_prompt_tokens_bucket"
    assert of(seen, name, le="2.0") == 0 and of(seen, name, le="5.0") == 1
    assert list(token_bounds(100)) == [1, 2, 5, 10, 20, 50, 100] and token_bounds(4096)[-1] == 2000


def test_gauges_show_how_things_stand():
    engine, metrics = watched(fake_engine("continuous", max_num_seqs=2, num_blocks=64))
    requests = [Request(f"r{i}", [1] * 8, SamplingParams(max_tokens=4, ignore_eos=True)) for i in range(5)]
    for request in requests:
        engine.submit(request)
    assert of(read(metrics), "vllm:num_requests_waiting") == 5
    engine.step()
    seen = read(metrics)
    assert of(seen, "vllm:num_requests_running") == 2 and of(seen, "vllm:num_requests_waiting") == 3
    assert 0 < of(seen, "vllm:kv_cache_usage_perc") == engine.scheduler.kv.num_used_blocks / 64
    assert of(seen, "minibatcher:slots") == 2 and of(seen, "minibatcher:kv_blocks") == 64
    engine.abort("r0")
    engine.abort("r4")
    while engine.has_work():
        engine.step()
    seen = read(metrics)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert of(seen, f"vllm:{name}") == 0
    assert of(seen, "vllm:request_success_total", finished_reason="abort") == 2
    assert of(seen, "vllm:e2e_request_latency_seconds_count") == 3, "an aborted request has no latency"


def test_every_metric_is_there_before_the_first_request_and_two_models_stand_side_by_side():
    metrics = ServerMetrics()
    ServeRecorder(metrics, "one", fake_engine("chunked").scheduler)
    ServeRecorder(metrics, 'two "quoted"\n', fake_engine("chunked").scheduler)
    seen = read(metrics)
    unlabelled = [name for name, (_, label) in COUNTERS.items() if label is None]
    for model in ("one", 'two "quoted"\n'):
        for name in (*GAUGES, *(f"{name}_total" for name in unlabelled), *(f"{name}_count" for name in HISTOGRAMS)):
            assert (name, ("model_name", model)) in seen
    metrics.refused("one", "queue_full", 2)
    metrics.left("one", 3)
    seen = read(metrics)
    assert seen["minibatcher:requests_refused_total", ("model_name", "one"), ("reason", "queue_full")] == 2
    assert seen["minibatcher:requests_left_total", ("model_name", "one")] == 3
    assert seen["minibatcher:requests_left_total", ("model_name", 'two "quoted"\n')] == 0
    body, content_type = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")


def test_names_and_labels_are_vllms():
    """As the dashboards that come with vLLM ask for them."""
    engine, metrics = watched(fake_engine("chunked"))
    engine.run(todo(3))
    asked = """vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum vllm:prompt_tokens_total
    vllm:generation_tokens_total vllm:inter_token_latency_seconds_bucket vllm:num_requests_running
    vllm:num_requests_waiting vllm:time_to_first_token_seconds_bucket vllm:kv_cache_usage_perc
    vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket vllm:request_success_total
    vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
    vllm:iteration_tokens_total_bucket vllm:prefix_cache_hits_total vllm:num_preemptions_total"""
    names = {name for name, *labels in read(metrics) if ("model_name", "fake") in labels}
    assert set(asked.split()) <= names


def test_memory_does_not_grow_with_the_requests_served():
    engine, _ = watched(stub_engine("continuous", max_num_seqs=8), inner=False)
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    def serve(first, n):
        engine.reset()
        for i in range(first, first + n):
            engine.submit(Request(f"r{i}", [1] * 8, params))
        while engine.has_work():
            engine.step()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        serve(0, 500)
        before = serve(500, 500)
        after = serve(1000, 500)
    finally:
        tracemalloc.stop()
    assert after - before < 500 * 20, "a record of a request takes far more than 20 bytes"
    assert not engine.timeline.steps and not engine.timeline.requests
    assert engine.timeline.header["strategy"] == "continuous"


def test_counters_go_on_over_a_reset():
    engine, metrics = watched(fake_engine("continuous"))
    for _ in range(2):
        engine.run([Request("r", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))])
    assert of(read(metrics), "vllm:generation_tokens_total") == 10


def test_who_has_ended_but_keeps_its_row_in_a_static_batch_does_not_run():
    engine, metrics = watched(fake_engine("static", max_num_seqs=2))
    for name, length in (("short", 1), ("long", 9)):
        engine.submit(Request(name, [1, 2, 3], SamplingParams(max_tokens=length, ignore_eos=True)))
    engine.step()
    assert len(engine.scheduler.running) == 2 and of(read(metrics), "vllm:num_requests_running") == 1
