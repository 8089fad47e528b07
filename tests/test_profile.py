"""`minibatcher profile`: parts that add up, a queue that costs nothing, a ledger in pairs, a start that is timed."""

from __future__ import annotations

import json
import os
import statistics
from itertools import chain, pairwise
from time import perf_counter as clock

import pytest

torch = pytest.importorskip("torch")

from minibatcher import stepping  # noqa: E402
from minibatcher.attention import sdpa  # noqa: E402
from minibatcher.bench import ledger, parts, profile, profile_table, start_up, waiting  # noqa: E402
from minibatcher.bench.ledger_steps import Case, Step, compiled_step, one_query_row, plain_step  # noqa: E402
from minibatcher.bench.models import write_model  # noqa: E402
from minibatcher.bench.process import ProcessFailed  # noqa: E402
from minibatcher.bench.stopwatch import Stopwatch  # noqa: E402
from minibatcher.build import build_engine, model_runner  # noqa: E402
from minibatcher.cli import main  # noqa: E402
from minibatcher.compiled import library as libraries  # noqa: E402
from minibatcher.errors import InvalidParameter  # noqa: E402
from minibatcher.kernels.random_model import TINY, random_model  # noqa: E402
from minibatcher.scheduling.ordering.fcfs import FirstComeFirstServed  # noqa: E402

CPU = torch.device("cpu")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
needs_compiler = pytest.mark.skipif(libraries.find_compiler() is None, reason="there is no C++ compiler here")


def engine_on(cpu_path="plain"):
    return build_engine(
        random_model(TINY, "tiny", CPU, torch.float32),
        strategy="chunked",
        cpu_path=cpu_path,
        max_num_seqs=4,
        max_model_len=128,
    )


