"""The selector's loss, compared with its definition, and equality of its choices in training and decoding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockdraft.decode.proposal import ChainPlan, chain
from blockdraft.drafters import load_drafter
from blockdraft.drafters.dflash2.drafter import DFlash2Drafter
from blockdraft.drafters.dflash2.network import DFlash2Config, DFlash2Network
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.targets import Target
from blockdraft.types import SamplingParams
from blockdraft_tools.export import ExportFormat, export
from blockdraft_train.dflash_pass import draft_hidden
from blockdraft_train.objectives import Slots
from blockdraft_train.variants.dflash2 import DFlash2Recipe, DFlash2Variant, selector_losses

KINDS = {
    "bidirectional": (LayerAttention(False, None),) * 2,
    "window": (LayerAttention(False, 5), LayerAttention(True, 12)),
}
RECIPE = DFlash2Recipe(layers=2, block_size=8, target_layers=(0, 1), selector_rank=4)


@pytest.fixture
def network(tiny_dflash2_dir: Path) -> DFlash2Network:
    config, tensors = read_checkpoint(tiny_dflash2_dir)
    assert isinstance(config, DFlash2Config)
    network = DFlash2Network(config)
    network.load_state_dict(tensors)
    return network


def make_slots(network: DFlash2Network) -> Slots:
    """Two blocks of three slots. The labels are the least likely tokens in the first, the third best in the second."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, network.config.hidden_size, generator=generator)
    logits = torch.randn(2, 3, network.config.vocab_size, generator=generator)
    order = logits.argsort(dim=-1, descending=True)
    labels = torch.stack([order[0, :, -1], order[1, :, 2]])
    tokens = torch.cat([torch.tensor([[7], [9]]), labels], dim=1)
    return Slots(hidden, logits.requires_grad_(), tokens, torch.ones(2, 3, dtype=torch.bool))


def test_the_selector_learns_the_label_among_the_candidates(network: DFlash2Network) -> None:
    slots, selector = make_slots(network), network.candidate_selector
    losses = selector_losses(network, slots)
    for block in range(2):
        for slot in range(3):
            before, label = slots.tokens_CL[block, slot : slot + 2].tolist()
            logits = slots.logits_CKV[block, slot]
            best = logits.topk(5).indices.tolist()
            if block == 0:
                assert label not in best
                best[-1] = label
            gate = selector.predecessor_codebook[before] * selector.hidden_projection(slots.hidden_CKH[block, slot])
            scores = torch.stack([logits[token] + gate @ selector.successor_codebook[token] for token in best])
            expected = scores.logsumexp(dim=0) - scores[best.index(label)]
            torch.testing.assert_close(losses[block, slot], expected)
    losses.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in selector.parameters())
    assert slots.logits_CKV.grad is not None and slots.logits_CKV.grad.any()  # the network learns from it too


def test_loss_and_counts(network: DFlash2Network) -> None:
    variant, slots = DFlash2Variant(replace(RECIPE, objective={"decay": 0.5})), make_slots(network)
    assert variant.factors() == {"decay": 0.5, "selector": 1.0} and variant.decayed("selector")
    assert variant.losses(network, slots).keys() == {"decay", "selector"}
    counts = variant.counts(network, slots)
    assert counts.keys() == {*variant.counted}
    assert counts["candidate_recall"].tolist() == [[False] * 3, [True] * 3]  # the label is not put in here
    assert not counts["base_accuracy"].any()
    assert torch.equal(counts["selector_accuracy"], variant.draft_tokens(network, slots) == slots.labels_CK)
    right = replace(slots, logits_CKV=slots.logits_CKV.scatter(2, slots.labels_CK[..., None], 99.0))
    assert all(count.all() for count in variant.counts(network, right).values())


@pytest.mark.parametrize("kind", KINDS)
def test_training_chooses_as_decoding_does(kind: str, network: DFlash2Network, target: Target) -> None:
    """If the data hold the drafter's draft tokens, the training pass drafts the same at every slot."""
    config, tensors = replace(network.config, layers=KINDS[kind]), network.state_dict()
    network = DFlash2Network(config)
    network.load_state_dict(tensors)
    drafter = DFlash2Drafter(network, target)
    tokens = torch.randint(5, 200, (1, 30), generator=torch.Generator().manual_seed(4))
    proposal = chain(tokens)
    hidden_states = target.forward(
        proposal.tokens, proposal.parents, target.new_cache(1, 30), drafter.target_layers
    ).hidden_states
    assert hidden_states is not None
    anchors, places = torch.tensor([[4, 17, 28]]), torch.arange(30)[None]
    mask = target.embed(torch.tensor(config.mask_token_id))
    with torch.no_grad():
        hidden = draft_hidden(
            network, hidden_states, torch.zeros_like(places), places, anchors, target.embed(tokens[0, anchors]), mask
        )[0, :, 1:]
    draft_tokens = []
    for anchor in anchors[0].tolist():
        state = drafter.new_state(1, 60)
        drafter.observe(state, tokens[:, :anchor], hidden_states[:, :anchor], [anchor])
        draft_tokens.append(drafter.propose(state, tokens[:, anchor], ChainPlan(8, [SamplingParams()])).tokens[0])
    logits = network.adjust_logits(target.head(hidden))
    slots = Slots(hidden, logits, torch.stack(draft_tokens), torch.ones(3, 7, dtype=torch.bool))
    assert torch.equal(DFlash2Variant(RECIPE).draft_tokens(network, slots), slots.labels_CK)
    assert not torch.equal(logits.argmax(dim=-1), slots.labels_CK)


def test_training_starts_from_a_v1_drafter(tmp_path: Path, target: Target, tiny_drafter_dir: Path) -> None:
    variant = DFlash2Variant(replace(RECIPE, init=str(tiny_drafter_dir), save_dtype="float32", kv_heads=2, heads=4))
    v1 = load_drafter(tiny_drafter_dir, target=target)
    config = variant.config(target)
    network = variant.network(config)
    export(tmp_path / "draft", ExportFormat("zlab"), config, variant.saved(network.state_dict()), target)
    v2 = load_drafter(tmp_path / "draft", target=target)
    assert isinstance(v2, DFlash2Drafter)
    hidden_states = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(5))
    actual = []
    for drafter in (v1, v2):
        state = drafter.new_state(2, 40)
        drafter.observe(state, torch.zeros(2, 9, dtype=torch.long), hidden_states, [9, 7])
        actual.append(drafter.propose(state, torch.tensor([7, 8]), ChainPlan(8, [SamplingParams()] * 2)))
    assert torch.equal(actual[0].tokens, actual[1].tokens)
