"""A running server: clients that leave or stall, signals, and the command that starts it."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockdraft.cli.serve import announce
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.serving import run, sockets
from blockdraft.serving.backends import Backends
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams

ENDLESS = {"model": "tiny", "prompt": "abc", "temperature": 0, "ignore_eos": True}


class Running:
    """A server in a thread. Method calls stand in for signals."""

    def __init__(self, engine: Engine, **given: Any) -> None:
        settings = ServeSettings(port=0, served_model_name=("tiny",), **given)
        self.service = Service(Backends(engine), settings)
        self.bound = sockets.bind(settings)
        self.url = sockets.url_of(self.bound)
        ready = threading.Event()
        self.server: Any = run.server_of(self.service, settings, ready.set)
        self.thread = threading.Thread(target=lambda: self.server.run(sockets=[self.bound]))
        self.thread.start()
        assert ready.wait(20)

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def raw(self, body: Any) -> socket.socket:
        """Open a connection that sends a completion and reads nothing by itself."""
        sent = json.dumps(body).encode()
        connection = socket.create_connection(self.bound.getsockname())
        head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        connection.sendall("\r\n".join([*head, f"Content-Length: {len(sent)}", "", ""]).encode() + sent)
        return connection

    def await_active(self, count: int) -> None:
        ends = time.monotonic() + 20
        while self.service.admission.active != count:
            assert time.monotonic() < ends, f"{self.service.admission.active} are active"
            time.sleep(0.005)


@pytest.fixture
def slow_engine(engine: Engine, slow_down: Callable[[Engine, float], None]) -> Engine:
    slow_down(engine, 0.02)
    return engine


@pytest.fixture
def start(slow_engine: Engine) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def make(**given: Any) -> Running:
        started.append(Running(slow_engine, **given))
        return started[-1]

    yield make
    for running in started:
        running.signal()
        running.signal()
        running.thread.join(20)
        assert not running.thread.is_alive()


def idle(engine: Engine) -> None:
    ends = time.monotonic() + 20
    while not engine.scheduler.idle:
        assert time.monotonic() < ends, "a row is still taken"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels_the_request(start: Callable[..., Running], slow_engine: Engine, stream: bool) -> None:
    server = start()
    with closing(server.raw(ENDLESS | {"stream": stream})) as connection:
        ends = time.monotonic() + 20
        while not (slow_engine.scheduler.running and slow_engine.scheduler.running[0].token_ids):
            assert time.monotonic() < ends
            time.sleep(0.005)
        [request] = slow_engine.scheduler.running
        if stream:
            assert b"200 OK" in connection.recv(100)
    idle(slow_engine)
    assert request.finish_reason == "cancelled" and len(request.token_ids) < 200
    server.await_active(0)


def test_a_disconnect_frees_the_place_in_the_queue(start: Callable[..., Running], slow_engine: Engine) -> None:
    server = start(max_queue=8)
    running = [server.raw(ENDLESS) for _ in range(4)]
    server.await_active(4)
    with closing(server.raw(ENDLESS)):
        server.await_active(5)
    server.await_active(4)
    for connection in running:
        connection.close()
    idle(slow_engine)


def test_a_signal_waits_for_running_responses(start: Callable[..., Running]) -> None:
    server = start()
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=ENDLESS | {"max_tokens": 100}))
    )
    asking.start()
    server.await_active(1)
    server.signal()
    asking.join(20)
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 100
    server.thread.join(20)
    assert not server.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_signal_ends_a_request_whose_prompt_is_being_read(
    tiny_target_dir: Path,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And what has been read is stored for the next start."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    target = load_target(tiny_target_dir, compile="off")
    forward = target.forward
    target.forward = lambda *args, **more: (time.sleep(0.3), forward(*args, **more))[1]  # type: ignore[method-assign]
    with Engine(target, prefill_tokens=4, stored_prefix_tokens=16) as engine:
        server = Running(engine)
        body = ENDLESS | {"stream": stream, "prompt": list(range(3, 103)), "max_tokens": 100}
        with closing(server.raw(body)) as connection:
            while not (engine.running and engine.running[0].num_prefilled >= 16):
                time.sleep(0.01)
            began = time.monotonic()
            server.signal()
            received = b"".join(iter(lambda: connection.recv(2**16), b"")).decode()
            server.thread.join(20)
        engine.close()
        seconds = time.monotonic() - began
    assert seconds < 2.5 and not server.thread.is_alive()
    assert "stopped before the response ended" in received
    [line] = capsys.readouterr().err.splitlines()
    ended = re.fullmatch(r"Stopping: a prompt is ended after (\d+) of 100 tokens\.", line)
    assert ended, line
    assert not caplog.records
    with Engine(target, stored_prefix_tokens=16) as again:
        [completion] = again.generate([body["prompt"]], SamplingParams(1))
    assert 0.9 * int(ended[1]) <= completion.stats.remembered < 100


def test_new_requests_are_refused_during_shutdown(start: Callable[..., Running]) -> None:
    server = start()
    with closing(server.raw(ENDLESS | {"stream": True})) as connection:
        assert b"200 OK" in connection.recv(100)
        server.signal()
        ends = time.monotonic() + 20
        while httpx.get(f"{server.url}/health").status_code == 200:
            assert time.monotonic() < ends
        answer = httpx.post(f"{server.url}/v1/completions", json=ENDLESS)
        assert answer.status_code == 503 and answer.headers["retry-after"]


@pytest.mark.parametrize("twice", [True, False])
def test_responses_that_do_not_end_in_time_fail(start: Callable[..., Running], twice: bool) -> None:
    server = start(grace_seconds=60.0 if twice else 0.2)
    with closing(server.raw(ENDLESS | {"stream": True})) as stream, closing(server.raw(ENDLESS)) as whole:
        server.await_active(2)
        begun = stream.recv(2**16).decode()
        server.signal()
        if twice:
            server.signal()
        received = [
            b"".join(iter(lambda connection=connection: connection.recv(2**16), b"")).decode()
            for connection in (stream, whole)
        ]
    assert "200 OK" in begun and '"error"' in received[0] and "stopped before" in received[0]
    assert "503 Service" in received[1] and "stopped before" in received[1]
    server.thread.join(20)
    assert not server.thread.is_alive()


def test_a_stalled_client_is_disconnected(
    start: Callable[..., Running], slow_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pad every piece, so that the response is far larger than the buffers of the connection."""
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)  # with which the system would see to it too
    server = start(stall_seconds=0.3)
    monkeypatch.setattr("blockdraft.serving.streaming.data", lambda body: f"data: {'x' * 2**18}\n\n")
    with closing(server.raw(ENDLESS | {"stream": True})):
        server.await_active(1)
        server.await_active(0)
        idle(slow_engine)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has none")
