"""Each convention of a good pair is broken in turn, and the doctor finds which. The pair is the bundled one."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from copies import copy_with
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.drafters import TINY_DRAFTER
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.targets import Target, load_target
from blockdraft_train.doctor.checks import Assumption
from blockdraft_train.doctor.dflash import checks
from blockdraft_train.doctor.examine import Diagnosis, conclude, examine

DRAFTER = TINY_DRAFTER
PROMPTS = [
    "Ann has 4 apples and buys 7 more. How many apples does she have now?",
    "Tom has 3 boxes of 12 pens. He gives away 5 pens. How many are left?",
]
SMALL = 48  # tokens of a response


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("bundled", compile="off")


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., Path]:
    """The bundled drafter with another config.json."""

    def change(**changes: Any) -> Path:
        folder = shutil.copytree(DRAFTER, tmp_path / "broken")
        raw = json.loads((folder / "config.json").read_text())
        raw["dflash_config"] |= changes.pop("dflash_config", {})
        (folder / "config.json").write_text(json.dumps(raw | changes))
        return folder

    return change


def diagnosis(target: Target, folder: Path) -> Diagnosis:
    return examine(target, folder, PROMPTS, SMALL)


@pytest.mark.slow
def test_a_good_pair(target: Target) -> None:
    found = diagnosis(target, DRAFTER)
    assert (found.fault, found.remedy, found.alike) == (None, "", 1.0)
    assert found.decoded == found.own and found.decoded[0] > 0.5
    usual, *others = found.tried
    assert {check.fault for check in others} == {"target_layers", "shift", "mask", "window", "causality", "rope"}
    assert len(found.decoded) == 15 and len(usual.by_position) == 14


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, -1])
def test_target_layers_off_by_one(target: Target, broken: Callable[..., Path], step: int) -> None:
    """Signs flipped at random in each layer: layers of the bundled target are so alike that a neighbour would do."""
    size, target_layers = target.hidden_size, [1, 2, 3, 4, 5]
    random = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (target.num_layers, size), generator=random) * 2.0 - 1
    folder = broken(dflash_config={"target_layer_ids": [target_layer + step for target_layer in target_layers]})
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] *= signs[target_layers].flatten().to(tensors["fc.weight"].dtype)
    save_file(tensors, folder / "model.safetensors")
    forward = target.forward

    def spoken(*given: Any, **named: Any) -> Any:
        output = forward(*given, **named)
        read = given[3] if len(given) > 3 else named.get("target_layers", ())
        if output.hidden_states is None or not read:
            return output
        return replace(output, hidden_states=output.hidden_states * signs[list(read)].flatten())

    found = diagnosis(copy_with(target, forward=spoken), folder)
    assert (
        found.fault == "target_layers"
        and f"target layers {target_layers} in place" in found.finding
        and str(target_layers) in found.remedy
    )
    assert found.alike > 0.9  # decoding does what the configuration says, but for near ties of nonsense


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "fault", "assumption"),
    [
        (
            {
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 3,
                "use_sliding_window": True,
                "is_causal": False,
            },
            "window",
            "full attention, bidirectional",
        ),
        ({"dflash_config": {"mask_token_id": 300}}, "mask", "mask token {mask} in place of 300"),
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope",
            "rope_theta 10000",
        ),
    ],
    ids=["window", "mask", "rope"],
)
def test_a_wrong_configuration(
    target: Target, broken: Callable[..., Path], changes: dict[str, Any], fault: str, assumption: str
) -> None:
    found = diagnosis(target, broken(**changes))
    assumption = assumption.format(mask=read_checkpoint(DRAFTER)[0].mask_token_id)
    assert found.fault == fault and assumption in found.finding and found.remedy
    assert found.alike == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_wrong", "fault", "assumption"),
    [
        (lambda kind: not kind.causal, "causality", "full attention, causal inside a block"),
        (lambda kind: kind.window is None, "window", "a sliding window of 32 tokens"),
    ],
    ids=["causality", "a window that was dropped"],
)
def test_attention_that_was_trained_otherwise(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    is_wrong: Callable[[LayerAttention], bool],
    fault: str,
    assumption: str,
) -> None:
    """Networks that compute wrong numbers if their layers attend as in the configuration."""
    through = DFlashNetwork.through_layers

    def spoilt(self: DFlashNetwork, *given: Any) -> Tensor:
        return through(self, *given) * (-1 if is_wrong(self.config.layers[0]) else 1)

    monkeypatch.setattr(DFlashNetwork, "through_layers", spoilt)
    found = diagnosis(target, DRAFTER)
    assert found.fault == fault and assumption in found.finding and found.remedy


@pytest.mark.slow
def test_a_shift_by_one(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each position drafts what the one before it drafts in the bundled drafter, as when DSpark is read as DFlash."""
    through = DFlashNetwork.through_layers

    def late(self: DFlashNetwork, *given: Any) -> Tensor:
        return through(self, *given).roll(-1, dims=1)

    monkeypatch.setattr(DFlashNetwork, "through_layers", late)
    found = diagnosis(target, DRAFTER)
    assert found.fault == "shift" and "position 0 drafts the token after the anchor" in found.finding


