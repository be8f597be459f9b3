"""Verification of rows whose guesses were drawn: p and q where the rules need them, and the draw that follows.

The rules run on the CPU, on the few tokens that q can offer; whole distributions stay on the target's device. Letters
here: R rows, N nodes of a path, C children of a node, K tokens of a sparse law.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from blockdraft.proposal import Proposal
from blockdraft.sampling import Laws, draw, exact
from blockdraft.verification.rules import accept_block, accept_sibling

Children = Sequence[dict[int, list[int]]]
Judged = tuple[list[list[int]], list[int]]


def judge_chains(
    rows: list[int], proposal: Proposal, children: Children, laws: Laws, uniforms_BN: Tensor, tests_BN: Tensor
) -> Judged:
    """Paths and bonus tokens of rows whose guesses are chains."""
    chains = []
    for row in rows:
        chain = [0]
        while following := children[row].get(chain[-1]):
            chain += following
        chains.append(chain)
    nodes_RN, is_node_RN = _padded(chains)
    ids_RNK, p_RNK, q_RNK = _offered(rows, nodes_RN, proposal, laws)
    has_child_RN1 = pad(is_node_RN, (0, 1))[:, 1:, None]
    p_RNK, q_RNK = p_RNK * has_child_RN1, q_RNK * has_child_RN1
    guesses_RN = _at(proposal.tokens, rows, nodes_RN)
    of_guesses = _of_guesses(ids_RNK[:, :-1], p_RNK[:, :-1], q_RNK[:, :-1], guesses_RN[:, 1:, None])
    guess_p_RN, guess_q_RN = (pad(values.squeeze(-1) * is_node_RN[:, 1:], (1, 0)) for values in of_guesses)
    _check_offered(guess_q_RN[:, 1:], is_node_RN[:, 1:])
    last_R, c_R = accept_block(p_RNK, q_RNK, guess_p_RN, guess_q_RN, _at(tests_BN, rows, nodes_RN))
    at = torch.arange(len(rows)), last_R
    bonus = _draw_residual(rows, nodes_RN[at], ids_RNK[at], q_RNK[at], c_R, laws, uniforms_BN)
    return [chain[: last + 1] for chain, last in zip(chains, last_R.tolist(), strict=True)], bonus


def judge_trees(
    rows: list[int], proposal: Proposal, children: Children, laws: Laws, uniforms_BN: Tensor, tests_BN: Tensor
) -> Judged:
    """Paths and bonus tokens of rows whose guesses are trees; all rows go down a level at a time."""
    paths, bonus = {row: [0] for row in rows}, dict.fromkeys(rows, -1)
    walking = rows
    while walking:
        nodes_R = torch.tensor([paths[row][-1] for row in walking])
        siblings = [children[row].get(paths[row][-1], []) for row in walking]
        siblings_RC, is_node_RC = _padded(siblings)
        ids_RK, p_RK, q_RK = (values.squeeze(1) for values in _offered(walking, nodes_R[:, None], proposal, laws))
        guess_p_RC, guess_q_RC = (
            values * is_node_RC
            for values in _of_guesses(ids_RK, p_RK, q_RK, _at(proposal.tokens, walking, siblings_RC))
        )
        _check_offered(guess_q_RC, is_node_RC)
        accepted_R, c_R = accept_sibling(p_RK, q_RK, guess_p_RC, guess_q_RC, _at(tests_BN, walking, siblings_RC))
        accepted = accepted_R.tolist()
        going, ended = [], []
        for r, row in enumerate(walking):
            if accepted[r] < siblings_RC.size(1):
                paths[row].append(siblings[r][accepted[r]])
                going.append(row)
            else:
                ended.append(r)
        if ended:
            ends = [walking[r] for r in ended]
            drawn = _draw_residual(ends, nodes_R[ended], ids_RK[ended], q_RK[ended], c_R[ended], laws, uniforms_BN)
            bonus.update(zip(ends, drawn, strict=True))
        walking = going
    return list(paths.values()), list(bonus.values())


def _padded(nodes: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Lists of nodes as one tensor, and which of its entries are real; the others are node 0."""
    longest = max(map(len, nodes))
    filled = [[*row, *[-1] * (longest - len(row))] for row in nodes]
    table = torch.tensor(filled, dtype=torch.int64).view(len(nodes), longest)
    return table.clamp(min=0), table >= 0


def _at(values_BN: Tensor, rows: list[int], nodes: Tensor) -> Tensor:
    """Entries `[R, ...]` of nodes `[R, ...]`, on the CPU."""
    return values_BN.cpu()[torch.tensor(rows)[:, None], nodes]


def _offered(rows: list[int], nodes_RN: Tensor, proposal: Proposal, laws: Laws) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens `[R, N, K]` that q can offer after these nodes, and their p and q. p is 0 where q is."""
    assert proposal.q is not None
    found = [law for row in rows if (law := proposal.q[row]) is not None]
    width = max(law.ids.size(-1) for law in found)
    at = nodes_RN.to(proposal.tokens.device)
    ids_RNK = torch.stack(
        [pad(law.ids[nodes], (0, width - law.ids.size(-1))) for law, nodes in zip(found, at, strict=True)]
    )
    q_RNK = torch.stack(
        [pad(law.probs[nodes], (0, width - law.ids.size(-1))) for law, nodes in zip(found, at, strict=True)]
    )
    q_RNK = exact(q_RNK).cpu()
    q_RNK = q_RNK / q_RNK.sum(dim=-1, keepdim=True).clamp(min=1e-300)  # where nothing is drawn, q may be 0
    every_row = [row for row in rows for _ in range(nodes_RN.size(1))]
    p_MK = laws.probs_of(every_row, nodes_RN.flatten().tolist(), ids_RNK.flatten(0, 1))
    return ids_RNK.cpu(), exact(p_MK).cpu().view_as(q_RNK) * (q_RNK > 0), q_RNK


def _of_guesses(ids: Tensor, p: Tensor, q: Tensor, guesses: Tensor) -> tuple[Tensor, Tensor]:
    """p and q `[..., C]` of guesses `[..., C]`, from laws `[..., K]`."""
    same = ids.unsqueeze(-2) == guesses.unsqueeze(-1)
    return (same * p.unsqueeze(-2)).sum(dim=-1), (same * q.unsqueeze(-2)).sum(dim=-1)


def _check_offered(guess_q: Tensor, is_guess: Tensor) -> None:
    assert bool((guess_q > 0).logical_or(~is_guess).all()), "a guess was not drawn from the law q of its parent"


def _draw_residual(
    rows: list[int], nodes_R: Tensor, ids_RK: Tensor, q_RK: Tensor, c_R: Tensor, laws: Laws, uniforms_BN: Tensor
) -> list[int]:
    """Draw the token after the last node of each path from `max(p - c q, 0)`, or from p where nothing is left."""
    p_RV = exact(laws.probs(rows, nodes_R.tolist()))
    taken = (c_R.unsqueeze(-1) * q_RK).to(p_RV.device)
    rest = p_RV.scatter_add(-1, ids_RK.to(p_RV.device), -taken).clamp(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p_RV)
    return draw(rest.unsqueeze(1), _at(uniforms_BN, rows, nodes_R[:, None])).squeeze(1).tolist()
