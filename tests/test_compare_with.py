"""A saved run beside new ones: the same requests in one table, and what must not be compared is not."""

from __future__ import annotations

import json

import pytest
from fakes import fake_requests, fake_run

pytest.importorskip("aiohttp")
pytest.importorskip("torch")

from fake_openai import MODEL, event, fake_server, token, usage

from minibatcher.cli import main
from minibatcher.errors import WorkloadError
from minibatcher.metrics import summarize
from minibatcher.replay.run import replay
from minibatcher.replay.saved import beside, load_runs
from minibatcher.report import comparison, html, markdown, table
from minibatcher.timeline import RequestRecord, Timeline
from minibatcher.workload import Workload, WorkloadRequest

SMALL = ["--num-requests", "5", "--max-model-len", "96", "--quiet"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder with the timelines of a run of compare on the bundled model, chunked.json and static.json."""
    folder = tmp_path_factory.mktemp("compared")
    assert main(["compare", *SMALL, "--strategies", "static", "chunked", "--timeline", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def bard(compared):
    """A server that knows the bundled model's answers by heart: prompt → token ids and texts of compare's run."""
    from minibatcher.model.loader import load_model
    from minibatcher.prompts import special_token_ids, synthetic_prompt

    model = load_model("bard")
    special = special_token_ids(model.config, model.tokenizer)
    by_heart = {}
    for record in Timeline.load(compared / "chunked.json").requests.values():
        prompt = synthetic_prompt(record.num_prompt_tokens, model.config.vocab_size, 0, record.request_id, special)
        by_heart[tuple(prompt)] = record
    entry = MODEL | {"id": "bard", "vocab_size": model.config.vocab_size, "special_token_ids": list(special)}
    return entry, by_heart


def knows(by_heart, ids: bool = True, spoil: bool = False):
    async def answer(body):
        record = by_heart.get(tuple(body["prompt"]))
        told = record.output_token_ids if record else range(10, 10 + body["max_tokens"])
        for i, token_id in enumerate(told):
            spoilt = token_id + (spoil and i == 1)
            text = (record.output_text if record and i == 0 else "") if not ids else "x"
            fields = {"token_ids": [spoilt]} if ids else {}
            yield event(choices=[token(i, body, text=text, **fields)], usage=usage(body, i + 1))

    return answer


def test_replay_and_compare_agree_and_stand_in_one_table(bard, compared, tmp_path, capsys):
    entry, by_heart = bard
    served = tmp_path / "served.json"
    with fake_server(knows(by_heart), models=[entry]) as server:
        assert main(["replay", "--base-url", server.url, *SMALL, "--json", str(served)]) == 0
    capsys.readouterr()
    out = tmp_path / "both.json"
    words = ["compare", *SMALL, "--strategies", "chunked", "--json", str(out)]
    assert main([*words, "--with", str(served), "--with", str(compared / "static.json")]) == 0
    printed = capsys.readouterr().out
    data = json.loads(out.read_text(encoding="utf-8"))
    assert list(data["strategies"]) == ["chunked", "minibatcher", "static"]
    assert data["other_requests"] == {} and data["answers_identical"] is True and data["num_answers_compared"] == 5
    first, *others = ([(r["id"], r["output_tokens"], r["output_hash"]) for r in run["requests"]]
                      for run in data["strategies"].values())  # fmt: skip
    assert all(run == first for run in others)
    assert "all runs gave identical tokens for each of 5 requests." in printed
    assert "NOT THE SAME" not in printed and "did the same work" not in printed
    # what nobody knows of a server is never 0
    steps = next(line for line in printed.splitlines() if line.strip().startswith("steps"))
    assert steps.split()[1] != "–" and steps.split()[2] == "–" and steps.split()[3] != "–"
    queue = printed[printed.index("Queue time") :].splitlines()[1]
    assert queue.split()[2] == "–"
    assert "Not the same in all runs: base_url" not in printed and "max_num_seqs" not in printed


def test_other_answers_and_other_requests_are_told(bard, tmp_path, capsys):
    entry, by_heart = bard
    spoilt, text, other = (tmp_path / name for name in ("spoilt.json", "text.json", "other.json"))
    with fake_server(knows(by_heart, spoil=True), models=[entry]) as server:
        assert main(["replay", "--base-url", server.url, *SMALL, "--json", str(spoilt), "--name", "spoilt"]) == 0
    with fake_server(knows(by_heart, ids=False), models=[entry]) as server:
        assert main(["replay", "--base-url", server.url, *SMALL, "--json", str(text), "--name", "text"]) == 0
        words = ["--seed", "1", "--json", str(other), "--name", "other"]
        assert main(["replay", "--base-url", server.url, *SMALL, *words]) == 0
    capsys.readouterr()
    files = [word for path in (spoilt, text, other) for word in ("--with", str(path))]
    assert main(["compare", *SMALL, "--strategies", "chunked", *files]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Answers DIFFER for" in printed and "under spoilt at output token 1" in printed
    assert "under text" not in printed and "under other" not in printed
    assert "NOT THE SAME REQUESTS as chunked" in printed and "other: seed 1, not 0" in printed
    assert main(["compare", *SMALL, "--strategies", "chunked", "--with", str(text)]) == 0
    assert "(as text with text, where token ids are not told)" in " ".join(capsys.readouterr().out.split())


def test_a_file_that_is_no_measured_run_is_refused(tmp_path, capsys):
    simulated = fake_run("chunked", fake_requests(3))
    assert simulated.clock == "simulated"
    simulated.save(tmp_path / "simulated.json")
    with pytest.raises(WorkloadError, match="simulated"):
        load_runs(str(tmp_path / "simulated.json"))
    (tmp_path / "table.json").write_text(json.dumps({"schema": "minibatcher.comparison"}), encoding="utf-8")
    with pytest.raises(WorkloadError, match="--timeline"):
        load_runs(str(tmp_path / "table.json"))
    (tmp_path / "list.json").write_text("[1, 2]", encoding="utf-8")
    for name in ("list.json", "absent.json", "simulated.json"):
        assert main(["compare", *SMALL, "--with", str(tmp_path / name)]) == 2
        told = capsys.readouterr().err
        assert name in told and "Traceback" not in told
    assert main(["compare", "--find-capacity", "--slo-ttft-ms", "9", "--with", "x.json"]) == 2
    assert "--with" in capsys.readouterr().err


def test_labels_are_free(compared):
    path = str(compared / "chunked.json")
    assert list(beside(["static"], [path])) == ["chunked"]
    assert list(beside(["chunked"], [path, path])) == ["chunked (chunked)", "chunked (chunked 2)"]


def by_client(**texts: str) -> Timeline:
    """A replay of requests that were answered in text."""
    timeline = Timeline("measured", {"source": "replay", "strategy": "there", "base_url": "http://there/v1"})
    for name, text in texts.items():
        record = RequestRecord(name, 0.0, 3, len(text), None, [0.1 * i for i in range(1, len(text) + 1)], 1.0, "stop")
        record.output_text = text
        timeline.requests[name] = record
    return timeline


def test_metrics_of_a_run_seen_from_outside():
    run = summarize(by_client(a="xyz", b="x"))
    known = {"num_output_tokens": 4, "num_prompt_tokens": 6, "num_requests": 2, "makespan_s": 1.0}
    assert {key: run[key] for key in known} == known
    assert run["ttft_ms"]["n"] == 2 and run["itl_ms"]["n"] == 2 and run["queue_ms"]["n"] == 0
    unknown = ("num_steps", "num_preemptions", "num_lost_tokens", "num_computed_tokens", "slot_occupancy", "busy_share")
    assert all(run[key] is None for key in (*unknown, "admissions_per_s", "padding_share"))
    assert set(run["kv_occupancy"].values()) == set(run["queue_depth"].values()) == {None}
    json.dumps(run, allow_nan=False)


def test_answers_in_text_are_compared_as_text():
    runs = {"here": by_client(a="xyz", b="x"), "there": by_client(a="xyw", b="x")}
    data = comparison(runs, beside=("there",))
    assert data["differences"] == [
        {"id": "a", "strategy": "there", "reference": "here", "as_text": True, "position": 2, "token": "w",
         "expected": "z"}
    ]  # fmt: skip
    assert data["same_work"] == [] and data["compared_by_text"] == ["here", "there"]
    assert [r["output_tokens"] for r in data["strategies"]["here"]["requests"]] == [3, 1]
    assert all(r["output_hash"] is None for r in data["strategies"]["here"]["requests"])
    for shown in (table(data), markdown(data), html(data)):
        assert "a under there at character 2 (w, here: z)" in shown and "Work" not in shown
    late = by_client(a="xyz", b="x")
    late.requests["b"].arrival_time = 0.5
    assert "b arrived at 0.500 s" in table(comparison(runs | {"late": late}, beside=("late",)))
    fewer = by_client(a="xyz")
    assert "1 requests, not 2" in table(comparison({"here": runs["here"], "fewer": fewer}, beside=("fewer",)))


def test_a_replay_survives_its_file(tmp_path):
    rows = tuple(WorkloadRequest(f"r{i}", 0.0, 4, 3) for i in range(3))
    with fake_server() as server:
        timeline = replay(Workload("w", rows, "s"), server.url)
    timeline.save(tmp_path / "run.json")
    again = Timeline.load(tmp_path / "run.json")
    assert again.requests == timeline.requests and again.header == timeline.header
    assert list(load_runs(str(tmp_path / "run.json"))) == ["minibatcher"]
    assert summarize(again) == summarize(timeline)
