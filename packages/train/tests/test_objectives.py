"""Each objective against a twin that goes slot by slot and token by token."""

import math
from collections.abc import Callable

import pytest
import torch

from blockdraft_train.objectives import OBJECTIVES, Slots, default_gamma, find_objective, slot_weights

BLOCKS, SLOTS, VOCAB = 3, 4, 6


def slots() -> Slots:
    random = torch.Generator().manual_seed(0)
    taught = torch.tensor([[True] * 4, [True, True, False, False], [True, False, True, True]])
    return Slots(
        hidden_CKH=torch.randn(BLOCKS, SLOTS, 2, generator=random),
        logits_CKV=2 * torch.randn(BLOCKS, SLOTS, VOCAB, generator=random),
        tokens_CL=torch.randint(0, VOCAB, (BLOCKS, SLOTS + 1), generator=random),
        taught_CK=taught,
        teacher_CKV=2 * torch.randn(BLOCKS, SLOTS, VOCAB, generator=random),
    )


def dist(logits: torch.Tensor) -> list[float]:
    powers = [math.exp(x) for x in logits.tolist()]
    return [x / sum(powers) for x in powers]


def dists(s: Slots, c: int, k: int) -> tuple[list[float], list[float]]:
    assert s.teacher_CKV is not None
    return dist(s.teacher_CKV[c, k]), dist(s.logits_CKV[c, k])


def entropy(s: Slots, c: int, k: int) -> float:
    return -math.log(dist(s.logits_CKV[c, k])[int(s.tokens_CL[c, k + 1])])


def kl(s: Slots, c: int, k: int) -> float:
    return sum(p * math.log(p / q) for p, q in zip(*dists(s, c, k), strict=True))


def alpha(s: Slots, c: int, k: int) -> float:
    return sum(map(min, *dists(s, c, k)))


def dpace(s: Slots, c: int, k: int) -> float:
    """The sum over i >= k, taught, of the product of the smoothed probabilities of taught slots up to i."""
    total = 0.0
    for i in range(k, SLOTS):
        if s.taught_CK[c, i]:
            total += math.prod(0.5 * math.exp(-entropy(s, c, j)) + 0.5 for j in range(i + 1) if bool(s.taught_CK[c, j]))
    return total * entropy(s, c, k)


def lk_hybrid(s: Slots, c: int, k: int) -> float:
    share = math.exp(-3 * alpha(s, c, k))
    return share * kl(s, c, k) + (1 - share) * (1 - alpha(s, c, k))


def block_verification(s: Slots, c: int, k: int) -> float:
    """The loss of slot k by the quotients of the tokens before it that are taught."""
    w = least = 1.0
    for i in range(k):
        if s.taught_CK[c, i]:
            p, q = (dist[int(s.tokens_CL[c, i + 1])] for dist in dists(s, c, i))
            w *= q / p
            least = min(least, w)
    return 1 - sum(min(least * p, w * q) for p, q in zip(*dists(s, c, k), strict=True))


TWINS: dict[str, Callable[[Slots, int, int], float]] = {
    "decay": entropy,
    "dpace": dpace,
    "forward_kl": kl,
    "total_variation": lambda s, c, k: 1 - alpha(s, c, k),
    "acceptance": lambda s, c, k: -math.log(alpha(s, c, k)),
    "lk_hybrid": lk_hybrid,
    "block_verification": block_verification,
}


def test_every_objective_has_a_twin() -> None:
    assert sorted(OBJECTIVES) == sorted(TWINS)


@pytest.mark.parametrize("name", sorted(TWINS))
def test_objective_equals_its_twin(name: str) -> None:
    s = slots()
    actual = find_objective(name).losses(s)
    assert actual.dtype == torch.float32
    for c in range(BLOCKS):
        for k in range(SLOTS):
            if s.taught_CK[c, k]:
                assert float(actual[c, k]) == pytest.approx(TWINS[name](s, c, k), rel=1e-4)


# What block verification accepts of one text says little of a distribution: it is taught on many, in its own file.
@pytest.mark.parametrize("name", sorted(TWINS.keys() - {"block_verification"}))
def test_going_downhill_makes_the_taught_tokens_or_the_target_likelier(name: str) -> None:
    s = slots()
    logits = s.logits_CKV.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.3)
    objective = find_objective(name)
    for _ in range(150):
        moved = Slots(s.hidden_CKH, logits, s.tokens_CL, s.taught_CK, s.teacher_CKV)
        loss = objective.losses(moved)[s.taught_CK].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for c, k in s.taught_CK.nonzero().tolist():
        if objective.needs_teacher:
            assert alpha(moved, c, k) > 0.9
        else:
            assert entropy(moved, c, k) < 0.1


@pytest.mark.parametrize("name", ["dpace", "lk_hybrid"])
def test_weights_carry_no_gradient(name: str) -> None:
    """The gradient is that of the same sum with its weights as plain numbers."""
    s = slots()
    logits = s.logits_CKV.clone().requires_grad_()
    moved = Slots(s.hidden_CKH, logits, s.tokens_CL, s.taught_CK, s.teacher_CKV)
    find_objective(name).losses(moved)[0].sum().backward()
    actual, logits.grad = logits.grad, None
    entropies = find_objective("decay").losses(moved)[0]
    kls, rejected = (find_objective(objective).losses(moved)[0] for objective in ("forward_kl", "total_variation"))
    total = torch.zeros(())
    for k in range(SLOTS):
        share = math.exp(-3 * alpha(s, 0, k))
        if name == "dpace":
            total = total + dpace(s, 0, k) / entropy(s, 0, k) * entropies[k]
        else:
            total = total + share * kls[k] + (1 - share) * rejected[k]
    total.backward()
    torch.testing.assert_close(actual, logits.grad, rtol=1e-4, atol=1e-6)


def test_acceptance_of_a_hopeless_slot_is_finite() -> None:
    far = torch.tensor([[[100.0, -100.0]]])
    s = Slots(torch.zeros(1, 1, 1), far, torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 1).bool(), -far)
    assert math.isfinite(float(find_objective("acceptance").losses(s)))


def test_weights_fall_with_the_distance_and_are_zero_where_nothing_is_taught() -> None:
    taught = torch.tensor([True, True, False, True])
    assert slot_weights(taught, 2.0).tolist() == pytest.approx([1, math.exp(-0.5), 0, math.exp(-1.5)])
    assert slot_weights(taught, None).tolist() == [1, 1, 0, 1]


def test_gamma_of_the_paper() -> None:
    assert [default_gamma(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]


def test_an_unknown_objective_is_named() -> None:
    with pytest.raises(ValueError, match="'decai' is unknown; there are acceptance, block_verification, decay"):
        find_objective("decai")
