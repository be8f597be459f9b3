"""Drafts and scores of two executors, compared after any change of their states."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from blockdraft.decode.proposal import ChainPlan, Plan, Proposal, SampledPlan, TreePlan, chain_parents
from blockdraft.kernels.cuda.graphs import room
from blockdraft.nn.foreign_tensor import in_torch
from blockdraft.types import SamplingParams

KINDS = ("dflash", "dflash2", "dspark", "eagle3", "medusa", "mtp", "mixed")
BATCHES = (1, 16)
SECONDS = [1.0 + 0.01 * count for count in range(41)]
SLOTS = room(60)


def plans(batch: int) -> list[Plan]:
    """Return plans of all kinds, each for requests some of which are sampled."""
    greedy = [SamplingParams()] * batch
    mixed = [SamplingParams(temperature=(0.0, 1.0, 0.7)[row % 3]) for row in range(batch)]
    uniforms = torch.rand(batch, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return [
        ChainPlan(4, mixed),
        ChainPlan(4, greedy, draft_window=5),
        ChainPlan(4, greedy, step_seconds=SECONDS),
        TreePlan(4, mixed, 11),
        TreePlan(4, greedy, 20, step_seconds=SECONDS),
        SampledPlan(4, [SamplingParams(temperature=1.0)] * batch, uniforms),
    ]


def changed(new_state: Callable[[int, int], Any], read: Callable[..., None], batch: int) -> Iterator[Any]:
    """Yield the state of sequences after each way to change them: empty, read, cut, copied, and stored.

    Args:
        read: Function from a state, numbers of tokens to read, and numbers of them to commit.
    """
    state = new_state(batch + 2, SLOTS)
    rows = [number * SLOTS for number in range(batch + 2)]
    own, copied, loaded = rows[:batch], *rows[batch:]
    part = state.of(own)
    yield part
    read(part, 9, [9 * (number % 3 != 1) for number in range(batch)])
    yield part
    read(part, 9, [9 * (number % 3 == 1) for number in range(batch)])
    yield part
    read(part, 6, [6 - number % 4 for number in range(batch)])
    yield part
    part.truncate([length - number % 3 for number, length in enumerate(part.lengths)])
    read(part, 1, [1] * batch)
    yield part
    state.copy(own[-1], copied, 8)
    yield state.of([*own[:-1], copied])
    read(state.of([copied]), 3, [2])
    state.load(loaded, range(7), state.export(own[0], 7))
    yield state.of([loaded, *own[1:]])


def drafts(drafter: Any, batch: int) -> Iterator[Proposal]:
    generator = torch.Generator().manual_seed(batch)
    size = max(len(drafter.target_layers), 1) * drafter.target.hidden_size

    def read(state: Any, count: int, lengths: Sequence[int]) -> None:
        tokens = torch.randint(5, 200, (len(lengths), count), generator=generator)
        drafter.observe(state, tokens, torch.randn(len(lengths), count, size, generator=generator), lengths)

    for state in changed(drafter.new_state, read, batch):
        if not all(state.lengths) and (drafter.network.description.has_pairs or not drafter.network.description.layers):
            continue  # pairs and heads need the hidden state of a token, which every prompt has
        anchors = torch.randint(5, 200, (batch,), generator=generator)
        before = list(state.lengths)
        for plan in plans(batch):
            yield drafter.propose(state, anchors, plan)
            assert state.lengths == before


TREE = torch.tensor([[-1, 0, 0, 1, 1, 2, 5]])


def scores(target: Any, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and hidden states of chains and trees, and the last logits of prompts."""
    generator, layers = torch.Generator().manual_seed(batch), (0, 2, 3)

    def tokens(rows: int, count: int) -> Tensor:
        return torch.randint(5, 200, (rows, count), generator=generator)

    def read(cache: Any, count: int, lengths: Sequence[int]) -> None:
        last = (torch.tensor(lengths) - 1).clamp(min=0)
        output = target.forward(tokens(len(lengths), count), chain_parents(len(lengths), count), cache, (), last)
        read_logits.append(output.logits)
        cache.commit([range(length) for length in lengths])

    read_logits = list[Tensor]()
    for cache in changed(target.new_cache, read, batch):
        for parents in (chain_parents(batch, 1), chain_parents(batch, 5), TREE.expand(batch, -1)):
            output = target.forward(tokens(batch, parents.size(1)), parents, cache, layers)
            yield output.logits, output.hidden_states
        cache.commit([([0, 2, 5], [0, 2], [0, 1, 4])[number % 3] for number in range(batch)])  # of the tree
    yield from ((logits, logits) for logits in read_logits)


def assert_same_drafts(ours: Any, theirs: Any, batch: int) -> None:
    for mine, expected in zip(drafts(ours, batch), drafts(theirs, batch), strict=True):
        for name in ("tokens", "parents"):
            assert torch.equal(in_torch(getattr(mine, name)), getattr(expected, name)), name
        torch.testing.assert_close(mine.expected, expected.expected, rtol=1e-3, atol=1e-4)
        if mine.acceptance_probs is not None:  # a chain in one call has none
            torch.testing.assert_close(mine.acceptance_probs, expected.acceptance_probs, rtol=1e-3, atol=1e-4)
        assert (mine.q is None) == (expected.q is None)
        for q, other in zip(mine.q or (), expected.q or (), strict=True):
            if q is not None and other is not None:
                torch.testing.assert_close(q.probs.cpu(), other.probs, rtol=1e-3, atol=1e-4)


def assert_same_scores(ours: Any, theirs: Any, batch: int) -> None:
    for mine, expected in zip(scores(ours, batch), scores(theirs, batch), strict=True):
        torch.testing.assert_close(tuple(map(in_torch, mine)), expected, atol=2e-4, rtol=1e-3)
