"""Replayed over HTTP and compared in this process: the same counts and answers; refusals, tenants, cached prefixes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from serving import needed, running_server

from minibatcher.cli import main
from minibatcher.timeline import RequestRecord, Timeline

needed("fastapi")
needed("aiohttp")

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


SMALL = ["--num-requests", "12", "--max-model-len", "160", "--quiet"]
SERVER = ["--max-model-len", "160", "--max-num-seqs", "4", "--threads", "1"]


def replayed(url: str, folder, name: str, *words: str) -> dict:
    out = folder / f"{name}.json"
    assert main(["replay", "--base-url", url, *SMALL, "--name", name, "--json", str(out), *words]) == 0
    return json.loads(out.read_text(encoding="utf-8"))


def compared(folder, *words: str) -> dict:
    out = folder / "compared.json"
    command = ["compare", *SMALL, "--strategies", "chunked", "--max-num-seqs", "4", "--json", str(out), *words]
    assert main(command) == 0
    return json.loads(out.read_text(encoding="utf-8"))


def outcomes(run: dict) -> list[tuple]:
    keys = ("id", "prompt_tokens", "output_tokens", "finish_reason", "output_hash")
    return [tuple(request[key] for key in keys) for request in run["requests"]]


def test_served_and_in_process_answers_are_the_same(tmp_path, capsys):
    kept = tmp_path / "server.json"
    with running_server(*SERVER, "--timeline", str(kept)) as url:
        one = replayed(url, tmp_path, "served")
        shared = replayed(url, tmp_path, "shared", "--workload", "shared-prefix", "--request-rate", "50")
    data = compared(tmp_path, "--with", str(tmp_path / "served.json"))
    assert data["other_requests"] == {} and data["answers_identical"] is True and data["num_answers_compared"] == 12
    here, there = data["strategies"].values()
    assert outcomes(here) == outcomes(there) == outcomes(one["strategies"]["served"])
    assert {reason for _, _, _, reason, _ in outcomes(there)} == {"length"}
    assert here["num_output_tokens"] == there["num_output_tokens"]
    # each token came in an event of its own, and what the client saw is what the server wrote down
    notes = data["strategies"]["served"]["header"]["client_notes"]
    assert not any("several tokens" in note or "counted" in note or "length" in note for note in notes)
    record = Timeline.load(kept)
    produced = Counter(r.num_output_tokens for r in record.requests.values())
    runs = (one["strategies"]["served"], shared["strategies"]["shared"])
    seen = Counter(request["output_tokens"] for run in runs for request in run["requests"])
    assert produced == seen + Counter({4: 4})  # the warm-ups
    # prompts that begin alike
    again = compared(tmp_path, "--workload", "shared-prefix", "--request-rate", "50")
    assert outcomes(shared["strategies"]["shared"]) == outcomes(again["strategies"]["chunked"])
    assert shared["strategies"]["shared"]["num_cached_tokens"] > 0
    assert shared["strategies"]["shared"]["prefix_hit_rate"] > 0


def test_a_short_queue_refuses_and_the_rest_is_served(tmp_path, capsys):
    with running_server(*SERVER, "--max-waiting-requests", "3") as url:
        data = replayed(url, tmp_path, "full")
    run = data["strategies"]["full"]
    reasons = Counter(request["finish_reason"] for request in run["requests"])
    assert set(reasons) == {"length", "refused"} and sum(reasons.values()) == 12
    assert "refused: queue full" in capsys.readouterr().out
    expected = {outcome[0]: outcome for outcome in outcomes(compared(tmp_path)["strategies"]["chunked"])}
    served = [outcome for outcome in outcomes(run) if outcome[3] == "length"]
    assert served and all(outcome == expected[outcome[0]] for outcome in served)


def test_tenants_send_keys_of_their_own(tmp_path, capsys):
    rows = [
        {"request_id": f"{who}{i}", "arrival_time": 0, "prompt_tokens": 8, "output_tokens": 6, "tenant": who}
        for i in range(4)
        for who in ("greedy", "polite")
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[keys.greedy]\nkey = "sk-greedy"\nrequests_per_s = 0.001\nburst_requests = 3\n\n'
        '[keys.polite]\nkey = "sk-polite"\n',
        encoding="utf-8",
    )
    with running_server(*SERVER, "--api-keys", str(keys)) as url:
        # a warm-up would take from a bucket
        words = ["replay", str(file), "--base-url", url, "--quiet", "--warm-up", "0", "--json"]
        assert main([*words, str(tmp_path / "keys.json"), "--api-keys", str(keys)]) == 0
        assert main([*words, str(tmp_path / "none.json")]) == 2
        assert "wants a key" in capsys.readouterr().err
    data = json.loads((tmp_path / "keys.json").read_text(encoding="utf-8"))
    tenants = next(iter(data["strategies"].values()))["tenants"]
    assert {name: (group["num_served"], group["num_refused"]) for name, group in tenants.items()} == {
        "greedy": (3, 1),
        "polite": (4, 0),
    }
