"""Equality of the training pass at an anchor and the draft pass there, for every variant."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from thinned import thinned

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import entries, load_drafter
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams
from blockdraft_tools.export import ExportFormat, export
from blockdraft_train.settings_files import read_settings
from blockdraft_train.variant import find_variant
from blockdraft_train.variants import variant_names
from blockdraft_train.variants.dflash import DFlashFamily

# Variants that z-lab's layout can hold.
KINDS = {
    "bidirectional": (LayerAttention(False, None),) * 2,
    "causal": (LayerAttention(True, None),) * 2,
    "window": (LayerAttention(False, 5),) * 2,
    "full and causal window": (LayerAttention(False, None), LayerAttention(True, 6)),
}


FAMILY = [name for name in variant_names() if issubclass(find_variant(name), DFlashFamily)]


@pytest.mark.parametrize("name", sorted({*variant_names()} - {*FAMILY}))
def test_training_pass_of_another_kind_equals_draft_pass(
    name: str, parity: Callable[..., Any], tiny_target_dir: Path, tmp_path: Path
) -> None:
    target = load_target(tiny_target_dir)
    flags = {"block-size": "6", "save-dtype": "float32"}
    variant = find_variant(name)(read_settings(find_variant(name).recipe_class, flags=flags))
    config = variant.config(target)
    network = disturbed(variant.network(config))
    written = ExportFormat(entries()[name].layouts[0])
    export(tmp_path / "drafter", written, config, variant.saved(network.state_dict()), target)
    parity(variant, network.eval(), load_drafter(tmp_path / "drafter", target=target), target)


def disturbed(network: Any) -> Any:
    """Network with random weights in every part."""
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=random)
    return network


@pytest.mark.parametrize(("name", "kind"), thinned(FAMILY, KINDS, keep=2))
def test_training_pass_equals_draft_pass(
    name: str, kind: str, parity: Callable[..., Any], tiny_target_dir: Path, tmp_path: Path
) -> None:
    target = load_target(tiny_target_dir)
    flags = {"layers": "2", "target_layers": "0,2", "block-size": "6", "save-dtype": "float32"}
    variant = find_variant(name)(read_settings(find_variant(name).recipe_class, flags=flags))
    config = dataclasses.replace(variant.config(target), layers=KINDS[kind])
    network = disturbed(variant.network(config))
    export(tmp_path / "drafter", ExportFormat("zlab"), config, variant.saved(network.state_dict()), target)
    drafter: Any = load_drafter(tmp_path / "drafter", target=target)
    logits, expected = parity(variant, network.eval(), drafter, target)
    for ours, one in zip(logits, expected, strict=True):
        plan = ChainPlan(drafter.block_size, [SamplingParams()])
        theirs = drafter.refined_pass(one.state, torch.tensor([one.anchor]), plan)[1][0]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
