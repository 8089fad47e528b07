"""Clients that are slow, deaf, rude or gone: they get what is due to them, and cost nobody else anything."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest
from raw_http import PATIENCE_S, check_alive, check_error, connection, exchange, head, post, read_answer
from serving import Metrics, check_nothing_in_use, started_server, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHORT = {"model": "bard", "prompt": "O", "max_tokens": 2}
LONG = {"model": "bard", "prompt": "O", "max_tokens": 1900, "ignore_eos": True}  # until somebody ends it
JSON_LINE = "Content-Type: application/json"
BODY = json.dumps(SHORT).encode()
DRIP_S = 0.2  # from one byte to the next of those who are slow


@pytest.fixture(scope="module")
def server():
    patience = ("--header-timeout-s", "1", "--body-timeout-s", "1")
    with started_server("--max-num-seqs", "4", *patience) as server:
        yield server


@pytest.fixture
def address(server):
    """Whatever a test does to the server, it is alive afterwards and nothing is left in use."""
    yield server.address
    check_alive(server.address)
    check_nothing_in_use(server.url)


def drip(sock: socket.socket, first: bytes, then: bytes = b"a"):
    """Send `first`, then a few bytes again and again, until the server answers or hangs up; returns its answer."""
    sock.sendall(first)
    sock.settimeout(DRIP_S)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if not sock.recv(1, socket.MSG_PEEK):
                return None
            break
        except TimeoutError:
            try:
                sock.sendall(then)
            except ConnectionError:
                break
        except ConnectionError:
            return None
    else:
        raise AssertionError(f"the server has listened for {PATIENCE_S} s")
    sock.settimeout(PATIENCE_S)
    return read_answer(sock)


# Slow


SLOW = {
    "the request line": (b"POST /v1/comp", b"l"),
    "a header": (head("POST", COMPLETIONS, "X-Slow: ")[:-4], b"a"),
    "headers without end": (head("POST", COMPLETIONS)[:-2], b"X-A: b\r\n"),
    "a body": (head("POST", COMPLETIONS, JSON_LINE, "Content-Length: 100000"), b" "),
    "a body in chunks": (head("POST", COMPLETIONS, JSON_LINE, "Transfer-Encoding: chunked"), b"1\r\n \r\n"),
    "what may follow a body in chunks": (
        head("POST", COMPLETIONS, JSON_LINE, "Transfer-Encoding: chunked") + b"0\r\n",
        b"X-A: b\r\n",
    ),
    "a body of a chat": (head("POST", CHAT, JSON_LINE, "Content-Length: 100000"), b" "),
}


@pytest.mark.parametrize("what", SLOW)
def test_who_is_slow_to_ask_is_timed_out(address, what):
    with connection(address) as sock:
        answer = drip(sock, *SLOW[what])
        check_error(answer, 408)
        assert answer.headers["connection"] == "close" and is_closed(sock)


def is_closed(sock: socket.socket) -> bool:
    """By the server, with an end of stream, or with a reset since bytes were on their way to it."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_says_nothing_is_hung_up_on(address):
    with connection(address) as sock:
        assert is_closed(sock)  # TimeoutError if it waits for ever


def test_the_second_request_of_a_connection_is_timed_too(address):
    with connection(address) as sock:
        sock.sendall(post(COMPLETIONS, SHORT))
        assert read_answer(sock).status == 200  # and nothing after it
        check_error(drip(sock, b"GET /hea"), 408)


def test_time_limits_are_for_asking_not_for_answering(address):
    """An answer may take longer than a client may to ask: its connection stays."""
    with connection(address) as sock:
        sock.sendall(post(COMPLETIONS, LONG | {"max_tokens": 1000}))
        answer = read_answer(sock)
        assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 1000


