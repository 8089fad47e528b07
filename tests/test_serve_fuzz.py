"""Whatever is sent, the server answers with the right status and an error of OpenAI's shape, and lives on.

From its own OpenAPI schema, by hand, and by changing the bytes of a good request at random.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_http import Reader, check_alive, check_error, connection, exchange, head, post, read_answer
from serving import Metrics, check_nothing_in_use, needed, started_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE = {
    COMPLETIONS: {"model": "bard", "prompt": "O", "max_tokens": 2},
    CHAT: {"model": "bard", "messages": [{"role": "user", "content": "O"}], "max_tokens": 2},
}
MAX_BODY = 1 << 20
SCHEMA_EXAMPLES = 60  # of each operation
# A list that is longer than its bound may be longer than bodies can be.
SCHEMATHESIS = "checks.negative_data_rejection.expected-statuses = [400, 401, 404, 405, 413, 415]"


@pytest.fixture(scope="module")
def server():
    # A short context, so that no answer takes long; little patience, for those who wait for bytes that never come.
    with started_server("--max-model-len", "160", "--header-timeout-s", "5", "--body-timeout-s", "5") as server:
        yield server
        check_alive(server.address)
        check_nothing_in_use(server.url)


@pytest.fixture(scope="module")
def address(server):
    return server.address


# From the schema


@pytest.mark.skipif(sys.version_info < (3, 11), reason="schemathesis needs Python 3.11")
def test_it_keeps_to_its_own_schema(server, tmp_path):
    """What is wrong is refused, and each answer is one that the schema foresees."""
    needed("schemathesis")
    (tmp_path / "schemathesis.toml").write_text(SCHEMATHESIS, encoding="utf-8")
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
    command += [server.url + "/openapi.json", "--no-color", "--continue-on-failure", "--checks", "all"]
    # What is right by itself may be more than the context holds, or need another field.
    command += ["--exclude-checks", "positive_data_acceptance"]
    # The same examples in each run.
    command += ["--generation-deterministic", "--max-examples", str(SCHEMA_EXAMPLES), "--request-timeout", "60"]
    before = sum(Metrics(server.url).ends.values())
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=600)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    generated = int(re.search(r"(\d+) generated", done.stdout)[1])
    assert generated > 4 * SCHEMA_EXAMPLES  # of two POSTs, the examples, right and wrong ones
    assert sum(Metrics(server.url).ends.values()) > before + SCHEMA_EXAMPLES / 2  # some of them are served


def test_the_schema_says_what_there_is(server, address):
    answer = exchange(address, head("GET", "/openapi.json"), "GET")
    paths = answer.json["paths"]
    assert {COMPLETIONS, CHAT, "/v1/models", "/health", "/metrics"} <= paths.keys()
    for path in (COMPLETIONS, CHAT):
        assert {"200", "400", "401", "404", "408", "413", "429", "500", "503"} <= paths[path]["post"][
            "responses"
        ].keys()


# Bodies by hand


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


def with_field(field: str, literal: str) -> bytes:
    """A good body but for one field, whose value is written as it stands."""
    rest = json.dumps({k: v for k, v in BASE[COMPLETIONS].items() if k != field})
    return f'{rest[:-1]}, "{field}": {literal}}}'.encode("utf-8", "surrogatepass")


DIGITS = "9" * 10_000
BODIES = {
    "nothing": b"",
    "half an object": b'{"model": "bard", "prom',
    "two objects": b"{}{}",
    "null": b"null",
    "a list": b"[]",
    "a text": b'"bard"',
    "a number": b"1",
    "bytes that are no UTF-8": b"\xff\xfe\x00\x01",
    "bytes that are no UTF-8 in a text": b'{"model": "bard", "prompt": "\xc3\x28"}',
    "UTF-8 of a surrogate": with_field("prompt", '"\ud800"'),
    "an escaped lone surrogate": with_field("prompt", r'"\ud800"'),
    "an escaped lone surrogate in a list": with_field("prompt", r'["fine", "\udfff x"]'),
    "an escaped lone surrogate in stop": with_field("stop", r'"\ud83d"'),
    "an escaped lone surrogate in a name": b'{"model": "\\udc80", "prompt": "x"}',
    "NaN": with_field("temperature", "NaN"),
    "Infinity": with_field("temperature", "Infinity"),
    "minus Infinity in an unknown field": with_field("x", "-Infinity"),
    "more than a float holds": with_field("temperature", "1e999"),
    "many digits": with_field("max_tokens", DIGITS),
    "many digits, negative": with_field("seed", "-" + DIGITS),
    "many digits in an unknown field": with_field("x", DIGITS),
    "many digits of a float": with_field("top_p", "1." + DIGITS + "e" + DIGITS),
    "deep lists": nested(100_000).encode(),
    "deep lists, not closed": b"[" * 1_000_000,
    "deep lists in an unknown field": with_field("x", nested(50_000)),
    "deep objects in the prompt": with_field("prompt", nested(50_000, '{"a":', "}").replace(":}", ":1}")),
    "single quotes": b"{'model': 'bard'}",
    "a comment": b'{"model": "bard", /* hello */ "prompt": "x"}',
    "a control character": b'{"model": "bard", "prompt": "a\x01b"}',
}
VALUES = {  # of one field of a completion: JSON literals
    "model": ("5", "[]", "{}", "true"),
    "prompt": (
        *("null", "5", "true", "{}", "[]", "[[]]", '["a", 5]', "[[1], []]", '[["a"]]', "[1.5]", "[1e0]", "[-1]"),
        *("[99999999]", "[true]", "[[[1]]]", "[null]", f"[{10**30}]"),
        json.dumps([1] * 100_000),
        json.dumps(["x"] * 100_000),
        json.dumps("word " * 150_000),
    ),
    "max_tokens": ("0", "-1", "1.5", '"5"', "true", "[]", "{}", "1" + "0" * 30),
    "min_tokens": ("-1", "3", '"1"', "1.5"),
    "n": ("0", "-1", "1000000000", "1.5", '"2"', "true", "129"),
    "temperature": ("-0.1", '"1"', "true", "[]", "-1e308", "1e308"),
    "top_p": ("0", "-1", "1.01", '"1"'),
    "top_k": ("-5", "1.5", '"1"', str(10**30)),
    "seed": ("-1", "1.5", '"1"', "true", "1" + "0" * 40),
    "stop": ("5", '[""]', "[5]", "[null]", "{}", '[["a"]]', json.dumps(["x"] * 1000)),
    "stop_token_ids": ("5", "[-1]", '["a"]', "[1.5]", "[true]", f"[{10**30}]"),
    "stream": ('"yes"', "1", "[]"),
    "stream_options": ("5", "[]", '{"include_usage": 5}'),
    "logprobs": ("-1", "21", "1.5", '"2"', "true"),
    "ignore_eos": ('"yes"', "1"),
    "priority": ('"high"', "1.5", "1" + "0" * 20, "1"),
    "echo": ("true", '"yes"'),
    "best_of": ("2", "0"),
    "logit_bias": ('{"5": 100}', "5"),
    "presence_penalty": ("1", '"0"'),
    "frequency_penalty": ("-1",),
}
MESSAGES = (
    *("null", "5", '"hello"', "{}", "[]", "[5]", "[null]", "[{}]", '[{"role": "user"}]', '[{"content": "x"}]'),
    *('[{"role": 5, "content": "x"}]', '[{"role": "user", "content": 5}]', '[{"role": "user", "content": null}]'),
    *('[{"role": "user", "content": [5]}]', '[{"role": "user", "content": [{"type": "text"}]}]'),
    *('[{"role": "user", "content": [{"type": "text", "text": 5}]}]', '[{"role": "user", "content": {"a": 1}}]'),
    '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
    '[{"role": "user", "content": "' + r"\ud800" + '"}]',
    '[{"role": "user", "content": "' + "word " * 150_000 + '"}]',
    json.dumps([{"role": "user", "content": "x"}] * 10_000),
)


@pytest.mark.parametrize("path", (COMPLETIONS, CHAT))
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_request(address, path, body):
    check_error(exchange(address, post(path, body)), 400)


@pytest.mark.parametrize("field", VALUES)
def test_a_value_that_a_field_cannot_have(address, field):
    for literal in VALUES[field]:
        error = check_error(exchange(address, post(COMPLETIONS, with_field(field, literal))), 400)
        said = f"{field}: {literal[:80]} -> {error}"
        assert field in f"{error['param']} {error['message']}", said
        assert len(error["message"]) < 2_000, said[:4_000]


def test_messages_that_are_none(address):
    for literal in MESSAGES:
        body = f'{{"model": "bard", "max_tokens": 2, "messages": {literal}}}'.encode()
        error = check_error(exchange(address, post(CHAT, body)), 400)
        assert len(error["message"]) < 2_000, error["message"][:4_000]


@pytest.mark.parametrize("path", (COMPLETIONS, CHAT))
def test_a_missing_field_is_named(address, path):
    field = "prompt" if path == COMPLETIONS else "messages"
    body = {k: v for k, v in BASE[path].items() if k != field}
    assert check_error(exchange(address, post(path, body)), 400)["param"] == field
    del body["max_tokens"], body["model"]  # where one model is served, nobody need name it
    assert exchange(address, post(path, body | {field: BASE[path][field]})).status == 200


def test_unknown_fields_nulls_and_odd_but_right_values_do_no_harm(address):
    harmless = {"x": {"y": [None, 1.5, "z"]}, "user": "me", "metadata": {}, "store": False, "service_tier": "auto"}
    odd = {
        "stop": [],
        "stop_token_ids": [],
        "temperature": 2,
        "top_p": 1e-300,
        "seed": 0,
        "logprobs": 0,
        "top_k": 0,
    }
    for extra in (harmless, odd, {"prompt": "\0\x7f\N{PILE OF POO}\r\n"}, {"prompt": [5]}, {"prompt": [[5], [6]]}):
        answer = exchange(address, post(COMPLETIONS, BASE[COMPLETIONS] | extra))
        assert answer.status == 200, (extra, answer.body[:500])


def test_models_that_are_not_there(address):
    for name in ("", "nobody", "bard ", "BARD", "../bard", "\0", "a" * 900, "a/b", "%s{x}"):
        for path in (COMPLETIONS, CHAT):
            error = check_error(exchange(address, post(path, BASE[path] | {"model": name})), 404)
            assert error["code"] == "model_not_found" and len(error["message"]) < 2_000
    for name in ("nobody", "a/b", "..%2fbard", "%00", "a" * 5_000):
        check_error(exchange(address, head("GET", f"/v1/models/{name}"), "GET"), 404)


# Sizes


def test_a_body_beyond_the_limit(address):
    check_error(exchange(address, post(COMPLETIONS, b" " * (MAX_BODY + 1))), 413)
    announced = head("POST", COMPLETIONS, "Content-Type: application/json", f"Content-Length: {10**12}")
    check_error(exchange(address, announced), 413)  # at once, without waiting for it
    chunks = (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * (MAX_BODY // 0x10000 + 2)
    streamed = head("POST", COMPLETIONS, "Content-Type: application/json", "Transfer-Encoding: chunked")
    check_error(exchange(address, streamed + chunks), 413)


def test_a_body_at_the_limit_is_read(address):
    body = json.dumps(BASE[COMPLETIONS]).encode()
    answer = exchange(address, post(COMPLETIONS, body + b" " * (MAX_BODY - len(body))))
    assert answer.status == 200


# What HTTP allows, and what it does not


def test_paths_that_are_not_there(address):
    for path in (
        "/",
        "/v1",
        "/v1/",
        "/v2/completions",
        "/v1/completions/",
        "//v1/completions",
        "/v1/embeddings",
        "/%00",
    ):
        for method in ("GET", "POST"):
            check_error(exchange(address, head(method, path, "Content-Length: 0"), method), 404)
    assert exchange(address, post("/v1/completions?a=b", BASE[COMPLETIONS])).status == 200


def test_methods_that_a_path_does_not_have(address):
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FROBNICATE"):
        answer = exchange(address, head(method, COMPLETIONS), method)
        check_error(answer, 405)
        assert answer.headers["allow"] == "POST"
    for path in ("/v1/models", "/v1/models/bard", "/health", "/metrics"):
        answer = exchange(address, post(path, {}))
        check_error(answer, 405)
        assert "GET" in answer.headers["allow"]
    assert exchange(address, head("HEAD", COMPLETIONS), "HEAD").status == 405


def test_content_types(address):
    for kind in ("application/json; charset=utf-8", "text/plain", "", "application/json; charset=utf-16", "a/b/c", "é"):
        answer = exchange(address, post(COMPLETIONS, BASE[COMPLETIONS], kind=kind))
        assert answer.status == 200 or check_error(answer, 400, 415)
    for kind in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        check_error(exchange(address, post(COMPLETIONS, b"model=bard&prompt=x", kind=kind)), 400, 415)
    answer = exchange(address, post(COMPLETIONS, BASE[COMPLETIONS], "Content-Encoding: gzip"))
    assert answer.status == 200 or check_error(answer, 400, 415)


JSON_LINE = "Content-Type: application/json"
CHUNKED = "Transfer-Encoding: chunked"
BODY = json.dumps(BASE[COMPLETIONS]).encode()
NO_HTTP = {
    "a length that is no number": head("POST", COMPLETIONS, "Content-Length: abc"),
    "a negative length": head("POST", COMPLETIONS, "Content-Length: -1"),
    "a signed length": head("POST", COMPLETIONS, f"Content-Length: +{len(BODY)}") + BODY,
    "two lengths": head("POST", COMPLETIONS, f"Content-Length: {len(BODY)}", "Content-Length: 3") + BODY,
    "a length of thousands of digits": head("POST", COMPLETIONS, f"Content-Length: {DIGITS}"),
    "an unknown encoding": head("POST", COMPLETIONS, "Transfer-Encoding: gzip") + BODY,
    "an encoding that only looks chunked": head("POST", COMPLETIONS, "Transfer-Encoding: xchunked") + BODY,
    "chunked twice over": head("POST", COMPLETIONS, "Transfer-Encoding: chunked, chunked") + b"0\r\n\r\n",
    "a chunk size that is no number": head("POST", COMPLETIONS, CHUNKED) + b"xyz\r\nabc\r\n0\r\n\r\n",
    "a chunk size without end": head("POST", COMPLETIONS, CHUNKED) + b"f" * 100 + b"\r\n",
    "a negative chunk size": head("POST", COMPLETIONS, CHUNKED) + b"-5\r\nabcde\r\n0\r\n\r\n",
    "a chunk longer than it says": head("POST", COMPLETIONS, CHUNKED) + b"3\r\nabcdef\r\n0\r\n\r\n",
    "a header without a colon": head("GET", "/health", "nonsense"),
    "a header with a NUL": head("GET", "/health", "X-A: a\0b"),
    "a space before the colon": head("GET", "/health", "X-A : b"),
    "a header without a name": head("GET", "/health", ": b"),
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": head("GET", "/health", "Host: other"),
    "a path with a space": b"GET /he alth HTTP/1.1\r\nHost: test\r\n\r\n",
    "an unknown version": b"GET /health HTTP/9.9\r\nHost: test\r\n\r\n",
    "no version": b"GET /health\r\nHost: test\r\n\r\n",
    "HTTP/2's first words": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2 + b"\r\n\r\n",
    "another protocol": b"EHLO example.org\r\n\r\n",
    "binary rubbish": b"\x00\x01\x02\x03\r\n\r\n",
    "headers without end": head("GET", "/health", *(f"X-{i}: {'a' * 1000}" for i in range(200)))[:-4],
    "a very long path": head("GET", "/" + "a" * 200_000),
}


@pytest.mark.parametrize("data", NO_HTTP.values(), ids=NO_HTTP)
def test_what_is_no_http_is_a_bad_request(address, data):
    answer = exchange(address, data)
    check_error(answer, 400, 411, 413, 414, 431, 501, 505)
    assert answer.headers["connection"] == "close"


def test_length_and_encoding_at_once_do_not_smuggle_a_second_request(address):
    """Whichever of the two counts, what follows must not be answered as a request of its own."""
    smuggled = b"0\r\n\r\n" + head("GET", "/health")
    with connection(address) as sock:
        sock.sendall(head("POST", COMPLETIONS, JSON_LINE, f"Content-Length: {len(smuggled)}", CHUNKED) + smuggled)
        reader = Reader(sock)
        check_error(reader.answer(), 400)
        assert reader.answer("GET") is None


def test_a_body_in_chunks(address):
    pieces = b"".join(b"%x;ext=1\r\n%c\r\n" % (1, byte) for byte in BODY)
    answer = exchange(address, head("POST", COMPLETIONS, JSON_LINE, CHUNKED) + pieces + b"0\r\nX-Trailer: t\r\n\r\n")
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 2


def test_an_empty_body_of_each_kind(address):
    for lines in ((), ("Content-Length: 0",)):
        check_error(exchange(address, head("POST", COMPLETIONS, JSON_LINE, *lines)), 400)
    check_error(exchange(address, head("POST", COMPLETIONS, JSON_LINE, CHUNKED) + b"0\r\n\r\n"), 400)
    with_body = head("GET", "/v1/models", "Content-Length: 4") + b"null"  # unusual, but allowed
    assert exchange(address, with_body, "GET").status == 200


def test_requests_that_come_in_one_piece_are_answered_in_turn(address):
    with connection(address) as sock:
        bad = post(COMPLETIONS, b"{")
        sock.sendall(
            post(COMPLETIONS, BODY) + head("GET", "/health") + bad + post(CHAT, BASE[CHAT]) + head("GET", "/nobody")
        )
        reader = Reader(sock)
        assert reader.answer().json["object"] == "text_completion"
        assert reader.answer("GET").status == 200
        check_error(reader.answer(), 400)
        assert reader.answer().json["object"] == "chat.completion"
        check_error(reader.answer("GET"), 404)


def test_a_stream_keeps_its_connection_for_the_next_request(address):
    with connection(address) as sock:
        reader = Reader(sock)
        for _ in range(3):
            sock.sendall(post(COMPLETIONS, BASE[COMPLETIONS] | {"stream": True}))
            answer = reader.answer()
            assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
            assert answer.body.endswith(b"data: [DONE]\n\n")


def test_http_1_0(address):
    for body in (BASE[COMPLETIONS], BASE[COMPLETIONS] | {"stream": True}):
        data = json.dumps(body).encode()
        lines = (JSON_LINE, f"Content-Length: {len(data)}")
        with connection(address) as sock:
            sock.sendall(head("POST", COMPLETIONS, *lines, version="HTTP/1.0") + data)
            answer = read_answer(sock)
            assert answer.status == 200 and "transfer-encoding" not in answer.headers
            assert sock.recv(1) == b""  # it ends with the connection


def test_a_client_that_asks_before_it_sends(address):
    lines = (JSON_LINE, "Expect: 100-continue")
    with connection(address) as sock:
        sock.sendall(head("POST", COMPLETIONS, *lines, f"Content-Length: {len(BODY)}"))
        assert sock.recv(4096).startswith(b"HTTP/1.1 100 ")
        sock.sendall(BODY)
        assert read_answer(sock).status == 200
    check_error(exchange(address, head("POST", COMPLETIONS, *lines, f"Content-Length: {10**12}")), 413)


def test_other_protocols_are_not_offered(address):
    websocket = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAA")
    for path in ("/v1/models", "/nobody"):
        answer = exchange(address, head("GET", path, *websocket), "GET")
        assert answer is not None and 200 <= answer.status < 500 and answer.status != 426
    plain = exchange(address, head("GET", "/health", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"), "GET")
    assert plain.status == 200


# At random


@settings(max_examples=150, derandomize=True)
@given(st.data())
def test_a_request_with_bytes_changed(address, data):
    whole = post(data.draw(st.sampled_from((COMPLETIONS, CHAT))), BODY, "Connection: close")
    start = data.draw(st.integers(0, len(whole) - 1))
    junk = data.draw(st.binary(max_size=8) | st.sampled_from((b"\r\n", b"\r\n\r\n", b"\0", b'"', b"}", b"9" * 50)))
    changed = whole[:start] + junk + whole[start + data.draw(st.integers(0, 8)) :]
    with connection(address) as sock:
        # What follows completes a head or a body that has become incomplete, and is else not read any more.
        with suppress(ConnectionError):
            sock.sendall(changed + b"\r\n\r\n" + b" " * 2000)
        answer = read_answer(sock)
    if answer is not None and answer.status != 200:
        check_error(answer, *range(400, 500), 501, 505)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ("max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream", "stream_options", "priority", "model")
EVERY_FIELD = {
    COMPLETIONS: (*FIELDS, "prompt", "logprobs", "logit_bias", "echo", "suffix", "best_of", "top_k", "stop_token_ids"),
    CHAT: (*FIELDS, "messages", "logprobs", "top_logprobs", "tools", "response_format", "max_completion_tokens"),
}


@settings(max_examples=150, derandomize=True)
@given(st.data())
def test_any_json_in_any_fields(address, data):
    path = data.draw(st.sampled_from((COMPLETIONS, CHAT)))
    body = BASE[path] | data.draw(st.dictionaries(st.sampled_from(EVERY_FIELD[path]), JSON, min_size=1, max_size=3))
    answer = exchange(address, post(path, body))
    assert answer is not None
    if answer.status != 200:
        check_error(answer, 400, 404)
