"""The client that replays a workload: against servers with every manner and fault, each request ends once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("torch")

from aiohttp import web
from fake_openai import MODEL, event, fake_server, token, usage, well_behaved

from minibatcher.cli import main
from minibatcher.errors import WorkloadError
from minibatcher.prompts import synthetic_prompt
from minibatcher.replay.answer import Answer, shared_out
from minibatcher.replay.events import Events
from minibatcher.replay.run import replay
from minibatcher.replay.server import NoServer
from minibatcher.timeline import Timeline, output_hash
from minibatcher.workload import Workload, WorkloadRequest

UNKNOWN = {"id": "fake", "object": "model", "owned_by": "somebody", "vocab_size": 100}
ROWS = [(5, 3), (9, 6), (2, 1), (7, 5)]  # prompt and output tokens; no output is as long as a warm-up's


def workload(rows=ROWS, gap_s: float = 0.0, **fields) -> Workload:
    requests = [WorkloadRequest(f"r{i}", i * gap_s, p, n, **fields) for i, (p, n) in enumerate(rows)]
    return Workload("by hand", tuple(requests), "these tests")


def served(timeline: Timeline) -> dict[str, tuple]:
    return {r.request_id: (r.finish_reason, r.num_output_tokens) for r in timeline.requests.values()}


ALL_WELL = {f"r{i}": ("length", n) for i, (_, n) in enumerate(ROWS)}


# --- what is read from a stream


def test_events_are_the_same_however_the_stream_is_cut():
    stream = (
        b': a comment\r\ndata: {"a": "\xc3\xa9\xe2\x82\xac"}\r\n\r\nevent: x\ndata:two\r\ndata: lines\r\n\r\nid: 7\n\n'
        b"data: cr\r\rdata: [DONE]\n"
    )
    expected = ['{"a": "é€"}'.encode(), b"two\nlines", b"cr", b"[DONE]"]
    for size in (1, 2, 3, 7, 1000):
        events = Events()
        found = [data for at in range(0, len(stream), size) for data in events.feed(stream[at : at + size])]
        assert found + events.close() == expected, size


def test_tokens_are_shared_out_by_characters():
    assert shared_out(10, [1, 1, 8]) == [1, 1, 8]
    assert shared_out(3, [0, 0]) in ([1, 2], [2, 1])
    assert shared_out(5, []) == []
    assert sum(shared_out(17, [3, 1, 4, 1, 5, 9])) == 17


def answer_of(*events: dict | bytes) -> Answer:
    answer = Answer(3)
    for moment, one in enumerate(events):
        answer.take(one if isinstance(one, bytes) else json.dumps(one).encode(), float(moment))
    answer.close(float(len(events)))
    return answer


def choice(text: str, reason: str | None = None, **fields) -> dict:
    return {"choices": [{"text": text, "finish_reason": reason} | fields]}


def test_each_way_of_counting_gives_each_token_its_events_time():
    by_id = answer_of(choice("a", token_ids=[4]), choice("", token_ids=[]), choice("bc", "length", token_ids=[5, 6]))
    assert by_id.record("x", 0.0, 0, "t").token_times == [0.0, 2.0, 2.0]
    assert by_id.record("x", 0.0, 0, "t").output_token_ids == [4, 5, 6]

    def counted(n: int, **fields) -> dict:
        return {"usage": {"completion_tokens": n}} | fields

    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]} | counted(0)
    by_usage = answer_of(role, choice("a") | counted(1), choice("bcd", "stop") | counted(4), counted(4, choices=[]))
    assert by_usage.tokens_of_events() == ([1, 3], "usage")
    assert by_usage.record("x", 0.0, 0, "t").token_times == [1.0, 2.0, 2.0, 2.0]

    at_the_end = answer_of(choice("a"), choice("bbb"), choice("", "stop"), counted(4, choices=[]))
    assert at_the_end.tokens_of_events() == ([1, 3], "total")
    assert at_the_end.record("x", 0.0, 0, "t").output_token_ids == []
    assert at_the_end.record("x", 0.0, 0, "t").output_hash is None

    nobody = answer_of(choice("a"), choice("bbb", "stop"))
    assert nobody.tokens_of_events() == ([1, 1], "events")
    assert nobody.finish_reason == "stop" and nobody.finished == 1.0

    unseen = answer_of(choice(""), choice("", "length"), counted(2, choices=[]))  # special tokens alone
    assert unseen.record("x", 0.0, 0, "t").token_times == [0.0, 1.0]


def test_an_answer_ends_once_and_a_stream_must_end_well():
    assert answer_of(choice("a")).finish_reason == "error"  # neither a reason nor [DONE]
    assert answer_of(choice("a"), b"[DONE]").finish_reason == "stop"
    broken = answer_of(choice("a"), {"error": {"message": "out of blocks"}}, choice("b", "stop"))
    assert (broken.finish_reason, broken.error) == ("error", "the server says: out of blocks")
    done = answer_of(choice("a", "length"))
    done.fail("too late", 9.0)
    assert (done.finish_reason, done.error, done.finished) == ("length", None, 0.0)


# --- a whole replay


def test_a_well_behaved_server_gets_what_compare_serves_and_its_ids_are_kept():
    with fake_server() as server:
        timeline = replay(workload(), server.url, seed=5)
    assert served(timeline) == ALL_WELL
    assert timeline.clock == "measured" and not timeline.steps and timeline.at_client
    prompts = sorted(body["prompt"] for body in server.recorded)
    assert prompts == sorted(synthetic_prompt(p, 100, 5, f"r{i}", (0, 1)) for i, (p, _) in enumerate(ROWS))
    for body in server.recorded:
        assert body["temperature"] == 0 and body["ignore_eos"] and body["return_token_ids"] and body["stream"]
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert timeline.requests["r1"].output_hash == output_hash(list(range(10, 16)))
    assert timeline.requests["r1"].num_prompt_tokens == 9
    assert timeline.header["client_notes"] == [] or "late" in timeline.header["client_notes"][0]
    assert len(server.bodies) == len(ROWS) + 2  # two to warm up


async def several(body):
    """Two tokens an event, and no ids."""
    n = body["max_tokens"]
    for i in range(0, n, 2):
        upto = min(i + 2, n)
        text = "".join(f" {j}" for j in range(i, upto))
        yield event(choices=[token(upto - 1, body, text=text)], usage=usage(body, upto))
    yield b"data: [DONE]\n\n"


async def cut_to_pieces(body):
    """A byte at a time, with CRLF and comments, and characters of several bytes."""
    stream = b": hello\r\n\r\n"
    for i in range(body["max_tokens"]):
        one = event(choices=[token(i, body, text="é€", token_ids=[i + 10])])
        stream += b": ping\r\n" + one.replace(b"\n", b"\r\n")
    stream += b"data: [DONE]\r\n\r\n"
    for at in range(0, len(stream), 11):
        yield stream[at : at + 11]


async def no_usage(body):
    for i in range(body["max_tokens"]):
        yield event(choices=[token(i, body)])
    yield b"data: [DONE]\n\n"


@pytest.mark.parametrize("answer", [several, cut_to_pieces, no_usage])
def test_other_manners_give_the_same_counts(answer):
    with fake_server(answer) as server:
        timeline = replay(workload(), server.url)
    assert served(timeline) == ALL_WELL
    notes = " ".join(timeline.header["client_notes"])
    assert ("several tokens" in notes) == (answer is several)
    assert ("events with text" in notes) == (answer is no_usage)
    if answer is cut_to_pieces:
        assert timeline.requests["r0"].output_text == "é€" * 3
        assert timeline.requests["r0"].output_token_ids == [10, 11, 12]
    else:
        assert not timeline.requests["r0"].output_token_ids
    if answer is several:
        times = timeline.requests["r1"].token_times
        assert times[0] == times[1] and times[2] == times[3] and len(times) == 6


async def tells_an_error(body):
    yield event(choices=[token(0, body)])
    yield event(error={"message": "the engine has died", "type": "server_error"})


async def closes_early(body):
    yield event(choices=[token(0, body)])


async def breaks(body):
    yield event(choices=[token(0, body)])
    await asyncio.sleep(0.05)
    yield b"BREAK"


async def no_json(body):
    yield event(choices=[token(0, body)])
    yield b"data: {oops\n\n"


async def hangs(body):
    yield event(choices=[token(0, body)])
    await asyncio.sleep(5)


@pytest.mark.parametrize(
    "answer, words",
    [
        (tells_an_error, "the engine has died"),
        (closes_early, "ended before the answer did"),
        (breaks, "connection broke"),
        (no_json, "not as it should be"),
        (hangs, "within 0.3 s"),
    ],
)
def test_whatever_breaks_ends_as_an_error_with_a_sentence(answer, words):
    rows = [(5, 3), (9, 6)]
    with fake_server(answer) as server:
        timeline = replay(workload(rows), server.url, warm_up=0, timeout_s=0.3)
    for record in timeline.requests.values():
        assert record.finish_reason == "error" and words in record.error, record
        assert record.num_output_tokens == 1 and record.finish_time is not None
    assert "errors: 2 ×" in " ".join(timeline.header["client_notes"])


def test_refusals_are_no_errors_and_say_what_the_server_said():
    def status(body):
        if body["max_tokens"] == 6:
            message = "the queue has no room: need 1 requests, have 0; come back later"
            return web.json_response({"error": {"message": message}}, status=429, headers={"Retry-After": "1"})
        if body["max_tokens"] == 5:
            return web.Response(status=503, text="shutting down")
        if body["max_tokens"] == 3:
            return web.json_response({"error": {"message": "no such field"}}, status=400)
        return None

    with fake_server(status=status) as server:
        timeline = replay(workload(), server.url)
    assert served(timeline) == {"r0": ("error", 0), "r1": ("refused", 0), "r2": ("length", 1), "r3": ("refused", 0)}
    assert timeline.requests["r1"].error.startswith("the queue has no room")
    assert timeline.requests["r3"].error == "shutting down"


def test_a_server_that_minds_our_fields_gets_none_of_them():
    def status(body):
        if "ignore_eos" in body:
            return web.json_response({"error": {"message": "unknown field ignore_eos"}}, status=400)
        return None

    with fake_server(status=status, models=[UNKNOWN]) as server:
        timeline = replay(workload(), server.url)
    assert served(timeline) == ALL_WELL
    assert not any("ignore_eos" in body for body in server.recorded)
    # and what nobody has told it to take it is not sent
    assert not any({"return_token_ids", "priority"} & body.keys() for body in server.bodies)


def test_requests_are_sent_in_time_whatever_became_of_those_before():
    """Open loop: none of these is answered before the last one has been sent."""
    arrived = threading.Event()

    async def waits(body):
        while not arrived.is_set():
            await asyncio.sleep(0.005)
        async for piece in well_behaved(body):
            yield piece

    def status(body):
        if len(server.bodies) == 30:
            arrived.set()
        return None

    with fake_server(waits, status=status) as server:
        timeline = replay(workload([(3, 2)] * 30, gap_s=0.005), server.url, warm_up=0, timeout_s=20)
    assert {reason for reason, _ in served(timeline).values()} == {"length"}
    first_token = min(r.token_times[0] for r in timeline.requests.values())
    assert all(r.arrival_time < first_token for r in timeline.requests.values())
    assert timeline.header["lateness_ms"]["n"] == 30


def test_tenants_priorities_and_texts():
    rows = (
        WorkloadRequest("a", 0.0, None, None, prompt="To be", tenant="alice", priority=2),
        WorkloadRequest("b", 0.0, None, 3, prompt="or not", tenant="bob"),
    )
    texts = Workload("texts", rows, "these tests")
    with fake_server() as server:
        timeline = replay(texts, server.url, tenant_keys={"alice": "sk-a", "bob": "sk-b"}, warm_up=0)
    sent = {body["prompt"]: (body, headers) for body, headers in zip(server.bodies, server.headers)}
    body, headers = sent["To be"]
    assert headers["Authorization"] == "Bearer sk-a" and body["priority"] == 2
    assert body["max_tokens"] == 128 and "ignore_eos" not in body  # it may end by itself
    body, headers = sent["or not"]
    assert headers["Authorization"] == "Bearer sk-b" and "priority" not in body and body["ignore_eos"]
    assert timeline.requests["a"].num_prompt_tokens == 7  # as the server counted

    async def chat(body):
        yield event(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        yield event(choices=[{"delta": {"content": "Ay"}, "finish_reason": None}])
        yield event(choices=[{"delta": {}, "finish_reason": "stop"}])
        yield event(choices=[], usage=usage(body, 1))

    with fake_server(chat) as server:
        timeline = replay(texts, server.url, chat=True, warm_up=0)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": server.bodies[0]["messages"][0]["content"]}]
    assert served(timeline) == {"a": ("stop", 1), "b": ("stop", 1)}
    assert timeline.requests["a"].output_text == "Ay"
    notes = " ".join(timeline.header["client_notes"])
    assert "2 tenants were sent with one key" in notes and "did not have the length" in notes
    with fake_server() as server, pytest.raises(WorkloadError, match="--chat"):
        replay(workload(), server.url, chat=True)


def test_random_tokens_may_go_as_text():
    with fake_server() as server:
        timeline = replay(workload(), server.url, tokenizer="bard", as_text=True)
    assert served(timeline) == ALL_WELL
    assert all(isinstance(body["prompt"], str) and body["prompt"] for body in server.bodies)
    assert len({body["prompt"] for body in server.recorded}) == len(ROWS)
    sent = sum(p for p, _ in ROWS)
    assert f"in all 28 tokens, not {sent}" in " ".join(timeline.header["client_notes"])  # the server counts seven each


def test_tokens_that_an_earlier_replay_left_in_the_cache_are_told():
    async def cached(body):
        for i in range(body["max_tokens"]):
            yield event(choices=[token(i, body, token_ids=[i])])
        yield event(choices=[], usage=usage(body, body["max_tokens"]) | {"prompt_tokens_details": {"cached_tokens": 2}})

    with fake_server(cached) as server:
        timeline = replay(workload([(5, 3), (9, 2)]), server.url)
    assert [r.num_cached_tokens for r in timeline.requests.values()] == [2, 2]
    assert "4 prompt tokens were found" in " ".join(timeline.header["client_notes"])


def test_a_server_that_tells_no_special_tokens_is_pointed_out():
    with fake_server(models=[UNKNOWN]) as server:
        told = replay(workload(), server.url).header["client_notes"]
        texts = replay(Workload("texts", (WorkloadRequest("a", 0.0, None, 3, prompt="O"),), "these tests"), server.url)
    assert "--tokenizer" in " ".join(told)
    assert "--tokenizer" not in " ".join(texts.header["client_notes"])


def test_no_connection_is_used_twice():
    """A server may drop an idle one just as the next request is on its way."""
    with fake_server() as server:
        replay(workload(), server.url)
    assert server.headers and all(headers["Connection"] == "close" for headers in server.headers)


# --- what goes wrong before the clock starts


def test_no_server_no_model_no_vocabulary():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(NoServer, match=r"no server answers at .*: Connection refused"):
        replay(workload(), nobody)
    two = [MODEL, MODEL | {"id": "other"}]
    with fake_server(models=two) as server:
        with pytest.raises(NoServer, match="serves fake, other; name one"):
            replay(workload(), server.url)
        with pytest.raises(NoServer, match="does not serve 'third'"):
            replay(workload(), server.url, model="third")
        assert served(replay(workload(), server.url + "/v1/", model="other")) == ALL_WELL
    with fake_server(models=[{"id": "fake", "owned_by": "vllm", "max_model_len": 64}]) as server:
        with pytest.raises(WorkloadError, match="--tokenizer"):
            replay(workload(), server.url)
        timeline = replay(workload(), server.url, tokenizer="bard")
        assert served(timeline) == ALL_WELL and timeline.header["strategy"] == "vLLM"
    with fake_server(models=None) as server:
        with pytest.raises(NoServer, match="--model"):
            replay(workload(), server.url)
        assert served(replay(workload(), server.url, model="any", tokenizer="bard")) == ALL_WELL


def test_a_key_that_is_not_known_ends_it_at_once():
    def status(body):
        return web.json_response({"error": {"message": "invalid key"}}, status=401)

    with fake_server(status=status) as server, pytest.raises(NoServer, match="invalid key"):
        replay(workload(), server.url)
    assert len(server.bodies) == 2


# --- the command


def test_the_command_prints_a_table_and_keeps_the_run(tmp_path, capsys):
    out, folder = tmp_path / "served.json", tmp_path / "timelines"
    with fake_server() as server:
        words = ["replay", "azure-conv", "--base-url", server.url, "--num-requests", "5", "--quiet", "--name", "there"]
        code = main([*words, "--json", str(out), "--timeline", str(folder), "--slo-ttft-ms", "60000"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "there" in printed and "Measured by the client of there (minibatcher at" in printed
    rows = printed.split("Measured by")[0]
    assert "Within objectives" in rows and "TTFT" in rows and "Queue time" not in rows and "steps" not in rows
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["strategies"]["there"]["num_steps"] is None and data["strategies"]["there"]["num_preemptions"] is None
    assert data["timelines"]["there"]["requests"][0]["token_times"] and data["measured"]["date"]
    kept = Timeline.load(folder / "there.json")
    assert kept.at_client and kept.num_slots == 0 and len(kept.requests) == 5
    assert all(len(body["prompt"]) + body["max_tokens"] <= 1024 for body in server.recorded)


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--base-url", "here"], "must be an address such as"),
        (["--base-url", "http://127.0.0.1:9", "a.jsonl", "--workload", "b.jsonl"], "two workloads are named"),
        (["--base-url", "http://127.0.0.1:9", "--api-keys", "absent.toml"], "can't read the keys"),
        (["--base-url", "http://127.0.0.1:9", "--with", "absent.json"], "can't read the run"),
        (["--base-url", "http://127.0.0.1:9"], "no server answers at"),
    ],
)
def test_mistakes_get_a_sentence(words, sentence, capsys):
    assert main(["replay", *words]) == 2
    told = capsys.readouterr().err
    assert sentence in told and "Traceback" not in told


def test_keys_of_tenants_come_from_the_file_that_serve_reads(tmp_path, capsys):
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.default]\nkey = "sk-1"\ntokens_per_s = 5\n', encoding="utf-8")
    with fake_server() as server:
        code = main(["replay", "--base-url", server.url, "--num-requests", "2", "--quiet", "--api-keys", str(keys)])
    assert code == 0 and {headers["Authorization"] for headers in server.headers} == {"Bearer sk-1"}
    keys.write_text('[keys.default]\nkey_sha256 = "00"\n', encoding="utf-8")
    assert main(["replay", "--base-url", server.url, "--api-keys", str(keys)]) == 2
    assert "no key that could be sent" in capsys.readouterr().err


def test_a_tenant_without_a_key_is_told_before_anything_is_sent(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.tenant-0]\nkey = "sk-0"\n', encoding="utf-8")
    with fake_server() as server:
        words = ["replay", "tenants:num_tenants=3", "--base-url", server.url, "--quiet", "--api-keys", str(keys)]
        assert main(words) == 2
        told = capsys.readouterr().err
        assert not server.bodies and "tenants without a key: tenant-1, tenant-2; there are keys for tenant-0." in told
        assert main([*words, "--api-key", "sk-all"]) == 0
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-0", "Bearer sk-all"}


def test_an_address_that_goes_too_far_is_told(capsys):
    with fake_server() as server:
        assert main(["replay", "--base-url", server.url + "/completions"]) == 2
    told = capsys.readouterr().err
    assert f"{server.url}/completions/models answers with status 404" in told and "ends in /v1 as a rule" in told


def test_an_interrupt_keeps_what_was_done(tmp_path):
    """The first requests are answered, one hangs, and the last is not due for an hour."""
    rows = [
        {"request_id": f"r{i}", "arrival_time": t, "prompt_tokens": 4, "output_tokens": n}
        for i, (t, n) in enumerate([(0, 3), (0, 2), (0.05, 9), (3600, 3)])
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    async def answer(body):
        if body["max_tokens"] == 9:
            yield event(choices=[token(0, body, token_ids=[10])])
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            await asyncio.sleep(20)
        async for piece in well_behaved(body):
            yield piece

    out = tmp_path / "out.json"
    with fake_server(answer) as server:
        code = main(["replay", str(file), "--base-url", server.url, "--quiet", "--json", str(out)])
    assert code == 130
    data = json.loads(out.read_text(encoding="utf-8"))
    (run,) = data["strategies"].values()
    assert [r["finish_reason"] for r in run["requests"]] == ["length", "length", "abort", "abort"]
    assert run["makespan_s"] < 3000 and run["requests"][2]["output_tokens"] == 1
    assert data["header"]["interrupted"] is True