def test_a_crowd_of_slow_clients_keeps_nobody_out(address):
    with ExitStack() as stack:
        crowd = [stack.enter_context(connection(address)) for _ in range(150)]
        for i, sock in enumerate(crowd):
            sock.sendall(list(SLOW.values())[i % len(SLOW)][0])
        answer = exchange(address, post(COMPLETIONS, SHORT))
        assert answer.status == 200
        for sock in crowd:
            check_error(read_answer(sock), 408)


# Deaf


@contextmanager
def deaf_client(address, body=None):
    """Asks for more than the buffers between here and the server hold, and reads none of it."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(PATIENCE_S)
        sock.connect(address)
        if body:
            sock.sendall(post(CHAT, body))
        yield sock


MUCH_TOKENS = 650
# Events of more than four megabytes, by log-probabilities: Linux keeps less for a socket that nobody reads.
MUCH = {"model": "bard", "messages": [{"role": "user", "content": "O"}], "max_tokens": MUCH_TOKENS, "ignore_eos": True}
MUCH |= {"stream": True, "n": 4, "logprobs": True, "top_logprobs": 20}


def test_who_does_not_read_stalls_nobody_and_keeps_no_slot(server, address):
    before = Counter(check_nothing_in_use(server.url).ends)
    with deaf_client(address, MUCH):
        wait_until(lambda: Metrics(server.url).in_use["num_requests_running"] == 4, "all slots are taken")
        check_alive(address)  # it is served as soon as they are free again
        check_nothing_in_use(server.url, before + Counter(length=4 + 1))  # though the client has read nothing


def test_who_has_not_read_at_first_gets_it_all_later(server, address):
    with deaf_client(address, MUCH) as sock:
        wait_until(lambda: Metrics(server.url).in_use["num_requests_running"] == 4, "it is served")
        check_nothing_in_use(server.url)
        answer = read_answer(sock)
    events = answer.body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and len(events) == 4 * (1 + MUCH_TOKENS) + 2
    assert len(answer.body) > 4e6  # else it was never stopped by anything


def test_a_deaf_client_does_not_hold_up_the_end():
    with started_server("--shutdown-timeout-s", "1") as server, ExitStack() as stack:
        stack.enter_context(deaf_client(server.address, MUCH))
        wait_until(lambda: Metrics(server.url).in_use["num_requests_running"] == 4, "it is served")
        check_nothing_in_use(server.url)  # all that is left is what it does not read
        server.process.terminate()
        server.process.wait(timeout=PATIENCE_S)


# Rude


def test_many_requests_on_one_connection_and_no_ear_for_the_answers(address):
    with deaf_client(address) as sock:
        sock.settimeout(1)
        with pytest.raises(TimeoutError):  # the server does not take in without bound
            for _ in range(100_000):
                sock.sendall(head("GET", "/v1/models", f"X-Padding: {'a' * 4000}"))
        check_alive(address)


def test_more_connections_than_there_may_be(server):
    with started_server("--max-connections", "20") as small:
        with ExitStack() as stack:
            crowd = [stack.enter_context(connection(small.address)) for _ in range(20)]
            for sock in crowd:
                sock.sendall(b"G")
            wait_until(lambda: turned_away(small.address), "one too many is turned away")
        wait_until(lambda: not turned_away(small.address), "there is room again")
        check_alive(small.address)


def turned_away(address) -> bool:
    answer = exchange(address, head("GET", "/v1/models"), "GET")
    return answer is None or (answer.status != 200 and bool(check_error(answer, 503)))


# Gone


def hang_up(sock: socket.socket, rudely: bool) -> None:
    if rudely:  # with a reset
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def running_or_waiting(url: str) -> tuple[float, float]:
    in_use = Metrics(url).in_use
    return in_use["num_requests_running"], in_use["num_requests_waiting"]


@pytest.mark.parametrize("rudely", (False, True), ids=("closed", "reset"))
@pytest.mark.parametrize("stream", (False, True), ids=("whole", "stream"))
def test_who_hangs_up_is_served_no_more(server, address, stream, rudely):
    ends = Counter(check_nothing_in_use(server.url).ends)
    for path, body in ((COMPLETIONS, LONG), (CHAT, LONG | {"messages": [{"role": "user", "content": "O"}]})):
        with connection(address) as sock:
            sock.sendall(post(path, body | {"stream": stream, "n": 3}))
            wait_until(lambda: running_or_waiting(server.url) == (3, 0), "it is served")
            if stream:
                assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
            hang_up(sock, rudely)
        ends["abort"] += 3
        check_nothing_in_use(server.url, ends)


@pytest.mark.parametrize("stream", (False, True), ids=("whole", "stream"))
def test_who_hangs_up_in_the_queue_leaves_it_while_others_are_served(server, address, stream):
    before = Counter(check_nothing_in_use(server.url).ends)
    with connection(address) as running, connection(address) as waiting:
        running.sendall(post(COMPLETIONS, LONG | {"n": 4}))
        wait_until(lambda: running_or_waiting(server.url) == (4, 0), "all slots are taken")
        waiting.sendall(post(COMPLETIONS, LONG | {"n": 2, "stream": stream}))
        wait_until(lambda: running_or_waiting(server.url) == (4, 2), "two wait")
        waiting.close()
        wait_until(lambda: running_or_waiting(server.url)[1] == 0, "the queue is empty")
        assert Metrics(server.url).in_use["num_requests_running"] == 4
    check_nothing_in_use(server.url, before + Counter(abort=4 + 2))


def test_who_hangs_up_before_all_is_said_has_asked_nothing(server, address):
    before = check_nothing_in_use(server.url).ends
    whole = post(COMPLETIONS, SHORT)
    for end in (0, 1, 40, whole.index(b"\r\n\r\n") + 4, len(whole) - 1):
        for rudely in (False, True):
            with connection(address) as sock:
                sock.sendall(whole[:end])
                hang_up(sock, rudely)
    check_nothing_in_use(server.url, before)


def test_who_hangs_up_as_soon_as_all_is_said(server, address):
    """Before the server has so much as read it: it may be served or not, but it ends once if it began."""
    before = sum(check_nothing_in_use(server.url).ends.values())
    for _ in range(50):
        with connection(address) as sock:
            sock.sendall(post(COMPLETIONS, LONG | {"stream": True}))
            hang_up(sock, rudely=True)
    assert sum(check_nothing_in_use(server.url).ends.values()) <= before + 50


def test_who_has_said_all_and_says_so_is_answered_or_given_up(server, address):
    """A socket closed in one direction may mean a client that waits, or one that has gone: in no case does it hang."""
    for stream in (False, True):
        with connection(address) as sock:
            sock.sendall(post(COMPLETIONS, SHORT | {"stream": stream}))
            sock.shutdown(socket.SHUT_WR)
            answer = read_answer(sock)
            assert answer is None or answer.status == 200
    with connection(address) as sock:
        sock.sendall(head("POST", COMPLETIONS, JSON_LINE, "Content-Length: 1000") + BODY)
        sock.shutdown(socket.SHUT_WR)  # though more was promised
        answer = read_answer(sock)
        assert answer is None or check_error(answer, 400)


# Together


def test_an_honest_client_is_served_amid_all_of_them(server, address):
    with ExitStack() as stack:
        for first, _ in SLOW.values():
            stack.enter_context(connection(address)).sendall(first)
        stack.enter_context(deaf_client(address, MUCH | {"n": 1}))
        for _ in range(3):
            sock = stack.enter_context(connection(address))
            sock.sendall(post(COMPLETIONS, LONG | {"stream": True}))
            sock.recv(100)
            hang_up(sock, rudely=True)
        with connection(address) as sock:
            sock.sendall(post(COMPLETIONS, SHORT | {"stream": True, "max_tokens": 20, "ignore_eos": True}))
            answer = read_answer(sock)
        assert answer.status == 200 and answer.body.count(b"data: {") == 20
