"""Captured forwards against eager ones. Without a GPU a stand-in for CUDA graphs shows that the right numbers are
copied to and from the right places; with one, the same tests run on real graphs."""

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_forwards import TARGET_LAYERS, assert_same, scores, target_of
from torch import Tensor

from blockdraft.decode.proposal import ChainPlan, chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.engine.adaptive.costs import Probe
from blockdraft.kernels.cuda import graphs
from blockdraft.kernels.cuda.captured_decoder import CapturedDecoder
from blockdraft.kernels.cuda.graphs import CudaRecorder, GraphRecorder, Graphs, room
from blockdraft.nn.cache import bucket, slot_bucket
from blockdraft.targets import load_target
from blockdraft.targets.native import NativeTarget
from blockdraft.types import Drafting, SamplingParams


class StandIn:
    """Replays by calling the function again on the tensors that it was captured with.

    As with CUDA graphs, to capture computes nothing, a replay may overwrite what other graphs have computed, and no
    tensor can be made of numbers that the host has.
    """

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self._results: list[Tensor] = []

    def capture(self, call: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        self.captures += 1
        results = [torch.full_like(each, torch.nan) for each in self._call(call)]
        self._results += results

        def replay() -> None:
            self.replays += 1
            for each in self._results:
                each.fill_(torch.nan)
            for own, new in zip(results, self._call(call), strict=True):
                own.copy_(new)

        return results, replay

    def _call(self, call: Callable[[], list[Tensor]]) -> list[Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "tensor", None)
            return call()


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def recorder(device: torch.device) -> GraphRecorder:
    return CudaRecorder(device) if device.type == "cuda" else StandIn()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("qwen3", 3), ("gemma2", 1), ("llama", 2)])
def test_logits_and_features_are_those_of_eager_forwards(
    small_buckets: None, device: torch.device, recorder: GraphRecorder, name: str, rows: int
) -> None:
    captured = target_of(name, device)
    captured.capture(recorder)
    assert_same(scores(captured, rows), scores(target_of(name, device), rows))


def test_a_graph_is_captured_once_for_a_shape() -> None:
    target, recorder = target_of("llama", torch.device("cpu")), StandIn()
    target.capture(recorder)
    before, cache = recorder.captures, target.new_cache(2, room(40))
    for count in (7, 7, 9, 10, 9):
        target.forward(torch.zeros(2, count, dtype=torch.int64), chain_parents(2, count), cache, TARGET_LAYERS)
        cache.commit([[0], [0, 1]])
    assert recorder.captures == before + 2 and recorder.replays == 1 + 5


def test_rows_that_lie_anywhere_or_have_no_slots_to_fill_up_stay_eager(scatter: Callable[..., Any]) -> None:
    target, recorder = target_of("llama", torch.device("cpu")), StandIn()
    target.capture(recorder)
    before, size = recorder.replays, room(20)

    def replayed(*places: tuple[int, int]) -> bool:
        cache, replays = scatter(target.new_cache(1, 4 * size), *places), recorder.replays
        target.forward(torch.zeros(len(places), 5, dtype=torch.int64), chain_parents(len(places), 5), cache)
        return recorder.replays > replays

    assert replayed((7, size)) and replayed((0, size), (size + 3, size), (2 * size + 6, size))
    assert not replayed((0, size), (size, size), (2 * size + 3, size))  # not at equal distances
    assert not replayed((size, size), (0, size))
    assert not replayed((0, size), (size, 20))  # one that shrank
    assert recorder.replays == before + 2


def test_at_most_so_many_graphs_are_kept(constants: Callable[..., None]) -> None:
    constants(graphs, MAX_GRAPHS=2)
    recorder = StandIn()
    kept = Graphs(recorder, torch.device("cpu"))

    def run(key: str) -> None:
        [doubled] = kept.run(key, lambda x: [2 * x], [torch.ones(1, 3)], 2)
        assert torch.equal(doubled, torch.full((1, 2), 2.0))

    for key, captures in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4)):  # c puts out b, and b then c
        run(key)
        assert recorder.captures == captures, key


def test_a_store_has_room_for_what_fills_up() -> None:
    target = target_of("llama", torch.device("cpu"))
    target.capture(StandIn())
    assert room(100) == target.row_slots(100)
    for count in range(1, graphs.MAX_NODES + 1):
        for capacity in (count, 500, 1000, 1024, 1025):
            assert slot_bucket(max(capacity - count, 0) + bucket(count)) <= room(capacity)


def test_what_cannot_be_captured_says_so_at_once() -> None:
    class Broken:
        def capture(self, call: object) -> Any:
            raise RuntimeError("CUDA error: operation not permitted\nmore of it")

    with pytest.raises(
        ValueError, match=r"could not be captured: CUDA error: operation not permitted more of it. .*--compile off"
    ):
        target_of("llama", torch.device("cpu")).capture(Broken())


