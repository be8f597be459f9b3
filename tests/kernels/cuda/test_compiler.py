"""Compiled forward passes against uncompiled ones, on CPU tensors: inductor then writes C++ in place of Triton."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from captured_forwards import Recorder, assert_same, scores, target_of
from thinned import LONG
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

from blockdraft.decode.proposal import chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.kernels.cuda import compiler as module
from blockdraft.kernels.cuda.captured_decoder import CapturedDecoder
from blockdraft.kernels.cuda.compiler import Compiler, compiled_layers
from blockdraft.kernels.cuda.graphs import WORTH_CALLS, room
from blockdraft.targets import load_target
from blockdraft.targets.native import NativeTarget
from blockdraft.types import Drafting, SamplingParams

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # which inductor uses


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    """Count what torch.compile does from nothing."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compilations() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_logits_are_those_of_uncompiled_forwards(small_buckets: None, name: str) -> None:
    """Layers with and without a window share code, and so do all numbers of slots."""
    compiled = target_of(name, CPU)
    compiled.capture(Recorder(), Compiler(CPU, in_background=False))
    assert_same(scores(compiled, 1), scores(target_of(name, CPU), 1))
    assert compilations() == 4, "one node, several, and several of several sequences, which are all of a memory or not"
    assert not counters["graph_break"]
    before = compilations()
    assert_same(scores(compiled, 1), scores(target_of(name, CPU), 1))
    assert compilations() == before, "the second round compiled again"


@torch.no_grad()
@pytest.mark.parametrize("runs", [False, pytest.param(True, marks=LONG)])
def test_draft_passes_write_in_place(
    tiny_target_dir: Path, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    if not runs:  # the C++ is written, but not compiled, which takes longer than all else
        monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *args: lambda *given: None)
    target: Any = load_target(tiny_target_dir, dtype="float32", device=CPU, backend="native", compile="off")
    target.executor = CapturedDecoder(target.decoder, Recorder(), Compiler(CPU, in_background=False))
    run = cast("Any", load_drafter(tiny_drafter_dir, target=target)).runner
    config = run.config
    heads, layers = 2 * config.num_key_value_heads, config.num_hidden_layers
    stores = torch.zeros(layers, 1, heads, 40, config.head_dim)[:, :, :, :32].unbind(0)
    with inductor.patch(fx_graph_cache=False):
        _, [code] = run_and_get_code(
            run.compiled_pass, torch.ones(1, 5, config.hidden_size), torch.tensor([3]), *stores
        )
    copied = re.findall(rf"empty_strided_cpu\(\(1, \d+, s\d+, {config.head_dim}\)", code)
    assert not copied, "the memory of keys and values is copied"
    assert not runs or all(store.count_nonzero() for store in stores)


