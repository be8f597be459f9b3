"""`blockdraft env` and `cache`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blockdraft.drafters import load_drafter
from blockdraft.engine.adaptive import costs as stored_costs
from blockdraft.kernels.cpu.build import Build
from blockdraft.machine import CACHED
from blockdraft.targets import load_target

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.slow
def test_facts(tmp_path: Path) -> None:
    own = {"OMP_NUM_THREADS": "1", "BLOCKDRAFT_CACHE": str(tmp_path), "CC": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-m", "blockdraft", "env"], env={**os.environ, **own}, capture_output=True, text=True
    )
    facts = dict(re.findall(r"^(\S.*?)  +(.+)$", done.stdout, re.M))
    assert done.returncode == 0 and {"blockdraft", "python", "torch", "processor", "memory"} <= facts.keys()
    assert (facts["cache"], facts["OMP_NUM_THREADS"]) == (str(tmp_path), "1")
    assert facts["compiled decoder"].startswith(("works", "none, since there is no C compiler (no-such-compiler)"))


def test_facts_without_torch_come_first() -> None:
    code = "import sys; from blockdraft.cli.machine import facts; found = facts(); names = [next(found)[0]"
    code += " for _ in range(14)]; print(names, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'processor'" in done.stdout and "'cache'" in done.stdout and done.stdout.endswith("False\n")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    for name, content in (("costs/a.json", "12"), ("costs/b.json", "345"), ("libraries/c.so", "6" * 3 * 2**20)):
        file = tmp_path / "cache" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (tmp_path / "cache" / "thesis.tex").write_text("mine")
    return tmp_path / "cache"


@pytest.fixture
def run(blockdraft: Run) -> Run:
    return lambda *args: blockdraft("cache", *args)


def test_list(cache: Path, run: Run) -> None:
    code, out, err = run("list")
    assert (code, err, out.splitlines()[0]) == (0, "", str(cache))
    lines = [line.split() for line in out.splitlines()]
    assert any(line[:4] == ["costs", "2", "0.0", "KiB"] for line in lines)
    assert any(line[:4] == ["libraries", "1", "3.0", "MiB"] for line in lines)
    report = json.loads(run("list", "--json")[1])
    newest = (cache / "costs" / "b.json").stat().st_mtime
    assert report["folder"] == str(cache) and list(report["kinds"]) == list(CACHED)
    assert report["kinds"]["costs"] == {"files": 2, "bytes": 5, "newest": pytest.approx(newest, abs=60)}
    assert report["kinds"]["threads"] == {"files": 0, "bytes": 0, "newest": None}


def test_clear_deletes_only_known_files(cache: Path, run: Run) -> None:
    code, out, err = run("clear", "costs")
    assert (code, out, err) == (0, "costs: 2 files, 0.0 KiB deleted\n", "")
    assert not any((cache / "costs").iterdir()) and (cache / "libraries" / "c.so").exists()
    assert run("clear")[0] == 0
    assert run("limit", "1")[0] == run("clear")[0] == 0
    assert {path.name for path in cache.rglob("*") if path.is_file()} == {"thesis.tex", "weights-limit"}
    code, out, err = run("clear", "cost")
    assert (code, out) == (
        2,
        "",
    ) and err == "error: KIND must be one of libraries, weights, costs, prefixes, threads, models, got 'cost'.\n"


def test_the_limit_of_packed_weights(cache: Path, run: Run) -> None:
    assert 0 < json.loads(run("list", "--json")[1])["weights_limit"] <= 20 * 10**9
    assert run("limit", "2.5") == run("limit") == (0, "weights: at most 2.5 GB, prefixes: 0.5 GB\n", "")
    assert "weights: at most 2.5 GB" in run("list")[1]
    for wrong in ("inf", "nan", "1e30", "abc"):
        code, out, err = run("limit", wrong)
        assert (code, out) == (2, "") and f"GB must be a number from 0 to 1000000, got '{wrong}'" in err
    assert run("limit", "-1")[0] == 2
    assert run("limit") == (0, "weights: at most 2.5 GB, prefixes: 0.5 GB\n", "")


def test_models_are_cleared_only_by_name(cache: Path, run: Run) -> None:
    """They cannot be made again without a connection."""
    kept_files = [
        cache / "models" / name for name in ("a.gguf", "of-hub/config.json", "of-hub/inside/weights.safetensors")
    ]
    for file in kept_files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    (cache / "models" / ".a.lock").touch()
    assert json.loads(run("list", "--json")[1])["kinds"]["models"]["files"] == 3
    assert run("clear")[0] == 0 and all(file.exists() for file in kept_files)
    assert run("clear", "models")[1] == "models: 3 files, 0.0 KiB deleted\n"
    assert not any(file.exists() for file in kept_files) and not (cache / "models" / "of-hub").exists()


def test_a_pull_that_may_be_running_is_left_alone(cache: Path, run: Run) -> None:
    young, old = (cache / "models" / f"{name}-wheel.partial" / "part.whl" for name in ("new", "old"))
    for file in (young, old):
        file.parent.mkdir(parents=True)
        file.write_text("1")
    os.utime(old, (1e9, 1e9))
    assert run("clear", "models")[0] == 0
    assert young.exists() and not old.parent.exists()


def test_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "none"))
    assert run("list")[0] == run("clear")[0] == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_cached_files_are_of_known_kinds(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tiny_target_dir: Path
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    library = Build(torch.float32, torch.float32, torch.float32).library()
    target = load_target(tiny_target_dir, device="cpu", threads="auto")
    torch.set_num_threads(threads)
    pair = target, load_drafter("none", target=target)
    costs = stored_costs.Costs((1,), (1.0,), ((),), ((),))
    stored_costs.store(stored_costs.path(*pair), costs, stored_costs.pair_of(*pair))
    kinds = {path.name for path in own_cache.iterdir()}
    assert "costs" in kinds <= set(CACHED) and ("libraries" in kinds or library is None)
