"""schemathesis, over the server's own OpenAPI document: no answer is a server error."""

import subprocess
import sys
from pathlib import Path

import pytest
from served import KEY, Server

pytest.importorskip("schemathesis", reason="make test-clients installs the clients")


def test_no_server_errors(with_tools: Server, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("st")
    words = [str(program), "run", f"{with_tools.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"]
    words += ["--checks", "not_a_server_error", "--max-examples", "20", "--seed", "1", "--phases"]
    # One worker: several parse Python source at once, which CPython 3.11 answers with a SystemError now and then.
    words += ["examples,coverage,fuzzing", "--request-timeout", "60", "--workers", "1", "--generation-database", "none"]
    completed = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-1000:]
