"""The server's answers, in this process: no socket, the real model in the box, each route by its own rules."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs minibatcher[serve]")

from in_process import JSON, served, talk, until

from minibatcher.build import build_engine
from minibatcher.errors import QueueFull, RateLimited
from minibatcher.limits import Limits, TenantLimit
from minibatcher.model.loader import load_model
from minibatcher.request import FinishReason, Request, SamplingParams
from minibatcher.runners.base import StepResult
from minibatcher.serve import answering, failures
from minibatcher.serve.host import EngineHost


@pytest.fixture(scope="module")
def model():
    return load_model("bard", dtype="float32")


@pytest.fixture(scope="module")
def host(model) -> Iterator[EngineHost]:
    with served(model) as host:
        yield host


@pytest.fixture(scope="module")
def alone(model) -> Callable[..., Any]:
    """What the engine answers by itself: the request after it has ended."""
    engine = build_engine(model)

    def run(prompt: Any, **params: Any):
        request = engine.add(prompt, SamplingParams(**params))
        while engine.has_work():
            engine.step()
        return request

    return run


def test_a_completion_is_what_the_engine_says_by_itself(host, alone):
    async def conversation(client):
        return await client.complete(max_tokens=40), await client.complete(return_token_ids=True, ignore_eos=True)

    by_itself, forced = alone("HAMLET:", max_tokens=40), alone("HAMLET:", max_tokens=8, ignore_eos=True)
    reply, longer = talk(host, conversation)
    answer, [choice] = reply.json, reply.json["choices"]
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    assert answer["object"] == "text_completion" and answer["model"] == "bard" and answer["id"].startswith("cmpl-")
    assert choice["text"] == by_itself.output_text and choice["finish_reason"] == by_itself.finish_reason.value
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": by_itself.num_output_tokens,
        "total_tokens": 3 + by_itself.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "token_ids" not in choice and choice["logprobs"] is None
    [choice] = longer.json["choices"]
    assert choice["token_ids"] == forced.output_token_ids and choice["prompt_token_ids"] == [0, 1180, 28]
    assert choice["finish_reason"] == "length"


def test_a_prompt_that_was_there_before_counts_as_cached(host):
    prompt = "FALSTAFF: " + "A cup of sack, good hostess, and a merry song. " * 8

    async def conversation(client):
        return [(await client.complete(prompt)).json["usage"] for _ in range(2)]

    first, second = talk(host, conversation)
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert cached == (second["prompt_tokens"] - 1) // 16 * 16 > 0


def test_several_prompts_and_choices_stand_in_order_and_draw_by_seed(host, alone):
    async def conversation(client):
        together = await client.complete(["ROMEO:", "PUCK:"], n=2, temperature=0.9, seed=5)
        greedy = await client.complete(n=2)
        ids = await client.complete([[0, 1180, 28], [0, 36]], return_token_ids=True)
        return together.json, greedy.json, ids.json

    together, greedy, ids = talk(host, conversation)
    wanted = [
        alone(prompt, max_tokens=8, temperature=0.9, seed=seed) for prompt in ("ROMEO:", "PUCK:") for seed in (5, 6)
    ]
    assert [choice["text"] for choice in together["choices"]] == [request.output_text for request in wanted]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    assert together["usage"]["prompt_tokens"] == sum(request.num_prompt_tokens for request in wanted[::2])
    assert together["usage"]["completion_tokens"] == sum(request.num_output_tokens for request in wanted)
    assert len({choice["text"] for choice in greedy["choices"]}) == 1 and len(greedy["choices"]) == 2
    assert [choice["prompt_token_ids"] for choice in ids["choices"]] == [[0, 1180, 28], [0, 36]]


@pytest.mark.parametrize("stop", [None, ["seen the"]])
def test_a_stream_has_an_event_for_each_token_and_says_what_the_whole_says(host, stop):
    options = {"include_usage": True}

    async def conversation(client):
        whole = await client.complete(max_tokens=30, stop=stop, return_token_ids=True)
        stream = await client.complete(
            max_tokens=30, stop=stop, stream=True, stream_options=options, return_token_ids=True
        )
        return whole.json, stream

    whole, stream = talk(host, conversation)
    *chunks, last = stream.events
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert len(choices) == len(chunks) == whole["usage"]["completion_tokens"]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == (stop[0] if stop else None)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert [index for index, choice in enumerate(choices) if "prompt_token_ids" in choice] == [0]
    if stop:
        assert any(choice["text"] == "" for choice in choices)  # held back, since it could have begun the stop string


def test_a_stream_counts_as_it_goes_if_asked_to(host):
    async def conversation(client):
        return await client.complete(n=2, stream=True, ignore_eos=True, stream_options={"continuous_usage_stats": True})

    counts: dict[int, list[int]] = {0: [], 1: []}
    for chunk in talk(host, conversation).events:
        counts[chunk["choices"][0]["index"]].append(chunk["usage"]["completion_tokens"])
    assert counts == {0: [*range(1, 9)], 1: [*range(1, 9)]}


def test_chat_speaks_the_template_of_the_model(host, model, alone):
    parts = [{"type": "text", "text": "Who's "}, {"type": "text", "text": "there?"}]
    text = "<|bos|>Chorus: Be brief.<|eot|>ROMEO: Who's there?<|eot|>JULIET:"

    async def conversation(client):
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
        whole = await client.chat(messages=messages, return_token_ids=True)
        stream = await client.chat(messages=messages, stream=True, n=2, return_token_ids=True)
        return whole.json, stream

    whole, stream = talk(host, conversation)
    ids = model.tokenizer.encode(text)
    by_itself = alone(ids, max_tokens=8)
    [choice] = whole["choices"]
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
    assert whole["prompt_token_ids"] == ids and ids[0] == 0 and ids.count(0) == 1
    assert choice["message"] == {"role": "assistant", "content": by_itself.output_text, "refusal": None}
    assert choice["token_ids"] == by_itself.output_token_ids
    assert [chunk.get("prompt_token_ids") for chunk in stream.events][:2] == [ids, None]
    for index in (0, 1):
        choices = [chunk["choices"][0] for chunk in stream.events if chunk["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""} and choices[0]["finish_reason"] is None
        assert "".join(choice["delta"]["content"] for choice in choices) == by_itself.output_text
        assert len(choices) == 1 + by_itself.num_output_tokens
        assert choices[-1]["finish_reason"] == by_itself.finish_reason.value


def test_a_chat_answer_may_fill_the_context(model):
    async def conversation(client):
        return await client.chat(max_tokens=None, ignore_eos=True), await client.complete(
            max_tokens=None, ignore_eos=True
        )

    with served(model, max_model_len=64) as host:
        chat, completion = (reply.json["usage"] for reply in talk(host, conversation))
    assert chat["total_tokens"] == 64 and completion["completion_tokens"] == 16


def test_a_template_hears_of_a_developer_as_the_system(host, monkeypatch):
    monkeypatch.setattr(host.tokenizer, "chat_template", "{{ messages[0]['role'] }}")
    messages = [{"role": "developer", "content": "Be brief."}]
    reply = talk(host, lambda client: client.chat(messages=messages, return_token_ids=True))
    assert reply.json["prompt_token_ids"] == host.tokenizer.encode("system")


def test_a_template_that_raises_is_the_clients_fault(host, monkeypatch):
    monkeypatch.setattr(host.tokenizer, "chat_template", "{{ messages[0]['content'] / 2 }}")
    reply = talk(host, lambda client: client.chat())
    assert (reply.status, reply.error["param"]) == (400, "messages")
    monkeypatch.setattr(host.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    reply = talk(host, lambda client: client.chat())
    assert reply.status == 400 and reply.error["message"].endswith("these messages: roles must alternate")
    monkeypatch.setattr(host.tokenizer, "chat_template", None)
    reply = talk(host, lambda client: client.chat())
    assert reply.status == 400 and "/v1/completions" in reply.error["message"]


def test_logprobs_in_both_shapes(host, alone):
    by_itself = alone("HAMLET:", max_tokens=5, logprobs=3)

    async def conversation(client):
        whole = await client.complete(max_tokens=5, logprobs=3)
        stream = await client.complete(max_tokens=5, logprobs=3, stream=True)
        chat = await client.chat(max_tokens=5, logprobs=True, top_logprobs=2)
        bare = await client.chat(max_tokens=5, logprobs=True)
        return whole.json["choices"][0], stream.events, chat.json["choices"][0], bare.json["choices"][0]

    whole, events, chat, bare = talk(host, conversation)
    logprobs = whole["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([entry.logprob for entry in by_itself.logprobs], abs=1e-4)
    assert "".join(logprobs["tokens"]) == whole["text"] == by_itself.output_text
    assert [whole["text"][at:][: len(token)] for at, token in zip(logprobs["text_offset"], logprobs["tokens"])] == (
        logprobs["tokens"]
    )
    for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
        assert top[token] == logprob == max(top.values()) and len(top) == 3  # greedy
    for name in logprobs:
        assert [chunk["choices"][0]["logprobs"][name][0] for chunk in events] == logprobs[name]
    entries = chat["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == chat["message"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == chat["message"]["content"]
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 5
    assert [len(entry["top_logprobs"]) for entry in bare["logprobs"]["content"]] == [0] * 5


def test_routes_models_and_request_ids(host):
    async def conversation(client):
        return {
            path: await client.send(method, path, headers={"X-Request-Id": "my-1"})
            for method, path in (
                ("GET", "/v1/models"),
                ("GET", "/v1/models/bard"),
                ("GET", "/v1/models/no/such"),
                ("GET", "/health"),
                ("GET", "/metrics"),
                ("GET", "/nowhere"),
                ("GET", "/v1/completions"),
            )
        }, await client.complete(model="no-such")

    replies, unknown = talk(host, conversation)
    card = replies["/v1/models/bard"].json
    assert replies["/v1/models"].json == {"object": "list", "data": [card]}
    assert (card["id"], card["vocab_size"], card["special_token_ids"], card["max_model_len"]) == (
        "bard",
        2_048,
        [0, 1, 2],
        2_048,
    )
    assert {path: reply.status for path, reply in replies.items() if reply.status != 200} == {
        "/v1/models/no/such": 404,
        "/metrics": 404,
        "/nowhere": 404,
        "/v1/completions": 405,
    }
    assert all(reply.error["message"] for reply in replies.values() if reply.status != 200)
    assert replies["/nowhere"].error["message"].startswith("GET /nowhere: Not Found")
    assert replies["/v1/completions"].error["message"].startswith("GET /v1/completions: Method Not Allowed")
    assert {reply.headers["x-request-id"] for reply in replies.values()} == {"my-1"}
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    assert len(unknown.headers["x-request-id"]) == 32


class Keys:
    """In place of ApiKeys: the secret is the name."""

    def __init__(self, **priorities: int) -> None:
        self.known = {name: SimpleNamespace(name=name, priority=p) for name, p in priorities.items()}

    def find(self, bearer: str | None):
        return self.known.get(bearer or "")


def test_a_key_is_asked_for_first_and_says_who_and_how_urgent(model):
    async def conversation(client):
        def bearer(name: str) -> dict[str, str]:
            return {"authorization": f"Bearer {name}"}

        refused = [
            await client.send("POST", "/v1/completions", [b"{"], JSON),  # its body is never read
            await client.send("GET", "/v1/models", headers=bearer("nobody")),
            await client.send("GET", "/v1/models", headers={"authorization": "Basic alice"}),
        ]
        assert (await client.send("GET", "/health")).status == 200
        fields = {"prompt": "a", "max_tokens": 2}
        default = await client.post("completions", bearer("bob"), **fields)
        lower = await client.post("completions", bearer("bob"), priority=3, **fields)
        higher = await client.post("completions", bearer("bob"), priority=1, **fields)
        return refused, default, lower, higher

    with served(model, ordering="priority") as host:
        refused, default, lower, higher = talk(host, conversation, keys=Keys(alice=0, bob=2))
        records = host.engine.timeline.requests
        assert {(reply.status, reply.error["code"]) for reply in refused} == {(401, "invalid_api_key")}
        assert all(reply.headers["www-authenticate"] == "Bearer" for reply in refused)
        assert [records[reply.json["id"]].priority for reply in (default, lower)] == [2, 3]
        assert {record.tenant for record in records.values()} == {"bob"}
        assert (higher.status, higher.error["param"]) == (400, "priority")


@contextmanager
def held(host: EngineHost) -> Iterator[None]:
    """The engine's thread stands still between two steps."""
    gate = threading.Event()
    host._run.post(gate.wait)
    try:
        yield
    finally:
        gate.set()


