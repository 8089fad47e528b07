"""Runs side by side: the dict, the table, and whether the answers were the same."""

import copy
import json

import pytest
from fakes import fake_requests as requests
from fakes import fake_run as run
from test_metrics import by_hand

from minibatcher.errors import InvalidParameter
from minibatcher.metrics import DEFINITIONS, goodput, summarize
from minibatcher.report import comparison, definitions, html, markdown, table
from minibatcher.report_rows import LABELS, lines_of, number, percent
from minibatcher.timeline import DeviceSample, RequestRecord, Timeline
from minibatcher.utilisation import UTILISATIONS

NAMES = ["static", "dynamic", "continuous", "chunked"]


def measured(name: str):
    """A run as if a model had made it: only then are answers compared."""
    timeline = run(name, requests(14, seed=2, longest=50))
    timeline.clock = "measured"
    return timeline


@pytest.fixture(scope="module")
def timelines():
    return {name: measured(name) for name in NAMES}


def test_json_holds_everything(timelines):
    data = json.loads(json.dumps(comparison(timelines), allow_nan=False))
    assert list(data["strategies"]) == NAMES and data["clock"] == "measured"
    for name, entry in data["strategies"].items():
        assert {key: entry[key] for key in summarize(timelines[name])} == summarize(timelines[name])
        records = list(timelines[name].requests.values())
        assert entry["requests"] == [
            {
                "id": r.request_id,
                "prompt_tokens": r.num_prompt_tokens,
                "output_tokens": len(r.output_token_ids),
                "finish_reason": "length",
                "output_hash": r.output_hash,
            }
            for r in records
        ]
    assert data["definitions"] == DEFINITIONS | UTILISATIONS and data["same_work"] == []
    assert data["header"]["workload"] == "fake" and "strategy" not in data["header"]
    assert data["differing"] == ["kv_layout", "block_size", "num_blocks"]
    assert data["strategies"]["chunked"]["header"] == {
        "strategy": "chunked", "kv_layout": "paged", "block_size": 16, "num_blocks": 200,
    }  # fmt: skip


def test_identical_answers(timelines):
    data = comparison(timelines)
    assert data["answers_identical"] is True and data["differences"] == [] and data["num_answers_compared"] == 14
    assert "all strategies gave identical tokens for each of 14 requests" in table(data)
    hashes = [[r["output_hash"] for r in entry["requests"]] for entry in data["strategies"].values()]
    assert hashes[0] == hashes[1] == hashes[2] == hashes[3] and len(set(hashes[0])) > 7


def test_differing_answers_say_who_and_where(timelines):
    changed = copy.deepcopy(timelines)
    ids = changed["chunked"].requests["r3"].output_token_ids
    right, ids[2] = ids[2], 5
    del changed["continuous"].requests["r4"].output_token_ids[4:]
    data = comparison(changed)
    assert data["answers_identical"] is False
    longer = timelines["static"].requests["r4"].output_token_ids[4]
    assert data["differences"] == [
        {"id": "r4", "strategy": "continuous", "reference": "static", "position": 4, "token": None, "expected": longer},
        {"id": "r3", "strategy": "chunked", "reference": "static", "position": 2, "token": 5, "expected": right},
    ]
    text = " ".join(table(data).split())
    assert "Answers DIFFER for 2 of 14 requests" in text
    assert f"r3 under chunked at output token 2 (5, static: {right})" in text


def test_objectives_and_price_add_their_rows(timelines):
    data = comparison(timelines, objectives={"ttft_ms": 400.0, "tpot_ms": 20.0}, price_per_hour=3.0)
    for name, entry in data["strategies"].items():
        assert entry["goodput"] == goodput(timelines[name], ttft_ms=400.0, tpot_ms=20.0)
        assert entry["cost_per_request"] == pytest.approx(3.0 * timelines[name].duration / 3600 / 14)
    text = table(data)
    assert "Within objectives: ttft ≤ 400 ms, tpot ≤ 20 ms" in text and "cost per million output tokens" in text
    assert "Within objectives" not in table(comparison(timelines)) and "cost" not in table(comparison(timelines))


def test_simulated_answers_are_placeholders_and_not_compared():
    data = comparison({name: run(name, requests(6, seed=2, longest=9)) for name in NAMES})
    assert data["answers_identical"] is None and "Answers" not in table(data)


def test_strategies_that_did_the_same_are_named():
    runs = {name: run(name, requests(8, seed=2, rate=1e9, longest=9)) for name in NAMES}
    text = " ".join(table(comparison(runs)).split())
    assert "static and dynamic did the same work here." in text and "noise" not in text


