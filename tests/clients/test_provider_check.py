"""`trustedrouter-provider-check`, an outside judge of OpenAI-compatible servers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from served import KEY, MODEL, Server

pytest.importorskip("tr_provider_check", reason="make test-clients installs the clients")


def test_provider_check_passes(with_tools: Server, tmp_path: Path) -> None:
    program, report = Path(sys.executable).with_name("trustedrouter-provider-check"), tmp_path / "report.json"
    words = [str(program), "--base-url", with_tools.v1, "--api-key", KEY, "--model", MODEL, "--tier", "5"]
    completed = subprocess.run([*words, "--json", str(report)], cwd=tmp_path, capture_output=True, text=True)
    checks = json.loads(report.read_text())["checks"]
    # The bundled model is too small to say PONG when it is told to; all else is the server's part.
    failed = [check for check in checks if check["status"] == "fail" and check["id"] != "chat.pong"]
    assert not failed, json.dumps(failed, indent=1)[:4000] + completed.stderr[-1000:]
    assert sum(check["status"] == "pass" for check in checks) >= 10
