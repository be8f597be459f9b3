"""The examples run, and those that miss something say so."""

import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import uvicorn

from blockdraft import Engine, cli, load_drafter, load_target
from blockdraft.serving.app import make_app
from blockdraft.serving.backends import Backends
from blockdraft.serving.service import Service
from blockdraft.serving.settings import ServeSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.usefixtures("own_cache")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_all_are_listed_and_can_be_imported(name: str) -> None:
    assert callable(load(name).main)
    assert f"[{name}.py]({name}.py)" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    load("quickstart").main()
    out = capsys.readouterr().out
    assert "of them drafted, tau " in out and out.count("The answer is") == 2


def test_chat(standard_input: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    standard_input("What is 37 + 58?\nAnd 12 + 7?\n")
    load("chat").main()
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert len(notes) == 2 and " 0 remembered" in notes[0] and " 0 remembered" not in notes[1]


@pytest.mark.slow
def test_compare_methods(capsys: pytest.CaptureFixture[str]) -> None:
    load("compare_methods").main()
    out = capsys.readouterr().out
    assert out.count("tokens/s, tau ") == 5 and "same tokens: True" in out


@pytest.mark.slow
def test_many_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    load("many_prompts").main()
    assert "same answers both ways: True" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("fresh_accelerator")
def test_own_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def in_this_process(command: list[str], check: bool) -> None:
        assert command[:3] == [sys.executable, "-m", "blockdraft"] and check
        with pytest.raises(SystemExit) as end:
            cli.main(command[3:])
        assert not end.value.code

    example = load("own_drafter")
    monkeypatch.setattr(example, "subprocess", SimpleNamespace(run=in_this_process))
    example.main(tmp_path / "own", steps=2)
    out = capsys.readouterr().out
    assert (tmp_path / "own/drafter/model.safetensors").is_file()
    assert [line.split()[-2] for line in out.splitlines() if line.startswith(("none ", "chain "))] == ["100", "100"]


def test_coding_session(capsys: pytest.CaptureFixture[str]) -> None:
    load("coding_session").main("bundled", max_new_tokens=24)
    assert capsys.readouterr().out.count("of them drafted]") == 2


def test_coding_session_without_its_model() -> None:
    with pytest.raises(SystemExit, match="blockdraft pull qwen2.5-coder-1.5b"):
        load("coding_session").main()


def test_client_without_a_server() -> None:
    with pytest.raises(SystemExit, match="No server answers at http://127.0.0.1:9/v1"):
        load("client").main("http://127.0.0.1:9/v1")


@pytest.mark.slow
def test_client(capsys: pytest.CaptureFixture[str]) -> None:
    target = load_target("bundled")
    with Engine(target, load_drafter(target=target), 2) as engine:
        settings = ServeSettings()
        app = make_app(Service(Backends(engine), settings), settings)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            load("client").main(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1")
        finally:
            server.should_exit = True
            thread.join()
    assert capsys.readouterr().out.strip()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_without_one() -> None:
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        load("gpu").main()
