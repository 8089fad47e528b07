"""`replay` against `minibatcher serve`: the counts and the hashes of `compare`, refusals, tenants, cached prefixes."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from serving import needed, running_server

from minibatcher.cli import main
from minibatcher.timeline import Timeline

needed("aiohttp")
needed("uvicorn")
pytest.importorskip("torch")

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
