"""The server for tests of third-party clients. It runs in the main environment, and the tests in the clients' own.

Clients can connect to 127.0.0.1 only.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from served import KEY, MODEL, Server

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "src" / "blockdraft" / "pair/tiny"
# The interpreter that has blockdraft.
PYTHON = os.environ.get("BLOCKDRAFT_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it downloads one at import
    "LANGSMITH_TRACING": "false",
    "DO_NOT_TRACK": "1",
}
LOCAL = ("127.0.0.1", "::1", "localhost")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("clients")


@pytest.fixture(autouse=True, scope="session")
def only_this_machine() -> Iterator[None]:
    """Refuse connections to other machines."""
    connect, resolve = socket.socket.connect, socket.getaddrinfo

    def local_connect(self: socket.socket, address: Any) -> None:
        assert not isinstance(address, tuple) or address[0] in LOCAL, f"{address} is another machine"
        return connect(self, address)

    def local_resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        assert name in (None, "", *LOCAL), f"{name} is another machine"
        return resolve(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_connect)
        patch.setattr(socket, "getaddrinfo", local_resolve)
        yield


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Return a function that starts `blockdraft serve` with a key, the bundled drafter and given arguments."""
    folder, started = tmp_path_factory.mktemp("servers"), list[subprocess.Popen[str]]()

    def start(target: Path, *words: str) -> Server:
        log = folder / f"{len(started)}.log"
        command = [PYTHON, "-m", "blockdraft", "serve", "--port", "0", "--api-key", KEY, "--target", str(target)]
        command += ["--drafter", str(PAIR / "drafter"), "--served-model-name", MODEL, *words]
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=_environment(), text=True)
        started.append(process)
        for _ in range(3000):
            if ready := re.search(r"Ready: (http://127\.0\.0\.1:\d+)", log.read_text()):
                return Server(ready[1], target)
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        raise TimeoutError(log.read_text())

    yield start
    for process in started:
        process.terminate()
        assert process.wait(60) == 0


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session")
def small(serve: Callable[..., Server]) -> Server:
    """Serve the bundled pair, which always drafts."""
    return serve(PAIR / "target", "--block-size", "4")


@pytest.fixture(scope="session")
def with_tools(serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Serve the bundled pair with a chat template for tools.

    The model was never trained for tools, so tests look only at calls that it must make.
    """
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([PYTHON, "-m", "tests.server_targets", str(folder)], env=_environment(), cwd=ROOT, check=True)
    return serve(folder / "pair", "--block-size", "4", "--max-answer-tokens", "600")  # it never stops calling


if sys.version_info < (3, 11):
    collect_ignore_glob = ["test_*.py"]  # which some of the clients need