def notes(runs, **own: list) -> str:
    """Of runs whose headers say what varies: option → its value in each run."""
    for i, timeline in enumerate(runs.values()):
        timeline.header |= {"varied": list(own)} | {option: values[i] for option, values in own.items()}
    return " ".join(table(comparison(runs)).rpartition("─")[2].split())


def twins(*names: str, rate: float = 1e9):
    return {name: run("chunked", requests(8, seed=2, rate=rate, longest=9)) for name in names}


def test_runs_that_served_in_the_same_order_say_why():
    assert notes(twins("a", "b")) == "a and b did the same work here."
    orders = {"ordering": ["fcfs", "priority"]}
    one_class = "fcfs and priority served in the same order: all requests are of one class."
    assert notes(twins("fcfs", "priority"), **orders) == one_class
    one_tenant = "fcfs and fair-share served in the same order: all requests are of one tenant."
    assert notes(twins("fcfs", "fair-share"), ordering=["fcfs", "fair-share"]) == one_tenant
    runs = twins("fcfs", "priority")
    for timeline in runs.values():
        timeline.requests["r1"].priority = 2
    assert notes(runs, **orders) == "fcfs and priority served in the same order."
    alone = notes(twins("fcfs", "priority", rate=0.01), **orders)
    assert alone.endswith("same order: nobody waited (raise --request-rate; inf lets all arrive at once).")


def test_another_order_is_other_work_though_the_sums_are_the_same():
    runs = twins("fcfs", "priority")
    step = next(step for step in runs["priority"].steps if len(step.admitted) > 1)
    step.admitted.reverse()
    assert comparison(runs)["same_work"] == [] and notes(runs, ordering=["fcfs", "priority"]) == ""
    runs = twins("fcfs", "priority")
    step = next(step for step in runs["priority"].steps if len(step.rows) > 1)
    step.rows[:2] = step.rows[0]._replace(request_id=step.rows[1].request_id), step.rows[1]
    assert comparison(runs)["same_work"] == []


def test_memory_that_was_never_short_is_told():
    short = "recompute and swap did the same work here: nobody was preempted (lower --kv-cache-tokens)."
    assert notes(twins("recompute", "swap"), preemption=["recompute", "swap"]) == short
    preempted = twins("recompute", "swap")
    for timeline in preempted.values():
        timeline.steps[3].preempted.append("r0")
    assert notes(preempted, preemption=["recompute", "swap"]) == "recompute and swap did the same work here."
    assert "nobody was preempted" in notes(twins("a", "b"), admission=["worst-case", "preempt"])
    assert "nobody waited" in notes(twins("a", "b", rate=0.01), admission=["worst-case", "preempt"])


def test_what_differs_is_told_once_a_line(timelines):
    runs = copy.deepcopy(timelines)
    runs["chunked"].header |= {"watermark": 0.5, "cuda_graph_sizes": [1, 2]}
    told = table(comparison(runs)).splitlines()[-3:]
    assert told == [
        "KV memory: 4 slots of 800 tokens (static, dynamic), 200 blocks of 16 tokens (continuous,",
        "chunked).",
        "Not the same in all runs: watermark: 0.0 (static, dynamic, continuous), 0.5 (chunked).",
    ]


def test_padding_has_no_rows_where_there_is_none(timelines):
    assert "rows of ended requests" in table(comparison(timelines))
    ragged = table(comparison({name: timelines[name] for name in ("continuous", "chunked")}))
    assert "padding" not in ragged and "rows of ended requests" not in ragged


def turned_away(moment: float, num_slots: int = 2) -> Timeline:
    """Two are served from 1 to 2 and from 1 to 3; a third finds the queue full at `moment`."""
    full = "the queue has no room for request 'c': need 1 requests, have 0; try again later, or raise it"
    records = [
        RequestRecord("a", 0.0, 3, 1, 1.0, [2.0], 2.0, "length"),
        RequestRecord("b", 0.0, 3, 1, 1.0, [3.0], 3.0, "length"),
        RequestRecord("c", 0.0, 3, finish_time=moment, finish_reason="refused", error=full),
        RequestRecord("d", 0.0, 3, finish_time=0.5, finish_reason="refused", error="tenant 'd' has asked for as much "),
    ]
    header = {"max_num_seqs": num_slots, "block_size": 4, "num_blocks": 8}
    return Timeline("simulated", header, [], {r.request_id: r for r in records})