LONG = {"max_tokens": 1_500, "ignore_eos": True, "stream": True}


def test_a_full_queue_lets_in_all_choices_or_none(model):
    async def conversation(client):
        leaves = asyncio.Event()
        host, statuses = client.host, {}
        running = asyncio.create_task(client.complete(leaves=leaves, **LONG))
        await until(lambda: len(host.engine.scheduler.running) == 1)
        with held(host):
            waiting = asyncio.create_task(client.complete())
            await asyncio.sleep(0)
            both = asyncio.create_task(client.complete(n=2))
            await until(lambda: host._run._jobs.qsize() == 2)
        statuses["both"] = await both
        statuses["never"] = await client.complete(n=3)
        leaves.set()
        await running
        return await waiting, statuses

    with served(model, max_num_seqs=1, limits=Limits(max_waiting_requests=2)) as host:
        waiting, statuses = talk(host, conversation)
        records = host.engine.timeline.requests
    both, never = statuses["both"], statuses["never"]
    assert waiting.status == 200
    assert both.status == 429 and both.error["type"] == "rate_limit_error" and int(both.headers["retry-after"]) >= 1
    assert never.status == 400 and "retry-after" not in never.headers
    assert not [name for name in records if name.count("-") == 2]  # neither of the two was ever in


def test_a_rate_limit_says_when_to_come_back(model):
    limits = Limits(tenants={"*": TenantLimit(requests_per_s=0.01, burst_requests=3)})

    async def conversation(client):
        return [await client.complete(n=n) for n in (4, 2, 2, 2, 1)]

    with served(model, limits=limits) as host:
        never, fine, later, again, last = talk(host, conversation)
    assert [reply.status for reply in (never, fine, later, again, last)] == [400, 200, 429, 429, 200]
    assert 60 < int(again.headers["retry-after"]) <= int(later.headers["retry-after"]) <= 100  # of both; it costs none


