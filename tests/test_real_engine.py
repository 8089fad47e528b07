"""The engine on real models: batching never changes an answer, whoever is beside whom."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

import minibatcher  # noqa: E402
from minibatcher import LLM, Engine, SamplingParams, load_workload  # noqa: E402
from minibatcher.compare import run_comparison  # noqa: E402
from minibatcher.errors import InvalidParameter, RequestRefused  # noqa: E402
from minibatcher.model.loader import load_model  # noqa: E402
from minibatcher.request import Request  # noqa: E402

STRATEGIES = [name for name in minibatcher.STRATEGIES if name != "solo"]
SMALL = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "block_size": 5}


@pytest.fixture(scope="module")
def bard():
    return load_model("bard", dtype="float32")


def answers(model, strategy, prompts, params, **options) -> list[list[int]]:
    engine = Engine.from_model(model, strategy=strategy, max_model_len=512, **options)
    requests = [Request(f"r{i}", list(p), q) for i, (p, q) in enumerate(zip(prompts, params))]
    engine.run(requests)
    engine.scheduler.kv.check()
    assert engine.scheduler.kv.num_used_blocks == 0
    return [r.output_token_ids for r in requests]


@pytest.fixture(scope="module")
def batch(bard):
    generator = torch.Generator().manual_seed(5)
    lengths = [3, 150, 41, 1, 77, 16, 33, 64, 15, 17]
    prompts = [torch.randint(3, bard.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    lengths = (40, 9, 70, 30, 1, 55, 2, 25, 33, 12)
    params = [SamplingParams(max_tokens=n, ignore_eos=n not in (25, 33)) for n in lengths]
    return prompts, params, answers(bard, "solo", prompts, params)


@pytest.mark.parametrize(
    "strategy, attention, options",
    [
        *itertools.product(STRATEGIES, ["sdpa"], [{}, SMALL]),
        *itertools.product(["static", "chunked"], ["reference"], [{"max_num_seqs": 4}]),
        ("chunked", "sdpa", {"max_num_batched_tokens": 24, "prefill_first": True}),
        ("dynamic", "sdpa", {"max_num_seqs": 3, "bucket_by_length": True}),
        *itertools.product(["continuous", "chunked"], ["sdpa"], [{"plan_ahead": True}, SMALL | {"plan_ahead": True}]),
    ],
)  # fmt: skip
def test_greedy_answers_equal_the_solo_run(bard, batch, strategy, attention, options):
    prompts, params, solo = batch
    assert answers(bard, strategy, prompts, params, attention=attention, **options) == solo


@pytest.mark.parametrize("strategy, plan_ahead", [("continuous", False), ("chunked", False), ("chunked", True)])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_shared_prefixes_and_short_memory_change_no_answer(bard, strategy, plan_ahead, preemption):
    head = torch.randint(3, bard.config.vocab_size, (61,), generator=torch.Generator().manual_seed(7)).tolist()
    prompts = [[*head[: 61 - 3 * i], 40 + i, 50 + i] for i in range(8)]
    params = [SamplingParams(max_tokens=30 + i, ignore_eos=True) for i in range(8)]
    solo = answers(bard, "solo", prompts, params)
    options = {"max_num_batched_tokens": 100, "block_size": 4, "kv_cache_tokens": 160, "preemption": preemption}
    engine = Engine.from_model(
        bard, strategy=strategy, max_model_len=512, enable_prefix_caching=True, plan_ahead=plan_ahead, **options
    )
    requests = [Request(f"r{i}", p, q) for i, (p, q) in enumerate(zip(prompts, params))]
    engine.run(requests)
    assert [r.output_token_ids for r in requests] == solo
    assert sum(r.num_cached_tokens for r in requests) > 200 and sum(r.num_preemptions for r in requests) > 0
    assert preemption == "swap" or sum(r.num_lost_tokens for r in requests) > 0
    engine.scheduler.kv.check()
    assert engine.scheduler.kv.num_used_blocks == 0


@pytest.mark.parametrize("strategy", ["continuous", "chunked"])
def test_preemption_changes_no_answer(bard, batch, strategy):
    prompts, params, solo = batch
    engine = Engine.from_model(bard, strategy=strategy, max_model_len=512, kv_cache_tokens=208, block_size=8)
    requests = [Request(f"r{i}", p, q) for i, (p, q) in enumerate(zip(prompts, params))]
    timeline = engine.run(requests)
    assert sum(r.num_preemptions for r in timeline.requests.values()) >= 2
    assert [r.output_token_ids for r in requests] == solo


def test_sampled_answers_do_not_depend_on_the_batch_either(bard, batch):
    prompts, _, _ = batch
    params = [SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=i) for i in range(len(prompts))]
    solo = answers(bard, "solo", prompts, params)
    assert answers(bard, "chunked", prompts, params, max_num_batched_tokens=32) == solo
    assert answers(bard, "static", prompts, params, max_num_seqs=4) == solo
    reseeded = [SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=100 + i) for i in range(len(prompts))]
    assert answers(bard, "solo", prompts, reseeded) != solo


def test_requests_without_a_seed_follow_the_engines(bard):
    def texts(seed):
        llm = LLM(bard, seed=seed, max_model_len=256)
        return [c.text for c in llm.generate(["ROMEO:", "ROMEO:"], SamplingParams(max_tokens=24, temperature=1.0))]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert texts(1)[0] != texts(1)[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_permuting_the_batch_permutes_the_answers(bard, batch, strategy):
    prompts, params, solo = batch
    order = [7, 2, 9, 0, 4, 1, 8, 3, 6, 5]
    shuffled = answers(bard, strategy, [prompts[i] for i in order], [params[i] for i in order], max_num_seqs=4)
    assert shuffled == [solo[i] for i in order]


def test_stop_strings_and_streams(bard):
    llm = LLM(bard, max_model_len=256)
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=4, ignore_eos=True)
    (whole,) = llm.generate("KING HENRY: The", params)
    assert "".join(llm.engine.stream("KING HENRY: The", params)) == whole.text
    stop = whole.text[20:26]
    cut = SamplingParams(max_tokens=60, temperature=0.9, seed=4, ignore_eos=True, stop=stop)
    (stopped,) = llm.generate("KING HENRY: The", cut)
    assert stopped.finish_reason == "stop" and stopped.text == whole.text[: whole.text.index(stop)]
    assert "".join(llm.engine.stream("KING HENRY: The", cut)) == stopped.text


def test_closing_a_stream_aborts_its_request(bard):
    engine = Engine.from_model(bard, max_model_len=256)
    stream = engine.stream("HAMLET:", SamplingParams(max_tokens=100, ignore_eos=True), request_id="given-up")
    next(stream)
    stream.close()
    assert engine.timeline.requests["given-up"].finish_reason == "abort"
    assert engine.scheduler.kv.num_used_blocks == 0 and not engine.scheduler.has_work()


def test_min_tokens_keeps_the_end_away(bard):
    llm = LLM(bard, max_model_len=256)
    prompts = [f"{name}:" for name in ("ROMEO", "JULIET", "NURSE", "MERCUTIO", "BENVOLIO", "TYBALT")]
    free = llm.generate(prompts, SamplingParams(max_tokens=120, temperature=1.0, seed=3))
    assert min(len(c.token_ids) for c in free) < 30
    held = llm.generate(prompts, SamplingParams(max_tokens=120, min_tokens=30, temperature=1.0, seed=3))
    assert min(len(c.token_ids) for c in held) >= 30
    eos = bard.config.eos_token_ids[0]
    assert all(eos not in c.token_ids[:29] for c in held)
    assert {c.finish_reason for c in held} <= {"stop", "length"}


def test_what_an_earlier_request_left_in_a_slot_is_not_seen(bard, batch):
    prompts, params, solo = batch
    engine = Engine.from_model(bard, strategy="static", max_model_len=512, max_num_seqs=4)
    for k_cache, v_cache in engine.runner.pool:
        k_cache.fill_(torch.nan)
        v_cache.fill_(torch.inf)
    requests = [Request(f"r{i}", p, q) for i, (p, q) in enumerate(zip(prompts, params))]
    engine.run(requests)
    assert [r.output_token_ids for r in requests] == solo


def test_comparison_serves_the_same_requests_under_each_strategy(bard):
    workload = load_workload("azure-conv", num_requests=6, seed=3, request_rate=float("inf")).fit_to_context(200)
    timelines = run_comparison(
        workload, model=bard, strategies=["solo", *STRATEGIES], max_num_seqs=3, max_model_len=200
    )
    hashes = {name: [r.output_hash for r in t.requests.values()] for name, t in timelines.items()}
    assert list(hashes) == ["solo", *STRATEGIES]
    assert len({tuple(h) for h in hashes.values()}) == 1 and len(set(hashes["solo"])) == 6
    for timeline in timelines.values():
        lengths = [(r.num_prompt_tokens, r.num_output_tokens) for r in timeline.requests.values()]
        assert lengths == [(r.prompt_tokens, r.output_tokens) for r in workload]
        assert timeline.header["workload"]["name"] == workload.name and timeline.clock == "measured"


def test_a_refusal_comes_before_anything_runs(bard, monkeypatch):
    workload = load_workload("uniform:prompt_min=80,prompt_max=80,output_min=16,output_max=16", num_requests=2)
    monkeypatch.setattr(Engine, "run", lambda *_, **__: pytest.fail("a strategy ran before the refusal"))
    with pytest.raises(RequestRefused, match="need 2 blocks, have 1"):
        run_comparison(
            workload, model=bard, strategies=["static", "chunked"], max_model_len=96, kv_cache_tokens=96, block_size=64
        )


def test_min_tokens_leaves_the_end_alone_where_it_is_ignored(bard):
    llm = LLM(bard, max_model_len=256)
    prompts = [f"{name}:" for name in ("ROMEO", "JULIET", "NURSE", "TYBALT")]
    params = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    free = [done.token_ids for done in llm.generate(prompts, SamplingParams(**params))]
    held = [done.token_ids for done in llm.generate(prompts, SamplingParams(**params, min_tokens=40))]
    assert held == free and any(bard.config.eos_token_ids[0] in token_ids for token_ids in free)


def test_prompts_may_be_arrays_and_tensors(bard):
    import numpy as np

    llm = LLM(bard, max_model_len=64)
    params = SamplingParams(max_tokens=4)
    forms = [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), torch.tensor([5, 6, 7]), [np.array([5, 6, 7])]]
    assert len({tuple(llm.generate(form, params)[0].token_ids) for form in forms}) == 1


def test_plans_of_an_all_at_once_run_repeat_exactly(bard):
    workload = load_workload("longtail", num_requests=8, seed=1).fit_to_context(200)

    def plans():
        timelines = run_comparison(workload, model=bard, max_num_seqs=3, max_model_len=200)
        return {name: [[tuple(row) for row in step.rows] for step in t.steps] for name, t in timelines.items()}

    assert plans() == plans()


def test_a_pool_too_small_for_a_slot_says_what_it_would_take(bard):
    with pytest.raises(RequestRefused, match="need 512 tokens, have 100"):
        Engine.from_model(bard, strategy="static", max_model_len=512, kv_cache_tokens=100)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_model_len": 4096}, "above the context of bard"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"block_size": 0}, "block_size"),
        ({"seed": -1}, "seed"),
        ({"colour": "red"}, "unknown engine option 'colour'; known: "),
    ],
)
def test_bad_engine_options_are_refused(bard, options, message):
    with pytest.raises(InvalidParameter, match=message):
        Engine.from_model(bard, **options)
