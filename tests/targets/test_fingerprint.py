"""Which target is which, whatever it was loaded in, and what drafters remember of theirs."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockdraft.drafters import load_drafter
from blockdraft.targets import as_target, load_target, save_quantized, target_fingerprint
from blockdraft.targets.fingerprint import weights_fingerprint


@pytest.fixture(scope="module")
def noisy_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """`tiny_target_dir` after a little training, as it were."""
    folder = tmp_path_factory.mktemp("noisy")
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for weight in model.parameters():
            weight.data *= 1 + 0.05 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return folder


def test_one_model_has_one_fingerprint(tiny_target_dir: Path, noisy_dir: Path) -> None:
    loads = [load_target(tiny_target_dir, dtype, "cpu", "native") for dtype in ("float32", "bfloat16")]
    loads += [load_target(tiny_target_dir, dtype, "cpu", "hf") for dtype in ("float32", "bfloat16")]
    loads.append(as_target(AutoModelForCausalLM.from_pretrained(tiny_target_dir)))
    assert len({target.source_fingerprint for target in loads}) == 1
    assert len({target_fingerprint(target) for target in loads}) == 1
    assert loads[0].source_fingerprint not in (None, load_target(noisy_dir, device="cpu").source_fingerprint)


def test_float16_has_other_numbers_and_so_says_nothing(tiny_target_dir: Path) -> None:
    assert load_target(tiny_target_dir, "float16", "cpu").source_fingerprint is None


def test_a_rounded_model_has_that_of_its_source(tiny_target_dir: Path, tmp_path: Path) -> None:
    source = load_target(tiny_target_dir, device="cpu")
    rounded = load_target(tiny_target_dir, device="cpu", quantize="int8")
    save_quantized(rounded, tmp_path / "int8")
    again = load_target(tmp_path / "int8", device="cpu")
    assert source.source_fingerprint == rounded.source_fingerprint == again.source_fingerprint
    assert target_fingerprint(rounded) == target_fingerprint(again) != target_fingerprint(source)
    file = tmp_path / "int8" / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]["source_fingerprint"]
    file.write_text(json.dumps(config))
    assert load_target(tmp_path / "int8", device="cpu").source_fingerprint is None  # not that of the rounded weights


def test_names_shapes_and_numbers_count() -> None:
    weight = torch.arange(6.0).view(2, 3)
    known = weights_fingerprint([("a", weight), ("b", torch.ones(()))])
    assert known == weights_fingerprint([("b", torch.ones(())), ("a", weight.T.contiguous().T)])
    others = [("b", weight)], [("a", weight.view(3, 2))], [("a", weight + 0.1 * (weight == 5))]
    assert len({known, *(weights_fingerprint([*other, ("b", torch.ones(()))]) for other in others)}) == 4
