"""The compiled forward pass where no size is a multiple of the vector length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blockdraft import Engine, SamplingParams, load_drafter, machine
from blockdraft.formats import Trained, zlab
from blockdraft.kernels.cpu.build import build
from blockdraft.kernels.cpu.compiled_runner import CompiledDraftRunner
from blockdraft.targets import Target, load_target, native_files
from blockdraft.types import Drafting

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 42,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# Gemma has norms behind its projections; the others add these to the residual stream.
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
}
LENGTHS = 60, 37  # beyond the window, different, and no multiples of the vector length
TREE = [[-1, 0, 0, 1, 2, 4, 5, 6, 7, 3], [-1, 0, 1, 2, 0, 4, 4, 5, 6, 8]]


def write_model(
    folder: Path, family: str, head_dim: int, window: int, dtype: torch.dtype = torch.float32, sizes: Any = SIZES
) -> None:
    more = FAMILIES[family] | {"head_dim": head_dim, "query_pre_attn_scalar": head_dim, "sliding_window": window}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **more))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.2 * (parameter.ndim == 1), std=0.3)
    model.to(dtype).save_pretrained(folder)


def logits_and_hidden_states(target: Target) -> list[torch.Tensor]:
    """Return logits and hidden states of two prompts and of trees after them, in float32."""
    generator = torch.Generator().manual_seed(0)
    cache, last = target.new_cache(2, 80), torch.tensor(LENGTHS) - 1
    prompts = torch.randint(53, (2, max(LENGTHS)), generator=generator)
    line = torch.arange(-1, max(LENGTHS) - 1).expand(2, -1)
    read = target.forward(prompts, line, cache, (0, 2), last)
    cache.commit([range(length) for length in LENGTHS])
    nodes = torch.randint(53, (2, len(TREE[0])), generator=generator)
    tree = target.forward(nodes, torch.tensor(TREE), cache, (0, 2))
    assert read.hidden_states is not None and tree.hidden_states is not None
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return [actual.float() for actual in (read.logits, tree.logits, read.hidden_states[real], tree.hidden_states)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", [8, 16])
@pytest.mark.parametrize("window", [3, 17, 21])
def test_it_computes_what_transformers_computes(tmp_path: Path, family: str, head_dim: int, window: int) -> None:
    write_model(tmp_path, family, head_dim, window)
    exact = logits_and_hidden_states(load_target(tmp_path, dtype="float32", device="cpu", backend="hf"))
    compiled = logits_and_hidden_states(
        load_target(tmp_path, dtype="float32", device="cpu", backend="native", compile="on")
    )
    torch.testing.assert_close(compiled, exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_quantized_give_what_torch_gives(tmp_path: Path, family: str, quantize: Any) -> None:
    write_model(tmp_path, family, 8, 17, sizes=SIZES | {"hidden_size": 48, "intermediate_size": 24})
    ours, theirs = (
        load_target(tmp_path, dtype="float32", device="cpu", backend="native", compile=way, quantize=quantize)
        for way in ("on", "off")
    )  # type: ignore[arg-type]
    assert f"{quantize} weights" in ours.running and f"{quantize} weights" in theirs.running
    exact = logits_and_hidden_states(load_target(tmp_path, dtype="float32", device="cpu", backend="hf"))
    for a, b, right in zip(logits_and_hidden_states(ours), logits_and_hidden_states(theirs), exact, strict=True):
        # Where two sums differ in the last bit, an input may be rounded to the next of 254 codes.
        assert float((a - b).abs().mean() / b.abs().mean()) < 0.005
        assert 1e-4 < float((a - right).norm() / right.norm()) < (0.05 if quantize == "int8" else 0.5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_bits_do_not_depend_on_the_number_of_threads(
    tmp_path: Path, family: str, quantize: Any, set_threads: Callable[[int], None]
) -> None:
    """With more groups than nodes, so that threads share the groups of an input when they quantize it."""
    shape = {"hidden_size": 168, "intermediate_size": 184, "num_attention_heads": 21, "num_key_value_heads": 3}
    write_model(tmp_path, family, 8, 17, sizes=SIZES | shape)
    target = load_target(tmp_path, dtype="float32", device="cpu", backend="native", compile="on", quantize=quantize)
    outputs = []
    for threads in (1, 3):
        set_threads(threads)
        outputs.append(logits_and_hidden_states(target))
    assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize("round_drafters", [pytest.param(True, marks=pytest.mark.slow), False])
def test_drafters_are_rounded_as_their_target_is_unless_they_are_to_be_kept(round_drafters: bool) -> None:
    target = load_target("bundled", dtype="float32", device="cpu", quantize="int4", round_drafters=round_drafters)
    drafter: Any = load_drafter(target=target)
    run = drafter.runner
    assert isinstance(run, CompiledDraftRunner)
    assert {packed.bits for packed in run.packed} == {4 if round_drafters else None}
    assert (run.library is target.compiled.library) == round_drafters  # type: ignore[attr-defined]
    answers = [
        Engine(target, each, drafting=Drafting(None))
        .generate([[5, 6, 7, 8]], SamplingParams(max_new_tokens=24))[0]
        .token_ids
        for each in (drafter, load_drafter("none", target=target))
    ]
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("round_drafters", [True, False])
def test_drafters_beside_bfloat16_are_rounded_where_integers_are_faster(
    constants: Callable[..., None], few: bool, round_drafters: bool
) -> None:
    constants(machine, BFLOAT16_FLAGS=machine.processor_flags() if few else frozenset())
    target = load_target("bundled", dtype="bfloat16", device="cpu", compile="on", round_drafters=round_drafters)
    drafter: Any = load_drafter(target=target)
    assert {packed.bits for packed in drafter.runner.packed} == {8 if few and round_drafters else None}
    ways = [Engine(target, each, drafting=Drafting(None)) for each in (drafter, load_drafter("none", target=target))]
    drafted, plain = (each.generate([[5, 6, 7, 8]], SamplingParams(max_new_tokens=24))[0].token_ids for each in ways)
    assert drafted == plain


@pytest.mark.parametrize(("how", "most"), [({"quantize": "int8"}, 0.55), ({"kv_dtype": "int8"}, 0.03)])
def test_a_channel_of_large_numbers_costs_its_own_group_alone(tmp_path: Path, how: Any, most: float) -> None:
    """One input channel is large and its weights are small: only its group of 32 loses precision."""
    sizes = SIZES | {"hidden_size": 96, "intermediate_size": 64, "head_dim": 8}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
            if name.endswith("layernorm.weight"):
                parameter[3] *= 100
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                parameter[:, 3] /= 100
    model.save_pretrained(tmp_path)
    exact = logits_and_hidden_states(load_target(tmp_path, dtype="float32", device="cpu", backend="hf"))
    ours = logits_and_hidden_states(
        load_target(tmp_path, dtype="float32", device="cpu", backend="native", compile="on", **how)
    )
    for a, right in zip(ours, exact, strict=True):
        error = float((a - right).norm() / right.norm())
        assert 1e-4 < error < most, error


def test_keys_and_values_in_bfloat16_are_rounded_to_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are in bfloat16 already, and inputs of products are not rounded."""
    monkeypatch.setattr(native_files, "build", lambda *given: build(*given[:4]))
    write_model(tmp_path, "mistral", 8, 40, torch.bfloat16)
    rounded, exact = (
        logits_and_hidden_states(load_target(tmp_path, dtype=dtype, device="cpu", backend="native", compile="on"))
        for dtype in ("bfloat16", "float32")
    )
    errors = [float((a - b).abs().mean() / b.abs().mean()) for a, b in zip(rounded, exact, strict=True)]
    assert 0 < max(errors) < 2.5e-3  # 1.7e-3; cut instead of rounded they are off by 6.1e-3


@pytest.mark.parametrize(
    ("how", "faster", "bits"),
    [
        ({"quantize": "int8"}, True, 4),
        ({"dtype": "bfloat16"}, True, 4),
        ({"dtype": "bfloat16"}, False, None),  # integers are no faster on this processor
        ({"dtype": "float32"}, True, None),
    ],
)
def test_a_drafter_trained_for_quantization_is_quantized_beside_a_target_that_is(
    constants: Callable[..., None],
    how: Any,
    faster: bool,
    bits: int | None,
    tiny_target_dir: Path,
    tiny_drafter_dir: Path,
    tmp_path: Path,
) -> None:
    constants(machine, BFLOAT16_FLAGS=machine.processor_flags() if faster else frozenset())
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    zlab.write_checkpoint(tmp_path / "drafter", config, tensors, Trained(None, 4))
    for round_drafters in (True, False):
        target = load_target(tiny_target_dir, device="cpu", compile="on", round_drafters=round_drafters, **how)
        drafter: Any = load_drafter(tmp_path / "drafter", target=target)
        assert {packed.bits for packed in drafter.runner.packed} == {bits if round_drafters else None}