def test_stores_take_what_they_say(tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    target = load_target(tiny_target_dir, device="cpu", backend="native", compile="off")
    drafter = load_drafter(tiny_drafter_dir, target=target)
    plain = target.cache_bytes(3, 100), drafter.state_bytes(3, 100)
    assert isinstance(target, NativeTarget)
    target.capture(StandIn())
    captured = load_drafter(tiny_drafter_dir, target=target)
    assert (target.cache_bytes(3, 100), captured.state_bytes(3, 100)) == plain  # what is filled up has row_slots
    for store in (target.new_cache(3, 100), captured.new_state(3, 100)):
        assert (store.starts, store.capacity) == ([0, 100, 200], 100)
    assert target.running == "native, captured"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "drafting"),
    [
        ("none", Drafting(None)),
        ("tiny_drafter_dir", Drafting(None)),
        ("tiny_dflash2_dir", Drafting(block_size=5, draft_window=9)),
        ("tiny_dspark_dir", Drafting(tree_budget=11)),
    ],
)
def test_answers_are_those_of_an_eager_engine(
    request: pytest.FixtureRequest,
    small_buckets: None,
    device: torch.device,
    recorder: GraphRecorder,
    tiny_target_dir: Path,
    drafter: str,
    drafting: Drafting,
) -> None:
    """Four requests in a batch of two, so that sequences come and go, in two rounds."""
    folder = drafter if drafter == "none" else request.getfixturevalue(drafter)
    prompts = [[7 * row + i for i in range(3 + 5 * row)] for row in range(4)]
    params = [SamplingParams(5 + 7 * row, temperature=float(row == 2), seed=1, ignore_eos=True) for row in range(4)]
    answers = []
    for capture in (False, True):
        target = load_target(tiny_target_dir, dtype="float32", device=device, backend="native", compile="off")
        assert isinstance(target, NativeTarget)
        if capture:
            target.capture(recorder)
        engine = Engine(target, load_drafter(folder, target=target), 2, drafting)
        answers.append([[c.token_ids for c in engine.generate(prompts, params)] for _ in range(2)])
    assert answers[0] == answers[1]
    if isinstance(recorder, StandIn):
        assert recorder.replays > recorder.captures


@NEEDS_GPU
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize(("budget", "waits"), [(0, 1), (11, 2)])
def test_how_often_a_greedy_step_waits_for_a_gpu(
    tiny_target_dir: Path, tiny_drafter_dir: Path, capture: bool, budget: int, waits: int
) -> None:
    target = load_target(
        tiny_target_dir, dtype="float32", device="cuda", backend="native", compile="on" if capture else "off"
    )
    drafter = load_drafter(tiny_drafter_dir, target=target)
    runner, rows = Probe(target, drafter).open_sequences(1, 3, 64)
    plan = ChainPlan(drafter.block_size, [SamplingParams()]).as_tree(budget)
    for _ in range(3):  # captures
        runner.step(rows, plan)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            runner.step(rows, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in heard if "synchroniz" in str(each.message)]) == waits


@torch.no_grad()
def test_draft_passes_are_those_of_an_eager_drafter(
    small_buckets: None, device: torch.device, recorder: GraphRecorder, tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    actual = []
    for capture in (False, True):
        target = load_target(tiny_target_dir, dtype="float32", device=device, backend="native", compile="off")
        assert isinstance(target, NativeTarget)
        if capture:
            target.capture(recorder)
        drafter: Any = load_drafter(tiny_drafter_dir, target=target)
        generator, passes = torch.Generator().manual_seed(0), []
        for _ in range(2):
            size = room(60)
            state = drafter.new_state(4, size)
            rows = [[0, size, 2 * size], [0, size, 3 * size], [2 * size, size, 0], [size, 2 * size, 3 * size]]
            for step in range(8):
                hidden_states = torch.randn(3, 6, 2 * target.hidden_size, generator=generator).to(device)
                part = state.of(rows[step // 2])
                drafter.observe(part, torch.zeros(3, 6), hidden_states, [6, 1 + step % 3, 4])
                tokens = torch.randint(5, 200, (3, 8 - step % 2), generator=generator).to(device)
                before = recorder.replays if isinstance(recorder, StandIn) else 0
                passes += drafter.draft_pass(part, tokens, step // 2 % 2)
                if capture and isinstance(recorder, StandIn):
                    assert (recorder.replays > before) == (step // 2 in (0, 3)), "those at equal distances"
        actual.append(passes)
    assert_same(iter(actual[1]), iter(actual[0]))


def test_decoders_share_no_graphs() -> None:
    recorder = StandIn()
    targets = [target_of(name, torch.device("cpu")) for name in ("llama", "qwen3")]
    for target in targets:
        target.executor = CapturedDecoder(target.decoder, recorder)
    outputs = [
        t.forward(torch.zeros(1, 3, dtype=torch.int64), chain_parents(1, 3), t.new_cache(1, 300)) for t in targets
    ]
    assert recorder.captures == 2 and not torch.equal(outputs[0].logits, outputs[1].logits)


def test_garbage_stays_during_a_capture() -> None:
    """A graph that Python frees during a capture would break it, as an H200 has shown."""
    with graphs.kept_garbage():
        assert not gc.isenabled()
        with graphs.kept_garbage():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