@pytest.mark.parametrize(
    ("wait", "told"),
    [(None, "1"), (0.0, "1"), (0.2, "1"), (1.0, "1"), (1.2, "2"), (99.5, "100"), (1e300, "2147483647")],
)
def test_a_wait_is_told_in_whole_seconds_that_suffice(wait, told):
    for kind in (QueueFull, RateLimited):
        error = failures.explain(kind("no room", need=1, have=0, unit="requests", hint="wait", retry_after_s=wait))
        assert (error.status, error.headers["Retry-After"]) == (429, told)


def test_a_quota_that_is_used_up_for_good_is_no_matter_of_waiting(model):
    limits = Limits(tenants={"*": TenantLimit(tokens_per_s=0, burst_tokens=20)})

    async def conversation(client):
        chat = await client.chat("a", max_tokens=None, ignore_eos=True)  # asks for no more than it may have
        return chat, await client.complete()

    with served(model, limits=limits) as host:
        fine, never = talk(host, conversation)
    assert fine.json["usage"]["total_tokens"] == 20
    assert never.status == 400 and "retry-after" not in never.headers


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_a_client_that_leaves_takes_its_requests_along(model, stream, waits):
    async def conversation(client):
        leaves, first_leaves = asyncio.Event(), asyncio.Event()
        host = client.host
        others = [asyncio.create_task(client.complete(leaves=first_leaves, **LONG))] if waits else []
        await until(lambda: len(host.engine.scheduler.running) == len(others))
        mine = asyncio.create_task(client.complete(leaves=leaves, **LONG | {"stream": stream, "n": 2}))
        await until(lambda: len(host.engine.requests) == 2 + len(others))
        if not waits:
            await until(lambda: len(host.engine.scheduler.running) == 1)
        leaves.set()
        await until(lambda: len(host.engine.requests) == len(others))
        await mine
        first_leaves.set()
        await asyncio.gather(*others)

    with served(model, max_num_seqs=1) as host:
        talk(host, conversation)
        reasons = {record.finish_reason for record in host.engine.timeline.requests.values()}
    assert reasons == {"abort"}


