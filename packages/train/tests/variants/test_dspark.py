"""Training of DSpark, compared with its formula in plain loops, and equality with drafting."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import load_drafter
from blockdraft.drafters.dspark.drafter import DSparkDrafter
from blockdraft.drafters.dspark.network import DSparkConfig, DSparkNetwork
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams
from blockdraft_train.dflash_pass import draft_hidden
from blockdraft_train.loss import term_weights
from blockdraft_train.objectives import Slots
from blockdraft_train.variants.dspark import DSparkRecipe, DSparkVariant

ANCHOR = 6


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, compile="off")  # a compiled drafter keeps no weights of its network


@pytest.fixture(scope="module")
def drafter(target: Target, tiny_dspark_dir: Path) -> DSparkDrafter:
    drafter = load_drafter(tiny_dspark_dir, target=target)
    assert isinstance(drafter, DSparkDrafter)
    return drafter


def slots_of(target: Target, drafter: DSparkDrafter, tokens: Tensor, hidden_states: Tensor) -> Slots:
    """Block at `ANCHOR` as training sees it, with arbitrary logits of the target."""
    network, size = drafter.network, drafter.config.block_size
    length = tokens.size(1)
    anchors = torch.tensor([[ANCHOR]])
    with torch.no_grad():
        hidden = draft_hidden(
            network,
            hidden_states,
            torch.zeros(1, length, dtype=torch.long),
            torch.arange(length)[None],
            anchors,
            target.embed(tokens[:, ANCHOR : ANCHOR + 1]),
            target.embed(torch.tensor(drafter.config.mask_token_id)),
        ).flatten(0, 1)
        teacher = torch.randn(1, size, target.vocab_size, generator=torch.Generator().manual_seed(1))
        taught = torch.ones(1, size, dtype=torch.bool)
        logits = network.adjust_logits(target.head(hidden))
    return Slots(hidden, logits, tokens[:, ANCHOR : ANCHOR + size + 1], taught, teacher)


def inputs(target: Target, drafter: DSparkDrafter) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, target.vocab_size, (1, 24), generator=generator)
    return tokens, torch.randn(1, 24, len(drafter.target_layers) * target.hidden_size, generator=generator)


def test_losses_are_those_of_the_paper(target: Target, drafter: DSparkDrafter) -> None:
    network = drafter.network
    variant = DSparkVariant(DSparkRecipe(block_size=8))
    slots = slots_of(target, drafter, *inputs(target, drafter))
    with torch.no_grad():
        actual = variant.losses(network, slots)
        total = sum(
            share * (actual[name] * term_weights(variant, name, slots.taught_CK)).sum()
            for name, share in variant.factors().items()
        )
        expected = 0.0
        w1, w2 = network.markov_head.markov_w1.weight, network.markov_head.markov_w2.weight
        assert network.confidence_head is not None and slots.teacher_CKV is not None
        for k in range(8):
            before, label = int(slots.tokens_CL[0, k]), int(slots.tokens_CL[0, k + 1])
            q = (slots.logits_CKV[0, k] + w2 @ w1[before]).softmax(dim=-1)
            p = slots.teacher_CKV[0, k].softmax(dim=-1)
            l1 = (p - q).abs().sum().item()
            seen = torch.cat([slots.hidden_CKH[0, k], w1[before]])
            c = network.confidence_head.proj(seen).sigmoid().item()
            right = 1 - l1 / 2
            bce = -right * math.log(c) - (1 - right) * math.log(1 - c)
            expected += math.exp(-k / 4) * (0.1 * -math.log(q[label].item()) + 0.9 * l1 + 1.0 * bce)
    assert float(total) == pytest.approx(expected, rel=1e-4)


def test_training_drafts_what_the_drafter_drafts(target: Target, drafter: DSparkDrafter) -> None:
    tokens, hidden_states = inputs(target, drafter)
    state = drafter.new_state(1, 40)
    drafter.observe(state, tokens[:, :ANCHOR], hidden_states[:, :ANCHOR], [ANCHOR])
    proposal = drafter.propose(state, tokens[:, ANCHOR], ChainPlan(drafter.block_size, [SamplingParams()]))
    assert proposal.tokens.shape == (1, 9)  # the anchor and a draft token of each of the 8 slots
    tokens[:, ANCHOR : ANCHOR + 9] = proposal.tokens  # so that the tokens before each slot are the drafter's own
    slots = slots_of(target, drafter, tokens, hidden_states)
    from_draft = DSparkVariant(DSparkRecipe(block_size=8)).draft_tokens(drafter.network, slots)
    assert from_draft.tolist() == proposal.tokens[:, 1:].tolist()


def test_only_the_confidence_heads_own_loss_trains_it(target: Target, drafter: DSparkDrafter) -> None:
    network = DSparkNetwork(drafter.network.config)
    network.load_state_dict(drafter.network.state_dict())
    slots = slots_of(target, drafter, *inputs(target, drafter))
    losses = DSparkVariant(DSparkRecipe(block_size=8)).losses(network, slots)
    (losses["decay"].sum() + losses["total_variation"].sum()).backward(retain_graph=True)
    assert network.confidence_head is not None
    assert network.confidence_head.proj.weight.grad is None
    assert network.markov_head.markov_w2.weight.grad is not None
    before = network.markov_head.markov_w2.weight.grad.clone()
    losses["confidence"].sum().backward()
    assert network.confidence_head.proj.weight.grad is not None
    assert torch.equal(network.markov_head.markov_w2.weight.grad, before)  # the acceptance is a label, not a lever


def test_warm_start_from_v1(target: Target, tiny_drafter_dir: Path) -> None:
    variant = DSparkVariant(
        DSparkRecipe(block_size=5, markov_rank=3, layers=2, target_layers=(0, 1), init=str(tiny_drafter_dir))
    )
    v1 = load_drafter(tiny_drafter_dir, target=target)
    config = DSparkConfig(**{**vars(v1.config), "block_size": 5}, **variant.own_config(target))  # type: ignore[attr-defined]
    network = variant.network(config)
    assert torch.equal(network.fc.weight, v1.network.fc.weight)  # type: ignore[attr-defined]
    assert not network.markov_head.markov_w2.weight.any() and network.markov_head.markov_w1.weight.any()
    assert variant.taught_slots == 5


def test_without_a_confidence_head(target: Target) -> None:
    variant = DSparkVariant(DSparkRecipe(confidence=0))
    assert variant.own_config(target)["enable_confidence_head"] is False
    assert "confidence" not in variant.factors()


@pytest.mark.parametrize("field", ["markov_rank", "confidence"])
def test_recipes_are_checked(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*, got -1"):
        DSparkRecipe(**{field: -1})  # type: ignore[arg-type]
