"""Command lines against recorded options of the engines, and a script that stands in for an engine."""

import json
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
from engine_schemas import check_recorded
from fake_server import FakeServer

from blockdraft import cli
from blockdraft.errors import UsageError
from blockdraft.formats import zlab
from blockdraft.formats.trained import Trained
from blockdraft.models.catalogue import known
from blockdraft.models.places import file_place, folder_place
from blockdraft.targets import BUNDLED, load_target
from blockdraft.tools.deploy import launch
from blockdraft.tools.deploy.launch import Running, command
from blockdraft.training.export import convert, export_gguf, format_for

FAKE_SERVER = Path(__file__).parents[2] / "evaluation" / "servers"
FAKE = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(FAKE_SERVER)!r})
import uvicorn
from fake_server import FakeServer
port = int(sys.argv[sys.argv.index("--port") + 1])
print("loading weights", flush=True)
uvicorn.run(FakeServer().app, port=port, log_level="error")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a script named vllm on the path."""

    def write(script: str) -> Path:
        file = tmp_path / "bin" / "vllm"
        file.parent.mkdir()
        file.write_text(script)
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{file.parent}:/usr/bin:/bin")
        return file

    return write


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_vllm(tiny_target_dir: Path, tiny_drafter_dir: Path, tiny_dflash2_dir: Path) -> None:
    for drafter in (tiny_drafter_dir, tiny_dflash2_dir):
        found = command("vllm", str(tiny_target_dir), str(drafter), 8001)
        line, said = found.line, check_recorded("vLLM", found.line, found.files)
        assert line[:3] == ["vllm", "serve", str(tiny_target_dir)] and "--no-enable-prefix-caching" in line
        assert said == {"method": "dflash", "model": str(drafter), "num_speculative_tokens": 7}
        assert line[line.index("--port") + 1] == "8001"
    assert (
        "--no-enable-prefix-caching" not in command("vllm", str(tiny_target_dir), str(tiny_drafter_dir), 1, True).line
    )


def test_sglang(tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    found = command("sglang", str(tiny_target_dir), str(tiny_drafter_dir), 8001, more=["--tp", "2"])
    line = found.line
    assert line[-2:] == ["--tp", "2"]
    check_recorded("SGLang", line[:-2], found.files)
    assert line[:3] == ["python", "-m", "sglang.launch_server"] and {"--enable-metrics", "--disable-radix-cache"} <= {
        *line
    }
    assert line[line.index("--speculative-num-draft-tokens") + 1] == "8"  # the anchor included
    assert "--disable-radix-cache" not in command("sglang", str(tiny_target_dir), str(tiny_drafter_dir), 1, True).line


def test_tensorrt_llm(tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    """The configuration is a YAML file, and JSON is valid YAML."""
    found = command("trtllm", str(tiny_target_dir), str(tiny_drafter_dir), 8001)
    said = check_recorded("TensorRT-LLM", found.line, found.files)
    assert said == {"decoding_type": "DFlash", "speculative_model": str(tiny_drafter_dir), "max_draft_len": 7}
    assert json.loads(found.files["trtllm.yaml"])["kv_cache_config"] == {"enable_block_reuse": False}
    kept = command("trtllm", str(tiny_target_dir), str(tiny_drafter_dir), 8001, True)
    assert list(json.loads(kept.files["trtllm.yaml"])) == ["speculative_config"]
    placed = found.placed(tmp_path)
    assert json.loads(Path(placed[placed.index("--config") + 1]).read_text())["speculative_config"] == said
    typed = subprocess.run(
        ["bash", "-c", f'trtllm-serve() {{ echo "$@"; }}\n{found.shell()}'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert typed.stdout.split() == found.line[1:]
    assert json.loads((tmp_path / "trtllm.yaml").read_text()) == json.loads(found.files["trtllm.yaml"])


def test_pairs_that_do_not_fit(tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    target = str(tiny_target_dir)
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    zlab.write_checkpoint(tmp_path / "deep", replace(config, num_target_layers=9), tensors)
    with pytest.raises(UsageError, match=r"does not fit .*: layers \(9 here, 3 in the target\)"):
        command("vllm", target, str(tmp_path / "deep"), 8000)
    zlab.write_checkpoint(tmp_path / "other", config, tensors, trained=Trained("0123456789abcdef"))
    notes = list[str]()
    assert command("vllm", target, str(tmp_path / "other"), 8000, note=notes.append)
    assert len(notes) == 1 and "may not fit" in notes[0] and "fingerprint (0123456789abcdef here" in notes[0]
    loaded = load_target(tiny_target_dir, device="cpu")
    convert(tiny_drafter_dir, tmp_path / "speculators", format_for("speculators", loaded, target), loaded)
    drafter = str(tmp_path / "speculators")
    assert command("vllm", target, drafter, 1, note=notes.append).line[:3] == ["vllm", "serve", drafter]
    assert len(notes) == 1
    convert(tiny_drafter_dir, drafter, format_for("speculators", loaded, target, "some/model"), loaded)
    assert command("vllm", target, drafter, 1, note=notes.append)
    assert len(notes) == 2 and f"names some/model as its target, which vLLM serves in place of {target}" in notes[1]
    file = export_gguf(tiny_drafter_dir, tmp_path / "gguf", tiny_target_dir, "f32").drafter
    with pytest.raises(UsageError, match=f"vLLM cannot be started with {file}: .*: blockdraft export .* --format zlab"):
        command("vllm", target, str(file), 8000)
    with pytest.raises(UsageError, match="SGLang cannot be started .* Export it first: blockdraft export"):
        command("sglang", target, str(tmp_path / "speculators"), 8000)
    with pytest.raises(UsageError, match="is a target itself"):
        command("vllm", target, target, 8000)
    with pytest.raises(UsageError, match="engine is 'llama'"):
        command("llama", target, str(tiny_drafter_dir), 8000)


def test_a_file_is_no_target_for_other_engines(
    tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    model = known("smollm2")
    file = file_place(model)
    assert file is not None
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="a GGUF file, and vLLM is .* pull smollm2 --from hub`, or let transformers"):
        command("vllm", "smollm2", str(tiny_drafter_dir), 8000)
    with pytest.raises(UsageError, match="folder; let transformers"):
        command("vllm", str(file.rename(tmp_path / "other.gguf")), str(tiny_drafter_dir), 8000)
    file.touch()
    folder_place(model).symlink_to(tiny_target_dir)
    assert command("vllm", "smollm2", str(tiny_drafter_dir), 8000).line[2] == str(folder_place(model))
    with pytest.raises(UsageError, match=r"bundled does not fit .*: hidden size \(576 here"):  # so it is SmolLM2's own
        command("vllm", "smollm2", "bundled", 8000)


@pytest.mark.slow
def test_engines_that_do_not_come_up(program: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with pytest.raises(UsageError, match="no-such-engine cannot be started .* --dry-run"):
        Running(["no-such-engine"], port, 5)
    file = program("#!/bin/sh\necho out of memory >&2\nexit 3\n")
    with pytest.raises(UsageError, match=r"engine ended with status 3 before it answered.*ends with\n  out of memory"):
        Running([str(file)], port, 20)
    with pytest.raises(UsageError, match="/no/such/engine.log, which cannot be written"):
        Running([str(file)], port, 20, Path("/no/such/engine.log"))
    file.write_text("#!/bin/sh\necho RuntimeError: operator torchvision::nms does not exist\nexit 1\n")
    with pytest.raises(UsageError, match="what helps: uninstall torchvision, torchaudio, torchcodec"):
        Running([str(file)], port, 20)
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.01)
    file.write_text("#!/bin/sh\nsleep 60 & echo $! > $0.child\nwait\n")
    with pytest.raises(UsageError, match="did not answer at .*/health in 0.3 s"):
        Running([str(file)], port, 0.3)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(UsageError, match=f"port is {port}, which is in use"):
            Running([str(file)], port, 5)


@pytest.mark.slow
def test_workers_of_an_engine_that_died_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, child, go = (tmp_path / name for name in ("engine", "child", "go"))
    engine.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {child}\nwhile [ ! -e {go} ]; do sleep 0.02; done\nexit 3\n")
    engine.chmod(engine.stat().st_mode | stat.S_IEXEC)
    seen = list[bool]()

    def get(*_: object, **__: object) -> None:
        if any(seen):  # it had a worker when its children were looked at
            go.touch()
        seen.append(child.exists() and bool(child.read_text()))
        raise httpx.ConnectError("")

    monkeypatch.setattr(launch, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(httpx, "get", get)
    with pytest.raises(UsageError, match="ended with status 3"):
        Running([str(engine)], free_port(), 60)
    worker = int(child.read_text())
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["blockdraft", "launch", *map(str, args)])
    try:
        cli.main()
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


def test_dry_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    pair = ("--target", tiny_target_dir, "--drafter", tiny_drafter_dir)
    assert run(monkeypatch, "vllm", *pair, "--dry-run", "--port", 9, "--", "--tensor-parallel-size", 2) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"vllm serve {tiny_target_dir} --speculative-config") and out.endswith(
        "--port 9 --no-enable-prefix-caching --tensor-parallel-size 2\n"
    )
    assert run(monkeypatch, "vllm", *pair, "--port", 0) == 2
    assert "port is 0; it must be at least 1" in capsys.readouterr().err
    assert run(monkeypatch, "vllm", "--target", "bundled", "--drafter", "bundled", "--dry-run") == 0
    assert capsys.readouterr().out.startswith(f"vllm serve {BUNDLED} ")


def test_other_engines_get_the_bundled_dflash_drafter(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_target_dir: Path,
    two_kinds: tuple[Path, Path],
) -> None:
    dflash, dspark = two_kinds
    for name, told in (("bundled", True), ("bundled-dflash", False)):
        assert run(monkeypatch, "vllm", "--target", tiny_target_dir, "--drafter", name, "--dry-run") == 0
        said = capsys.readouterr()
        assert f'"{dflash}"' in said.out
        assert ("bundled means bundled-dflash for other engines" in said.err and str(dspark) in said.err) == told


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("prompt", "told", "status"),
    [
        ("FAIL", "4 requests failed", 0),
        pytest.param("HANG", "gone 1 s without an answer", 7, marks=pytest.mark.slow),
    ],
)
def test_a_measurement_that_failed_does_not_end_serving(
    keep: bool,
    prompt: str,
    told: str,
    status: int,
    program: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_target_dir: Path,
    tiny_drafter_dir: Path,
) -> None:
    class Served:
        def __init__(self, url: str) -> None:
            self.url = url

        def last_words(self) -> str:
            return "Its log is here."

        def wait(self) -> int:
            return status

    @contextmanager
    def running(*_: object) -> Iterator[Served]:
        with FakeServer().served() as url:
            yield Served(url)

    monkeypatch.setattr(launch, "Running", running)
    program("")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "{prompt}"}}\n{{"prompt": "long enough to be asked first"}}\n')
    pair = ("--target", tiny_target_dir, "--drafter", tiny_drafter_dir)
    options = ("--prompts", prompts, "--concurrency", 2, "--requests", 8, "--silence", 60 if prompt == "FAIL" else 1)
    code = run(monkeypatch, "vllm", *pair, *options, *(["--keep"] if keep else []))
    assert code == (status or 1 if keep else 1 if prompt == "FAIL" else 2)
    captured = capsys.readouterr()
    assert ("The measurement went wrong: " in captured.err and "Serving at" in captured.err) == keep
    assert (f"The engine ended with status {status}. Its log is here." in captured.err) == keep
    assert told in captured.out + captured.err


@pytest.mark.slow
def test_started_and_measured(
    program: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_target_dir: Path,
    tiny_drafter_dir: Path,
) -> None:
    program(FAKE)
    port, out = free_port(), tmp_path / "out"
    log = tmp_path / "engine.log"
    options = ("--port", port, "--concurrency", 2, "--requests", 4, "--limit", 2, "--out", out, "--json", "--log", log)
    assert run(monkeypatch, "vllm", "--target", tiny_target_dir, "--drafter", tiny_drafter_dir, *options) == 0
    captured = capfd.readouterr()
    found = json.loads(captured.out)
    assert found["servers"]["url"]["engine"] == "vLLM" and found["levels"][0]["tau"] == 2.5
    assert found["arguments"]["command"][1] == "serve" and (out / "server.csv").exists()
    assert log.read_text() == "loading weights\n" and str(log) in captured.err  # so the report stands last
    with pytest.raises(httpx.ConnectError):  # it is gone
        httpx.get(f"http://127.0.0.1:{port}/health")


@pytest.mark.slow
def test_an_engine_that_is_killed_while_it_is_measured(
    program: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_target_dir: Path,
    tiny_drafter_dir: Path,
) -> None:
    worker = tmp_path / "worker"
    start = (
        f"import os, signal, subprocess\nopen({str(worker)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
    )
    die = "import threading\nthreading.Timer(2, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
    program(FAKE.replace("import sys\n", "import sys\n" + start, 1).replace("print(", die + "print("))
    options = ("--port", free_port(), "--concurrency", 1, "--requests", 2000)
    assert run(monkeypatch, "vllm", "--target", tiny_target_dir, "--drafter", tiny_drafter_dir, *options) == 2
    assert "The engine's log is" in capfd.readouterr().err
    left = int(worker.read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
