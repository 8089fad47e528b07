"""Bodies that make no sense: the right status, the field named, and nobody else held up."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs minibatcher[serve]")

from in_process import JSON, served, talk

from minibatcher.model.loader import load_model
from minibatcher.serve import failures
from minibatcher.serve.host import EngineHost


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    with served(load_model("bard", dtype="float32")) as host:
        yield host


BAD_FIELDS = [
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": {"text": "a"}}),
    ("prompt", {"prompt": "a" * 100_000}),
    ("prompt", {"prompt": "to be or not to be " * 400}),
    ("prompt", {"prompt": [1] * 2_048}),
    ("prompt", {"prompt": ["a"] * 129}),
    ("prompt", {"max_tokens": 2_048}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": 5.0}),
    ("max_tokens", {"max_tokens": 10**30}),
    ("min_tokens", {"min_tokens": 9}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": 1e999}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -2}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("seed", {"seed": -1}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop", {"stop": 5}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": True}),
    ("stream", {"stream": 1}),
    ("stream_options", {"stream_options": {}}),
    ("priority", {"priority": 1}),
    ("logit_bias", {"logit_bias": {"1": 2}}),
    ("best_of", {"best_of": 2}),
    ("echo", {"echo": True}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("presence_penalty", {"presence_penalty": False}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_a_field_that_makes_no_sense_is_named(host, param, fields):
    body = json.dumps({"prompt": "HAMLET:", "max_tokens": 8} | fields).replace("Infinity", "1e999").encode()
    reply = talk(host, lambda client: client.send("POST", "/v1/completions", body, JSON))
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert reply.error["type"] == "invalid_request_error" and len(reply.body) < 1_000


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user"}]}),
        ("messages", {"messages": [{"role": "wizard", "content": "a"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        ("messages", {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "a" * 100_000}]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("response_format", {"response_format": {"type": "json_object"}}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_field_of_a_chat_that_makes_no_sense_is_named(host, param, fields):
    reply = talk(host, lambda client: client.chat(**fields))
    assert (reply.status, reply.error["param"]) == (400, param), reply.body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "a", "stop": [1] * 500_000}),
        ("completions", {"prompt": [[1]] * 500_000}),
        ("completions", {"prompt": "a", "stop_token_ids": [-1] * 500_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": [1] * 256}] * 2_000}),
    ],
    ids=["stop", "prompt", "stop_token_ids", "messages"],
)
def test_a_million_faults_are_told_of_as_one(host, monkeypatch, path, body):
    """Each fault costs far more than the byte that makes it, and the loop serves others too."""
    counts: list[int] = []
    explain = failures._invalid
    monkeypatch.setattr(failures, "_invalid", lambda error: (counts.append(len(error.errors())), explain(error))[1])
    reply = talk(
        host, lambda client: client.send("POST", f"/v1/{path}", json.dumps(body).encode(), JSON), max_body_bytes=4 << 20
    )
    assert reply.status == 400 and len(reply.body) < 2_000
    assert counts and counts[0] < 1_000


def test_a_text_that_can_never_fit_is_not_even_tokenized(host, monkeypatch):
    def encode(*_: Any, **__: Any):
        raise AssertionError("this takes seconds")

    monkeypatch.setattr(type(host.tokenizer), "encode", encode)
    text = "a" * (host.longest_token * 2_048 + 1)

    async def conversation(client):
        return await client.complete(text), await client.complete(["a", text]), await client.chat(text)

    for reply in talk(host, conversation):
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


def test_what_changes_nothing_is_accepted(host):
    neutral = {
        "user": "me",
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_p": 0,
        "tools": [],
        "response_format": {"type": "text"},
        "priority": 0,
        "top_k": -1,
        "stop": None,
        "n": None,
        "a_field_of_tomorrow": {"x": [1]},
    }

    async def conversation(client):
        return await client.complete(), await client.complete(**neutral)

    plain, full = talk(host, conversation)
    assert full.status == 200 and full.json["choices"] == plain.json["choices"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"null", 400),
        (b"[1]", 400),
        (b'{"prompt": NaN}', 400),
        (b'{"prompt": "a", "unknown": -Infinity}', 400),
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}", 400),
        (b"[" * 100_000, 400),
        (b'{"prompt":' * 100_000, 400),
        (b'{"prompt": "' + b"a" * (4 << 20) + b'"}', 413),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_body_that_is_none_is_refused(host, body, status):
    reply = talk(host, lambda client: client.send("POST", "/v1/completions", body, JSON))
    assert reply.status == status and reply.error["type"] == "invalid_request_error"


def test_a_body_is_held_to_bytes_time_and_type(host):
    async def conversation(client):
        return [
            await client.send("POST", "/v1/completions", [b"a" * 60, b"a" * 60], JSON),
            await client.send("POST", "/v1/completions", b"{}", JSON | {"content-length": "9" * 100}),
            await client.send("POST", "/v1/completions", [b'{"prompt"'], JSON),
            await client.send("POST", "/v1/completions", b'{"prompt": "a"}', {"content-type": "text/plain"}),
        ]

    replies = talk(host, conversation, max_body_bytes=100, body_timeout_s=0.05)
    assert [(reply.status, reply.error["type"]) for reply in replies] == [
        (413, "invalid_request_error"),
        (413, "invalid_request_error"),
        (408, "timeout_error"),
        (415, "invalid_request_error"),
    ]