def test_a_server_that_shuts_down_takes_nobody_in_and_ends_whom_it_has(model):
    async def conversation(client):
        host = client.host
        running = asyncio.create_task(client.complete(**LONG))
        await until(lambda: len(host.engine.scheduler.running) == 1)
        host.draining = True
        refused = await client.complete(), await client.send("GET", "/health")
        await asyncio.to_thread(host.stop)
        return refused, await running

    with served(model) as host:
        refused, running = talk(host, conversation)
    assert [(reply.status, reply.error["type"]) for reply in refused] == [(503, "server_error")] * 2
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert running.events[-1]["choices"][0]["finish_reason"] == "abort"


def broken(plan: Any) -> StepResult:
    raise RuntimeError("the device is gone")


@pytest.mark.filterwarnings("ignore:the step failed")
def test_a_request_that_fails_is_a_500_or_an_error_in_its_stream(model, monkeypatch):
    async def conversation(client):
        runner, healthy = client.host.engine.runner, client.host.engine.runner.run
        monkeypatch.setattr(runner, "run", broken)
        whole, stream = await client.complete(), await client.complete(stream=True)
        monkeypatch.setattr(runner, "run", healthy)
        return whole, stream, await client.complete()

    with served(model) as host:
        whole, stream, after = talk(host, conversation)
    assert whole.status == 500 and "the device is gone" in whole.error["message"]
    assert stream.status == 200 and b"[DONE]" not in stream.body
    assert "the device is gone" in json.loads(stream.body.removeprefix(b"data: "))["error"]["message"]
    assert after.status == 200


