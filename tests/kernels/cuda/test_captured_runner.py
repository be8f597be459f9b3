"""Chains in one graph against those drafted node by node."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_forwards import Recorder
from thinned import LONG
from torch import Tensor
from torch._dynamo.utils import counters

from blockdraft.decode.drafting import GrowingChain
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.kernels.cuda.compiler import Compiler
from blockdraft.kernels.cuda.graphs import WORTH_CALLS, room
from blockdraft.targets import load_target
from blockdraft.types import Drafting, SamplingParams

CPU = torch.device("cpu")
COSTS: dict[str, tuple[list[float] | None, float]] = {
    "all": (None, 1.0),
    "cheap": ([1.0, 1.0001, 1.0002, 1.0003, 1.0004, 1.0005], 1.0),
    "dear": ([1.0, 1.02, 1.05, 1.5, 2.0, 3.0], 1.5),
    "none": ([1.0, 9.0], 1.0),
}


def drafter_of(folder: Path, target_dir: Path, recorder: Recorder | None, compiler: Compiler | None = None) -> Any:
    target: Any = load_target(target_dir, dtype="float32", device=CPU, backend="native", compile="off")
    if recorder is not None:
        target.capture(recorder, compiler)
    return load_drafter(folder, target=target)


def state_of(drafter: Any, lengths: list[int], extra: int = 40) -> Any:
    generator, size = torch.Generator().manual_seed(0), room(max(lengths) + extra)
    state, count, hidden_size = drafter.new_state(len(lengths), size), max(lengths), drafter.target.hidden_size
    tokens = torch.randint(5, 200, (len(lengths), count), generator=generator)
    width = hidden_size * len(drafter.target_layers)
    drafter.observe(state, tokens, torch.randn(len(lengths), count, width, generator=generator), lengths)
    return state


@torch.no_grad()
def node_by_node(run: Any, state: Any, anchor: Tensor, seconds: list[float] | None, calibration: float) -> Any:
    nodes, tokens, count = run.nodes(state, 8, 1), [anchor], 5 if seconds is None else min(5, len(seconds) - 1)
    growing = GrowingChain(torch.ones(len(anchor)), seconds, calibration)
    while len(tokens) <= count and growing.pays():
        probs = nodes(tokens[-1][:, None])[:, 0].float().softmax(-1)
        growing.add(probs.amax(-1))
        tokens.append(run.network.kept[probs.argmax(-1)])
    return torch.stack(tokens, dim=1), growing.expected


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", ["tiny_eagle3_dir", "tiny_mtp_dir"])
def test_a_chain_in_one_graph_is_that_of_its_nodes(
    request: pytest.FixtureRequest, name: str, costs: str, tiny_target_dir: Path
) -> None:
    recorder, (seconds, calibration) = Recorder(), COSTS[costs]
    drafter = drafter_of(request.getfixturevalue(name), tiny_target_dir, recorder)
    count = 5 if seconds is None else min(5, len(seconds) - 1)
    for lengths in ([9, 4], [1], [200, 3]):
        state, anchor = state_of(drafter, lengths), torch.tensor([40, 41])[: len(lengths)]
        wanted, expected = node_by_node(drafter.runner, state, anchor, seconds, calibration)
        for _ in range(2):  # the first leaves nothing behind
            replays = recorder.replays
            tokens, accepted = drafter.runner.chain(state, anchor, count, None, seconds, calibration)
            assert torch.equal(tokens, wanted) and recorder.replays == replays + 1
            assert (accepted is None) == (seconds is None)
            assert accepted is None or torch.allclose(accepted, expected, rtol=1e-4)


def test_what_is_drafted_without_graphs(tiny_target_dir: Path, tiny_eagle3_dir: Path) -> None:
    drafter = drafter_of(tiny_eagle3_dir, tiny_target_dir, Recorder())
    state, anchor = state_of(drafter, [9, 4, 5]), torch.tensor([40, 41, 42])
    size = state.capacity
    assert drafter.runner.chain(state, anchor, 5, window=4) is None
    assert drafter.runner.chain(state.of([0, 2 * size, size]), anchor, 5) is None  # not at equal distances
    assert drafter.runner.chain(state_of(drafter, [9], extra=-8), anchor[:1], 300) is None  # no slots behind
    assert drafter.runner.chain(drafter.new_state(1, room(9)), anchor[:1], 5) is None  # no hidden state yet
    assert drafter.runner.chain(state, anchor, 5) is not None
    assert drafter.slots_beside == drafter.block_size - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_eagle3_dir", pytest.param("tiny_mtp_dir", marks=pytest.mark.long)])
@pytest.mark.parametrize("drafting", [Drafting(4), pytest.param(Drafting(tree_budget=6), marks=pytest.mark.long)])
def test_answers_are_those_of_an_eager_engine(
    request: pytest.FixtureRequest, name: str, drafting: Drafting, tiny_target_dir: Path
) -> None:
    prompts = [[7 * row + i for i in range(3 + 5 * row)] for row in range(4)]
    params = [SamplingParams(5 + 7 * row, temperature=float(row == 2), seed=1, ignore_eos=True) for row in range(4)]
    answers, recorder = [], Recorder()
    for own in (None, recorder):
        drafter = drafter_of(request.getfixturevalue(name), tiny_target_dir, own)
        engine = Engine(drafter.target, drafter, 2, drafting)
        answers.append([[c.token_ids for c in engine.generate(prompts, params)] for _ in range(2)])
    assert answers[0] == answers[1]
    assert recorder.replays > recorder.captures


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    "name", [pytest.param("tiny_eagle3_dir", marks=pytest.mark.slow), pytest.param("tiny_mtp_dir", marks=LONG)]
)
def test_compiled_chains(backend: None, request: pytest.FixtureRequest, name: str, tiny_target_dir: Path) -> None:
    torch.compiler.reset()
    counters.clear()
    recorder, compiler = Recorder(), Compiler(CPU, in_background=False)
    drafter = drafter_of(request.getfixturevalue(name), tiny_target_dir, recorder, compiler)
    before = counters["stats"]["unique_graphs"]
    for lengths in ([9, 4], [300, 3, 2]):
        state, anchor = state_of(drafter, lengths), torch.tensor([40, 41, 42])[: len(lengths)]
        wanted, _ = node_by_node(drafter.runner, state, anchor, None, 1.0)
        tokens, _ = drafter.runner.chain(state, anchor, 5)
        assert torch.equal(tokens, wanted)
    assert counters["stats"]["unique_graphs"] == before + 2 and not counters["graph_break"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_chains_go_without_graphs_while_a_thread_compiles(
    backend: None, rows: int, tiny_target_dir: Path, tiny_eagle3_dir: Path
) -> None:
    torch.compiler.reset()
    counters.clear()
    recorder, compiler = Recorder(), Compiler(CPU, in_background=True)
    drafter = drafter_of(tiny_eagle3_dir, tiny_target_dir, recorder, compiler)
    state, anchor = state_of(drafter, [9, 4][:rows]), torch.tensor([40, 41])[:rows]
    assert drafter.runner.chain(state, anchor, 5) is None
    while not compiler.ready("another", list):
        time.sleep(0.01)
    assert compiler.reason is None
    before = counters["stats"]["unique_graphs"]
    for _ in range(WORTH_CALLS - 1):
        assert drafter.runner.chain(state, anchor, 5) is None
    tokens, _ = drafter.runner.chain(state, anchor, 5)
    assert torch.equal(tokens, node_by_node(drafter.runner, state, anchor, None, 1.0)[0])
    assert counters["stats"]["unique_graphs"] == before, "what a thread has compiled was compiled again"