def test_sockets_have_a_user_timeout() -> None:
    with closing(sockets.bind(ServeSettings(port=0, stall_seconds=2.5))) as bound:
        bound.listen()
        with closing(socket.create_connection(bound.getsockname())), closing(bound.accept()[0]) as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500


def test_a_port_in_use_is_an_error() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"port is {port}, which is in use"):
            sockets.bind(ServeSettings(port=port))
    with closing(sockets.bind(ServeSettings(port=0))) as loading:
        socket.create_connection(loading.getsockname()).close()  # which waits until the server accepts it
        with pytest.raises(UsageError, match="in use"):
            sockets.bind(ServeSettings(port=loading.getsockname()[1]))
    with pytest.raises(UsageError, match="cannot listen at"):
        sockets.bind(ServeSettings(host="no.such.host.invalid", api_key="k"))


def test_a_port_in_use_is_reported_before_anything_is_loaded() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        command = [sys.executable, "-X", "importtime", "-m", "blockdraft", "serve", "--port"]
        done = subprocess.run([*command, str(other.getsockname()[1])], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "in use at 127.0.0.1" in done.stderr
    assert not re.search(r"\b(torch|transformers|fastapi|uvicorn)$", done.stderr, re.M)


def test_the_log_tells_tokens_and_seconds_of_each_response(
    start: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "blockdraft")
    server = start()
    body = ENDLESS | {"max_tokens": 5, "n": 2, "prompt": "abc" * 20}
    httpx.post(f"{server.url}/v1/completions", json=body)
    httpx.get(f"{server.url}/v1/models")
    with closing(server.raw(ENDLESS | {"stream": True})) as connection:
        connection.recv(100)
    server.await_active(0)
    first, second = (record.getMessage() for record in caplog.records if "tokens" in record.getMessage())
    pattern = r"127\.0\.0\.1 /v1/completions: \d+ tokens, \d+ from the cache, read in [\d.]+ s; wrote 10 "
    assert re.fullmatch(pattern + r"\([\d.]+/s\)(, tau [\d.]+)?; [\d.]+ s in all, length", first)
    assert second.endswith(" s in all, abort") and "abc" not in caplog.text


def test_the_log_of_responses_can_be_turned_off(
    start: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "blockdraft")
    httpx.post(f"{start(log_requests=False).url}/v1/completions", json=ENDLESS | {"max_tokens": 5})
    assert "tokens" not in caplog.text


def test_probes_without_a_body(start: Callable[..., Running]) -> None:
    server = start()
    for path, status in (("/health", 200), ("/", 200), ("/v1/models", 200), ("/v1/completions", 405)):
        answer = httpx.head(f"{server.url}{path}")
        assert answer.status_code == status and answer.content == b""
        assert httpx.get(f"{server.url}{path}").headers["content-length"] == answer.headers["content-length"]


def test_startup_reports_a_callable_address(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ServeSettings(host="0.0.0.0", port=0, api_key="secret-key", served_model_name=("tiny",))
    with closing(sockets.bind(settings)) as bound:
        port = bound.getsockname()[1]
        assert sockets.url_of(bound) == f"http://127.0.0.1:{port}"
        announce(Service(Backends(engine), settings), bound, None)
    printed = capsys.readouterr().out
    assert f"at port {port} of this machine's address" in printed and "--allow-host" in printed
    assert "Bearer KEY" in printed and "secret-key" not in printed and "0.0.0.0" not in printed
    local = ServeSettings(port=0, served_model_name=("tiny",))
    with closing(sockets.bind(local)) as bound:
        announce(Service(Backends(engine), local), bound, None)
    assert "Network" not in (printed := capsys.readouterr().out) and "Record" not in printed
    recording = ServeSettings(port=0, served_model_name=("tiny",), record=Path("traffic"))
    with closing(sockets.bind(recording)) as bound:
        announce(Service(Backends(engine), recording), bound, None)
    assert 'recorded in traffic, except requests with "store": false' in capsys.readouterr().out


def test_startup_reports_a_draft_vocabulary(
    tiny_target_dir: Path, tiny_drafter_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(tiny_target_dir, device="cpu", compile="off")
    settings = ServeSettings(port=0, served_model_name=("tiny",))
    few = Engine(target, load_drafter(tiny_drafter_dir, target=target, draft_vocab=40))
    with closing(sockets.bind(settings)) as bound, closing(few):
        announce(Service(Backends(few), settings), bound, None)
    assert re.search("^Drafter .*, proposes 40 of 265 tokens$", capsys.readouterr().out, re.M)


@pytest.mark.slow
def test_the_command(tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "blockdraft",
        "serve",
        "--port",
        "0",
        "--self-check",
        "2",
        "--served-model-name",
        "tiny",
    ]
    command += ["--target", str(tiny_target_dir), "--drafter", str(tiny_drafter_dir), "--compile", "off"]
    environment = os.environ | {"BLOCKDRAFT_API_KEY": "secret-key"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        printed = ""
        while "Ready" not in printed:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            printed += line
        ready = re.search(r"Ready: (http://127\.0\.0\.1:\d+)/v1", printed)
        assert ready, printed
        assert "0 of 2 greedy responses differ" in printed and "Target   target" in printed
        assert "secret-key" not in printed and str(tiny_target_dir) not in printed
        assert httpx.get(f"{ready[1]}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret-key"}
        answer = httpx.post(f"{ready[1]}/v1/completions", json=ENDLESS | {"max_tokens": 5}, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert "Traceback" not in err and "secret-key" not in out + err
        assert re.search(r"^\d\d:\d\d:\d\d 127\.0\.0\.1 /v1/completions: \d+ tokens, read in .*wrote 5 ", err, re.M)
    finally:
        process.kill()
        process.communicate()
