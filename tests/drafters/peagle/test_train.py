"""Training of P-EAGLE: what its entries see, its first weights, and that it learns."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockdraft.data.documents import read_data
from blockdraft.drafters import load_drafter
from blockdraft.drafters.peagle.network import PEagleNetwork
from blockdraft.drafters.peagle.train import PEagleRecipe, PEagleVariant
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.formats import read_drafter
from blockdraft.settings import read_settings
from blockdraft.targets import Target, embedding_and_head, load_target
from blockdraft.training.batches import Rows
from blockdraft.training.devices import make_accelerator
from blockdraft.training.trainer import run_folder, train
from blockdraft.types import Drafting, SamplingParams

RECIPE = PEagleRecipe(block_size=5, layers=2, save_dtype="float32")


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


def random_network(variant: PEagleVariant, target: Target) -> PEagleNetwork:
    network, random = variant.network(variant.config(target)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=random)
    return network.eval()


def test_entries_see_the_text_up_to_the_anchor_and_nothing_behind_it(target: Target) -> None:
    """They see features before the anchor and tokens up to it, in its document, and no other block."""
    variant = PEagleVariant(RECIPE)
    network = random_network(variant, target)
    tokens, hidden_states = torch.arange(12)[None] + 20, torch.randn(1, 12, 2 * target.hidden_size)
    documents = torch.tensor([[0] * 3 + [1] * 9])
    positions = torch.cat([torch.arange(3), torch.arange(9)])[None]
    anchors = torch.tensor([[5, 7]])

    def hidden(hidden_states: Tensor, tokens: Tensor) -> Tensor:
        block = torch.stack([tokens[:, anchor : anchor + 5] for anchor in (5, 7)], dim=1)
        rows = Rows(tokens, positions, documents, anchors, block, block[:, :, 1:] > 0)
        with torch.no_grad():
            return variant.hidden(network, target, hidden_states, rows)[0]

    before = hidden(hidden_states, tokens)
    assert before.shape == (2, 4, target.hidden_size)
    for place in range(12):
        other, others = hidden_states.clone(), tokens.clone()
        other[0, place] += 1
        others[0, place] += 50
        changed = (hidden(other, tokens) != before).any(dim=-1)
        assert changed.tolist() == [[3 <= place < anchor] * 4 for anchor in (5, 7)], place
        changed = (hidden(hidden_states, others) != before).any(dim=-1)
        # The first token of a document has no entry that others see.
        assert changed.tolist() == [[3 < place <= anchor] * 4 for anchor in (5, 7)], place


def test_a_new_network_has_the_targets_embedding_and_head(target: Target) -> None:
    variant = PEagleVariant(replace(RECIPE, draft_vocab=100))
    network = variant.network(variant.config(target))
    network.keep(torch.arange(100) * 2)
    variant.fit_head(network, target)
    embedding, head = embedding_and_head(target)
    assert torch.equal(network.embed_tokens.weight, embedding)
    assert torch.equal(network.lm_head.weight, head[network.kept])
    config = network.config
    assert (config.mask_token_id, config.num_hidden_layers, config.draft_vocab_size) == (3, 2, 100)
    assert max(config.target_layers) < target.num_layers - 1  # its format cannot list the last layer's output
    matrices = [name for name, parameter in network.named_parameters() if variant.is_matrix(name, parameter)]
    assert not {"lm_head.weight", "embed_tokens.weight", "mask_hidden"} & {*matrices}
    assert {"fc.weight", "layers.1.mlp.up_proj.weight"} <= {*matrices}


def test_training_goes_on_from_a_drafter(target: Target, tiny_peagle_dir: Path) -> None:
    fields = {"draft_vocab": 120, "target_layers": (0, 1), "intermediate_size": 48}
    variant = PEagleVariant(replace(RECIPE, init=str(tiny_peagle_dir), block_size=7, **fields))  # type: ignore[arg-type]
    network = variant.network(variant.config(target))
    variant.fit_head(network, target)
    theirs = read_drafter(tiny_peagle_dir, None, 3).tensors
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in network.state_dict().items())
    assert network.config.block_size == 7
    other = PEagleVariant(replace(RECIPE, init=str(tiny_peagle_dir), layers=3, **fields))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="num_hidden_layers of .* is 2; it must be that of the recipe and target, 3"):
        other.network(other.config(target))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_it_learns_and_decodes_losslessly(target: Target, tiny_data_dir: Path, tmp_path: Path) -> None:
    flags = {"block-size": "4", "layers": "2", "length": "40", "batch": "4", "anchors": "12", "held-out": "1"}
    flags |= {"steps": "80", "learning-rate": "1e-2", "draft-vocab": "200", "objective": "decay=1.0", "trackers": ""}
    flags |= {"eval-every": "0", "eval-prompts": "1", "eval-tokens": "6", "save-every": "0"}
    out, recipe = tmp_path / "drafter", read_settings(PEagleRecipe, flags=flags)
    lines = train(
        "peagle", target, read_data(tiny_data_dir), out, recipe, make_accelerator(recipe, run_folder(out), "cpu")
    )
    assert sum(line["loss"] for line in lines[-5:]) < 0.5 * sum(line["loss"] for line in lines[:5])
    drafter = load_drafter(out, target=target)
    params = SamplingParams(20, ignore_eos=True)
    plain = Engine(target, load_drafter("none", target=target)).generate([[7, 8, 9]], params)
    assert (
        Engine(target, drafter, drafting=Drafting(None)).generate([[7, 8, 9]], params)[0].token_ids
        == plain[0].token_ids
    )
