"""Connections that take too long or too much, signals, and engines that die: nobody hangs, and who can be told is."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import time
from unittest.mock import Mock

import pytest

pytest.importorskip("uvicorn")

from fakes import fake_engine
from uvicorn.server import ServerState

from minibatcher.errors import InvalidParameter
from minibatcher.serve import connections, server
from minibatcher.serve.connections import Bounds
from minibatcher.serve.listening import is_loopback, listen_on, url_of
from minibatcher.serve.server import Server, configure

posix = pytest.mark.skipif(os.name != "posix", reason="elsewhere a process can't send itself a signal")
FOREVER = 60.0  # longer than any test waits
SOON = 0.15
SIZES = {"/": 5, "/large": 32 << 20, "/middling": 60_000}  # bytes; small buffers hold less than the last


class Host:
    """What the server asks of an engine's host."""

    def __init__(self):
        self.name, self.running, self.error, self.draining = "fake", False, None, False
        self.stopped = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def start(self):
        self.running = True

    def stop(self):
        self.running = False
        self.loop.call_soon_threadsafe(self.stopped.set)


class App:
    """Most answer at once; /held when it is let go or the engine stops; /flood never stops; a POST is read whole."""

    def __init__(self, host):
        self.host, self.let_go, self.num_running = host, asyncio.Event(), 0

    async def __call__(self, scope, receive, send):
        self.num_running += 1
        try:
            if scope["method"] == "POST":
                while (await receive()).get("more_body"):
                    pass
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if scope["path"] == "/held":
                await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
                ways = [asyncio.create_task(event.wait()) for event in (self.let_go, self.host.stopped)]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                await send({"type": "http.response.body", "body": b"whole" if self.let_go.is_set() else b"aborted"})
                return
            while scope["path"] == "/flood":
                if not asyncio.current_task() or (await self._gone(receive)):
                    return
                await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            await send({"type": "http.response.body", "body": bytes(SIZES.get(scope["path"], 5))})
        finally:
            self.num_running -= 1

    async def _gone(self, receive):
        try:
            return (await asyncio.wait_for(receive(), 0.001))["type"] == "http.disconnect"
        except asyncio.TimeoutError:
            return False


