"""A new kind of draft network is a description: `new_kind/mixed_layers.py` runs in C, as graphs and in torch."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured_forwards import Recorder
from node_logits import logits_of, two_texts
from torch import Tensor

from blockdraft import Engine, load_drafter, load_target
from blockdraft.kernels.cpu.compiled_runner import CompiledDraftRunner
from blockdraft.kernels.cuda.captured_runner import CapturedDraftRunner
from blockdraft.nn.torch_runner import TorchDraftRunner
from blockdraft.types import Drafting, SamplingParams

PROMPTS = [[7 * row + i for i in range(1 + 6 * row)] for row in range(4)]
PARAMS = [SamplingParams(12 + row, temperature=float(row == 2), seed=1, ignore_eos=True) for row in range(4)]
CHAINS = [Drafting(5), Drafting(tree_budget=12)]


@pytest.fixture(autouse=True)
def kind(installed_plugin: Callable[..., None]) -> Iterator[None]:
    """Install the kind as pip would."""
    folder = Path(__file__).parent / "new_kind"
    installed_plugin("mixed-layers", "[blockdraft.drafters]\nmixed = mixed_layers\n", folder)
    yield
    sys.modules.pop("mixed_layers", None)


def drafter_in(way: str, folder: Path, **how: Any) -> Any:
    target: Any = load_target(folder, device="cpu", backend="native", compile="on" if way == "C" else "off", **how)
    if way == "graphs":
        target.capture(Recorder())
    drafter: Any = load_drafter("mixed", target=target)
    runners = {"C": CompiledDraftRunner, "graphs": CapturedDraftRunner, "torch": TorchDraftRunner}
    assert type(drafter.runner) is runners[way] and (drafter.compile_reason is None) == (way != "torch")
    return drafter


def reference(drafter: Any, tokens: Tensor, hidden_states: Tensor) -> Tensor:
    """Return the logits `[V]` behind the last of n + 1 tokens, all of whose entries pass the network together.

    Args:
        hidden_states: `[n, m * H]`, those of the target at all tokens but the last.
    """
    network, target, count = drafter.network, drafter.target, len(hidden_states)
    behind = torch.arange(count)[:, None] - torch.arange(count)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        window = (count, network.config.window)[layer]
        mask = (behind >= 0) & (behind < window)
        return F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)

    fused, embedded = network.fuse(hidden_states[None]), target.embed(tokens[None, 1:])
    out = network(embedded, torch.arange(count)[None], attend, fused)
    return network.logits(out, target.head)[0, -1]  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize("parts", [[9], [1, 8], [4, 1, 4]])
@pytest.mark.parametrize("way", ["C", "torch"])
def test_a_node_sees_what_the_description_says(way: str, parts: list[int], tiny_target_dir: Path) -> None:
    """However many tokens are observed at once. The token without an entry is seen by no layer."""
    drafter, generator = drafter_in(way, tiny_target_dir, dtype="float32"), torch.Generator().manual_seed(6)
    tokens, hidden_states = torch.randint(5, 200, (10,), generator=generator), torch.randn(9, 64, generator=generator)
    plain = drafter_in("torch", tiny_target_dir, dtype="float32")
    expected, state, at = reference(plain, tokens, hidden_states), drafter.new_state(1, 30), 0
    for count in parts:
        part = slice(at, at + count)
        drafter.observe(state, tokens[None, part], hidden_states[None, part], [count])
        at += count
    actual = drafter.runner.nodes(state, 6, 1)(tokens[None, 9:])[0, 0]
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("way", ["C", "graphs"])
def test_trees_have_torchs_logits(way: str, window: int | None, tiny_target_dir: Path) -> None:
    runs = [drafter_in(each, tiny_target_dir, dtype="float32") for each in (way, "torch")]
    ours, theirs = (logits_of(drafter.runner, drafter.network, window) for drafter in runs)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, atol=4e-4, rtol=1e-3)


@torch.no_grad()
def test_quantized_trees_are_close_to_torchs(tiny_target_dir: Path) -> None:
    run = drafter_in("C", tiny_target_dir, dtype="float32", kv_dtype="int8")
    plain = drafter_in("torch", tiny_target_dir, dtype="float32")
    for mine, expected in zip(logits_of(run.runner, run.network), logits_of(plain.runner, plain.network), strict=True):
        assert float((mine - expected).abs().max()) < 0.4 * float(expected.std())


@torch.no_grad()
@pytest.mark.parametrize("way", ["C", "graphs"])
def test_a_chain_in_one_call_is_that_of_its_nodes(way: str, tiny_target_dir: Path) -> None:
    drafter = drafter_in(way, tiny_target_dir, dtype="float32")
    run, anchor = drafter.runner, torch.tensor([40, 41])
    state, observed = run.new_state(2, 400), torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(2))
    drafter.observe(state, torch.arange(18).view(2, 9) + 5, observed, [9, 4])
    nodes, tokens, survival, expected = run.nodes(state, 8, 1), [anchor], torch.ones(2), torch.zeros(2)
    for _ in range(5):
        best = nodes(tokens[-1][:, None])[:, 0].softmax(-1).max(-1)
        tokens.append(best.indices)
        survival = survival * best.values
        expected = expected + survival
    drafted, accepted = run.chain(state, anchor, 5, None, [1.0 + 1e-6 * count for count in range(6)])
    assert torch.equal(drafted, torch.stack(tokens, dim=1)) and torch.allclose(accepted, expected, rtol=1e-4)


@pytest.mark.parametrize("way", ["C", pytest.param("graphs", marks=pytest.mark.slow), "torch"])
@pytest.mark.parametrize("drafting", CHAINS)
def test_it_drafts_losslessly(way: str, drafting: Drafting, tiny_target_dir: Path) -> None:
    drafter = drafter_in(way, tiny_target_dir, dtype="float32")
    engines = Engine(drafter.target, drafter, 3, drafting), Engine(drafter.target)
    outputs = [[done.token_ids for done in engine.generate(PROMPTS, PARAMS)] for engine in engines]
    assert outputs[0] == outputs[1]


def test_states_are_copied_shrunk_and_stored(tiny_target_dir: Path) -> None:
    """Keys and values of both layers, and hidden states."""
    for way in ("C", "torch"):
        drafter = drafter_in(way, tiny_target_dir, dtype="float32")
        run, state = drafter.runner, two_texts(drafter.runner, drafter.network)
        assert state.nbytes == drafter.state_bytes(2, 150)
        with torch.no_grad():
            expected = run.nodes(state, 8, 3)(torch.tensor([[40], [41]]))[0]
            stored = state.export(160, 29)
            loaded = run.new_state(1, 60)
            loaded.load(0, list(range(29)), stored)
            actual = run.nodes(loaded, 8, 3)(torch.tensor([[40]]))[0]
            state.open(80, 70)
            state.copy(160, 80, 29)
            copied = run.nodes(state.of([80]), 8, 3)(torch.tensor([[40]]))[0]
        torch.testing.assert_close((actual, copied), (expected, expected), atol=1e-5, rtol=1e-5)


def test_its_kinds_are_named(tiny_target_dir: Path) -> None:
    """A description states what no runner of another backend may miss."""
    kinds = drafter_in("torch", tiny_target_dir, dtype="float32").network.description.kinds
    assert kinds == ("pairs", "sliding windows", "several layers of pairs")
