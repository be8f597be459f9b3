"""The backend mlx beside the native one: the same tokens, cycles and features, with one wait a cycle."""

import json
from pathlib import Path
from typing import Any

import exact_distribution
import pytest
import torch
from tiny_families import ATTENTION, write_model

pytest.importorskip("mlx_lm")

from blockdraft.decode.proposal import ChainPlan, chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.mlx import tensor
from blockdraft.mlx.tensor import FewBits, MLXTensor, mx, round_weight
from blockdraft.nn.foreign_tensor import in_torch
from blockdraft.targets import Target, load_target
from blockdraft.targets.mlx import MLXTarget
from blockdraft.types import Drafting, SamplingParams

pytestmark = pytest.mark.mlx

FOLDERS = ["tiny_drafter_dir", "tiny_dflash2_dir", "tiny_dspark_dir", "tiny_eagle3_dir", "tiny_mtp_dir"]
PROMPTS = [[7, 60, 33, 12, 9], [5], [40, 41, 42, 40, 41], [(7 * i + 3) % 60 + 4 for i in range(70)]]
PARAMS = [SamplingParams(14, (0.0, 0.0, 0.8, 0.0)[row], seed=row, ignore_eos=True) for row in range(4)]
TREE = torch.tensor([[7, 60, 33, 12, 9, 11]]), torch.tensor([[-1, 0, 1, 0, 3, 4]])


@pytest.fixture(scope="module")
def native(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, backend="native", compile="off")


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, "float32", "cpu", backend="mlx")


def answers(target: Target, drafter: Any, drafting: Drafting | None = None, rows: int = 4) -> list[Any]:
    with Engine(target, load_drafter(drafter, target=target), rows, drafting or Drafting(None)) as engine:
        requests = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        return [each.result().checked() for each in requests]


