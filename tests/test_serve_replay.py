"""The same requests over HTTP and in this process: the same counts, and the same answers token for token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs minibatcher[serve]")
pytest.importorskip("aiohttp", reason="replay needs minibatcher[serve]")

from serving import running_server

from minibatcher.cli import main
from minibatcher.timeline import RequestRecord, Timeline

NUM_REQUESTS = 12
ENGINE = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--threads", "1"]
REQUESTS = ["--num-requests", str(NUM_REQUESTS), "--seed", "3"]


def both(workload: str, caching: str, folder: Path, request_rate: str) -> tuple[Timeline, Timeline, dict]:
    """The run of `compare`, that of `replay` against `serve`, and what `compare --with` says of them."""
    words = ["--workload", workload, *REQUESTS, "--request-rate", request_rate, "--quiet"]
    with running_server(*ENGINE, "--enable-prefix-caching", caching) as url:
        assert main(["replay", "--base-url", url, *words, "--name", "http", "--timeline", str(folder)]) == 0
    said = folder / "said.json"
    beside = ["--with", str(folder / "http.json"), "--json", str(said), "--timeline", str(folder)]
    engine = [*ENGINE, "--enable-prefix-caching", caching]
    assert main(["compare", "--strategies", "chunked", *words, *engine, *beside]) == 0
    inside, outside = (Timeline.load(folder / f"{name}.json") for name in ("chunked", "http"))
    return inside, outside, json.loads(said.read_text(encoding="utf-8"))


def outcome(record: RequestRecord) -> tuple:
    return (record.num_prompt_tokens, record.num_output_tokens, record.output_hash, record.finish_reason)


@pytest.mark.parametrize("caching", ["off", "on"])
def test_replay_against_serve_and_compare_agree(tmp_path, caching):
    inside, outside, said = both("shared-prefix", caching, tmp_path, "inf")
    assert len(inside.requests) == len(outside.requests) == NUM_REQUESTS
    for name, record in inside.requests.items():
        assert outcome(record) == outcome(outside.requests[name]), name
        assert len(outside.requests[name].token_times) == record.num_output_tokens
    assert (said["answers_identical"], said["num_answers_compared"], said["compared_by_text"]) == (
        True,
        NUM_REQUESTS,
        [],
    )
    for run in (inside, outside):
        assert (sum(record.num_cached_tokens for record in run.requests.values()) > 0) == (caching == "on")


def test_they_agree_on_text_that_ends_by_itself(tmp_path):
    """The server cuts the text into tokens, and the model says when to stop; requests arrive while others run."""
    speakers = ("ROMEO:", "First Citizen:\nBefore", "KING HENRY V:", "Enter the ghost of")
    rows = [
        {"prompt": f"{speakers[i % 4]} {'my lord ' * (i // 4)}", "arrival_time": i / 50, "request_id": f"r{i}"}
        for i in range(NUM_REQUESTS)
    ]
    file = tmp_path / "speeches.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    inside, outside, _ = both(str(file), "on", tmp_path, "50")
    for name, record in inside.requests.items():
        assert outcome(record) == outcome(outside.requests[name]), name
        assert record.output_text == outside.requests[name].output_text
    assert {record.finish_reason for record in outside.requests.values()} >= {"stop"}
