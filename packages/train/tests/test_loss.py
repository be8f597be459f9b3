"""Logits in chunks give the same sums and gradients as all at once, and the sums are what a slow twin finds."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.decode.proposal import chain
from blockdraft.targets import load_target
from blockdraft_train.batches import Batches, Documents
from blockdraft_train.data.documents import read_data
from blockdraft_train.hidden_state_sources import batch_hidden_states, open_source
from blockdraft_train.loss import DraftLoss, Sums, term_weights
from blockdraft_train.objectives import Slots
from blockdraft_train.progress import Progress
from blockdraft_train.variants.dflash import DFlashRecipe, DFlashVariant

RECIPE = DFlashRecipe(
    layers=2,
    target_layers=(0, 1),
    block_size=6,
    length=48,
    batch=3,
    anchors=7,
    held_out=4,
    objective={"decay": 0.5, "dpace": 0.2, "forward_kl": 0.3},
)


def run(
    recipe: DFlashRecipe, target_dir: Path, data_dir: Path, kind: type[DFlashVariant] = DFlashVariant
) -> tuple[Sums, dict[str, torch.Tensor]]:
    target, data = load_target(target_dir), read_data(data_dir)
    variant = kind(recipe)
    module = DraftLoss(variant.network(variant.config(target)), variant, target)
    documents = Documents(data, recipe.length)
    batch = next(iter(Batches(documents, documents.usable, recipe, variant.taught_slots).run(0)))[1]
    target_layers = (0, 1, target.num_layers)
    source = open_source(
        None, target, data, documents, target_layers, beside=Path(), reserved=None, progress=Progress()
    )
    hidden_states = batch_hidden_states(batch, source, len(target_layers) * target.hidden_size, target)
    target_layer_numbers = 2 * target.hidden_size
    sums = module(
        hidden_states[:, :, :target_layer_numbers], hidden_states[:, :, target_layer_numbers:], *batch.on(target.device)
    )
    sums.terms_T.sum().backward()
    return sums, {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("change", [{"chunk": 4}, {"chunk": 1}, {"checkpoint_activations": True}])
def test_chunks_and_recomputing_change_nothing(
    change: dict[str, int], tiny_target_dir: Path, tiny_data_dir: Path
) -> None:
    whole, gradients = run(RECIPE, tiny_target_dir, tiny_data_dir)
    parts, others = run(dataclasses.replace(RECIPE, **change), tiny_target_dir, tiny_data_dir)
    assert int(whole.blocks) > 10
    for ours, theirs in zip(whole, parts, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        assert float(gradient.abs().max()) > 0
        torch.testing.assert_close(gradient, others[name], rtol=1e-4, atol=1e-5)


def test_logits_of_a_chunk_are_all_that_exist_at_once(tiny_target_dir: Path, tiny_data_dir: Path) -> None:
    sizes = []

    class Watched(DFlashVariant):
        def losses(self, network: Any, slots: Slots) -> dict[str, torch.Tensor]:
            sizes.append(len(slots.logits_CKV))
            return super().losses(network, slots)

    run(dataclasses.replace(RECIPE, chunk=4), tiny_target_dir, tiny_data_dir, Watched)
    assert max(sizes) == 4 and sum(sizes) == 2 * 3 * 7  # each chunk forward, and once more in the backward pass


def test_accepted_length_and_accuracy_are_counted_block_by_block(tiny_target_dir: Path, tiny_data_dir: Path) -> None:
    """With drafts that are right at slots 1, 2 and 4 of every block."""
    pattern = torch.tensor([True, True, False, True, False])

    class Right(DFlashVariant):
        def draft_tokens(self, network: Any, slots: Slots) -> torch.Tensor:
            return torch.where(pattern, slots.labels_CK, -1)

    sums, _ = run(RECIPE, tiny_target_dir, tiny_data_dir, Right)
    right = sums.taught_K * pattern
    assert sums.right_K.tolist() == right.tolist() and int(sums.taught_K[0]) == int(sums.blocks)
    assert int(sums.accepted) == int(sums.blocks + sums.taught_K[0] + sums.taught_K[1])


@pytest.mark.parametrize("chunk", [4, 100])
def test_what_a_variant_counts_is_counted_over_taught_slots(
    chunk: int, tiny_target_dir: Path, tiny_data_dir: Path
) -> None:
    pattern = torch.tensor([True, True, False, True, False])

    class Counting(DFlashVariant):
        counted = ("some", "all")

        def counts(self, network: Any, slots: Slots) -> dict[str, torch.Tensor]:
            return {"all": slots.labels_CK >= 0, "some": pattern.expand_as(slots.labels_CK)}

    sums, _ = run(dataclasses.replace(RECIPE, chunk=chunk), tiny_target_dir, tiny_data_dir, Counting)
    assert sums.counts_M.tolist() == [int((sums.taught_K * pattern).sum()), int(sums.taught_K.sum())]
    assert 0 < int(sums.taught_K.sum()) < 5 * int(sums.blocks)  # some slots are not taught


def test_the_teacher_speaks_of_the_token_that_the_label_is(tiny_target_dir: Path, tiny_data_dir: Path) -> None:
    """Of each taught slot, the teacher's logits are those of the target after all tokens before the label."""
    seen: list[Slots] = []

    class Watched(DFlashVariant):
        def losses(self, network: Any, slots: Slots) -> dict[str, torch.Tensor]:
            seen.append(slots)
            return super().losses(network, slots)

    run(RECIPE, tiny_target_dir, tiny_data_dir, Watched)
    target, data = load_target(tiny_target_dir), read_data(tiny_data_dir)
    dists = {}  # by the tokens so far
    for document in data:
        proposal = chain(document.tokens[None])
        cache = target.new_cache(1, len(document.tokens))
        logits = target.forward(proposal.tokens, proposal.parents, cache).logits[0]
        for place in range(1, len(document.tokens) - 1):
            dists[tuple(document.tokens[place - 1 : place + 2].tolist())] = logits[place]
    [slots], compared = seen, 0
    assert slots.teacher_CKV is not None
    for c, k in slots.taught_CK[:, 1:].nonzero().tolist():  # from the second label on, three tokens are known
        key = tuple(slots.tokens_CL[c, k : k + 3].tolist())
        torch.testing.assert_close(slots.teacher_CKV[c, k + 1], dists[key], atol=1e-4, rtol=1e-4)
        compared += 1
    assert compared > 20