def test_launches_of_a_layer() -> None:
    """Five products and attention, and what inductor fuses: norm, heads and their writing, order, norm, activation."""
    target = target_of("qwen3", CPU)
    layer, store = target.decoder.layers[0], torch.zeros(1, 4, 40, 12)[:, :, :32]
    angles = torch.ones(1, 5, 1, 12), torch.zeros(1, 5, 1, 12)
    given = (layer, torch.ones(5, 32), angles, torch.arange(5)[None], torch.zeros(1, 1, 10, 32), store)
    with torch.no_grad():
        actual, [code] = run_and_get_code(compiled_layers(), *given)
        torch.testing.assert_close(actual, layer(*given[1:]), atol=1e-4, rtol=1e-4)
    lines = re.findall(r"^ {8}(?:\w+ = )?(cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.aten\.\w+)", code, re.MULTILINE)
    fused = [line for line in lines if line.startswith("cpp_fused")]
    assert len(fused) <= 5 and len(lines) <= 10, lines
    assert "copy_" not in code, "the memory of keys and values is copied"


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_forwards_go_on_while_a_thread_compiles(backend: None, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    begin = threading.Event()
    compile_in_thread = Compiler.compile

    def slowly(self: Compiler, *args: Any) -> None:
        begin.wait()
        compile_in_thread(self, *args)

    monkeypatch.setattr(Compiler, "compile", slowly)
    target, recorder, expected = target_of("llama", CPU), Recorder(), target_of("llama", CPU)
    compiler = Compiler(CPU, in_background=True)
    target.capture(recorder, compiler)

    def logits(target: NativeTarget) -> Tensor:
        nodes, cache = torch.zeros(rows, 1, dtype=torch.int64), target.new_cache(rows, room(1))
        return target.forward(nodes, chain_parents(rows, 1), cache).logits

    assert torch.equal(logits(target), logits(expected)) and recorder.captures == 0 == compilations()
    begin.set()
    while not compiler.ready("another", list):
        time.sleep(0.01)
    assert compilations() > 0 and compiler.reason is None
    before = compilations()
    for _ in range(WORTH_CALLS):
        assert recorder.captures == 0
        torch.testing.assert_close(logits(target), logits(expected), atol=1e-4, rtol=1e-4)
    assert (recorder.captures, recorder.replays) == (1, 1)
    assert compilations() == before, "what a thread has compiled was compiled again"


def test_what_cannot_be_compiled_is_captured_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()

    def fail(function: Any, dynamic: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            ended.set()
            raise RuntimeError("no compiler found\nmore of it")

        return call

    monkeypatch.setattr(module, "compiled", fail)
    target, recorder, compiler = target_of("llama", CPU), Recorder(), Compiler(CPU, in_background=True)
    with caplog.at_level(logging.WARNING):
        target.capture(recorder, compiler)
        assert ended.wait(60)
        with module.COMPILING:  # the thread has noted the reason
            pass
    assert compiler.reason is not None and "no compiler found" in compiler.reason
    assert "CUDA graphs run uncompiled" in caplog.text
    cache, node = target.new_cache(1, room(1)), torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(WORTH_CALLS):
        actual = target.forward(node, chain_parents(1, 1), cache).logits
    plain = target_of("llama", CPU)
    expected = plain.forward(torch.zeros(1, 1, dtype=torch.int64), chain_parents(1, 1), plain.new_cache(1, 20)).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert recorder.captures > 0

    at_once = target_of("llama", CPU)
    with pytest.raises(ValueError, match=r"torch.compile failed: no compiler found more of it. .*--compile off"):
        at_once.capture(Recorder(), Compiler(CPU, in_background=False))


def test_nothing_is_captured_while_a_thread_compiles() -> None:
    compiler = Compiler(CPU, in_background=True)
    done = threading.Event()
    compiler.ready("a", done.set)
    assert done.wait(60)
    with module.COMPILING:
        assert not compiler.ready("a", done.set)
    assert compiler.ready("a", done.set)


@pytest.mark.parametrize(
    ("drafter", "rows"),
    [
        pytest.param("tiny_drafter_dir", 2, marks=LONG),
        pytest.param("tiny_dflash2_dir", 1, marks=LONG),
    ],
)
def test_answers_are_those_of_an_uncompiled_engine(
    request: pytest.FixtureRequest, small_buckets: None, tiny_target_dir: Path, drafter: str, rows: int
) -> None:
    folder, prompts = (
        request.getfixturevalue(drafter),
        [[7 * row + i for i in range(3 + 5 * row)] for row in range(rows)],
    )
    params = [SamplingParams(12, temperature=float(row == 1), seed=1, ignore_eos=True) for row in range(rows)]
    answers, recorder = [], Recorder()
    for capture in (False, True):
        target = load_target(tiny_target_dir, dtype="float32", device=CPU, backend="native", compile="off")
        assert isinstance(target, NativeTarget)
        if capture:
            target.capture(recorder, Compiler(CPU, in_background=False))
        engine = Engine(target, load_drafter(folder, target=target), rows, Drafting(5))
        answers.append([c.token_ids for c in engine.generate(prompts, params)])
    assert answers[0] == answers[1]
    assert recorder.replays > recorder.captures and compilations() > 1


@torch.no_grad()
@pytest.mark.slow
def test_draft_passes_are_those_of_an_uncompiled_drafter(
    backend: None, tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    actual, recorder = [], Recorder()
    for capture in (False, True):
        target = load_target(tiny_target_dir, dtype="float32", device=CPU, backend="native", compile="off")
        assert isinstance(target, NativeTarget)
        if capture:
            target.executor = CapturedDecoder(target.decoder, recorder, Compiler(CPU, in_background=False))
        drafter: Any = load_drafter(tiny_drafter_dir, target=target)
        generator, state = torch.Generator().manual_seed(0), drafter.new_state(1, room(320))
        for count in (6, 3, 280):  # more slots the third time
            hidden_states = torch.randn(1, count, 2 * target.hidden_size, generator=generator)
            drafter.observe(state, torch.zeros(1, count), hidden_states, [count])
            tokens = torch.randint(5, 200, (1, 5), generator=generator)
            actual.append(drafter.draft_pass(state, tokens, 1))
    assert recorder.replays == 3 and compilations() == 1
    for plain, compiled in zip(actual[:3], actual[3:], strict=True):
        torch.testing.assert_close(compiled, plain, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_captured_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """Where the compiler works in the background; else it is an error."""

    class Broken:
        captures = 0

        def capture(self, call: object) -> Any:
            self.captures += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    target, recorder, compiler = target_of("llama", CPU), Broken(), Compiler(CPU, in_background=True)
    compiler.reason = "not needed here"
    target.capture(recorder, compiler)
    node, plain = torch.zeros(1, 1, dtype=torch.int64), target_of("llama", CPU)
    expected = plain.forward(node, chain_parents(1, 1), plain.new_cache(1, 20)).logits
    with caplog.at_level(logging.WARNING):
        for _ in range(WORTH_CALLS + 2):
            cache = target.new_cache(1, room(1))
            torch.testing.assert_close(target.forward(node, chain_parents(1, 1), cache).logits, expected)
    assert recorder.captures == 1 and caplog.text.count("Steps run without CUDA graphs") == 1
    assert "CUDA out of memory" in caplog.text


def test_measurements_wait_for_what_is_being_compiled() -> None:
    begin, compiler = threading.Event(), Compiler(CPU, in_background=True)
    compiled_in = list[str]()
    compiler.ready("a", lambda: (begin.wait(60), compiled_in.append(threading.current_thread().name)))
    threading.Timer(0.1, begin.set).start()
    compiler.compile_at_once()
    assert compiled_in == ["compiler"] and compiler.ready("a", list)
    assert compiler.ready("b", lambda: compiled_in.append(threading.current_thread().name))
    assert compiled_in == ["compiler", threading.current_thread().name]


def test_a_failure_at_once_is_an_error_each_time() -> None:
    def fail() -> None:
        raise RuntimeError("no compiler found")

    compiler = Compiler(CPU, in_background=False)
    for _ in range(2):
        with pytest.raises(UsageError, match="no compiler found"):
            compiler.ready("a", fail)
    compiler = Compiler(CPU, in_background=True)
    compiler.ready("a", fail)
    with pytest.raises(UsageError, match="no compiler found. Use compile off"):
        compiler.compile_at_once()


def test_benchmarks_compile_at_once() -> None:
    target, compiler = target_of("llama", CPU), Compiler(CPU, in_background=True)
    target.compile_at_once()  # not captured: nothing to wait for
    target.executor = CapturedDecoder(target.decoder, Recorder(), compiler)
    target.compile_at_once()
    assert not compiler.in_background
