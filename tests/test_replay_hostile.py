"""A replay against servers that lie, flood and babble: each request ends once, and the record can be read again."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("torch")

from aiohttp import web
from fake_openai import MODEL, event, fake_server, token, well_behaved

from minibatcher.cli import main
from minibatcher.errors import InvalidParameter
from minibatcher.replay import client, run
from minibatcher.replay.keys import tenant_keys
from minibatcher.replay.run import in_a_thread, replay
from minibatcher.replay.saved import load_runs
from minibatcher.replay.server import NoServer
from minibatcher.workload import Workload, WorkloadRequest

NAN, INF = float("nan"), float("inf")
DEEP = b"[" * 200_000
COLD = ["--warm-up", "0"]


def rows(n: int = 2) -> Workload:
    return Workload("by hand", tuple(WorkloadRequest(f"r{i}", 0.0, 5, 6) for i in range(n)), "these tests")


def replayed(url: str, **options):
    return list(replay(rows(), url, warm_up=0, timeout_s=20, **options).requests.values())


def saying(*pieces: bytes):
    async def answer(body):
        for piece in pieces:
            yield piece

    return answer


def end(**fields) -> bytes:
    return event(choices=[{"index": 0, "text": "x", "finish_reason": "length"} | fields])


def counting(**usage) -> bytes:
    return event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 1} | usage)


LIES = {
    "more than fits a memory": counting(completion_tokens=10**9),
    "more digits than a float has": b'data: {"usage": {"completion_tokens": ' + b"9" * 4000 + b"}}\n\n",
    "text": counting(completion_tokens="5"),
    "a fraction": counting(completion_tokens=5.5),
    "less than nothing": counting(completion_tokens=-5),
    "not a number": counting(completion_tokens=NAN),
    "a prompt in words": counting(prompt_tokens="five"),
    "a prompt below nothing": counting(prompt_tokens=-3),
    "an infinite cache": counting(prompt_tokens_details={"cached_tokens": INF}),
    "a cache in words": counting(prompt_tokens_details={"cached_tokens": "all"}),
    "nests": b"data: " + DEEP + b"\n\n",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("when", ["before the end", "after it"])
def test_counts_that_can_be_none_cost_their_own_answer_and_not_the_record(lie, when, tmp_path):
    """After the end the answer stands, and is counted by what came."""
    out = tmp_path / "out.json"
    with fake_server(saying(*((lie, end()) if when == "before the end" else (end(), lie)))) as server:
        timeline = replay(rows(), server.url, warm_up=0)
        code = main(["replay", "--base-url", server.url, "--num-requests", "2", "--quiet", *COLD, "--json", str(out)])
    ended = {(r.finish_reason, r.num_output_tokens) for r in timeline.requests.values()}
    assert ended == ({("error", 0)} if when == "before the end" else {("length", 1)})
    assert code == 0 and len(load_runs(str(out))) == 1


@pytest.mark.parametrize("ids", [["a"], [1.5], [NAN], [[1]], [-1], [True], {"a": 1}, 5, list(range(10_000))])
def test_token_ids_that_are_none_are_an_error(ids):
    with fake_server(saying(end(token_ids=ids))) as server:
        for record in replayed(server.url):
            assert record.finish_reason == "error" and record.num_output_tokens == 0


async def babbles(body):
    while True:
        yield event(choices=[token(0, body)], pad="x" * 10_000)


async def never_ends_a_line(body):
    while True:
        yield b"x" * 100_000


@pytest.mark.parametrize("answer", [babbles, never_ends_a_line])
def test_an_endless_answer_ends_with_its_share_of_memory(answer, monkeypatch):
    monkeypatch.setattr(client, "ANSWER_BYTES", 300_000)
    with fake_server(answer) as server:
        for record in replayed(server.url):
            assert record.finish_reason == "error" and "bytes for 6 tokens" in record.error


def test_what_comes_after_the_end_is_not_read(monkeypatch):
    """Neither tokens nor comments, which some proxies send for ever."""
    monkeypatch.setattr(client, "LINGER_S", 0.01)

    async def goes_on(body):
        yield end()
        yield b"data: [DONE]\n\n" + event(choices=[token(1, body)])
        while True:
            yield b": still here\n\n" + event(choices=[token(1, body)])
            await asyncio.sleep(0.01)

    with fake_server(goes_on) as server:
        for record in replayed(server.url):
            assert (record.finish_reason, record.num_output_tokens, record.error) == ("length", 1, None)


def test_what_is_no_stream_at_all_is_named():
    with fake_server(saying(b"<html>welcome</html>")) as server:
        assert all("no event came, in 20 bytes" in record.error for record in replayed(server.url))


def test_words_of_a_server_steer_no_terminal():
    with fake_server(
        status=lambda body: web.json_response({"error": {"message": "a\x1b[31mb\x07"}}, status=400)
    ) as server:
        assert [record.error for record in replayed(server.url)] == ["a?[31mb?"] * 2
    models = [MODEL | {"id": "a\x1b[2J"}, MODEL | {"id": "b"}]
    with fake_server(models=models) as server, pytest.raises(NoServer, match=r"serves a\?\[2J, b"):
        replayed(server.url)


def test_an_error_longer_than_anybody_reads_keeps_its_status():
    with fake_server(status=lambda body: web.Response(status=429, body=b"x" * 1_000_000)) as server:
        assert {record.finish_reason for record in replayed(server.url)} == {"refused"}


@pytest.mark.parametrize(
    "fields",
    [{"vocab_size": 10**18}, {"special_token_ids": list(range(100))}, {"vocab_size": 1, "special_token_ids": [0]}],
)
def test_a_vocabulary_of_which_no_prompt_can_be_made(fields):
    with fake_server(models=[MODEL | fields]) as server, pytest.raises(NoServer, match="no vocabulary"):
        replayed(server.url)


@pytest.mark.parametrize(
    "fields", [{"meta": "odd"}, {"meta": []}, {"special_token_ids": [10**30, -4, [1], 2]}, {"owned_by": ["me"]}]
)
def test_odd_facts_about_a_model_do_no_harm(fields):
    with fake_server(models=[MODEL | fields]) as server:
        assert {record.finish_reason for record in replayed(server.url)} == {"length"}


def test_a_model_list_that_nests_or_never_ends_is_none(monkeypatch):
    monkeypatch.setattr("minibatcher.replay.server.MOST_BYTES", 100)
    with fake_server() as server, pytest.raises(NoServer, match="longer than 100 bytes"):
        replayed(server.url)


def test_keys_that_no_header_can_carry(tmp_path):
    file = tmp_path / "keys.toml"
    for text in ('[keys.a]\nkey = "x\\ny"', '[keys.a]\nkey = "é"', "a = " + "[" * 100_000):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidParameter, match="key"):
            tenant_keys(file)
    with fake_server() as server:
        with pytest.raises(InvalidParameter, match="the API key must be"):
            replayed(server.url, api_key="two words")
        replayed(server.url, api_key="sk-1\n")  # as `cat` leaves it in a variable
        assert server.headers[-1]["Authorization"] == "Bearer sk-1"


def test_an_interrupt_before_there_is_anything_to_interrupt(monkeypatch):
    """The first comes before the loop runs, the second after it has closed."""

    class Future:
        def __init__(self, work) -> None:
            self.work, self.num_asked = work, 0

        def result(self):
            self.num_asked += 1
            if self.num_asked == 1:
                raise KeyboardInterrupt
            try:
                return self.work()
            except asyncio.CancelledError:
                if self.num_asked == 2:
                    raise KeyboardInterrupt from None
                raise

    class Pool:
        def __init__(self, _) -> None: ...
        def __enter__(self):
            return self

        def __exit__(self, *_) -> None: ...
        def submit(self, work):
            return Future(work)

    async def main_() -> None:
        raise AssertionError("it was interrupted")

    monkeypatch.setattr(run, "ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        in_a_thread(main_)


def test_well_behaved_servers_lose_nothing_by_all_this():
    with fake_server(well_behaved) as server:
        assert {(r.finish_reason, r.num_output_tokens) for r in replayed(server.url)} == {("length", 6)}