def test_terms_weigh_their_slots_as_their_objectives_say() -> None:
    variant = DFlashVariant(dataclasses.replace(RECIPE, gamma=2.0))
    taught = torch.tensor([[True, True, False, True, True]])
    decayed = [[1, math.exp(-0.5), 0, math.exp(-1.5), math.exp(-2)]]
    torch.testing.assert_close(term_weights(variant, "decay", taught), torch.tensor(decayed))
    torch.testing.assert_close(term_weights(variant, "forward_kl", taught), torch.tensor(decayed))
    assert term_weights(variant, "dpace", taught).tolist() == [[1, 1, 0, 1, 1]]


def test_losses_of_slots_that_are_not_taught_may_be_infinite(tiny_target_dir: Path, tiny_data_dir: Path) -> None:
    expected, gradients = run(RECIPE, tiny_target_dir, tiny_data_dir)

    class Wild(DFlashVariant):
        def losses(self, network: Any, slots: Slots) -> dict[str, torch.Tensor]:
            values = super().losses(network, slots)
            return {name: losses.masked_fill(~slots.taught_CK, torch.inf) for name, losses in values.items()}

    sums, others = run(RECIPE, tiny_target_dir, tiny_data_dir, Wild)
    assert torch.equal(sums.terms_T, expected.terms_T)
    assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())