def test_features_and_logits_are_the_native_ones(target: Target, native: Target) -> None:
    tokens = torch.tensor([[7, 60, 33, 12, 9, 11]])
    target_layers = (0, 1, native.num_layers)
    ours, theirs = (
        each.forward(tokens, chain_parents(1, 6), each.new_cache(1, 8), target_layers) for each in (target, native)
    )
    assert ours.hidden_states is not None and theirs.hidden_states is not None
    torch.testing.assert_close(ours.hidden_states.real, theirs.hidden_states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.logits.real, theirs.logits, rtol=1e-4, atol=1e-4)
    one = target.forward(tokens, chain_parents(1, 6), target.new_cache(1, 8), logits_at=torch.tensor([2]))
    torch.testing.assert_close(one.logits.real, theirs.logits[:, 2:3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_greedy_cycle_waits_once(
    kind: str, target: Target, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host waits for in a cycle are the best tokens and the guesses, and never logits."""
    drafter = load_drafter(request.getfixturevalue(kind), target=target)
    fetched: list[tuple[int, ...]] = []
    own = mx.eval

    def recorded(*arrays: Any) -> None:
        fetched.extend(tuple(array.shape) for array in arrays)
        own(*arrays)

    with Engine(target, drafter, 1, Drafting(None)) as engine:
        engine.generate([PROMPTS[0]], SamplingParams(4, ignore_eos=True))
        monkeypatch.setattr(mx, "eval", recorded)
        [found] = engine.generate([PROMPTS[0]], SamplingParams(30, ignore_eos=True))
    cycles = len(found.stats.committed)
    # Two arrays a cycle, the second of which the first has computed; two more for the first token.
    assert len(fetched) <= 2 * cycles + 2, fetched
    assert max(max(shape) for shape in fetched) <= drafter.block_size


def test_guesses_are_not_computed_before_they_are_scored(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    state = drafter.new_state(1, 32)
    proposal = drafter.propose(state, torch.tensor([5]), ChainPlan(6, [SamplingParams()]))
    assert isinstance(proposal.tokens, MLXTensor)


def test_a_family_whose_trees_come_out_wrong_gets_chains(
    tiny_target_dir: Path, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that turns its nodes by other means than those that are wrapped."""
    monkeypatch.setattr(MLXTarget, "_rotate", lambda self, call, x, offset=0, **how: call(x, offset=offset, **how))
    few = load_target(tiny_target_dir, "float32", "cpu", backend="mlx")
    assert not few.has_trees
    with pytest.raises(ValueError, match="tree_budget is 9, and the backend mlx scores chains only"):
        answers(few, tiny_drafter_dir, Drafting(tree_budget=9))
    every = [[each.token_ids for each in answers(few, drafter)] for drafter in (tiny_drafter_dir, "none")]
    assert every[0] == every[1]


def test_trees_are_tried_with_tokens_of_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three words; MLX would read others beyond the table, and find numbers there or none."""
    own, highest = MLXTarget.forward, list[int]()

    def recorded(self: MLXTarget, tokens: torch.Tensor, *others: Any) -> Any:
        highest.append(int(tokens.max()))
        return own(self, tokens, *others)

    monkeypatch.setattr(MLXTarget, "forward", recorded)
    load_target(exact_distribution.write_model(tmp_path, 2), "float32", "cpu", backend="mlx")
    assert max(highest) == 2


def test_scales_of_few_bits_stay_float32() -> None:
    """Rounded to bfloat16, products differ by some per cent; a drafter of many layers then guesses nothing right."""
    exact = torch.nn.Linear(256, 64, bias=False)
    torch.manual_seed(0)
    torch.nn.init.normal_(exact.weight)
    half = torch.nn.Parameter(exact.weight.to(torch.bfloat16), requires_grad=False)
    round_weight(half, 8, 64)
    few = tensor.weight(half)
    assert isinstance(few, FewBits) and few.scales.dtype == few.biases.dtype == mx.float32
    x = torch.randn(4, 256)
    ours = torch.nn.functional.linear(MLXTensor(tensor.sent(x)), half).real
    reference = x @ half.float().T
    assert (ours - reference).norm() < 0.01 * reference.norm()


def test_unknown_functions_run_in_torch_and_lost_writes_are_refused() -> None:
    values = MLXTensor(mx.array([[3.0, 1.0], [2.0, 5.0]]))
    assert torch.equal(torch.linalg.det(values), torch.linalg.det(values.real))
    values[0, 1] = 7.0
    assert values.real.tolist() == [[3.0, 7.0], [2.0, 5.0]]
    with pytest.raises(NotImplementedError, match="writes to part"):
        values[0][1] = 2.0
    with pytest.raises(NotImplementedError, match="not known here"):
        values.add_(1.0)


@pytest.mark.parametrize(
    ("bits", "kept", "asked", "runs"),
    [
        (4, "float32", "float32", "float32"),
        (8, "float32", "float32", "float32"),
        (4, "bfloat16", "float32", "float32"),
        (8, "bfloat16", "bfloat16", "bfloat16"),
        (4, "float32", "bfloat16", "float32"),
        (4, "float16", "bfloat16", "float16"),
    ],
)
def test_quantised_checkpoints(
    tiny_target_dir: Path,
    tiny_drafter_dir: Path,
    tmp_path: Path,
    bits: int,
    kept: str,
    asked: str,
    runs: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A checkpoint of mlx-lm in few bits loses none of its scales, and says so where it computes in another dtype than
    was asked for. The drafter beside it gets as many bits, with scales in float32 whatever the arithmetic is."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(tiny_target_dir)
    model.set_dtype(getattr(mx, kept))
    model, config = quantize_model(model, config, 32, bits)
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")
    few: Any = load_target(tmp_path, asked, "cpu", backend="mlx")
    assert (few.running, str(few.dtype)) == (f"mlx, int{bits} weights", f"torch.{runs}")
    assert (f"has scales in torch.{runs}, and computes in it, not in torch.{asked}" in caplog.text) == (runs != asked)
    layer = few._model.model.layers[0]
    assert layer.mlp.up_proj.scales.dtype == layer.input_layernorm.weight.dtype == getattr(mx, runs)
    assert in_torch(few.forward(*TREE, few.new_cache(1, 8)).logits).dtype == few.dtype
    drafter: Any = load_drafter(tiny_drafter_dir, target=few)
    rounded = tensor.weight(drafter.network.layers[0].mlp.up_proj.weight)
    assert isinstance(rounded, FewBits) and rounded.bits == bits == drafter.bits
    assert rounded.scales.dtype == rounded.biases.dtype == mx.float32
    drafted, plain = (answers(few, each) for each in (tiny_drafter_dir, "none"))
    if runs == "float32":
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


ROPES = {"rope_theta": 300.0, "rope_type": "default"}, {"rope_theta": 300.0, "rope_type": "linear", "factor": 4.0}
FAMILIES = [(family, None) for family in ATTENTION]


@pytest.mark.parametrize(("family", "rope"), [*FAMILIES, *(("llama", rope) for rope in ROPES)])
def test_logits_are_those_of_transformers(family: str, rope: dict[str, Any] | None, tmp_path: Path) -> None:
    """Of a text within the windows, some of which mlx-lm lacks; with rotary embeddings as transformers writes them."""
    found = []
    for backend in ("mlx", "hf"):
        folder = write_model(family, tmp_path / backend, for_mlx=backend == "mlx" or family != "gpt_oss")
        if rope is not None:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"rope_parameters": rope}
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        target = load_target(folder, "float32", "cpu", backend=backend)
        tokens = torch.tensor([[7, 60, 33, 12, 9, 11]])
        found.append(in_torch(target.forward(tokens, chain_parents(1, 6), target.new_cache(1, 8)).logits))
    torch.testing.assert_close(*found, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "gpt_oss"])
def test_windows_that_the_text_outgrows(family: str, tmp_path: Path) -> None:
    """Windows of 6 tokens, behind a prompt of 19: logits of a tree are those of transformers."""
    found = []
    for backend in ("mlx", "hf"):
        folder = write_model(family, tmp_path / backend, for_mlx=backend == "mlx" or family != "gpt_oss")
        target = load_target(folder, "float32", "cpu", backend=backend)
        cache = target.new_cache(1, 40)
        prompt = torch.tensor([[(5 * i + 3) % 60 + 4 for i in range(19)]])
        target.forward(prompt, chain_parents(1, 19), cache)
        cache.commit([range(19)])
        found.append(target.forward(*TREE, cache).logits)
        cache.commit([[0, 3, 4]])  # a path that is no chain
        found.append(target.forward(torch.tensor([[5]]), chain_parents(1, 1), cache).logits)
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(in_torch(ours), theirs, rtol=1e-3, atol=2e-3)
