"""Fingerprints of targets, which do not depend on how they are loaded, and which drafters store."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockdraft.drafters import TINY_DRAFTER, load_drafter
from blockdraft.formats import read_config, read_drafter
from blockdraft.formats.trained import UNKNOWN, Trained
from blockdraft.targets import as_target, load_target, target_fingerprint
from blockdraft.targets.fingerprint import other_target_warning, weights_fingerprint
from blockdraft_tools.export import convert, export, format_for
from blockdraft_tools.quantize.run import quantize
from blockdraft_tools.quantize.settings import QuantizeSettings


@pytest.fixture(scope="module")
def noisy_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """Return a copy of `tiny_target_dir` whose weights differ a little, as after training."""
    folder = tmp_path_factory.mktemp("noisy")
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for weight in model.parameters():
            weight.data *= 1 + 0.05 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return folder


def test_one_model_has_one_fingerprint(tiny_target_dir: Path, noisy_dir: Path) -> None:
    loads = [
        load_target(tiny_target_dir, dtype=dtype, device="cpu", backend="native") for dtype in ("float32", "bfloat16")
    ]
    loads += [
        load_target(tiny_target_dir, dtype=dtype, device="cpu", backend="hf") for dtype in ("float32", "bfloat16")
    ]
    loads.append(as_target(AutoModelForCausalLM.from_pretrained(tiny_target_dir)))
    assert len({target.source_fingerprint for target in loads}) == 1
    assert len({target_fingerprint(target) for target in loads}) == 1
    assert loads[0].source_fingerprint not in (None, load_target(noisy_dir, device="cpu").source_fingerprint)


def test_float16_has_other_numbers_and_so_says_nothing(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir, dtype="float16", device="cpu")
    assert target.source_fingerprint is None
    assert other_target_warning("a drafter", "0123456789abcdef", target) is None


@pytest.mark.slow
def test_a_rounded_model_has_that_of_its_source(tiny_target_dir: Path, tmp_path: Path) -> None:
    source = load_target(tiny_target_dir, device="cpu")
    rounded = load_target(tiny_target_dir, device="cpu", quantize="int8")
    quantize(tiny_target_dir, tmp_path / "int8", QuantizeSettings(8))
    again = load_target(tmp_path / "int8", device="cpu")
    assert source.source_fingerprint == rounded.source_fingerprint == again.source_fingerprint
    assert len({target_fingerprint(target) for target in (source, rounded, again)}) == 3  # groups differ
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


def test_a_drafter_of_another_target_is_reported(
    tiny_target_dir: Path, noisy_dir: Path, tiny_drafter_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, other = (load_target(folder, device="cpu") for folder in (tiny_target_dir, noisy_dir))
    load_drafter(tiny_drafter_dir, target=other)  # it does not say what it was trained for
    for layout in ("zlab", "speculators"):
        format_ = format_for(layout, target, str(tiny_target_dir))
        actual = read_drafter(tiny_drafter_dir, None, target.num_layers)
        assert actual.trained == UNKNOWN
        export(tmp_path / layout, format_, actual.config, actual.tensors, target, qat_bits=4)
        convert(tmp_path / layout, tmp_path / "back", format_for("zlab", target, str(tiny_target_dir)), target)
        for folder in (tmp_path / layout, tmp_path / "back"):
            trained = Trained(target.source_fingerprint, 4)
            assert read_drafter(folder, None, target.num_layers).trained == trained
            load_drafter(folder, target=target)
    assert caplog.messages == []
    load_drafter(tmp_path / "zlab", target=other)
    [message] = caplog.messages
    assert "was trained for another target" in message and "tau may be low" in message
    assert all(str(each) in message for each in (target.source_fingerprint, other.source_fingerprint, noisy_dir))


def test_a_converted_drafter_stays_one_for_its_own_target(
    tiny_target_dir: Path, noisy_dir: Path, tiny_drafter_dir: Path, tmp_path: Path
) -> None:
    target, other = (load_target(folder, device="cpu") for folder in (tiny_target_dir, noisy_dir))
    layout = format_for("zlab", target, None)
    actual = read_drafter(tiny_drafter_dir, None, target.num_layers)
    export(tmp_path / "trained", layout, actual.config, actual.tensors, target)
    for source, expected in ((tmp_path / "trained", target.source_fingerprint), (tiny_drafter_dir, None)):
        convert(source, tmp_path / "converted", layout, other)
        assert read_drafter(tmp_path / "converted", None, target.num_layers).trained.target == expected


def test_the_bundled_drafter_is_the_bundled_targets(caplog: pytest.LogCaptureFixture) -> None:
    target = load_target("bundled", device="cpu")
    assert Trained.read(read_config(TINY_DRAFTER)).target == target.source_fingerprint
    load_drafter("bundled", target=target)
    assert caplog.messages == []
