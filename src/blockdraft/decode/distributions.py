"""Target distributions: the best and the probable tokens after each node of a proposal, from logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.decode.sampling import draw
from blockdraft.types import SamplingParams

PART = 2**22  # probabilities computed at a time, to save memory


def best_tokens(logits: Tensor) -> Tensor:
    """Return the argmax of the last dimension, int64: the lowest of equal logits, and the first NaN."""
    if logits.device.type != "cpu" or type(logits) is not Tensor:  # a subclass may not be computed yet
        return logits.max(dim=-1).indices
    # numpy's argmax takes a tenth of the time of torch's.
    return torch.from_numpy(np.asarray(_as_numpy(logits).argmax(axis=-1)))


def best_and_own(logits_BNV: Tensor, tokens_BN: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Return the best token after each node, and the node's own.

    The best is -1 where the largest logit is not finite: NaN if any logit is, and -inf if no token is possible.
    """
    if logits_BNV.device.type != "cpu":
        highest, best = logits_BNV.max(dim=-1)
        # In a greedy step the host waits for a GPU only here.
        best_BN, own_BN = torch.stack([best.masked_fill(~highest.isfinite(), -1), tokens_BN]).tolist()
        return best_BN, own_BN
    scores_MV = _as_numpy(logits_BNV.flatten(0, 1))
    best_M = scores_MV.argmax(axis=-1)
    best_M[~np.isfinite(scores_MV[np.arange(len(best_M)), best_M])] = -1
    return best_M.reshape(tokens_BN.shape).tolist(), tokens_BN.tolist()


def _as_numpy(values: Tensor) -> NDArray[Any]:
    return (values.float() if values.dtype.itemsize == 2 else values).numpy()  # numpy knows no bfloat16


class Rules(Protocol):
    """Restriction of the tokens of one answer, such as a grammar."""

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        """Return whether `token` may follow the output so far and `tokens`. Faster than `after`."""

    def after(self, tokens: Sequence[int]) -> Tensor | None:
        """Return the tokens that may follow the output so far and `tokens`, `[V]` bool on the CPU, or None."""