@pytest.mark.slow
def test_numbers_that_do_not_fit(broken: Callable[..., Path]) -> None:
    """The output of `fc` is normed, so a factor only makes the numbers before the norm larger."""
    folder = broken()
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"] * 65536
    save_file(tensors, folder / "model.safetensors")
    in_float16 = load_target("bundled", dtype="float16", compile="off")
    found = examine(in_float16, folder, PROMPTS[:1], 16)  # one prompt: float16 is slow on CPUs
    assert found.fault == "dtype" and "float32 in place of float16" in found.finding


@pytest.mark.slow
def test_another_target(tmp_path: Path, target: Target) -> None:
    folder = shutil.copytree(DRAFTER.parent / "target", tmp_path / "target")
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(tensor.shape, generator=random).to(tensor.dtype)
        * tensor.float().std().nan_to_num(1.0).to(tensor.dtype)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = diagnosis(load_target(folder, compile="off"), DRAFTER)
    assert found.fault == "target" and "another target" in found.finding and "fingerprint" in found.finding


@pytest.mark.slow
def test_decoding_at_fault(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = DFlashDrafter.draft_pass

    def confused(self: DFlashDrafter, state: KVCache, tokens: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        hidden, logits = draft(self, state, tokens, *given)
        return hidden, logits.roll(1, dims=1)

    monkeypatch.setattr(DFlashDrafter, "draft_pass", confused)
    found = diagnosis(target, DRAFTER)
    assert found.fault == "decoding" and found.alike < 0.9 and "report it" in found.remedy


def test_checks_are_different_and_possible() -> None:
    config = read_checkpoint(DRAFTER)[0]
    known = list(checks(config, 1, {"rope_theta": 500_000.0}, torch.bfloat16, 1000))
    assert len(
        {(one.config.layers, one.target_layers, one.config.rope_theta, one.shift, one.dtype) for one in known}
    ) == len(known)
    thetas = {one.config.rope_theta for one in known if one.fault == "rope"}
    assert thetas == {5e5, 1e6, 1e7}
    windows = {layer.window for one in known if one.fault == "window" for layer in one.config.layers}
    assert windows == {32, 128, 512}
    sliding = LayerAttention(causal=True, window=64), LayerAttention(causal=False, window=None)
    config = type(config)(**{**vars(config), "layers": sliding, "target_layers": (0, 7)})
    known = list(checks(config, 0, {}, torch.float32, 100))
    assert {one.fault for one in known} == {"", "shift", "window", "causality", "rope"}  # no tap beside those of an end
    assert {one.shift for one in known if one.fault == "shift"} == {-1, -2}
    flipped = {one.config.layers for one in known if one.fault == "causality"}
    assert {tuple(layer.causal for layer in layers) for layers in flipped} == {(True, True), (False, False)}
    assert all(tuple(layer.window for layer in layers) == (64, None) for layers in flipped)


def test_small_gains_are_no_fault() -> None:
    config = read_checkpoint(DRAFTER)[0]
    usual, other = (
        Assumption(config, assumption="usual"),
        Assumption(config, fault="target_layers", assumption="other", remedy="do this"),
    )
    generator = torch.Generator().manual_seed(0)
    runs = [(torch.rand(60, 1, generator=generator) < share).long() for share in (0.5, 0.6)]
    assert conclude([usual, other], runs, [1], [1], 1.0, None)[0] is None
    # 40 % more are right, but at other places: with so few that may be luck.
    runs = [torch.tensor([[1]] * 20 + [[0]] * 20), torch.tensor([[1]] * 10 + [[0]] * 10 + [[1]] * 18 + [[0]] * 2)]
    assert conclude([usual, other], runs, [1], [1], 1.0, None)[0] is None
    runs = [torch.tensor([[1]] * 20 + [[0]] * 40), torch.tensor([[1]] * 50 + [[0]] * 10)]
    assert conclude([usual, other], runs, [1], [1], 1.0, None)[::2] == ("target_layers", "do this")
