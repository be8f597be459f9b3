"""The page at `/radar`."""

from __future__ import annotations

import base64
import hashlib

from fastapi import FastAPI
from starlette.testclient import TestClient

from blockdraft.serving import web
from blockdraft.serving.security import OPEN_PATHS


def test_radar_policy_allows_only_its_script() -> None:
    app = FastAPI()
    app.include_router(web.router())
    answer = TestClient(app).get("/radar")
    assert answer.status_code == 200
    script = answer.text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in answer.headers["content-security-policy"]
    assert "/radar" in OPEN_PATHS
