"""Targets of mlx-lm: logits, hidden states, quantized checkpoints, and how often a step waits for the device."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import ATTENTION, write_model

pytest.importorskip("mlx_lm")

from blockdraft.decode.proposal import ChainPlan, chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.nn.foreign_tensor import in_torch
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams
from blockdraft_mlx.tensor import MLXTensor, computing, mx, quantize_weight

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
    return load_target(tiny_target_dir, dtype="float32", device="cpu", backend="mlx")


def outputs(target: Target, drafter: Any, drafting: Drafting | None = None) -> list[list[int]]:
    with Engine(target, load_drafter(drafter, target=target), 4, drafting or Drafting(None)) as engine:
        return [completion.checked().token_ids for completion in engine.generate(PROMPTS, PARAMS)]


def test_hidden_states_and_logits_equal_the_native_ones(target: Target, native: Target) -> None:
    tokens = torch.tensor([[7, 60, 33, 12, 9, 11]])
    target_layers = (0, 1, native.num_layers)
    ours, theirs = (
        model.forward(tokens, chain_parents(1, 6), model.new_cache(1, 8), target_layers) for model in (target, native)
    )
    torch.testing.assert_close(in_torch(ours.hidden_states), theirs.hidden_states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(in_torch(ours.logits), theirs.logits, rtol=1e-4, atol=1e-4)
    one = target.forward(tokens, chain_parents(1, 6), target.new_cache(1, 8), logits_at=torch.tensor([2]))
    torch.testing.assert_close(in_torch(one.logits), theirs.logits[:, 2:3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_greedy_step_waits_once(
    kind: str, target: Target, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the best tokens and the draft tokens, and never for logits."""
    drafter = load_drafter(request.getfixturevalue(kind), target=target)
    shapes: list[tuple[int, ...]] = []
    evaluate = mx.eval

    def recorded(*arrays: Any) -> None:
        shapes.extend(tuple(array.shape) for array in arrays)
        evaluate(*arrays)

    with Engine(target, drafter, 1, Drafting(None)) as engine:
        engine.generate([PROMPTS[0]], SamplingParams(4, ignore_eos=True))
        monkeypatch.setattr(mx, "eval", recorded)
        [completion] = engine.generate([PROMPTS[0]], SamplingParams(30, ignore_eos=True))
    # Two arrays per step, of which the first computes the second; two more for the first token.
    assert len(shapes) <= 2 * len(completion.stats.committed) + 2, shapes
    assert max(max(shape) for shape in shapes) <= drafter.block_size


