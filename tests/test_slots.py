"""What the slot animation is given, that it is what happened; and what it says to timelines that it can't show."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from fakes import fake_engine, fake_requests, fake_run

from minibatcher.cli import main
from minibatcher.errors import InvalidParameter
from minibatcher.metrics import summarize
from minibatcher.timeline import RequestRecord, RowRecord, RowState, StepRecord, Timeline
from minibatcher.viz.plots import describe, slots_text
from minibatcher.viz.slots import animate
from minibatcher.viz.trace import FULL, REQUEST_FIELDS, STATES, columns, trace

STRATEGIES = ("static", "dynamic", "continuous", "chunked")


@pytest.fixture(scope="module")
def timelines() -> dict[str, Timeline]:
    return {name: fake_run(name, fake_requests(40)) for name in STRATEGIES}


def crowded() -> Timeline:
    """A run that preempts."""
    engine = fake_engine(
        "chunked", num_blocks=30, block_size=4, max_model_len=100, max_num_seqs=6, max_num_batched_tokens=64
    )
    return engine.run(fake_requests(40, rate=100, longest=30))


def step(index: int, rows: list[RowRecord], **changes) -> StepRecord:
    facts = dict(
        index=index, start=float(index), duration=1.0, rows=rows, width=None, num_computed_tokens=0, num_waiting=0,
        wait=None, admitted=[], finished=[], preempted=[], kv_used_blocks=0, kv_free_blocks=0, kv_tokens=0,
    )  # fmt: skip
    return StepRecord(**facts | changes)


def by_hand(*steps: StepRecord, slots: int = 3) -> Timeline:
    return Timeline(header={"max_num_seqs": slots}, steps=list(steps))


def told_of(*requests: RequestRecord) -> Timeline:
    timeline = by_hand(step(0, []))
    timeline.requests = {r.request_id: r for r in requests}
    return timeline


def cells(arrays: dict, num_columns: int, num_slots: int) -> list[list]:
    """The picture, column by column: (request, state, share) or None for each slot."""
    grid = [[None] * num_slots for _ in range(num_columns)]
    names = ("slot", "first", "last", "request", "state", "share")
    for slot, first, last, *cell in zip(*(arrays[f"run_{name}"].tolist() for name in names)):
        for column in range(first, last):
            assert grid[column][slot] is None, "two runs in one place"
            grid[column][slot] = tuple(cell)
    return grid


@pytest.mark.parametrize("name", STRATEGIES)
def test_counts_of_a_trace_are_those_of_the_metrics(timelines, name):
    timeline = timelines[name]
    s, (data, arrays) = summarize(timeline), trace(timeline)
    places = arrays["steps"].sum() * data["slots"]
    assert arrays["output"].sum() == s["num_output_tokens"] > 0
    assert arrays["working"].sum() / places == pytest.approx(s["slot_occupancy"])
    assert arrays["held"].sum() / places == pytest.approx(s["batch_fill"])
    assert (arrays["computed"] - arrays["useful"]).sum() == s["num_padding_tokens"]
    assert data["end"] - data["origin"] == pytest.approx(s["makespan_s"])
    assert arrays["waiting"].max() == s["queue_depth"]["max"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_trace_shows_in_each_step_what_each_slot_did(timelines, name):
    timeline = timelines[name]
    data, arrays = trace(timeline)
    assert data["bin"] == 1
    ids = {request[0]: request[1] for request in data["requests"]}
    grid = cells(arrays, len(timeline.steps), timeline.num_slots)
    for column, record in zip(grid, timeline.steps):
        found = {slot: (ids[c[0]], STATES[c[1]]) for slot, c in enumerate(column) if c}
        assert found == {row.slot: (row.request_id, row.state) for row in record.rows}
        for row in record.rows:
            padded = record.width and 0 < row.num_tokens < record.width
            share = row.num_tokens / record.width if padded else 1
            assert column[row.slot][2] / FULL == pytest.approx(share, abs=1 / FULL)


def test_a_long_run_is_put_in_fewer_columns_without_losing_a_count(timelines):
    timeline = timelines["continuous"]
    whole, (data, arrays) = trace(timeline)[1], trace(timeline, max_columns=50)
    assert data["bin"] == math.ceil(len(timeline.steps) / 50) and len(arrays["start"]) <= 50
    for name in ("steps", "working", "held", "useful", "computed", "output"):
        assert arrays[name].sum() == whole[name].sum(), name
    assert arrays["start"][0] == whole["start"][0] and arrays["end"][-1] == whole["end"][-1]
    cells(arrays, len(arrays["start"]), timeline.num_slots)


def test_a_slot_that_mostly_idled_in_a_column_is_idle_there():
    decode = RowRecord(0, "a", RowState.DECODE, 1, 5)
    prefill = decode._replace(state=RowState.PREFILL, num_tokens=4)
    timeline = by_hand(
        step(0, [prefill]), step(1, [decode]), step(2, [decode]), step(3, [decode]), step(4, []), step(5, [])
    )
    grid = cells(trace(timeline, max_columns=2)[1], 2, 3)
    assert STATES[grid[0][0][1]] is RowState.DECODE and grid[1] == [None] * 3


def test_pieces_put_together_are_the_whole(timelines):
    timeline = timelines["static"]
    data, whole = trace(timeline)
    pieces, messages, first = [], [], 0
    for stop in (1, 2, 40, len(timeline.steps)):
        part = Timeline(timeline.clock, timeline.header, timeline.steps[:stop], timeline.requests)
        message, arrays = columns(part, first)
        assert message["kind"] == "append" and message["first"] == first
        pieces.append(arrays)
        messages.append(message)
        first = stop
    for name in ("start", "end", "steps", "working", "useful", "computed", "output", "waiting", "kv"):
        assert np.concatenate([piece[name] for piece in pieces]).tolist() == whole[name].tolist(), name
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in whole}
    size = (len(timeline.steps), timeline.num_slots)
    assert cells(joined, *size) == cells(whole, *size)
    stories = {request[0]: request for message in messages for request in message["requests"]}
    assert {i: r[:12] for i, r in stories.items()} == {r[0]: r[:12] for r in data["requests"]}


def test_only_requests_that_can_have_changed_are_sent_again(timelines):
    timeline = timelines["continuous"]
    message, _ = columns(timeline, len(timeline.steps) - 5)
    since = timeline.steps[-6].start
    assert {r[1] for r in message["requests"]} == {
        name for name, r in timeline.requests.items() if r.finish_time >= since
    }
    assert len(message["requests"]) < len(timeline.requests) / 2


def test_stories_tell_when_and_why(timelines):
    data, _ = trace(timelines["static"])
    stories = [dict(zip(REQUEST_FIELDS, request)) for request in data["requests"]]
    for story in stories:
        record = timelines["static"].requests[story["id"]]
        assert (story["arrival"], story["scheduled"]) == (record.arrival_time, record.first_scheduled_time)
        assert (story["first_token"], story["last_token"]) == (record.token_times[0], record.token_times[-1])
        assert (story["finish"], story["reason"]) == (record.finish_time, "length")
        assert (story["output_tokens"], story["prompt_tokens"]) == (record.num_output_tokens, record.num_prompt_tokens)
    assert any("batch already launched" in story["why"] for story in stories)
    assert any(story["why"].startswith("behind others in the queue: ") for story in stories)
    reasons = [r[-1] for r in trace(crowded())[0]["requests"]]
    assert any("not enough free KV blocks (needs" in reason for reason in reasons)


def test_a_preemption_is_marked_where_the_request_sat():
    timeline = crowded()
    data, arrays = trace(timeline)
    ids = {request[0]: request[1] for request in data["requests"]}
    marks = list(zip(*(arrays[f"mark_{name}"].tolist() for name in ("column", "slot", "request"))))
    assert len(marks) == summarize(timeline)["num_preemptions"] > 5
    for column, slot, request in marks:
        assert ids[request] in timeline.steps[column].preempted
        held = [row.slot for s in timeline.steps[:column] for row in s.rows if row.request_id == ids[request]]
        assert held[-1] == slot


def test_rows_written_by_hand_need_no_records_and_a_header_of_one_entry():
    timeline = by_hand(step(0, [RowRecord(2, "mine", RowState.DECODE, 1, 1)]))
    data, _ = trace(timeline)
    assert [r[1] for r in data["requests"]] == ["mine"] and len(data["requests"][0]) == len(REQUEST_FIELDS)
    json.dumps(data, allow_nan=False)
    assert "slot  2 d" in animate(timeline).text


@pytest.mark.parametrize(
    ("timeline", "words"),
    [
        ({"steps": []}, "needs a Timeline"),
        (Timeline(), "max_num_seqs"),
        (by_hand(slots=0), "at least 1, not 0"),
        (by_hand(step(0, [RowRecord(3, "a", RowState.DECODE, 1, 1)])), "slot 3"),
        (by_hand(step(0, []), step(1, [], start=-5.0)), "before the step ahead"),
        (by_hand(step(0, [], duration=math.nan)), "takes nan s"),
        (by_hand(step(0, [], duration=-1.0)), "takes -1.0 s"),
        (by_hand(step(0, [RowRecord(0, "a", "resting", 1, 1)])), "known: prefill, decode"),
        (by_hand(step(0, [], num_computed_tokens=2**40)), "more tokens than"),
        (told_of(RequestRecord("a", math.inf, 3)), "'a' has inf among its times"),
        (told_of(RequestRecord("a", 0.0, 3, token_times=[1.0, math.nan])), "'a' has nan among its times"),
    ],
)
def test_a_malformed_timeline_gets_a_sentence(timeline, words):
    with pytest.raises(InvalidParameter, match=words):
        animate({"run": timeline})


def test_malformed_options_get_a_sentence(timelines):
    timeline = timelines["static"]
    for wrong in ({"axis": "minutes"}, {"columns": 0}, {"max_columns": 0}, {"max_columns": 2.5}):
        with pytest.raises(InvalidParameter, match=r"minutes|at least 1"):
            animate(timeline, **wrong)
    with pytest.raises(InvalidParameter, match="at least one run"):
        animate({})
    with pytest.raises(InvalidParameter, match="-1"):
        columns(timeline, -1)


def test_an_animation_stands_still_where_nothing_runs(timelines):
    one = animate(timelines["static"])
    assert one.data["axis"] == "steps" and one.alt == describe(timelines["static"])
    assert one.text == slots_text(timelines["static"])
    bundle = one._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert "data:image/png;base64," in bundle["text/html"] and "Slots of a run" in bundle["text/html"]
    several = animate(timelines)
    assert several.data["axis"] == "seconds" and [run["title"] for run in several.data["runs"]] == list(timelines)
    assert several.text.count("One letter is") == 4
    assert len(several.page("four")) < 1_000_000


@pytest.mark.parametrize("timeline", [by_hand(), by_hand(step(0, [RowRecord(0, "a", RowState.PREFILL, 3, 3)]))])
def test_empty_and_one_step_have_a_still_picture_too(timeline):
    assert "<img" in animate(timeline).html()
    assert "<img" in animate({"a": timeline, "b": timeline}).html()


def test_a_request_that_never_ran_is_in_the_queue():
    timeline = by_hand(step(0, []))
    timeline.requests["late"] = RequestRecord("late", arrival_time=0.0, num_prompt_tokens=4)
    story = dict(zip(REQUEST_FIELDS, trace(timeline)[0]["requests"][0]))
    assert story["scheduled"] is None and story["finish"] is None and story["output_tokens"] == 0


def test_any_names_will_do(timelines):
    film = animate({1: timelines["static"], 8.5: timelines["chunked"]})
    assert [run["title"] for run in film.data["runs"]] == ["1", "8.5"]
    number = by_hand(step(0, [RowRecord(0, "9" * 5000, RowState.DECODE, 1, 1)]))
    assert "9" * 5000 in animate(number).html()


def test_a_run_that_was_stopped_says_so(timelines):
    run = by_hand(step(0, []))
    assert trace(run)[0]["interrupted"] is False
    run.header["interrupted"] = True
    assert trace(run)[0]["interrupted"] is True


def test_two_results_do_not_go_into_one_file(tmp_path, capsys):
    path = tmp_path / "runs.html"
    assert main(["simulate", "--num-requests", "2", "--html", str(path), "--json", f"{tmp_path}/./runs.html"]) == 2
    assert "a file of its own" in capsys.readouterr().err and not path.exists()


def test_the_command_writes_a_page_that_stands_alone(tmp_path, capsys):
    path = tmp_path / "runs.html"
    args = ["simulate", "--num-requests", "30", "--max-num-seqs", "8", "--quiet", "--html", str(path)]
    assert main(args) == 0
    page = path.read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert "SIMULATED" in printed and "SIMULATED" in page and len(page) < 5_000_000
    assert page.count("<td>") > 50 and "output tokens/s" in page and "Calibration" in page
    for loading in ("<link", "src=http", 'src="http', "import(", "@import", "fetch("):
        assert loading not in page


def test_a_page_goes_into_html_only_and_needs_every_step(tmp_path, capsys):
    assert main(["simulate", "--html", str(tmp_path / "runs.png")]) == 2
    assert "--html writes .html" in capsys.readouterr().err
    many = ["simulate", "--num-requests", "10001", "--html", str(tmp_path / "runs.html"), "--quiet"]
    assert main(many) == 2
    assert "--html" in capsys.readouterr().err
