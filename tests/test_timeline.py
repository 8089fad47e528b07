"""The record of a run: saved, loaded, cut; damaged files are told in sentences."""

import json
from pathlib import Path

import pytest
from fakes import fake_requests as requests
from fakes import fake_run as run
from test_metrics import by_hand

from minibatcher.errors import WorkloadError
from minibatcher.metrics import summarize
from minibatcher.timeline import DeviceSample, RequestRecord, RowRecord, RowState, Timeline


@pytest.mark.parametrize("name", ["static", "dynamic", "continuous", "chunked"])
def test_round_trip(name, tmp_path):
    timeline = run(name, requests(12, seed=3, longest=40))
    timeline.requests["r1"].output_text = "naïve ☕\n"
    timeline.save(tmp_path / "run.json")
    again = Timeline.load(tmp_path / "run.json")
    assert again == timeline
    assert all(type(row) is RowRecord and type(row.state) is RowState for step in again.steps for row in step.rows)
    assert summarize(again) == summarize(timeline)
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "run.json").read_bytes()


def test_file_says_what_it_is(tmp_path):
    by_hand().save(tmp_path / "run.json")
    data = json.loads((tmp_path / "run.json").read_text())
    assert (data["schema"], data["schema_version"], data["clock"]) == ("minibatcher.timeline", 1, "measured")
    assert data["steps"][1]["rows"] == [[0, "a", "decode", 1, 6], [1, "b", "finished", 0, 2]]
    assert data["requests"][0]["output_hash"] == by_hand().requests["a"].output_hash


