"""Threads of the kernels compute every piece once, in order, and take no time while idle."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockdraft.decode.proposal import chain_parents
from blockdraft.kernels.cpu.library import num_threads, one_torch_thread
from blockdraft.kernels.cpu.sources import PARALLEL, SOURCE
from blockdraft.targets import Target, load_target

DEFINES = ("-DWEIGHT=0", "-DNARROW=0", "-DSTORE=0", "-DMAX_LANES=16", "-DINTEGERS=0", f'-DSOURCE="{SOURCE}"')
THREAD_SANITIZER = ("-fsanitize=thread", "-march=native")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize(
    ("options", "calls"),
    [
        (("-O1",), 30),
        (("-O1", *THREAD_SANITIZER), 20),
        pytest.param(("-O2",), 300, marks=pytest.mark.long),
        pytest.param(("-O1", *THREAD_SANITIZER), 100, marks=pytest.mark.long),
    ],
)
def test_each_piece_is_computed_once_and_in_the_order_of_the_stages(
    tmp_path: Path, options: tuple[str, ...], calls: int
) -> None:
    program, source = tmp_path / "program", Path(__file__).with_name("pool_check.c")
    command = ["gcc", "-g", *options, "-ffp-contract=off", *PARALLEL, *DEFINES, "-o", program, source, "-lm"]
    subprocess.run(command, check=True)
    done = subprocess.run([program, str(calls)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


SetThreads = Callable[[int], None]


@pytest.fixture(params=[None, "int8", "int4"])
def target(request: pytest.FixtureRequest, tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu", compile="on", quantize=request.param)


def logits(target: Target, batch: int, count: int, tree: bool) -> Tensor:
    """Return the logits of a chain, a prompt or a tree behind five committed tokens."""
    cache = target.new_cache(batch, 160)
    tokens = torch.arange(5 + count).remainder(200).expand(batch, -1)
    target.forward(tokens[:, :5], chain_parents(batch, 5), cache)
    cache.commit([range(5)] * batch)
    parents = chain_parents(batch, count)
    if tree:
        parents = (torch.arange(count) - 1).div(2, rounding_mode="floor").expand(batch, -1)
    return target.forward(tokens[:, 5:], parents, cache).logits


def test_threads_change_no_bit(target: Target, set_threads: SetThreads) -> None:
    shapes = [(1, 1, False), (1, 8, False), (1, 13, True), (3, 1, False), (2, 7, True), (1, 120, False)]
    set_threads(1)
    expected = [logits(target, *shape) for shape in shapes]
    for threads in (2, 3, 4, 2 * (os.cpu_count() or 1) + 1):
        set_threads(threads)
        for shape, right in zip(shapes, expected, strict=True):
            assert torch.equal(logits(target, *shape), right), (threads, shape)


@pytest.mark.parametrize("target", [None], indirect=True)
def test_idle_threads_cost_no_time(target: Target, set_threads: SetThreads) -> None:
    set_threads(2)
    logits(target, 1, 1, False)
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize("target", [None], indirect=True)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_threads_of_another_number_end(target: Target, set_threads: SetThreads) -> None:
    def count(threads: int) -> int:
        set_threads(threads)
        logits(target, 1, 1, False)
        return len(os.listdir("/proc/self/task"))

    few, many = count(2), count(9)
    assert many == few + 7 and count(2) == few and count(9) == many


@pytest.mark.parametrize("target", [None], indirect=True)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_has_threads_of_its_own(target: Target, set_threads: SetThreads) -> None:
    set_threads(3)
    expected = logits(target, 1, 8, False)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(logits(target, 1, 8, False), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(logits(target, 1, 8, False), expected)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="torch may use another library for threads")
def test_torch_may_use_one_thread_while_the_kernels_use_all(set_threads: SetThreads) -> None:
    seen: list[int] = []
    set_threads(3)
    with one_torch_thread:
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert (torch.get_num_threads(), num_threads(), seen) == (1, 3, [3])
    assert torch.get_num_threads() == num_threads() == 3