class Running:
    def __init__(self, bounds, shutdown_timeout_s):
        self.host = Host()
        self.app = App(self.host)
        self.listener = listen_on("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.listener.listen()
        self.ready = asyncio.Event()
        self.said = []
        config = configure(self.app, bounds)
        self.server = Server(config, [self.host], shutdown_timeout_s, self.ready.set, self.said.append)

    async def ask(self, text=b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(text)
        return reader, writer


@contextlib.asynccontextmanager
async def running(bounds=None, shutdown_timeout_s=FOREVER):
    it = Running(bounds or Bounds(head_timeout_s=FOREVER, keep_alive_s=FOREVER), shutdown_timeout_s)
    it.task = asyncio.create_task(it.server.serve(sockets=[it.listener]))
    await it.ready.wait()
    try:
        yield it
    finally:
        it.server.should_exit = it.server.force_exit = True
        await it.task


def in_time(test):
    """Run an asynchronous test; one that hangs fails."""

    def run(*args, **options):
        asyncio.run(asyncio.wait_for(test(*args, **options), 20))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def answer(reader):
    """Status, headers and body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).strip(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    return int(head[0].split()[1]), headers, body


async def error_of(reader):
    status, headers, body = await answer(reader)
    assert headers["content-type"] == "application/json" and headers["connection"] == "close"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert await reader.read() == b"", "the connection is closed"
    return status, error["message"]


@in_time
async def test_a_connection_serves_one_request_after_another_and_sends_at_once():
    async with running() as it:
        reader, writer = await it.ask()
        assert (await answer(reader))[::2] == (200, bytes(5))
        (connection,) = it.server.server_state.connections
        theirs = connection.transport.get_extra_info("socket")
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
        assert (await answer(reader))[0] == 200


@in_time
async def test_a_head_that_trickles_in_gets_408_however_steadily_it_does():
    async with running(Bounds(head_timeout_s=SOON)) as it:
        reader, writer = await it.ask(b"")
        got = asyncio.create_task(error_of(reader))
        for byte in b"GET / HTTP/1.1\r\nX: " + b"x" * 100:
            writer.write(bytes([byte]))
            await asyncio.sleep(SOON / 10)
            if got.done():
                break
        else:
            pytest.fail("more bytes gave it more time")
        status, message = await got
        assert status == 408 and "0.15 s" in message
        assert not it.app.num_running


@in_time
async def test_a_second_head_has_no_more_time_than_the_first():
    async with running(Bounds(head_timeout_s=SOON, keep_alive_s=FOREVER)) as it:
        reader, writer = await it.ask()
        assert (await answer(reader))[0] == 200
        await asyncio.sleep(2 * SOON)  # idle: the head's time has not begun
        writer.write(b"GET / HTTP/1.1\r\nX:")
        assert (await error_of(reader))[0] == 408


@in_time
async def test_time_for_the_head_is_no_time_for_the_answer():
    async with running(Bounds(head_timeout_s=SOON)) as it:
        reader, _ = await it.ask(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(3 * SOON)
        it.app.let_go.set()
        assert (await answer(reader))[::2] == (200, b"begun whole")


@in_time
async def test_silent_connections_are_closed_without_a_word():
    async with running(Bounds(head_timeout_s=SOON, keep_alive_s=SOON)) as it:
        reader, _ = await it.ask(b"")
        assert await reader.read() == b""
        reader, _ = await it.ask()
        assert (await answer(reader))[0] == 200
        assert await reader.read() == b""
        await it.server._until(lambda: not it.server.server_state.connections, FOREVER)


@pytest.mark.parametrize(
    "sent, status, words",
    [
        (b"\x16\x03\x01 hello\r\n\r\n", 400, "HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", 431, "32,768 bytes"),
        (b"GET /" + b"x" * 200_000, 431, "32,768 bytes"),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "Content-Length"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501, ""),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n", 400, "chunk"),
    ],
)
def test_what_is_no_http_gets_its_status_and_the_reason(sent, status, words):
    @in_time
    async def check():
        async with running() as it:
            reader, writer = await it.ask(sent)
            found, message = await error_of(reader)
            assert found == status and words in message
            with contextlib.suppress(ConnectionError):
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            reader, _ = await it.ask()
            assert (await answer(reader))[0] == 200, "others are served"
            await it.server._until(lambda: not it.server.server_state.tasks, FOREVER)

    check()


@in_time
async def test_nonsense_amid_an_answer_ends_the_connection_and_the_application_hears_of_it():
    async with running() as it:
        reader, writer = await it.ask(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"begun ")
        writer.write(b"\x00\x01nonsense\r\n\r\n")
        it.app.let_go.set()
        await reader.read()
        await it.server._until(lambda: not it.app.num_running, FOREVER)
        assert not it.app.num_running


@in_time
async def test_a_client_that_reads_nothing_is_dropped_in_time():
    async with running(Bounds(send_timeout_s=SOON)) as it:
        _, writer = await it.ask(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.transport.pause_reading()
        await it.server._until(lambda: it.app.num_running == 1, FOREVER)
        await it.server._until(lambda: it.app.num_running == 0, 10)
        assert it.app.num_running == 0 and not it.server.server_state.connections


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("path", [b"/large", b"/middling"])
def test_a_whole_answer_that_nobody_reads_does_not_stay_for_ever(path, close):
    @in_time
    async def check():
        async with running(Bounds(send_timeout_s=SOON, keep_alive_s=SOON)) as it:
            it.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", it.port))
            deaf.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n" + close + b"\r\n")
            await it.server._until(lambda: it.server.server_state.total_requests == 1, 5)
            await it.server._until(lambda: not it.server.server_state.connections, 5)
            assert not it.server.server_state.connections and not it.app.num_running
            deaf.close()

    check()


@in_time
async def test_a_large_answer_may_take_longer_than_the_time_for_reading_nothing():
    async with running(Bounds(send_timeout_s=0.8)) as it:
        reader, _ = await it.ask(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        num_read = 0
        while piece := await reader.read(1 << 20):
            num_read += len(piece)
            await asyncio.sleep(0.06)
        assert num_read > SIZES["/large"]


@in_time
async def test_a_client_that_reads_slowly_is_not_dropped():
    async with running(Bounds(send_timeout_s=1.0)) as it:
        reader, writer = await it.ask(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(30):
            assert len(await reader.read(1 << 20)) > 0
            await asyncio.sleep(0.05)
        writer.close()
        await it.server._until(lambda: it.app.num_running == 0, 10)
        assert it.app.num_running == 0


@in_time
async def test_who_finds_too_many_connections_is_told_and_who_finds_far_too_many_is_dropped():
    bounds = Bounds(head_timeout_s=FOREVER, max_connections=2)
    async with running(bounds) as it:
        first = [await it.ask(b"") for _ in range(2)]
        reader, _ = await it.ask()
        status, headers, _ = await answer(reader)
        assert status == 503 and headers["retry-after"] == "1"
        extra = [await it.ask(b"") for _ in range(connections.SPARE)]
        reader, _ = await it.ask()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        for _, writer in (*extra, first[0]):
            writer.close()
        await it.server._until(lambda: len(it.server.server_state.connections) < 2, FOREVER)
        reader, _ = await it.ask()
        assert (await answer(reader))[0] == 200


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_what_is_under_way_is_finished_and_nobody_new_comes(number):
    @in_time
    async def check():
        async with running() as it:
            held, idle = await it.ask(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"), await it.ask()
            await held[0].readuntil(b"begun ")
            await answer(idle[0])
            os.kill(os.getpid(), number)
            assert await idle[0].read() == b"", "an idle connection is closed at once"
            assert it.host.draining and it.host.running and not it.task.done()
            assert len(it.said) == 1 and it.said[0].startswith(
                "stopping; requests under way: 1, which may take 60 s more"
            )
            with pytest.raises(ConnectionRefusedError):
                await it.ask()
            it.app.let_go.set()
            assert b"whole" in await held[0].read()
            await it.task
            assert not it.host.running and it.server.failure is None

    check()


@posix
@in_time
async def test_what_takes_longer_than_the_shutdown_may_is_aborted_and_its_client_hears_of_it():
    async with running(shutdown_timeout_s=SOON) as it:
        reader, _ = await it.ask(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"begun ")
        os.kill(os.getpid(), signal.SIGTERM)
        assert b"aborted" in await reader.read()
        await it.task


@posix
@in_time
async def test_a_second_signal_aborts_at_once():
    async with running() as it:
        reader, _ = await it.ask(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"begun ")
        os.kill(os.getpid(), signal.SIGTERM)
        await it.server._until(lambda: it.host.draining, FOREVER)
        assert it.host.running
        os.kill(os.getpid(), signal.SIGTERM)
        assert b"aborted" in await reader.read()
        await it.task


@in_time
async def test_an_engine_that_dies_ends_the_server_with_a_sentence():
    async with running() as it:
        reader, _ = await it.ask(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"begun ")
        it.host.error = RuntimeError("the device is gone")
        it.host.stop()
        assert b"aborted" in await reader.read()
        await it.task
        assert it.server.failure == "the engine of model 'fake' has stopped: RuntimeError: the device is gone"


def test_where_it_listens():
    with listen_on("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
        assert url_of(free) == f"http://127.0.0.1:{port}" and is_loopback(free)
        free.listen()
        with pytest.raises(InvalidParameter, match=f"port {port} of 127.0.0.1 is in use"):
            listen_on("127.0.0.1", port)
    with listen_on("localhost", 0) as local:
        assert is_loopback(local)
    with listen_on("0.0.0.0", 0) as everywhere:
        assert not is_loopback(everywhere)
    with pytest.raises(InvalidParameter, match="is no address of this machine"):
        listen_on("192.0.2.1", 0)
    for bad in ("no such host", "256.1.1.1", "a" * 300, "x..y"):
        with pytest.raises(InvalidParameter, match="unknown host"):
            listen_on(bad, 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6():
    try:
        listener = listen_on("::1", 0)
    except InvalidParameter as error:
        pytest.skip(str(error))
    with listener:
        assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}" and is_loopback(listener)


def test_somebody_who_was_quicker_to_listen_gets_a_sentence():
    """Two may bind to one port as long as neither listens."""
    with listen_on("127.0.0.1", 0) as first:
        try:
            second = listen_on("127.0.0.1", first.getsockname()[1])
        except InvalidParameter:
            return  # this system sees to it when they bind
        first.listen()
        with second, pytest.raises(InvalidParameter, match="is in use"):
            server.run_server(None, [], second)


@contextlib.asynccontextmanager
async def serving(engine):
    """The real application and host around an engine; yields the server, its port, and what /metrics says."""
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    from minibatcher.serve.app import create_app
    from minibatcher.serve.host import EngineHost
    from minibatcher.serve.metrics import ServerMetrics
    from minibatcher.serve.recorder import ServeRecorder
    from minibatcher.serve.settings import ServeSettings

    metrics = ServerMetrics()
    engine.recorder = ServeRecorder(metrics, "fake", engine.scheduler)
    engine.reset()
    host, ready = EngineHost("fake", engine, 0), asyncio.Event()
    app = create_app({"fake": host}, ServeSettings(metrics=metrics))
    listener = listen_on("127.0.0.1", 0)
    listener.listen()
    it = Server(configure(app, Bounds()), [host], FOREVER, ready.set)
    it.task, it.port = asyncio.create_task(it.serve(sockets=[listener])), listener.getsockname()[1]
    it.lines = lambda: metrics.exposition(None)[0].decode().splitlines()
    await ready.wait()
    try:
        yield it
    finally:
        it.should_exit = it.force_exit = True
        await it.task
    assert not engine.requests and engine.scheduler.kv.num_used_blocks == 0


async def complete(port, **fields):
    """Ask for a completion; the answer's head has come."""
    body = json.dumps({"prompt": [1, 2, 3], "ignore_eos": True} | fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    return await reader.readuntil(b"\r\n\r\n"), reader, writer


@in_time
async def test_with_an_engine_that_dies_mid_stream_its_client_hears_of_it_and_so_does_the_server():
    engine = fake_engine("continuous", num_blocks=1000, max_model_len=4000)
    plan, num_steps = engine.scheduler.schedule, 0

    def schedule(now):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 20:
            raise RuntimeError("a bug in the scheduler")
        return plan(now)

    async with serving(engine) as it:
        engine.scheduler.schedule = schedule
        head, reader, _ = await complete(it.port, max_tokens=3000, stream=True)
        assert b"200 OK" in head
        events = await reader.read()
        assert b'"error"' in events and b"has stopped" in events and b'"finish_reason":"length"' not in events
        await it.task
        assert it.failure == "the engine of model 'fake' has stopped: RuntimeError: a bug in the scheduler"


@in_time
async def test_who_is_refused_and_who_leaves_is_counted():
    engine = fake_engine("continuous", num_blocks=2000, max_model_len=4000)
    async with serving(engine) as it:
        head, _, _ = await complete(it.port, max_tokens=4000)
        assert b"400 Bad Request" in head
        refused = 'minibatcher:requests_refused_total{model_name="fake",reason="context_length_exceeded"} 1.0'
        assert refused in it.lines()
        head, _, _ = await complete(it.port, max_tokens=10, n=2)
        assert b"200 OK" in head
        assert 'minibatcher:requests_left_total{model_name="fake"} 0.0' in it.lines()
        engine.runner = Slow(engine.runner)
        _, reader, writer = await complete(it.port, max_tokens=3000, n=2, stream=True)
        await reader.readline()
        writer.close()
        await it._until(lambda: not engine.requests, 10)
        assert 'minibatcher:requests_left_total{model_name="fake"} 2.0' in it.lines()
        assert 'vllm:request_success_total{finished_reason="abort",model_name="fake"} 2.0' in it.lines()
        assert 'vllm:request_success_total{finished_reason="length",model_name="fake"} 2.0' in it.lines()


class Slow:
    """A runner that leaves a client the time to go away."""

    def __init__(self, runner):
        self.runner = runner

    def run(self, plan):
        time.sleep(0.002)
        return self.runner.run(plan)


def test_a_client_that_is_gone_when_it_is_told_off():
    """Its socket can't be half closed any more, which is no fault of the server's."""

    async def conversation():
        transport = Mock(spec=asyncio.Transport)
        transport.get_extra_info.return_value = None
        transport.write_eof.side_effect = OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        config = configure(App(Host()), Bounds())
        config.load()
        protocol = connections.BoundedProtocol(config, ServerState(), {}, bounds=Bounds())
        protocol.connection_made(transport)
        protocol.data_received(b"no HTTP\r\n\r\n")
        return b"".join(call.args[0] for call in transport.write.call_args_list)

    assert asyncio.run(conversation()).startswith(b"HTTP/1.1 400 ")