def test_draft_tokens_are_not_computed_before_they_are_scored(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    proposal = drafter.propose(drafter.new_state(1, 32), torch.tensor([5]), ChainPlan(6, [SamplingParams()]))
    assert isinstance(proposal.tokens, MLXTensor)


def test_a_family_whose_trees_fail_the_check_gets_chains(
    tiny_target_dir: Path, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes rotary embeddings a plain function, which cannot be wrapped."""
    from mlx_lm.models import qwen3

    make = qwen3.initialize_rope

    def initialize(*args: Any, **options: Any) -> Any:
        rope = make(*args, **options)
        return lambda x, offset=0: rope(x, offset=offset)

    monkeypatch.setattr(qwen3, "initialize_rope", initialize)
    target = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="mlx")
    assert not target.has_trees
    with pytest.raises(ValueError, match="tree_budget must be 0 with the backend mlx"):
        outputs(target, tiny_drafter_dir, Drafting(tree_budget=9))
    assert outputs(target, tiny_drafter_dir) == outputs(target, "none")


def test_threads_free_what_mlx_caches_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise MLX frees it after the thread was joined, and aborts a process that is exiting (status 134)."""
    cleared: list[int | None] = []
    monkeypatch.setattr(mx, "clear_streams", lambda: cleared.append(threading.get_ident()))

    def compute() -> None:
        for _ in range(2):
            with computing():
                mx.eval(mx.ones(3))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    compute()  # MLX cleans up after the main thread itself
    assert cleared == [thread.ident]


def test_scales_of_quantized_weights_stay_float32() -> None:
    """Rounded to bfloat16, products differ by some per cent, and deep drafters lose their acceptance."""
    torch.manual_seed(0)
    half = torch.nn.Parameter(torch.randn(64, 256).to(torch.bfloat16), requires_grad=False)
    quantize_weight(half, 8, 64)
    x = torch.randn(4, 256)
    product, reference = torch.nn.functional.linear(MLXTensor(mx.array(x.numpy())), half), x @ half.float().T
    assert (in_torch(product) - reference).norm() < 0.01 * reference.norm()


def test_unknown_functions_run_in_torch_and_lost_writes_are_refused() -> None:
    values = MLXTensor(mx.array([[3.0, 1.0], [2.0, 5.0]]))
    assert torch.equal(torch.linalg.det(values), torch.linalg.det(in_torch(values)))
    values[0, 1] = 7.0
    assert in_torch(values).tolist() == [[3.0, 7.0], [2.0, 5.0]]
    for write in (lambda: values[0].__setitem__(1, 2.0), lambda: values.add_(1.0)):
        with pytest.raises(NotImplementedError, match="would write to a view"):
            write()


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
def test_quantized_checkpoints(
    tiny_target_dir: Path,
    tiny_drafter_dir: Path,
    tmp_path: Path,
    bits: int,
    kept: str,
    asked: str,
    runs: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A quantized checkpoint keeps its scales exact, and warns where it computes in another dtype than requested. Its
    drafter is quantized to as many bits."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(tiny_target_dir)
    model.set_dtype(getattr(mx, kept))
    model, config = quantize_model(model, config, 32, bits)
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")
    few: Any = load_target(tmp_path, dtype=asked, device="cpu", backend="mlx")
    assert (few.running, str(few.dtype)) == (f"mlx, int{bits} weights", f"torch.{runs}")
    warning = f"has scales in torch.{runs} and computes in that dtype, not in torch.{asked}"
    assert (warning in caplog.text) == (runs != asked)
    assert in_torch(few.forward(*TREE, few.new_cache(1, 8)).logits).dtype == few.dtype
    assert load_drafter(tiny_drafter_dir, target=few).bits == bits
    drafted, plain = (outputs(few, drafter) for drafter in (tiny_drafter_dir, "none"))
    if runs == "float32":
        assert drafted == plain


ROPES = {"rope_theta": 300.0, "rope_type": "default"}, {"rope_theta": 300.0, "rope_type": "linear", "factor": 4.0}
FAMILIES = [(family, None) for family in ATTENTION]


@pytest.mark.parametrize(("family", "rope"), [*FAMILIES, *(("llama", rope) for rope in ROPES)])
def test_logits_equal_transformers(family: str, rope: dict[str, Any] | None, tmp_path: Path) -> None:
    """The tokens fit the sliding windows, some of which mlx-lm lacks; rotary embeddings are written by transformers."""
    scored = []
    for backend in ("mlx", "hf"):
        folder = write_model(family, tmp_path / backend, for_mlx=backend == "mlx" or family != "gpt_oss")
        if rope is not None:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"rope_parameters": rope}
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        target = load_target(folder, dtype="float32", device="cpu", backend=backend)
        tokens = torch.tensor([[7, 60, 33, 12, 9, 11]])
        scored.append(in_torch(target.forward(tokens, chain_parents(1, 6), target.new_cache(1, 8)).logits))
    torch.testing.assert_close(*scored, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "gpt_oss"])
def test_sequences_longer_than_the_window(family: str, tmp_path: Path) -> None:
    """Windows have 6 tokens and the prompt 19; logits of a tree equal those of transformers."""
    scored = []
    for backend in ("mlx", "hf"):
        folder = write_model(family, tmp_path / backend, for_mlx=backend == "mlx" or family != "gpt_oss")
        target = load_target(folder, dtype="float32", device="cpu", backend=backend)
        cache = target.new_cache(1, 40)
        prompt = torch.tensor([[(5 * i + 3) % 60 + 4 for i in range(19)]])
        target.forward(prompt, chain_parents(1, 19), cache)
        cache.commit([range(19)])
        scored.append(target.forward(*TREE, cache).logits)
        cache.commit([[0, 3, 4]])  # not a chain
        scored.append(target.forward(torch.tensor([[5]]), chain_parents(1, 1), cache).logits)
    for ours, theirs in zip(scored[:2], scored[2:], strict=True):
        torch.testing.assert_close(in_torch(ours), theirs, rtol=1e-3, atol=2e-3)
