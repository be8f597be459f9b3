"""Block verification: how far a sampled chain is accepted, and which distribution the next token then has.

A draft token sampled from q is offered too often where q is above p. The rule rejects just enough of these and then
draws from a residual `max(p - c q, 0)`, normalized; c = 1 is plain rejection sampling (arXiv 2211.17192). It needs p
and q only of the K tokens that q can offer. It runs on the CPU in float64; whole distributions stay on the target's
device. Letters here: R sequences, N nodes of a chain, C draft tokens after a node, K tokens that q can offer.

Rounding does no harm. A draft token of p = 0 is never accepted: its number in [0, 1) is never below 0. A residual is
reached with a probability equal to its mass, so one that rounding creates or empties is as rare as rounding errors are
small. An empty one is replaced by p, so that even then no token of p = 0 is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from blockdraft.decode.distributions import Distributions
from blockdraft.decode.proposal import Proposal, SparseDistribution
from blockdraft.decode.sampling import draw, exact


def residual_mass(p: Tensor, q: Tensor, c: Tensor) -> Tensor:
    """Return the sum of `max(p - c q, 0)` over the vocabulary.

    Args:
        p, q: `[..., K]`; p is 0 where q is.
        c: `[...]`; may be infinite.
    """
    outside = (1 - p.sum(dim=-1)).clamp(min=0)
    return outside + torch.where(q > 0, p - c.unsqueeze(-1) * q, 0.0).clamp(min=0).sum(dim=-1)


def block_acceptance_probs(
    p_RNK: Tensor, q_RNK: Tensor, draft_token_p_RN: Tensor, draft_token_q_RN: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the acceptance probabilities of whole chains (block verification, arXiv 2403.10444, algorithm 2).

    With the paper's ratio `r_i = min(1, r_{i-1} p(x_i) / q(x_i))` this computes c = 1 / r. Its chance
    `h_i = S_i / (S_i + 1 - r_i)`, `S_i = sum max(r_i p - q, 0)`, is then `m / (m + c - 1)` with m the mass of the
    residual. The node after which nothing was sampled has q = 0, so m = 1, h = r and the residual p: no special case.

    Args:
        p_RNK, q_RNK: Distributions after the N nodes of R chains.
        draft_token_p_RN, draft_token_q_RN: p and q of each node's token, after the node before; both 0 for padding.
            Node 0 is the anchor, whose entries are not read.

    Returns:
        acceptance_probs: `[R, N]`; the path ends with the last node whose number is below its chance. The anchor's is
            1.
        c: `[R, N]`, the factor of the residual if the path ends there.
    """
    factors = [torch.ones_like(draft_token_p_RN[:, 0])]
    for p, q in zip(draft_token_p_RN.unbind(1)[1:], draft_token_q_RN.unbind(1)[1:], strict=True):
        factors.append(torch.where(p > 0, factors[-1] * q / p, torch.inf).clamp(min=1))
    c = torch.stack(factors, dim=1)
    mass = residual_mass(p_RNK, q_RNK, c)
    # With c = 1 the chance is 1, also where p equals q and the mass is 0.
    return torch.where(c == 1, 1.0, mass / (mass + c - 1)), c