def test_an_engine_whose_thread_has_died_is_no_silence(model, monkeypatch, caplog):
    def crash(now: float):
        raise ZeroDivisionError("a bug in the scheduler")

    async def conversation(client):
        monkeypatch.setattr(client.host.engine.scheduler, "schedule", crash)
        return await client.complete(), await client.complete(), await client.send("GET", "/health")

    with served(model) as host:
        replies = talk(host, conversation)
    assert [reply.status for reply in replies] == [500] * 3
    assert all("the server's log" in reply.error["message"] for reply in replies)
    assert "a bug in the scheduler" in caplog.text and caplog.text.count("has stopped") == 1


def test_a_bug_in_the_server_is_a_500_and_is_logged(host, monkeypatch, caplog):
    def bug(*_: Any):
        raise KeyError("oops")

    monkeypatch.setattr(EngineHost, "check_open", bug)
    reply = talk(host, lambda client: client.complete())
    assert reply.status == 500 and "oops" not in reply.error["message"] and reply.headers["x-request-id"]
    assert "oops" in caplog.text


def test_outputs_cross_to_the_loop_once_a_step_and_not_once_a_request(host, monkeypatch):
    calls, hand_out = [], host._hand_out
    monkeypatch.setattr(host, "_hand_out", lambda: (calls.append(1), hand_out()))
    reply = talk(host, lambda client: client.complete(n=16, max_tokens=20, ignore_eos=True, stream=True))
    assert len(reply.events) == 16 * 20
    assert 0 < len(calls) < 16 * 20 / 2


def test_a_long_answer_is_written_off_the_loop_and_the_same(host, monkeypatch):
    async def conversation(client):
        return (await client.complete(logprobs=5)).json["choices"]

    short = talk(host, conversation)
    threads: list[str] = []
    monkeypatch.setattr("minibatcher.serve.answering.SMALL_ANSWER", 1)
    monkeypatch.setattr(
        "minibatcher.serve.answering._whole",
        lambda *given, whole=answering._whole: (
            threads.append(threading.current_thread().name),
            whole(*given),
        )[1],
    )
    assert talk(host, conversation) == short
    assert threads and threads[0] != threading.main_thread().name


def test_the_schema_tells_the_bounds_and_every_status(host):
    schema = talk(host, lambda client: client.send("GET", "/openapi.json")).json
    body = schema["components"]["schemas"]["CompletionBody"]
    assert body["required"] == ["prompt"]
    assert body["properties"]["n"]["anyOf"][0]["minimum"] == 1
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = schema["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "401", "404", "408", "413", "415", "429", "500", "503"}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "HTTPValidationError" not in schema["components"]["schemas"]


def test_a_stream_ends_once_for_each_request_and_may_be_dropped_twice(host):
    async def conversation() -> list[Any]:
        engine = host.engine
        requests = [Request(f"by-hand-{i}", [0, 1180], SamplingParams(max_tokens=900, ignore_eos=True)) for i in (0, 1)]
        stream = await host.submit(requests)
        first = await anext(stream)
        assert first.finish_reason is None and first.request_id in engine.requests
        stream.abort()
        stream.abort()
        return [output.finish_reason async for output in stream if output.finish_reason is not None]

    assert asyncio.run(conversation()) == [FinishReason.ABORT] * 2