@pytest.mark.parametrize("moment, free", [(0.5, 1), (1.0, 1), (1.5, 0), (2.0, 1), (2.5, 1)])
def test_a_queue_that_is_full_beside_free_slots_is_told(moment, free):
    data = comparison({"one": turned_away(moment)})
    assert data["strategies"]["one"]["num_refused_beside_free_slots"] == free
    told = "A full queue turned requests away although slots were free (1): who arrives between two steps waits"
    assert (told in " ".join(table(data).split())) is bool(free)
    two = table(comparison({"one": turned_away(moment), "other": turned_away(0.1)}))
    assert (f"free ({'1 under one, ' if free else ''}1 under other):") in " ".join(two.split())


def test_what_varies_on_purpose_is_no_warning(timelines):
    runs = {name: copy.deepcopy(timelines["chunked"]) for name in ("worst-case", "preempt")}
    for name, timeline in runs.items():
        timeline.header |= {"admission": name, "varied": ["admission"]}
    text = " ".join(table(comparison(runs, setting="The pool is small.")).split())
    assert "strategy chunked" in text and "The pool is small." in text and "relative to worst-case" in text
    assert "these are not the same" not in text and "all runs gave identical tokens" in text
    runs["preempt"].header["watermark"] = 0.25
    text = " ".join(table(comparison(runs)).split())
    assert "Not the same in all runs: watermark: 0.0 (worst-case), 0.25 (preempt)." in text
    assert "KV memory" not in text
    assert "The pool is small." in markdown(comparison(runs, setting="The pool is small."))
    assert "<br>The pool is small.</caption>" in html(comparison(runs, setting="The pool is small."))


def test_missing_request_is_a_difference(timelines):
    changed = copy.deepcopy(timelines)
    del changed["dynamic"].requests["r9"]
    data = comparison(changed)
    assert data["answers_identical"] is False
    assert "r9 was not served by dynamic" in table(data)


def test_aborted_answers_are_not_compared(timelines):
    changed = copy.deepcopy(timelines)
    record = changed["chunked"].requests["r3"]
    record.finish_reason = "abort"
    del record.output_token_ids[1:], record.token_times[1:]
    assert comparison(changed)["answers_identical"] is True
    only = {name: changed[name] for name in ("static", "chunked")}
    assert comparison(only)["num_answers_compared"] == 13
    assert any(line.split()[-4:] == ["0", "0", "0", "1"] for line in table(comparison(changed)).splitlines())


def test_solo_is_the_reference(timelines):
    changed = copy.deepcopy({"chunked": timelines["chunked"], "solo": measured("solo")})
    assert comparison(changed)["answers_identical"] is True
    changed["chunked"].requests["r2"].output_token_ids[0] += 1
    assert comparison(changed)["differences"][0]["reference"] == "solo"


def test_one_run_has_nothing_to_compare(timelines):
    data = comparison({"static": timelines["static"]})
    assert data["answers_identical"] is None
    assert "Answers" not in table(data) and "relative to" not in table(data)


def test_table_is_aligned_and_narrow(timelines):
    text = table(comparison(timelines))
    lines = text.splitlines()
    assert lines[0].startswith("MEASURED (wall clock) · 14 requests")
    assert max(map(len, lines)) <= 100
    head = next(line for line in lines if "static" in line and "chunked" in line)
    ends = [head.index(name) + len(name) for name in NAMES]
    speeds = next(line for line in lines if line.startswith("output tokens/s"))
    for end, name in zip(ends, NAMES):
        value = summarize(timelines[name])["output_tokens_per_s"]
        assert speeds[:end].split()[-1] == f"{value:.0f}" and speeds[end : end + 1] in ("", " ")
    ratio = (
        summarize(timelines["chunked"])["output_tokens_per_s"] / summarize(timelines["static"])["output_tokens_per_s"]
    )
    assert ratio > 1.2
    assert next(line for line in lines if "relative to static" in line).rstrip().endswith(f"{ratio:.2f} ×")
    for heading in (
        "Queue time, ms (n = 14)",
        "TTFT, queue included, ms (n = 14)",
        "ITL, ms (n =",
        "TPOT, ms",
        "E2EL, ms",
    ):
        assert any(line.startswith(heading) for line in lines), heading


def test_measured_says_so_and_missing_samples_show_a_dash():
    run = by_hand()
    run.header |= {"workload": {"name": "chat"}, "hardware": {"device": "Some CPU"}, "dtype": "float32"}
    run.requests = {"d": run.requests["d"]}
    text = table(comparison({"by hand": run}))
    assert text.startswith("MEASURED (wall clock) · 1 request · workload chat · 3 slots · Some CPU · float32")
    assert text.splitlines()[text.splitlines().index("TTFT, queue included, ms (n = 0)") + 1].split() == [
        "mean",
        "–",
    ]


