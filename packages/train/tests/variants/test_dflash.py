"""Training of DFlash over part of the vocabulary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.drafters import TINY_DRAFTER, load_drafter
from blockdraft.errors import UsageError
from blockdraft.formats import read_drafter
from blockdraft.targets import load_target, load_target_text
from blockdraft_tools.export import ExportFormat, export
from blockdraft_tools.gguf.drafters import write_drafter
from blockdraft_tools.gguf.tokenizers import tokenizer_metadata
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.documents import read_data
from blockdraft_train.draft_vocabulary import frequent_tokens
from blockdraft_train.objectives import Slots
from blockdraft_train.recipe import with_place
from blockdraft_train.variants.dflash import DFlashRecipe, DFlashVariant
from blockdraft_train.variants.dflash2 import DFlash2Recipe, DFlash2Variant

RECIPE = DFlashRecipe(layers=2, target_layers=(0, 1), block_size=6, draft_vocab=200, save_dtype="float32")


def test_the_training_pass_equals_the_draft_pass(
    parity: Callable[..., Any], tiny_target_dir: Path, tiny_data_dir: Path, tmp_path: Path
) -> None:
    """The drafter that is written drafts among the same tokens, with the target's own head."""
    target, variant, data = load_target(tiny_target_dir), DFlashVariant(RECIPE), read_data(tiny_data_dir)
    config = variant.config(target)
    network = variant.network(config)
    variant.fit_data(network, data)
    variant.fit_head(network, target)
    with torch.no_grad():
        network.norm.weight.fill_(1.0)  # so that draft tokens differ
        random = torch.Generator().manual_seed(5)
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=random)
    assert DFlashVariant.layout(RECIPE, target) == "speculators"
    saved = variant.saved(network.state_dict())
    export(tmp_path / "drafter", ExportFormat("speculators"), config, saved, target, variant.kept)
    drafter: Any = load_drafter(tmp_path / "drafter", target=target)
    kept = frequent_tokens(data, target.vocab_size, 200)
    assert torch.equal(drafter.reduced_head.kept, kept) and len(kept.unique()) == 200
    logits, expected = parity(variant, network.eval(), drafter, target)
    assert logits.shape[-1] == 200
    for ours, one in zip(logits, expected, strict=True):
        theirs = drafter.draft_pass(one.state, torch.tensor([[one.anchor] + 5 * [config.mask_token_id]]), 1)[1][0]
        torch.testing.assert_close(ours, theirs[:, kept], atol=1e-4, rtol=1e-4)


def test_tokens_outside_of_the_draft_vocabulary_teach_nothing(tiny_target_dir: Path, tiny_data_dir: Path) -> None:
    target, variant, data = load_target(tiny_target_dir), DFlashVariant(RECIPE), read_data(tiny_data_dir)
    network = variant.network(variant.config(target))
    variant.fit_data(network, data)
    variant.fit_head(network, target)
    assert variant.kept is not None
    inside = variant.kept[:5].tolist()
    outside = sorted({*range(target.vocab_size)} - {*variant.kept.tolist()})[:2]
    tokens = torch.tensor([[7, *inside], [7, outside[0], *inside[:3], outside[1]]])
    hidden = torch.randn(2, 5, target.hidden_size, generator=torch.Generator().manual_seed(1))
    slots = Slots(hidden, variant.logits(network, target, hidden), tokens, torch.ones(2, 5, dtype=torch.bool))
    losses = variant.losses(network, slots)["decay"]
    known = [[True] * 5, [False, True, True, True, False]]
    assert variant.counts(network, slots)["covered"].tolist() == known and variant.counted == ("covered",)
    assert ((losses > 0).tolist()) == known
    whole = (hidden[0] @ target.head(torch.eye(target.hidden_size)))[:, variant.kept].log_softmax(dim=-1)
    torch.testing.assert_close(losses[0], -whole[torch.arange(5), torch.arange(5)])


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (DFlashVariant(DFlashRecipe(draft_vocab=10**6)), "draft_vocab must be at most the target's"),
        (DFlash2Variant(DFlash2Recipe(draft_vocab=60)), "draft_vocab must be left out"),
    ],
)
def test_draft_vocabularies_that_cannot_be_are_refused(variant: Any, message: str, tiny_target_dir: Path) -> None:
    variant.defaults(load_target(tiny_target_dir), None, complaints := Complaints())
    assert message in complaints.messages[0]


def test_training_starts_from_all_that_decodes(tmp_path: Path, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    """A folder, a GGUF file, and the name of the bundled drafter, as `generate --drafter` takes them."""
    target = load_target(tiny_target_dir)
    checkpoint = read_drafter(tiny_drafter_dir, None, target.num_layers)
    tokenizer, _ = tokenizer_metadata(load_target_text(tiny_target_dir), checkpoint.config.vocab_size, "dflash")
    write_drafter(tmp_path / "d.GGUF", checkpoint, tokenizer, "f32")
    networks = []
    for init in (str(tiny_drafter_dir), str(tmp_path / "d.GGUF")):
        recipe = with_place(DFlashRecipe(block_size=4, init=init), target)
        variant = DFlashVariant(recipe)
        networks.append(variant.network(variant.config(target), None))
    first, second = (network.state_dict() for network in networks)
    assert all(torch.allclose(first[name].float(), second[name].float()) for name in first)
    assert with_place(DFlashRecipe(init="bundled"), target).init == str(TINY_DRAFTER)
    with pytest.raises(UsageError, match="lookup names a drafter without weights"):
        with_place(DFlashRecipe(init="lookup"), target)