def accept_block(
    p_RNK: Tensor, q_RNK: Tensor, draft_token_p_RN: Tensor, draft_token_q_RN: Tensor, tests_RN: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each chain, given numbers in [0, 1) for its nodes.

    Other arguments are as for `block_acceptance_probs`.

    Returns:
        last: `[R]` int64, the last accepted node.
        c: `[R]`, the factor of the residual that the next token is sampled from.
    """
    acceptance_probs, c = block_acceptance_probs(p_RNK, q_RNK, draft_token_p_RN, draft_token_q_RN)
    accepted = tests_RN < acceptance_probs
    accepted[:, 0] = True
    last = torch.where(accepted, torch.arange(accepted.size(1)), 0).amax(dim=1)
    return last, c.gather(1, last.unsqueeze(1)).squeeze(1)


def judge_chains(
    rows: list[int],
    proposal: Proposal,
    children: Sequence[dict[int, list[int]]],
    distributions: Distributions,
    uniforms_BN: Tensor,
    tests_BN: Tensor,
) -> tuple[list[list[int]], list[int]]:
    """Return paths and bonus tokens of sequences with sampled chains; there must be a distribution after their anchors.

    A chain ends with its first node without a distribution, as if no more had been drafted. If that node is accepted,
    its token becomes the bonus, and the next step handles what follows. Chosen draft tokens beside the chain are
    ignored.
    """
    chains = []
    for row in rows:
        chain, count = [0], len(_q_of(proposal, row).ids)
        while distributions.exists(row, chain[-1]):
            following = [child for child in children[row].get(chain[-1], ()) if child < count]
            assert len(following) <= 1, "sampled draft tokens form a chain"
            if not following:
                break
            chain += following
        chains.append(chain)
    nodes_RN, is_node_RN = _padded(chains)
    # Where the last node has no distribution, that of the anchor stands in: it is not used.
    known_RN, _ = _padded(
        [[n if distributions.exists(row, n) else 0 for n in c] for row, c in zip(rows, chains, strict=True)]
    )
    ids_RNK, q_RNK = _dense_q(rows, proposal)
    each_R1 = torch.arange(len(rows))[:, None]
    ids_RNK, q_RNK = ids_RNK[each_R1, nodes_RN], q_RNK[each_R1, nodes_RN]
    p_RNK = _p_of(rows, known_RN, ids_RNK, q_RNK, distributions)
    has_child_RN1 = pad(is_node_RN, (0, 1))[:, 1:, None]
    p_RNK, q_RNK = p_RNK * has_child_RN1, q_RNK * has_child_RN1
    draft_tokens_RN = _at(proposal.tokens, rows, nodes_RN)
    # A draft token is sampled from the distribution of the node before.
    p_and_q = _of_draft_tokens(
        ids_RNK[:, :-1], p_RNK[:, :-1], q_RNK[:, :-1], draft_tokens_RN[:, 1:, None], is_node_RN[:, 1:, None]
    )
    draft_token_p_RN, draft_token_q_RN = (pad(values.squeeze(-1), (1, 0)) for values in p_and_q)
    last_R, c_R = accept_block(p_RNK, q_RNK, draft_token_p_RN, draft_token_q_RN, _at(tests_BN, rows, nodes_RN))
    end = torch.arange(len(rows)), last_R
    bonus = _draw_residual(rows, known_RN[end], ids_RNK[end], q_RNK[end], c_R, distributions, uniforms_BN)
    paths = [chain[: last + 1] for chain, last in zip(chains, last_R.tolist(), strict=True)]
    for at, (row, path) in enumerate(zip(rows, paths, strict=True)):
        if not distributions.exists(row, path[-1]):
            bonus[at] = distributions.tokens[row][path.pop()]
    return paths, bonus


def _padded(nodes: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return lists of nodes as one tensor, padded with node 0, and a mask of the entries that are not padding."""
    longest = max(map(len, nodes))
    filled = [[*row, *[-1] * (longest - len(row))] for row in nodes]
    table = torch.tensor(filled, dtype=torch.int64).view(len(nodes), longest)
    return table.clamp(min=0), table >= 0


def _at(values_BN: Tensor, rows: list[int], nodes: Tensor) -> Tensor:
    """Return the entries `[R, ...]` of nodes `[R, ...]`, on the CPU."""
    return values_BN.cpu()[torch.tensor(rows)[:, None], nodes]


def _q_of(proposal: Proposal, row: int) -> SparseDistribution:
    q = proposal.q and proposal.q[row]
    assert q, "the sequence has sampled draft tokens"
    return q


def _dense_q(rows: list[int], proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Return the tokens that q can offer after each node, `[R, N, K]`, and their probabilities.

    The probabilities are 0 after nodes outside the chain.
    """
    count = proposal.tokens.size(1)
    q = [_q_of(proposal, row) for row in rows]
    ids_RKN, q_RKN = (
        pad_sequence([pad(values, (0, 0, 0, count - len(values))).T for values in part], batch_first=True)
        for part in ([dist.ids for dist in q], [dist.probs for dist in q])
    )
    q_RKN = exact(q_RKN).cpu()
    # A distribution that nothing was sampled from may sum to 0.
    q_RKN = q_RKN / q_RKN.sum(dim=1, keepdim=True).clamp(min=1e-300)
    return ids_RKN.cpu().mT, q_RKN.mT


def _p_of(rows: list[int], nodes_RN: Tensor, ids_RNK: Tensor, q_RNK: Tensor, distributions: Distributions) -> Tensor:
    """Return p `[R, N, K]` of the tokens that q can offer; 0 where q is 0, since there the id is padding."""
    every_row = [row for row in rows for _ in range(nodes_RN.size(1))]
    p_MK = distributions.probs_of(every_row, nodes_RN.flatten().tolist(), ids_RNK.flatten(0, 1))
    return exact(p_MK).cpu().view_as(q_RNK) * (q_RNK > 0)


def _of_draft_tokens(
    ids: Tensor, p: Tensor, q: Tensor, draft_tokens: Tensor, is_draft_token: Tensor
) -> tuple[Tensor, Tensor]:
    """Return p and q `[..., C]` of draft tokens `[..., C]` from distributions `[..., K]`; 0 where there is none."""
    same = (ids.unsqueeze(-2) == draft_tokens.unsqueeze(-1)) & is_draft_token.unsqueeze(-1)
    draft_token_p, draft_token_q = (same * p.unsqueeze(-2)).sum(dim=-1), (same * q.unsqueeze(-2)).sum(dim=-1)
    assert bool(((draft_token_q > 0) | ~is_draft_token).all()), "a draft token was not sampled from its parent's q"
    return draft_token_p, draft_token_q


def _draw_residual(
    rows: list[int],
    nodes_R: Tensor,
    ids_RK: Tensor,
    q_RK: Tensor,
    c_R: Tensor,
    distributions: Distributions,
    uniforms_BN: Tensor,
) -> list[int]:
    """Sample the token after each path from `max(p - c q, 0)`, or from p where that is 0."""
    p_RV = exact(distributions.probs(rows, nodes_R.tolist()))
    taken = (c_R.unsqueeze(-1) * q_RK).to(p_RV.device)
    rest = p_RV.scatter_add(-1, ids_RK.to(p_RV.device), -taken).clamp(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p_RV)
    return draw(rest.unsqueeze(1), _at(uniforms_BN, rows, nodes_R[:, None])).squeeze(1).tolist()