def test_explanations(timelines):
    data = comparison(timelines)
    assert "inter-token latency" not in table(data)
    explained = " ".join(table(data, explain=True).split())
    for name, sentence in (DEFINITIONS | UTILISATIONS).items():
        called = f"{LABELS[name]} ({name}): {sentence}" if name in LABELS else f"{name}: {sentence}"
        assert called in explained
        assert called in " ".join(definitions(70).split())
    assert "slot occupancy, by step (slot_occupancy): slots" in explained and "model FLOPs (mfu): model" in explained
    assert set(LABELS) <= set(data["definitions"])
    shown = {label.strip() for label, _ in lines_of(data)}
    for name in ("output_tokens_per_s", "makespan_s", "slot_occupancy", "padding_share", "queue_depth"):
        assert LABELS[name] in shown
    assert max(map(len, definitions(70).splitlines())) <= 70


def test_markdown_and_notebook_forms(timelines):
    data = comparison(timelines)
    rows = [line for line in markdown(data).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {6}
    assert "| | static | dynamic | continuous | chunked |" in rows
    assert data._repr_markdown_() == markdown(data) and str(data) == table(data)
    assert markdown(json.loads(json.dumps(data))) == markdown(data)


def test_bad_comparisons_get_a_sentence(timelines):
    with pytest.raises(InvalidParameter, match="at least one run"):
        comparison({})
    simulated = run("chunked", requests(6, seed=2, longest=9))
    assert table(comparison({"chunked": simulated})).startswith("SIMULATED (virtual time, no model ran) · 6 requests")
    with pytest.raises(InvalidParameter, match="measured and simulated runs can't stand in one table"):
        comparison({"static": timelines["static"], "chunked": simulated})


def test_few_digits():
    values = {
        0: "0",
        0.04123: "0.0412",
        0.99999: "1.00",
        7.346: "7.35",
        41.23: "41.2",
        99.96: "100",
        9.996: "10.0",
        9.994: "9.99",
        999.6: "1,000",
        1207.4: "1,207",
    }
    assert {value: number(value, 3) for value in values} == values
    assert number(None, 3) == "–" and number(14.4, 2) == "14"
    assert [percent(share) for share in (None, 0, 0.004, 0.126, 1)] == ["–", "0 %", "<1 %", "13 %", "100 %"]


def with_samples(name: str, samples: list[DeviceSample]):
    timeline = measured(name)
    timeline.device_samples = samples
    return timeline


def test_gpu_rows_where_something_was_sampled():
    silent, end = measured("static"), measured("continuous").span[1]
    sampled = with_samples(
        "continuous",
        [
            DeviceSample(0.0, 0.5, 3 << 30, 100.0),
            DeviceSample(end / 4, 0.75, 7 << 30, 300.0),
            DeviceSample(end + 1.0, 1.0, 5 << 30, 300.0),
        ],
    )
    data = json.loads(json.dumps(comparison({"static": silent, "continuous": sampled}), allow_nan=False))
    run, tokens = data["strategies"]["continuous"], data["strategies"]["continuous"]["num_output_tokens"]
    assert run["gpu_busy_share"] == 0.75 and run["gpu_memory_peak_gib"] == 7
    assert run["gpu_power_w"] == pytest.approx(275)  # 200 W for a quarter of the run, 300 W for the rest
    assert run["joules_per_output_token"] == pytest.approx(275 * end / tokens)
    assert not any(key.startswith(("gpu", "joules")) for key in data["strategies"]["static"])
    shown = markdown(data)
    assert "| **GPU, sampled during the run** |" in shown
    for label, cell in {"any kernel at all (nvidia-smi)": "75 %", "power, mean, W": "275", "peak, GiB": "7.00"}.items():
        assert f"{label} | – | {cell} |" in shown


def test_no_gpu_rows_without_samples(timelines):
    text = table(comparison(timelines))
    assert "GPU" not in text and "joule" not in text and "energy" not in text


def test_a_gpu_that_could_not_be_sampled_is_told(timelines):
    runs = copy.deepcopy(timelines)
    for timeline in runs.values():
        timeline.header["gpu_monitor"] = "the GPU is split (MIG)"
    assert "GPU: the GPU is split (MIG)." in table(comparison(runs))