def test_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    by_hand().save(path)
    before = path.read_bytes()
    whole = Path.write_text

    def half(self, text, **options):
        whole(self, text[: len(text) // 2], **options)
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space left"):
        by_hand().slice(0, 2).save(path)
    assert path.read_bytes() == before


def test_no_nan_in_a_file(tmp_path):
    broken = by_hand()
    broken.steps[0].duration = float("nan")
    with pytest.raises(ValueError):
        broken.save(tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_hash_tells_answers_apart():
    def record(ids):
        return RequestRecord("x", 0.0, 1, output_token_ids=ids).output_hash

    assert record([1, 23]) == record([1, 23])
    assert len({record([1, 23]), record([12, 3]), record([23, 1]), record([123]), record([])}) == 5
    assert len(record([5])) == 16


def test_span():
    timeline = by_hand()
    assert timeline.span == (1.0, 2.75) and timeline.duration == 1.75
    assert timeline.slice(1, 3).span == (1.5, pytest.approx(1.9))
    assert Timeline(header={"max_num_seqs": 2}).span == (0.0, 0.0)


def test_slice_keeps_those_who_ran_or_waited():
    part = by_hand().slice(1, 2)  # 1.5 to 1.6: a and b ran, c waited, d had not come
    assert list(part.requests) == ["a", "b", "c"]
    assert part.header["slice"] == [1, 1] and part.waiting_at(0) == ["c"]
    assert "slice" not in by_hand().header
    assert list(by_hand().slice(3, 4).requests) == ["c", "d"]  # a and b had ended
    assert by_hand().slice(7, 9).steps == []


def test_waiting_at_agrees_with_the_queue_depth():
    timeline = run("continuous", requests(20, seed=5, rate=200), max_num_seqs=3, num_blocks=40)
    assert max(step.num_waiting for step in timeline.steps) > 5
    for position, step in enumerate(timeline.steps):
        assert len(timeline.waiting_at(position)) == step.num_waiting


SAMPLES = [
    DeviceSample(1.05, 0.0, 900, 71.5),
    DeviceSample(1.5, 0.93, None, 301.25),
    DeviceSample(1.55, None, 1 << 40, None),
    DeviceSample(1.6, 1.0, 1000, 640.0),
    DeviceSample(2.3, 0.5, 1000, 600.0),
]


def sampled():
    timeline = by_hand()
    timeline.device_samples = list(SAMPLES)
    return timeline


def test_device_samples_are_kept_and_cut(tmp_path):
    sampled().save(tmp_path / "run.json")
    again = Timeline.load(tmp_path / "run.json")
    assert again == sampled() and all(type(sample) is DeviceSample for sample in again.device_samples)
    assert sampled().slice(1, 2).device_samples == SAMPLES[1:4]  # 1.5 to 1.6
    assert by_hand().device_samples == [] and sampled().slice(7, 9).device_samples == []


def test_file_from_before_there_were_samples(tmp_path):
    path = tmp_path / "run.json"
    by_hand().save(path)
    data = json.loads(path.read_text())
    assert data.pop("device_samples") == []
    path.write_text(json.dumps(data))
    assert Timeline.load(path) == by_hand()


def damage(change):
    def apply(data):
        change(data)
        return json.dumps(data)

    return apply


def drop(data, *path):
    *path, last = path
    for key in path:
        data = data[key]
    del data[last]


def put(data, value, *path):
    *path, last = path
    for key in path:
        data = data[key]
    data[last] = value


DAMAGED = {
    "half written": (lambda data: json.dumps(data)[:-40], "can't read the timeline"),
    "not JSON": (lambda data: "step,start\n0,1.1\n", "can't read the timeline"),
    "deeply nested": (lambda data: "[" * 100_000, "can't read the timeline"),
    "a list": (lambda data: "[1, 2]", "is not a minibatcher timeline"),
    "another file": (damage(lambda d: put(d, "minibatcher.comparison", "schema")), "is not a minibatcher timeline"),
    "from the future": (damage(lambda d: put(d, 99, "schema_version")), "schema version 99.*reads version 1"),
    "no clock": (damage(lambda d: drop(d, "clock")), "damaged timeline: 'clock' is missing"),
    "odd clock": (damage(lambda d: put(d, "sundial", "clock")), "measured, simulated, not 'sundial'"),
    "no slots": (damage(lambda d: drop(d, "header", "max_num_seqs")), "'max_num_seqs' is missing"),
    "no rows": (damage(lambda d: drop(d, "steps", 2, "rows")), "step 2: 'rows' is missing"),
    "no start": (damage(lambda d: drop(d, "steps", 1, "start")), "step 1: .*'start'"),
    "short row": (damage(lambda d: drop(d, "steps", 1, "rows", 0, 4)), "step 1: .*context"),
    "odd state": (damage(lambda d: put(d, "asleep", "steps", 0, "rows", 1, 2)), "step 0: 'asleep' is not a valid"),
    "text as time": (damage(lambda d: put(d, "1.1", "steps", 3, "start")), "step 3: a time must be .*'1.1'"),
    "negative count": (damage(lambda d: put(d, -2, "steps", 3, "kv_tokens")), "step 3: a count must be .*-2"),
    "slot too high": (damage(lambda d: put(d, 3, "steps", 0, "rows", 0, 0)), "step 0: slot 3, but max_num_seqs is 3"),
    "stranger": (damage(lambda d: put(d, "z", "steps", 2, "rows", 1, 1)), "step 2: request 'z' has no record"),
    "step is a number": (damage(lambda d: put(d, 5, "steps", 0)), "step 0: "),
    "request lacks arrival": (damage(lambda d: drop(d, "requests", 1, "arrival_time")), "request 1: .*'arrival_time'"),
    "sample without time": (damage(lambda d: put(d, None, "device_samples", 1, 0)), "device sample 1: a time must be"),
    "short sample": (damage(lambda d: drop(d, "device_samples", 2, 3)), "device sample 2: not enough values"),
    "per cent": (damage(lambda d: put(d, 93, "device_samples", 1, 1)), "device sample 1: .*between 0 and 1, not 93"),
    "odd memory": (damage(lambda d: put(d, "1 GiB", "device_samples", 0, 2)), "device sample 0: a count .*'1 GiB'"),
    "odd power": (damage(lambda d: put(d, [], "device_samples", 3, 3)), r"device sample 3: .*\[\]"),
    "endless time": (damage(lambda d: put(d, 10**400, "requests", 0, "arrival_time")), "request 0: a time must be"),
    "not a number": (
        damage(lambda d: put(d, float("nan"), "header", "seed")),
        "can't read the timeline.*NaN is no JSON",
    ),
    "endless count": (damage(lambda d: put(d, 10**400, "requests", 0, "num_prompt_tokens")), "request 0: a count must"),
    "text as cached": (damage(lambda d: put(d, "x", "requests", 0, "num_cached_tokens")), "request 0: a count must"),
    "text as lost": (damage(lambda d: put(d, [], "requests", 0, "num_lost_tokens")), "request 0: a count must"),
    "a list as reason": (damage(lambda d: put(d, [1], "requests", 0, "finish_reason")), "request 0: .*must be a text"),
    "a number as tenant": (damage(lambda d: put(d, 5, "requests", 1, "tenant")), "request 1: .*must be a text, not 5"),
    "odd priority": (damage(lambda d: put(d, None, "requests", 1, "priority")), "request 1: priority must be"),
    "odd cached blocks": (damage(lambda d: put(d, "", "steps", 0, "kv_cached_blocks")), "step 0: a count must"),
    "odd swapped blocks": (damage(lambda d: put(d, {}, "steps", 0, "num_swapped_blocks")), "step 0: a count must"),
    "odd width": (damage(lambda d: put(d, {}, "steps", 0, "width")), "step 0: a count must"),
    "odd preempted": (damage(lambda d: put(d, True, "steps", 0, "preempted")), "step 0: names .*must be a list"),
    "odd admitted": (damage(lambda d: put(d, [{}], "steps", 0, "admitted")), "step 0: .*must be a text"),
    "header is a list": (damage(lambda d: put(d, [], "header")), "damaged timeline"),
    "odd strategy": (damage(lambda d: put(d, [1], "header", "strategy")), "damaged timeline: .*must be a text"),
    "odd block size": (damage(lambda d: put(d, "16", "header", "block_size")), "a count must .*'16'"),
    "odd notes": (damage(lambda d: put(d, 5, "header", "client_notes")), "must be a list, not 5"),
    "odd server": (damage(lambda d: put(d, True, "header", "server")), "server must be an object, not True"),
    "token changed": (damage(lambda d: put(d, 6, "requests", 0, "output_token_ids", 0)), "request 0: output_hash"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_file_gets_a_sentence(case, tmp_path):
    change, message = DAMAGED[case]
    path = tmp_path / "run.json"
    sampled().save(path)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(WorkloadError, match=message) as caught:
        Timeline.load(path)
    assert "run.json" in str(caught.value) and "__init__" not in str(caught.value)


def test_missing_file_gets_a_sentence(tmp_path):
    with pytest.raises(WorkloadError, match=r"can't read the timeline .*none\.json"):
        Timeline.load(tmp_path / "none.json")


def test_a_timeline_shows_itself_in_a_line():
    timeline = run("chunked", requests(3))
    shown = f"{len(timeline.steps)} steps, 3 requests, {timeline.duration:.4g} s"
    assert repr(timeline) == f"<Timeline: chunked, simulated, {shown}>"
    assert repr(Timeline()) == "<Timeline: None, measured, 0 steps, 0 requests, 0 s>"
