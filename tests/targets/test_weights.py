"""Adapters of PEFT, merged into the weights, on both backends."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockdraft.decode.proposal import chain
from blockdraft.targets import load_target, target_fingerprint
from blockdraft_tools.quantize.run import quantize
from blockdraft_tools.quantize.settings import QuantizeSettings

peft: Any = pytest.importorskip("peft")


def wrap(make: Callable[..., Any], folder: Path, *how: Any) -> Any:
    """Return a model wrapped by PEFT, without its warning about a name of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return make(AutoModelForCausalLM.from_pretrained(folder), *how)


@pytest.fixture(scope="module")
def make_adapter(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Callable[..., Path]:
    """Return a function that writes a random adapter of `tiny_target_dir` from a PEFT configuration."""

    def make(config: Any) -> Path:
        folder = tmp_path_factory.mktemp("adapter")
        model = wrap(peft.get_peft_model, tiny_target_dir, config)
        with torch.random.fork_rng():
            torch.manual_seed(6)
            for name, weight in model.named_parameters():
                if weight.requires_grad and "lora" in name:
                    torch.nn.init.normal_(weight, std=0.3)
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def lora(make_adapter: Callable[..., Path]) -> Path:
    modules = ["q_proj", "v_proj", "down_proj"]
    return make_adapter(peft.LoraConfig(r=2, lora_alpha=6, target_modules=modules, task_type="CAUSAL_LM"))


@pytest.mark.parametrize("backend", ["native", "hf"])
def test_a_lora_is_merged(tiny_target_dir: Path, lora: Path, backend: str) -> None:
    adapted = load_target(tiny_target_dir, device="cpu", backend=backend, adapter=lora)
    plain = load_target(tiny_target_dir, device="cpu", backend=backend)
    tokens = torch.arange(20, 60)[None]
    wrapped = wrap(peft.PeftModel.from_pretrained, tiny_target_dir, str(lora)).eval()
    with torch.no_grad():
        expected = wrapped(tokens).logits
    scored = [
        target.forward(tokens, chain(tokens).parents, target.new_cache(1, 40)).logits for target in (adapted, plain)
    ]
    torch.testing.assert_close(scored[0], expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scored[1], expected, atol=1e-2)
    assert dict(adapted.named_weights()).keys() == dict(plain.named_weights()).keys()
    assert adapted.backend == backend and adapted.tokenizer is not None


@pytest.mark.slow
def test_drafters_of_an_adapted_model_are_distinguished_from_those_of_its_source(
    tiny_target_dir: Path, lora: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    plain = load_target(tiny_target_dir, device="cpu")
    adapted = [load_target(tiny_target_dir, device="cpu", backend=way, adapter=lora) for way in ("native", "hf")]
    rounded = load_target(tiny_target_dir, device="cpu", adapter=lora, quantize="int8")
    quantize(tiny_target_dir, tmp_path / "int8", QuantizeSettings(8), adapter=lora)
    saved = load_target(tmp_path / "int8", device="cpu")
    assert target_fingerprint(saved) != target_fingerprint(adapted[0])
    weights = dict(rounded.named_weights())
    assert all(torch.allclose(weight, weights[name], atol=0.02) for name, weight in saved.named_weights())
    adapted += [rounded, saved, load_target(tiny_target_dir, dtype="bfloat16", device="cpu", adapter=lora)]
    [known] = {target.source_fingerprint for target in adapted}
    other = make_adapter(peft.LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM"))
    different = load_target(tiny_target_dir, device="cpu", adapter=other).source_fingerprint
    assert len({known, different, plain.source_fingerprint, None}) == 4
    assert (
        load_target(tiny_target_dir, dtype="float16", device="cpu", backend="hf", adapter=lora).source_fingerprint
        is None
    )
    assert target_fingerprint(adapted[0]) == target_fingerprint(adapted[1]) != target_fingerprint(plain)
    with pytest.raises(ValueError, match="is quantized .compressed-tensors., and no adapter can be merged"):
        load_target(tmp_path / "int8", device="cpu", adapter=lora)


def test_what_is_no_adapter_of_the_model_is_refused(
    tiny_target_dir: Path, lora: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    prompts = make_adapter(peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    for adapter, message in (
        (tiny_target_dir, "has no adapter_config.json"),
        (tmp_path / "nowhere", "There is no folder .*nowhere"),
        ("./nowhere", "There is no folder ./nowhere"),
        (prompts, "cannot be merged into"),
    ):
        with pytest.raises(ValueError, match=message):
            load_target(tiny_target_dir, device="cpu", adapter=adapter)
    with pytest.raises(ValueError, match="cannot be merged into .*size mismatch"):
        load_target("bundled", device="cpu", adapter=lora)  # the bundled target is wider


def test_a_folder_has_no_revision(tiny_target_dir: Path) -> None:
    for backend in ("native", "hf"):
        with pytest.raises(ValueError, match="revision is 'v2', and .* is a folder, which has none; leave it out"):
            load_target(tiny_target_dir, device="cpu", backend=backend, revision="v2")