def spin(seconds):
    end = clock() + seconds
    while clock() < end:
        pass


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    """Compiled libraries leave nothing behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIBATCHER_CACHE", str(tmp_path_factory.mktemp("cache")))
        libraries.library.cache_clear()
        yield
    libraries.library.cache_clear()


def test_each_second_counts_once():
    class Thing:
        def outer(self):
            spin(0.01)
            self.inner()

        def inner(self):
            spin(0.02)

    thing = Thing()
    watch = Stopwatch("rest")
    watch.wrap(thing, "outer", "out")
    watch.wrap(thing, "inner", "in")
    watch.lap()
    begun = clock()
    thing.outer()
    spin(0.005)
    watch.lap()
    whole = clock() - begun
    lap = watch.laps[-1]
    assert sum(lap.values()) == pytest.approx(whole, abs=0.001)
    assert lap["out"] >= 0.01 and lap["in"] >= 0.02 and lap["rest"] >= 0.005
    watch.restore()
    assert vars(thing) == {}


def test_seconds_that_are_moved_leave_the_sum_as_it_is():
    watch = Stopwatch("rest")
    watch.lap()
    begun = clock()
    spin(0.01)
    watch.move("library", 0.004)
    watch.lap()
    lap = watch.laps[-1]
    assert lap["library"] == 0.004 and lap["rest"] >= 0.006
    assert sum(lap.values()) <= clock() - begun


def test_a_wrapper_lets_exceptions_through_and_leaves_its_part():
    class Thing:
        def fail(self):
            raise KeyError

    thing, watch = Thing(), Stopwatch("rest")
    watch.wrap(thing, "fail", "failing")
    with pytest.raises(KeyError):
        thing.fail()
    watch.lap()
    with watch.within("other"):
        pass
    watch.lap()
    assert set(watch.laps[1]) == {"rest", "other"}


@pytest.mark.parametrize("cpu_path", ["plain", "prepacked", pytest.param("compiled", marks=needs_compiler)])
def test_the_parts_of_a_real_step_add_up_and_none_is_negative(cpu_path, cache_folder):
    engine = engine_on(cpu_path)
    runner = model_runner(engine)
    before = {id(thing): dict(vars(thing)) for thing in (engine, engine.scheduler, engine.recorder)}
    attention = runner.attention
    laps = profile.watched(engine, 4, 20, 60)
    steps = [step for step in engine.timeline.steps if len(step.rows) == 4 == step.num_computed_tokens]
    assert 40 < len(laps) <= len(steps)
    assert all(seconds >= 0 for lap in laps for seconds in lap.values())
    expected = set(parts.PARTS) - {parts.DETOKENISATION}  # it has no tokenizer
    assert all(set(lap) == expected for lap in laps)
    # The record of the engine says the same of the time from step to step.
    ends = [step.start + step.duration for step in steps]
    apart = statistics.median(b - a for a, b in pairwise(ends))
    assert statistics.median(sum(lap.values()) for lap in laps) == pytest.approx(apart, rel=0.3)
    data = profile.results(laps, [sum(lap.values()) for lap in laps])
    assert sum(data["parts_ms"].values()) == pytest.approx(data["step_ms"])
    assert sum(data["shares"].values()) == pytest.approx(1)
    share = data["shares"][parts.SCHEDULER] + data["shares"][parts.BOOKKEEPING]
    assert data["scheduler_and_bookkeeping_share"] == pytest.approx(share)
    assert data["overhead"]["ratio"] == pytest.approx(1)
    # Nothing stays wrapped.
    assert all(vars(thing).keys() == before[id(thing)].keys() for thing in (engine, engine.scheduler, engine.recorder))
    assert runner.attention is attention and "_launch" not in vars(runner)
    assert not any("forward" in vars(module) for module in runner.model.modules())
    assert runner.compiled is None or runner.compiled.seconds is None


SLOWED = {
    "planning": (lambda engine: (engine.scheduler, "schedule"), parts.SCHEDULER),
    "learning": (lambda engine: (engine.scheduler, "computed"), parts.SCHEDULER),
    "leaving": (lambda engine: (engine.scheduler, "update"), parts.SCHEDULER),
    "checking": (lambda engine: (stepping, "check_plan"), parts.SCHEDULER),
    "record of the plan": (lambda engine: (engine.recorder, "launched"), parts.BOOKKEEPING),
    "record of the step": (lambda engine: (engine.recorder, "stepped"), parts.BOOKKEEPING),
    "new tokens": (lambda engine: (engine, "_append"), parts.BOOKKEEPING),
    "tables": (lambda engine: (engine.runner.tables, "of"), parts.PACKING),
    "norm": (lambda engine: (engine.runner.model.norm, "forward"), parts.ELEMENTWISE),
    "first product": (lambda engine: (engine.runner.model.layers[0].self_attn.qkv_proj, "forward"), parts.LINEAR),
    "last product": (lambda engine: (engine.runner.model.layers[0].mlp.down_proj, "forward"), parts.LINEAR),
    "attention": (lambda engine: (sdpa, "_attend_request"), parts.ATTENTION),
    "logits": (lambda engine: (engine.runner.model, "logits"), parts.LOGITS),
    "sampling": (lambda engine: (engine.runner, "sample_from"), parts.SAMPLING),
    "loop": (lambda engine: (engine, "_report"), parts.REST),
}


@pytest.mark.parametrize("name", SLOWED)
def test_what_is_slower_shows_in_its_own_part(name, monkeypatch):
    find, part = SLOWED[name]
    engine = engine_on()
    owner, function = find(engine)
    quick = getattr(owner, function)
    monkeypatch.setattr(owner, function, lambda *args: (spin(0.003), quick(*args))[1])
    taken = profile.results(profile.watched(engine, 4, 20, 50), [1.0])["parts_ms"]
    assert taken[part] >= 3
    assert all(ms < 3 for other, ms in taken.items() if other != part)


def test_watching_changes_no_output():
    engine = engine_on()
    profile.run(engine, 4, 20, 50)
    plain = {name: record.output_hash for name, record in engine.timeline.requests.items()}
    profile.watched(engine, 4, 20, 50)
    assert {name: record.output_hash for name, record in engine.timeline.requests.items()} == plain


def test_an_interrupt_ends_the_whole_profile(monkeypatch):
    """The engine takes Ctrl-C as the end of one run, and a profile has many."""
    engine = build_engine(model="bard", strategy="chunked", max_num_seqs=2, max_model_len=64)
    step, begun = engine._step, []

    def interrupted():
        begun.append(None)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "_step", interrupted)
    for way in (profile.run, profile.watched):
        begun.clear()
        with pytest.raises(KeyboardInterrupt):
            way(engine, 2, 8, 20)


def test_a_model_with_a_tokenizer_spends_time_on_text():
    data = profile.profile(threads=1, num_seqs=2, context=40, steps=50, runs=1)
    assert data["parts_ms"][parts.DETOKENISATION] > 0
    assert data["provenance"]["cpu_path"] == "plain"


def test_many_long_prompts_leave_steps_of_decodes_alone():
    data = profile.profile(threads=1, num_seqs=64, context=100, steps=20, runs=1)
    assert data["num_steps"] >= 20 - profile.PROMPT_STEPS - profile.SKIPPED


def test_slow_steps_do_not_move_the_typical_one():
    laps = [{parts.LINEAR: 0.001, parts.REST: 0.001}] * 8 + [{parts.LINEAR: 5.0}]
    assert profile.results(laps, [0.002])["step_ms"] == pytest.approx(2)


@pytest.mark.parametrize("ordering", waiting.ORDERINGS)
def test_a_step_calls_no_more_functions_when_more_wait(ordering):
    few, many = (waiting.calls_of_a_step(number, ordering) for number in (10, 1_000))
    assert few > 100 and many < 2 * few


def test_a_scan_of_the_queue_would_be_seen(monkeypatch):
    monkeypatch.setattr(
        FirstComeFirstServed, "head", property(lambda self: max(self._queue, key=lambda r: -r.arrival_time))
    )
    few, many = (waiting.calls_of_a_step(number, "fcfs") for number in (10, 1_000))
    assert many > 2 * few


def test_the_steps_of_the_long_queue_are_decodes_of_those_that_run():
    engine = waiting.loaded_engine(100, "priority", steps=5)
    for _ in range(5):
        assert len(engine.step()) == waiting.NUM_SEQS
    assert len(engine.scheduler.waiting) == 100
    last = engine.timeline.steps[-1]
    assert last.num_computed_tokens == waiting.NUM_SEQS and not last.preempted and not last.finished


def test_a_ledger_step_is_one_that_an_engine_could_have_planned():
    step = Step(random_model(TINY, "tiny", CPU, torch.float32), Case([1, 5], [40, 20]))
    batch = step.batch
    assert step.positions.tolist() == [39, *range(15, 20)] and step.newest.tolist() == [0, 5]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 6]
    used = [table.tolist() for table in batch.used_blocks(16)]
    assert sorted(chain(*used)) == list(range(5))
    own = [used[0][39 // 16] * 16 + 39 % 16, *(used[1][p // 16] * 16 + p % 16 for p in range(15, 20))]
    assert batch.slot_mapping.tolist() == own


@needs_compiler
def test_the_ways_of_the_ledger_compute_the_same(cache_folder):
    model = random_model(ledger_config(), "small", CPU, torch.float32)
    step = Step(model, Case([1, 5, 1], [40, 20, 7]))
    with torch.inference_mode():
        plain, compiled = (forward(step) for forward in (plain_step(model.model), compiled_step(model)))
        without = compiled_step(model, "last layer for the newest tokens alone")(step)
    assert plain.shape == compiled.shape == (3, 512)
    assert torch.allclose(plain, compiled, atol=1e-4) and torch.allclose(plain, without, atol=1e-4)
    assert plain.abs().max() > 0.05  # so that this says something


def test_the_ledger_names_every_switch():
    assert set(libraries.SWITCHES) < set(ledger.INVARIANTS) == set(ledger.OVER)


def test_gains_are_of_pairs():
    data = ledger.gains([(1.0, 2.0), (2.0, 2.0), (1.0, 3.0)])
    assert data == {"gain": 2.0, "lowest": 1.0, "highest": 3.0, "with_ms": 1000.0, "without_ms": 2000.0}


def test_in_every_pair_the_slower_way_is_the_slower(monkeypatch):
    monkeypatch.setattr(ledger, "LEAST_S", 0.001)
    order = []

    def way(name, seconds):
        def forward(step):
            order.append(name)
            spin(seconds)
            return torch.tensor([[1.0, 2.0]])

        return forward

    found = ledger._case(way("with", 0.001), way("without", 0.004), None, pairs=7)
    assert found["lowest"] > 1.5 and found["max_difference"] == 0 and found["same_argmax"] == 1
    # Two calls to warm up, two to time, then seven pairs that begin with each in turn.
    assert order[4:] == ["without", "with", "with", "without"] * 3 + ["without", "with"]


def test_a_ledger_of_what_needs_no_compiler(monkeypatch):
    names = ("prepacked weights", "two query rows in half precision")
    monkeypatch.setattr(ledger, "INVARIANTS", {name: ledger.INVARIANTS[name] for name in names})
    monkeypatch.setattr(ledger, "shape_config", lambda name: ledger_config())
    monkeypatch.setattr(ledger, "LEAST_S", 0.0001)
    cases = {"two decodes": Case([1, 1], [20, 30]), "chunk": Case([8], [8])}
    done = []
    data = ledger.ledger("small", threads=1, cases=cases, progress=lambda: done.append(1))
    assert len(done) == 2
    for row in data["rows"]:
        for found in row["cases"].values():
            assert 0 < found["lowest"] <= found["gain"] <= found["highest"]
            assert found["max_difference"] < 0.05 and found["same_argmax"] >= 0.5
    assert {row["name"] for row in data["rows"]} | set(data["missing"]) >= set(names)
    assert "chunk" in profile_table.text(data)
    with pytest.raises(InvalidParameter, match="at least 7 pairs"):
        ledger.ledger("small", pairs=3)


def ledger_config():
    from minibatcher.bench.models import shape_config

    return shape_config(SMALL)


def test_one_query_row_is_what_the_attention_of_decodes_gets(monkeypatch):
    model = random_model(ledger_config(), "small", CPU, torch.bfloat16)
    step, ours, rows = Step(model, Case([1, 4], [9, 4])), sdpa._attend_request, []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, *args, **kwargs: rows.append(q.shape[2]) or attend(q, *args, **kwargs),
    )
    forward = plain_step(model.model)
    with torch.inference_mode():
        two = forward(step)
        assert rows == [2, 4] * 2  # for each of two layers the decode, doubled, and the chunk
        rows.clear()
        one = one_query_row(forward)(step)
    assert rows == [1, 4] * 2
    assert torch.allclose(one, two, atol=0.05)
    assert sdpa._attend_request is ours


def test_the_start_is_timed_and_a_package_that_loads_torch_is_refused(monkeypatch):
    data = start_up.start_up(runs=1)
    assert list(data["commands"]) == ["import minibatcher", "minibatcher --help", "first token"]
    for found in data["commands"].values():
        assert 0 < found["lowest_s"] <= found["median_s"] and found["met"] == (found["median_s"] < found["goal_s"])
    assert "goal" in profile_table.text(data)
    loaded = start_up.LIGHT.replace("import minibatcher", "import torch, minibatcher")
    with pytest.raises(ProcessFailed, match="torch was loaded"):
        start_up.seconds("import minibatcher", ("-c", loaded))


def test_the_command_prints_the_share_of_scheduler_and_bookkeeping(tmp_path, capsys):
    folder, out = write_model(SMALL, tmp_path / "model"), tmp_path / "out.json"
    small = ["--num-seqs", "2", "--context", "30", "--steps", "50", "--runs", "1", "--threads", "1", "--quiet"]
    assert main(["profile", "--model", str(folder), *small, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    data = json.loads(out.read_text(encoding="utf-8"))
    assert f"scheduler + bookkeeping: {data['scheduler_and_bookkeeping_share'] * 100:.1f} % of the step" in printed
    assert data["kind"] == "profile" and data["provenance"]["threads"] == 1
    assert data["provenance"]["hardware"]["omp_wait_policy"] == os.environ.get("OMP_WAIT_POLICY", "unset")


def test_the_command_prints_the_long_queue(capsys):
    assert main(["profile", "--waiting", "--steps", "5", "--runs", "1", "--quiet", "--json", "-"]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert data["waiting"] == [0, 100, 1_000, 10_000] and set(data["orderings"]) == {"fcfs", "priority"}
    assert "10,000" in printed.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--waiting", "--model", "15M"], "--model means nothing with --waiting"),
        (["--start-up", "--steps", "3"], "--steps means nothing with --start-up"),
        (["--ledger", "--runs", "3"], "--runs means nothing with --ledger"),
        (["--pairs", "9"], "--pairs means nothing without --ledger"),
        (["--ledger", "--model", "bard"], "--ledger takes one of the shapes"),
        (["--steps", "10"], "take at least 20 steps"),
        (["--context", "20"], "a context above 50"),
        (["--context", "5000"], "above the model's context"),
    ],
)
def test_what_makes_no_sense_is_told_in_a_sentence(options, words, capsys):
    assert main(["profile", *options]) == 2
    assert words in capsys.readouterr().err
