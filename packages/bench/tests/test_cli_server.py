"""`blockdraft bench server`: scripted servers, and our own with a tiny model."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, serve

Run = Callable[..., Any]


@pytest.fixture
def bench(blockdraft: Run, tmp_path: Path) -> Run:
    """Runs `blockdraft bench server` on two prompts."""
    prompts = tmp_path / "first.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    def bench_server(*args: object) -> Any:
        return blockdraft("bench", "server", "--prompts", prompts, *args)

    return bench_server


@pytest.fixture
def fake() -> Iterator[str]:
    with FakeServer(key="secret").served() as url:
        yield url


def test_written_and_printed(bench: Run, fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKDRAFT_SERVER_KEY", "secret")
    out = tmp_path / "out"
    options = (
        fake,
        "--out",
        out,
        "--concurrency",
        "1,2",
        "--temperature",
        "0,1",
        "--requests",
        3,
        "--seed",
        3,
    )
    result = bench(*options)
    assert (result.code, result.err.splitlines()[-1]) == (0, "first, temperature 1, 2 at a time: 12 of 12 requests")
    assert "fake-model" in result.out and " 2.50 " in result.out
    report = json.loads((out / "server.json").read_text())
    assert [(entry["temperature"], entry["concurrency"]) for entry in report["levels"]] == [
        (0, 1),
        (0, 2),
        (1, 1),
        (1, 2),
    ]
    assert report["arguments"]["seed"] == 3 and report["arguments"]["concurrency"] == [1, 2]
    assert "secret" not in json.dumps(report)
    again = bench(*options)
    assert again.code == 2 and "server.json exists" in again.err
    assert json.loads(bench(*options, "--overwrite", "--json").out)["servers"]["url"]["engine"] == "vLLM"


def test_failed_requests_end_in_1(bench: Run, tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text('{"prompt": "FAIL"}\n{"prompt": "long enough to be asked first"}\n')
    with FakeServer().served() as url:
        result = bench("--prompts", more, url, "--concurrency", 1)
    assert result.code == 1 and "2 requests failed: status 500" in result.out


@pytest.mark.slow
def test_a_server_that_hangs_leaves_the_levels_before(bench: Run, tmp_path: Path) -> None:
    more, out = tmp_path / "more.jsonl", tmp_path / "out"
    more.write_text('{"prompt": "HANG"}\n{"prompt": "long enough to be asked first"}\n')
    with FakeServer().served() as url:
        result = bench("--prompts", more, url, "--concurrency", 2, "--silence", 1.5, "--out", out, "--json")
    assert result.code == 2
    assert (
        "has gone 1.5 s without an answer" in result.err
        and "--silence SECONDS" in result.err
        and f"in {out}." in result.err
    )
    for report in (json.loads(result.out), json.loads((out / "server.json").read_text())):
        assert [level["prompt_set"] for level in report["levels"]] == ["first"] and "hang" in report["stopped"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["http://x", "--concurrency", "0"], "--concurrency must be at least 1, got '0'"),
        (["http://x", "--concurrency", "65"], "at most 64"),
        (["http://x", "--temperature", "hot"], "--temperature must be a number, got 'hot'"),
        (["http://127.0.0.1:9"], "cannot be reached"),
        (["nonsense"], "nonsense cannot be reached"),
    ],
)
def test_bad_input(bench: Run, args: list[str], message: str) -> None:
    result = bench(*args)
    assert (result.code, result.out) == (2, "") and result.err.startswith("error: ")
    assert message in result.err and "Traceback" not in result.err


@pytest.mark.slow
def test_our_own_server(bench: Run, tiny_target_dir: Path, tiny_drafter_dir: Path, own_cache: Path) -> None:
    """It drafts, by its metrics, and says what a server says that does not."""
    pytest.importorskip("fastapi")
    from blockdraft.drafters import load_drafter
    from blockdraft.engine import Engine
    from blockdraft.serving.app import make_app
    from blockdraft.serving.backends import Backends
    from blockdraft.serving.service import Service
    from blockdraft.serving.settings import ServeSettings
    from blockdraft.targets import load_target
    from blockdraft.types import Drafting

    def app(drafter: object, **drafting: Any) -> Any:
        target = load_target(tiny_target_dir, device="cpu")
        engine = Engine(target, load_drafter(str(drafter), target=target), 4, Drafting(**drafting))
        settings = ServeSettings(prefix_tokens=0)
        return make_app(Service(Backends(engine), settings), settings)

    with serve(app(tiny_drafter_dir, block_size=8)) as url, serve(app("none")) as other:
        options = (url, "--against", other, "--max-new-tokens", 12, "--concurrency", "1,4", "--json")
        result = bench(*options, "--temperature", "0,1")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["equality"] == {"prompts": 2, "identical": 2, "differences": []}
    assert [about["engine"] for about in report["servers"].values()] == ["blockdraft"] * 2
    assert [about["prefix_caching"] for about in report["servers"].values()] == [False, False]
    assert len(report["levels"]) == 8
    for level in report["levels"]:
        assert level["failed"] == 0 and level["tokens_per_second"] > 0
        drafts = level["server"] == "url"
        assert bool(level["acceptance_by_position"]) == drafts and level["tau"] >= 1
