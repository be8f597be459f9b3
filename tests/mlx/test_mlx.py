"""The backend mlx beside the native one: the same tokens, cycles and features, with one wait a cycle."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("mlx_lm")

from blockdraft.decode.proposal import Plan, chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.mlx import tensor
from blockdraft.mlx.tensor import FewBits, MLXTensor, mx, round_weight
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

pytestmark = pytest.mark.mlx

FOLDERS = ["tiny_drafter_dir", "tiny_dflash2_dir", "tiny_dspark_dir", "tiny_eagle3_dir", "tiny_medusa_dir"]
PROMPTS = [[7, 60, 33, 12, 9], [5], [40, 41, 42, 40, 41], [(7 * i + 3) % 60 + 4 for i in range(70)]]
PARAMS = [SamplingParams(14, (0.0, 0.0, 0.8, 0.0)[row], seed=row, ignore_eos=True) for row in range(4)]
WAYS = {"chain": Drafting(None), "tree": Drafting(tree_budget=9), "sampled": Drafting(None, sampled=True)}


@pytest.fixture(scope="module")
def native(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, backend="native", compile="off")


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, "float32", "cpu", backend="mlx")


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def answers(target: Target, drafter: Any, drafting: Drafting | None = None, rows: int = 4) -> list[Any]:
    with Engine(target, load_drafter(drafter, target=target), rows, drafting or Drafting(None)) as engine:
        requests = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        return [each.result().checked() for each in requests]


@pytest.fixture(scope="module")
def plain(native: Target) -> list[list[int]]:
    return [each.token_ids for each in answers(native, "none", rows=1)]


def test_plain_decoding(target: Target, plain: list[list[int]]) -> None:
    assert target.backend == "mlx" and target.has_trees
    assert [each.token_ids for each in answers(target, "none", rows=1)] == plain
    assert [each.token_ids for each in answers(target, "none")] == plain


@pytest.mark.parametrize("way", ["chain", "tree"])
def test_drafting_changes_no_answer(
    target: Target, native: Target, folder: Path, way: str, plain: list[list[int]]
) -> None:
    """Answers are plain ones, and what is accepted in each cycle is what the native backend accepts."""
    ours, theirs = (answers(each, folder, WAYS[way]) for each in (target, native))
    assert [each.token_ids for each in ours] == plain
    assert [each.stats.committed for each in ours] == [each.stats.committed for each in theirs]


def test_sampled_guesses_and_prefixes(target: Target, tiny_drafter_dir: Path) -> None:
    params = [SamplingParams(12, 1.0, seed=row, ignore_eos=True) for row in range(3)]
    drafter = load_drafter(tiny_drafter_dir, target=target)
    with Engine(target, drafter, 3, Drafting(sampled=True), prefix_tokens=400, prefill_tokens=16) as engine:
        first = engine.generate([PROMPTS[3]] * 3, params)
        again = engine.generate([PROMPTS[3]] * 3, params)  # from the kept prefix
    assert [each.token_ids for each in first] == [each.token_ids for each in again]
    assert any(sum(each.stats.committed) > len(each.stats.committed) for each in first)


def test_features_and_logits_are_the_native_ones(target: Target, native: Target) -> None:
    tokens = torch.tensor([[7, 60, 33, 12, 9, 11]])
    taps = (0, 1, native.num_layers)
    ours, theirs = (each.forward(tokens, chain_parents(1, 6), each.new_cache(1, 8), taps) for each in (target, native))
    assert ours.features is not None and theirs.features is not None
    torch.testing.assert_close(ours.features.real, theirs.features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.logits.real, theirs.logits, rtol=1e-4, atol=1e-4)
    one = target.forward(tokens, chain_parents(1, 6), target.new_cache(1, 8), logits_at=torch.tensor([2]))
    torch.testing.assert_close(one.logits.real, theirs.logits[:, 2:3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", FOLDERS[:4])
def test_a_greedy_cycle_waits_once(
    kind: str, target: Target, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host fetches in a cycle are the best tokens and the guesses, and never logits."""
    drafter = load_drafter(request.getfixturevalue(kind), target=target)
    fetched: list[tuple[int, ...]] = []
    own = tensor.fetched

    def recorded(array: Any) -> torch.Tensor:
        fetched.append(tuple(array.shape))
        return own(array)

    with Engine(target, drafter, 1, Drafting(None)) as engine:
        engine.generate([PROMPTS[0]], SamplingParams(4, ignore_eos=True))
        monkeypatch.setattr(tensor, "fetched", recorded)
        [found] = engine.generate([PROMPTS[0]], SamplingParams(30, ignore_eos=True))
    cycles = len(found.stats.committed)
    # Two arrays a cycle, the second of which the first has computed; two more for the first token.
    assert len(fetched) <= 2 * cycles + 2, fetched
    assert max(max(shape) for shape in fetched) <= drafter.block_size


def test_guesses_are_not_computed_before_they_are_scored(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    state = drafter.new_state(1, 32)
    proposal = drafter.propose(state, torch.tensor([5]), Plan(6, [SamplingParams()]))
    assert isinstance(proposal.tokens, MLXTensor)


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


def test_a_drafter_that_torch_runs_is_told_of_and_drafts(
    target: Target, tiny_medusa_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert any(any(each.stats.drafted) for each in answers(target, tiny_medusa_dir))
    assert "The drafter is not run by MLX: MLX knows no networks of the kind MedusaNetwork" in caplog.text


def test_threads_share_a_target(target: Target, tiny_drafter_dir: Path, plain: list[list[int]]) -> None:
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = [each.token_ids for each in answers(target, tiny_drafter_dir)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: plain, 1: plain}


def test_cancelled_requests_leave_others_alone(target: Target, tiny_drafter_dir: Path, plain: list[list[int]]) -> None:
    with Engine(target, load_drafter(tiny_drafter_dir, target=target), 2) as engine:
        long = engine.submit(PROMPTS[1], SamplingParams(150, ignore_eos=True))
        other = engine.submit(PROMPTS[0], PARAMS[0])
        long.cancel()
        assert other.result().checked().token_ids == plain[0]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"quantize": "int8"}, "it has no quantize; mlx_lm.convert"),
        ({"kv_dtype": "int8"}, "it has no kv_dtype"),
        ({"exact": True}, "it has no exact"),
        ({"compile": "on"}, "it has no compile"),
    ],
)
def test_options_of_other_backends_are_refused(tiny_target_dir: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_target(tiny_target_dir, backend="mlx", **how)


def test_models_that_mlx_lm_does_not_know_are_refused(tmp_path: Path, tiny_target_dir: Path) -> None:
    config = json.loads((tiny_target_dir / "config.json").read_text()) | {"model_type": "opt"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="The mlx backend cannot run .*: mlx-lm .* does not know the model"):
        load_target(tmp_path, backend="mlx")


def test_quantised_checkpoints(
    tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of mlx-lm in 4 bits says with a drafter what it says without."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(tiny_target_dir)
    model, config = quantize_model(model, config, 32, 4)
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")
    few = load_target(tmp_path, "float32", "cpu", backend="mlx")
    assert few.running == "mlx, int4 weights"
    drafted: Callable[[Any], list[Any]] = lambda drafter: [each.token_ids for each in answers(few, drafter)]  # noqa: E731
    assert drafted(tiny_drafter_dir) == drafted("none")