class Distributions:
    """Holds the target's distributions p after the nodes of a proposal, each computed when needed.

    Penalties depend on the tokens before a node: the prompt, the output, and the path from the anchor to the node.
    Logits are adjusted in the order of vLLM (bias, repetition penalty, presence and frequency penalty). Tokens that the
    rules forbid are then masked, and the rest is cut as in `probabilities`.

    Args:
        logits_BNV: Logits `[B, N, V]` after each node, any float dtype.
        params: Sampling parameters of each sequence.
        tokens_BN, parents_BN: The nodes, as in `Proposal`.
        prompts: Token ids of each prompt.
        outputs: Token ids of each output so far, of which node 0 is the last.
        best_BN: Argmax of the logits as in `TargetOutput`, if known.
        rules: Rules of each sequence, or None; None if there are no rules at all.

    Attributes:
        tokens: Tokens of the nodes, one list per sequence.
        argmax: The token after each node, if no sequence is sampled or adjusted; else None.
        invalid_rows: Indices of sequences with a node whose logits are not finite, see `exists`.
        draws_ahead: Whether the first draw samples after all nodes. It does on a GPU, so that the host waits once
            instead of once per tree level.
    """

    _best: list[list[int]]
    argmax: list[list[int]] | None
    tokens: list[list[int]]
    draws_ahead: bool

    def __init__(
        self,
        logits_BNV: Tensor,
        params: Sequence[SamplingParams],
        tokens_BN: Tensor,
        parents_BN: Tensor,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        best_BN: Tensor | None = None,
        rules: Sequence[Rules | None] | None = None,
    ) -> None:
        self._logits, self._params = logits_BNV, params
        self._parents = parents_BN
        self._prompts, self._outputs = prompts, outputs
        self._rules = {row: own for row, own in enumerate(rules or ()) if own is not None}
        self._allowed: dict[tuple[int, int], Tensor | None] = {}
        self._allows_best: dict[tuple[int, int], bool] = {}
        self._adjusted = [_adjusts(p) or row in self._rules for row, p in enumerate(params)]
        self._greedy = [p.temperature == 0 for p in params]
        self.draws_ahead = logits_BNV.device.type == "cuda" and not self._rules  # rules take time at each node
        self._ahead: dict[tuple[int, int], int] = {}
        if best_BN is None:
            self._best, self.tokens = best_and_own(logits_BNV, tokens_BN)
        else:
            self._best, self.tokens = best_BN.tolist(), tokens_BN.tolist()
        self.invalid_rows = [row for row, best in enumerate(self._best) if -1 in best]
        self.argmax = self._best if all(self._greedy) and not any(self._adjusted) else None

    def exists(self, row: int, node: int) -> bool:
        """Return whether there is a distribution after a node.

        There is none if a logit is NaN or +inf or all are -inf (a single -inf is legal), if the rules leave no token
        with a finite logit, or if they forbid the node.
        """
        if self._best[row][node] == -1 or row not in self._rules:
            return self._best[row][node] != -1
        return self._takes_best(row, node) or self._allowed_at(row, node) is not None

    def _best_is_allowed(self, row: int, node: int) -> bool:
        """Return whether the rules allow the argmax of the logits after a node."""
        if (row, node) not in self._allows_best:
            allows = self._rules[row].allows(self._path(row, node)[::-1], self._best[row][node])
            self._allows_best[row, node] = allows
        return self._allows_best[row, node]

    def _allowed_at(self, row: int, node: int) -> Tensor | None:
        """Return the tokens `[V]` that the rules allow after a node, or None if none of them has a finite logit."""
        if (row, node) not in self._allowed:
            allowed = self._rules[row].after(self._path(row, node)[::-1])
            if allowed is not None:
                allowed = allowed.to(self._logits.device)
                if not bool((self._logits[row, node].isfinite() & allowed).any()):
                    allowed = None
            self._allowed[row, node] = allowed
        return self._allowed[row, node]

    def draw(self, rows: Sequence[int], nodes: Sequence[int], uniforms_BN: Tensor | None) -> list[int]:
        """Choose or sample one token after each of these nodes, with the node's own number.

        A greedy sequence takes the argmax. A sampled one computes the distributions after these nodes only.

        Args:
            rows, nodes: Node `nodes[m]` of sequence `rows[m]`, for M nodes for which `exists` holds.
            uniforms_BN: A number in [0, 1) for each node of the proposal, float64; None if all sequences are greedy.
        """
        if not self.draws_ahead:
            return self._draw(rows, nodes, uniforms_BN)
        if not self._ahead:
            count = range(self._logits.size(1))
            every = [(row, node) for row in range(len(self._params)) for node in count if self.exists(row, node)]
            taken = self._draw([row for row, _ in every], [node for _, node in every], uniforms_BN)
            self._ahead = dict(zip(every, taken, strict=True))
        return [self._ahead[at] for at in zip(rows, nodes, strict=True)]

    def _draw(self, rows: Sequence[int], nodes: Sequence[int], uniforms_BN: Tensor | None) -> list[int]:
        tokens = [self._best[row][node] for row, node in zip(rows, nodes, strict=True)]
        adjusted = [
            m
            for m, row in enumerate(rows)
            if self._greedy[row] and self._adjusted[row] and not self._takes_best(row, nodes[m])
        ]
        sampled = [m for m, row in enumerate(rows) if not self._greedy[row]]
        if adjusted:
            scores = self.scores([rows[m] for m in adjusted], [nodes[m] for m in adjusted])
            for m, token in zip(adjusted, scores.argmax(dim=-1).tolist(), strict=True):
                tokens[m] = token
        if sampled:
            assert uniforms_BN is not None, "sampling needs random numbers"
            taken = []
            for part in self._parts(sampled):
                at = [rows[m] for m in part], [nodes[m] for m in part]
                taken.append(draw(self.probs(*at), uniforms_BN[at]))
            for m, token in zip(sampled, torch.cat(taken).tolist(), strict=True):
                tokens[m] = token
        return tokens

    def _takes_best(self, row: int, node: int) -> bool:
        """Return whether a sequence takes the argmax of the logits as they are, since the rules allow it."""
        is_plain = self._greedy[row] and row in self._rules and not _adjusts(self._params[row])
        return is_plain and self._best_is_allowed(row, node)

    def probs(self, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """Return p `[M, V]` float32 after each of these nodes."""
        scores_MV = self.scores(rows, nodes)
        return probabilities(scores_MV.unsqueeze(1), [self._params[row] for row in rows]).squeeze(1)

    def probs_of(self, rows: Sequence[int], nodes: Sequence[int], ids_MK: Tensor) -> Tensor:
        """Return p `[M, K]` float32 of a few tokens after each of these nodes, some distributions at a time."""
        ids_MK = ids_MK.to(self._logits.device)
        return torch.cat(
            [
                self.probs([rows[m] for m in part], [nodes[m] for m in part]).gather(-1, ids_MK[part])
                for part in self._parts(list(range(len(rows))))
            ]
        )

    def _parts(self, entries: list[int]) -> list[list[int]]:
        """Split entries so that the distributions of each part hold at most `PART` probabilities."""
        step = max(1, PART // self._logits.size(-1))
        return [entries[m : m + step] for m in range(0, len(entries), step)]

    def scores(self, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """Return adjusted logits `[M, V]` float32 after each of these nodes."""
        # Slicing out a single node takes a fraction of the time of indexing.
        if len(rows) == 1:
            scores_MV = self._logits[rows[0], nodes[0]].unsqueeze(0).to(torch.float32, copy=self._adjusted[rows[0]])
        else:
            scores_MV = self._logits[list(rows), list(nodes)].float()
        if type(scores_MV) is not Tensor and any(self._adjusted[row] for row in rows):
            scores_MV = scores_MV.clone()  # in torch; arrays of another framework cannot be written to
        biases, repeated, written = [], [], []  # entries (m, token, amount)
        for m, (row, node) in enumerate(zip(rows, nodes, strict=True)):
            if not self._adjusted[row]:
                continue
            p, output = self._params[row], [*self._outputs[row], *self._path(row, node)]
            biases += [(m, token, bias) for token, bias in dict(p.logit_bias).items()]
            if p.repetition_penalty != 1:
                repeated += [(m, token, p.repetition_penalty) for token in {*self._prompts[row], *output}]
            if p.presence_penalty or p.frequency_penalty:
                times = Counter(output).items()
                written += [(m, token, p.presence_penalty + p.frequency_penalty * count) for token, count in times]
        if biases:
            at, amounts = _entries(biases, scores_MV.device)
            scores_MV[at] += amounts
        if repeated:
            at, amounts = _entries(repeated, scores_MV.device)
            scores = scores_MV[at]
            scores = torch.where(scores < 0, scores * amounts, scores / amounts)
            most = torch.finfo(scores.dtype).max
            scores_MV[at] = scores.clamp(-most, most)  # penalties may overflow
        if written:
            at, amounts = _entries(written, scores_MV.device)
            scores_MV[at] -= amounts
        ruled = [m for m, row in enumerate(rows) if row in self._rules] if self._rules else ()
        for m in ruled:
            allowed = self._allowed_at(rows[m], nodes[m])
            assert allowed is not None, "the rules allow no token after this node"
            scores_MV[m].masked_fill_(~allowed, -torch.inf)
        return scores_MV

    def _path(self, row: int, node: int) -> list[int]:
        """Return the tokens from this node up to the anchor, which is left out."""
        path = []
        while node > 0:
            path.append(self.tokens[row][node])
            node = int(self._parents[row, node])
        return path


def _entries(entries: list[tuple[int, int, float]], device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Split entries (m, token, amount) into an index and amounts."""
    m, token, amount = zip(*entries, strict=True)
    at = torch.tensor([m, token], device=device)
    return (at[0], at[1]), torch.tensor(amount, dtype=torch.float32, device=device)


def _adjusts(params: SamplingParams) -> bool:
    """Return whether biases or penalties change the logits."""
    penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return penalties or bool(params.logit_bias)


# Sorting a whole vocabulary is slow, so top-k and top-p look at the best HEAD tokens first, then at MORE times as many.
HEAD, MORE = 128, 8


def probabilities(logits_BNV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the distributions under temperature, top-k, top-p and min-p, in the order of transformers.

    Args:
        logits_BNV: Logits `[B, N, V]`, any float dtype.
        params: Parameters of each sequence. Biases and penalties, which depend on the tokens before a node, are left to
            `Distributions`.

    Returns:
        `[B, N, V]` float32, summing to 1 over V; one-hot where the temperature is 0. For equal logits,
        argmax takes the lowest token id, and top-k and top-p keep the lowest.
    """
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for row, p in enumerate(params):
        groups.setdefault((p.temperature, p.top_k, p.top_p, p.min_p), []).append(row)
    if len(groups) == 1:
        return _probabilities(logits_BNV, *next(iter(groups)))
    probs_BNV = torch.empty_like(logits_BNV, dtype=torch.float32)
    for settings, rows in groups.items():
        probs_BNV[rows] = _probabilities(logits_BNV[rows], *settings)
    return probs_BNV


def _probabilities(logits_BNV: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    if temperature == 0:
        best_BN1 = best_tokens(logits_BNV).unsqueeze(-1)
        return torch.zeros_like(logits_BNV, dtype=torch.float32).scatter_(-1, best_BN1, 1.0)
    logits_BNV = logits_BNV.float()
    # The maximum is subtracted first, so that no temperature, however low, overflows.
    scores_BNV = (logits_BNV - logits_BNV.amax(dim=-1, keepdim=True)) / temperature
    if top_k >= logits_BNV.size(-1):
        top_k = 0  # keeps all; sorting the whole vocabulary would be slow
    if top_k == 0 and top_p == 1:
        probs_BNV = scores_BNV.softmax(dim=-1)
    else:
        head = max(HEAD, top_k + 1)
        probs_BNV = _best_probabilities(scores_BNV.flatten(0, 1), top_k, top_p, head).view_as(scores_BNV)
    if min_p > 0:
        probs_BNV = probs_BNV.masked_fill(probs_BNV < min_p * probs_BNV.amax(dim=-1, keepdim=True), 0.0)
        probs_BNV = probs_BNV / probs_BNV.sum(dim=-1, keepdim=True)
    return probs_BNV


def _best_probabilities(scores_MV: Tensor, top_k: int, top_p: float, head: int) -> Tensor:
    """Return the softmax `[M, V]` cut to top-k and top-p, from the `head` best tokens if these suffice."""
    vocabulary = scores_MV.size(-1)
    scores, ids = scores_MV.topk(min(head, vocabulary), dim=-1)
    # The order of equals is undefined for topk; the lower id is to come first.
    ids, by_id = ids.sort(dim=-1)
    scores, order = scores.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    whole = scores[:, :top_k] if top_k else scores_MV
    probs = (scores - whole.logsumexp(dim=-1, keepdim=True)).exp()
    if top_k:
        probs[:, top_k:] = 0.0
    if top_p < 1:
        # A token stays if the tokens before it do not reach top_p; the first one always stays.
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
    probs_MV = torch.zeros_like(scores_MV).scatter_(-1, ids, probs / probs.sum(dim=-1, keepdim=True))
    if scores.size(-1) < vocabulary:
        # All other tokens score at most as much as the last of the head. Rows that keep it, or an equal of it, may keep
        # others as well, so more of the vocabulary must be looked at.
        cut_short = ((scores == scores[:, -1:]) & (probs > 0)).any(dim=-1)
        if cut_short.any():
            probs_MV[cut_short] = _best_probabilities(scores_MV[cut_short], top_k, top_p, MORE * head)
    return probs_MV
