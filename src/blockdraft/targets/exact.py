"""Forward passes in which the bits of a node do not depend on what else is computed, and a check of this."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import count as counting
from typing import TypeAlias

import torch
from torch import Tensor

from blockdraft.decode.proposal import chain_parents, depths, tree_mask
from blockdraft.errors import UsageError
from blockdraft.machine import send
from blockdraft.nn.attention import EXACT_NODES, ExactAttention, PieceRow, attention_bytes, visible_slots
from blockdraft.nn.cache import KVCache, RecurrentState
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.recurrent_mixer import DeltaRecurrence, ExactRecurrence
from blockdraft.nn.torch_decoder import TorchDecoder, layer_widths, recurrent_bytes
from blockdraft.targets.base import Target, TargetOutput

Windows: TypeAlias = "Mapping[int | None, ExactAttention]"
# Runs a piece. Takes tokens and positions `[1, EXACT_NODES]`, its attention by window, and whether logits are needed.
# Returns logits `[1, EXACT_NODES, V]`, of any shape if not needed, and hidden states `[1, EXACT_NODES, m * H]`.
RunPiece: TypeAlias = "Callable[[Tensor, Tensor, Windows, bool], tuple[Tensor, Tensor | None]]"

CONTEXTS = (5, 18, 40)  # tokens before the checked nodes
CHECKED_TREE = 40  # nodes of the checked tree
REMEDY = "Use other threads, another dtype or another backend, or do without exact"


def forward_in_pieces(
    run: RunPiece,
    tokens: Tensor,
    parents: Tensor,
    cache: KVCache,
    windows: Collection[int | None],
    last_position: int,
    logits_at: Tensor | None,
) -> TargetOutput:
    """Run a target's forward pass over the nodes of all rows in pieces of `EXACT_NODES` nodes.

    The last piece is padded, so every matrix product has the same shape for drafted tokens, plain decoding and prefill.
    A parent comes before its children: it is in the same piece, or in an earlier one, whose keys and values are already
    in their slots.

    Args:
        run: Runs a piece.
        tokens, parents, cache, logits_at: As in `Target.forward`.
        windows: Windows of the layers; None is full attention.
        last_position: Position to which later ones are clamped.
    """
    (batch, count), device = tokens.shape, tokens.device
    cache.check_room(count)
    lengths = cache.lengths
    # Nodes that are never committed may be past the last position.
    positions = send((depths(parents) + torch.tensor(lengths)[:, None]).clamp(max=last_position), device)
    slots = cache.memory_slots(count).flatten()

    @lru_cache(maxsize=1)  # pieces of the same row follow each other
    def visible(row: int) -> dict[int | None, Tensor]:
        within = send(tree_mask(parents[row : row + 1]), device)
        own = positions[row : row + 1]
        return {window: visible_slots([lengths[row]], within, own, window)[0] for window in windows}

    wanted = range(batch * count)
    picked = wanted if logits_at is None else [row * count + at for row, at in enumerate(logits_at.tolist())]
    logits, hidden_states = list[Tensor](), list[Tensor]()
    for first in range(0, batch * count, EXACT_NODES):
        end = min(first + EXACT_NODES, batch * count)
        rows: dict[int | None, list[PieceRow]] = {window: [] for window in windows}
        for row in range(first // count, (end - 1) // count + 1):
            begin, stop = max(first - row * count, 0), min(end - row * count, count)  # among the row's nodes
            nodes = slice(row * count + begin - first, row * count + stop - first)
            slot, length = cache.starts[row], lengths[row] + stop
            for window, seen in visible(row).items():
                rows[window].append(PieceRow(nodes, slice(slot, slot + length), seen[begin:stop, :length]))
        own_slots = send(slots[first:end], device)
        attention = {window: ExactAttention(own_slots, row) for window, row in rows.items()}
        here = [node - first for node in picked if first <= node < end]
        out, captured = run(filled(tokens, first, end), filled(positions, first, end), attention, bool(here))
        if here:
            logits.append(out[0, : end - first] if logits_at is None else out[0, here])
        if captured is not None:
            hidden_states.append(captured[0, : end - first])
    return TargetOutput(
        torch.cat(logits).view(batch, -1, logits[0].size(-1)),
        torch.cat(hidden_states).view(batch, count, -1) if hidden_states else None,
    )


class ExactDecoder(TorchDecoder):
    """Runs torch's operations in pieces of one size, so that a node's bits do not depend on what else is computed.

    Args:
        decoder: The decoder.
        max_context: Positions from this one on are clamped; nodes there are never committed.
    """

    def __init__(self, decoder: Decoder, max_context: int) -> None:
        super().__init__(decoder)
        self._last_position = max_context - 1

    @property
    def traits(self) -> list[str]:
        return [*super().traits, "exact"]

    def working_bytes(self, batch: int, nodes: int, slots: int) -> int:
        config, dtype = self.decoder.config, self.decoder.dtype
        head_dim = max(head_dim for _, head_dim in config.memories)
        working = EXACT_NODES * layer_widths(config) * dtype.itemsize + len(config.windows) * nodes * slots
        working += attention_bytes(config.num_heads, config.num_kv_heads, head_dim, slots)
        return working + recurrent_bytes(config, dtype, batch, nodes)

    def recurrences_of(self, states: Sequence[RecurrentState], parents: Tensor) -> Sequence[DeltaRecurrence]:
        above = parents.tolist()
        return [ExactRecurrence(state, above) for state in states]

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: KVCache,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        window, recurrences = self.convolution_window(parents, cache), self.recurrences(parents, cache)
        stores, firsts = cache.stores, counting(0, EXACT_NODES)
        inputs = stores.pop() if window is not None else None

        def run(
            tokens: Tensor, positions: Tensor, attention: Windows, has_logits: bool
        ) -> tuple[Tensor, Tensor | None]:
            first = next(firsts)
            own = None if window is None else window.piece(first, EXACT_NODES)
            memories = self.memories([store.unsqueeze(1) for store in stores], recurrences, inputs, own)
            masks = [attention[window] for window in windows]
            none = None if has_logits else tokens.new_empty(0)
            output: tuple[Tensor, Tensor | None] = self.decoder(
                tokens, positions, positions, masks, memories, target_layers, none
            )
            return output

        windows = self.decoder.config.windows
        return forward_in_pieces(run, tokens, parents, cache, windows, self._last_position, logits_at)


def filled(values: Tensor, first: int, end: int) -> Tensor:
    """Return values `[B, N]` of nodes `first` to `end` as a piece `[1, EXACT_NODES]`, padded with the last one."""
    nodes = values.flatten()[first:end]
    return torch.cat([nodes, nodes[-1:].expand(EXACT_NODES - len(nodes))])[None]


def check_exact(target: Target) -> None:
    """Check that the bits of a token's logits and hidden states depend on nothing but its context.

    They must not depend on its index among the nodes, on other nodes and rows, or on number and slots of keys.

    Raises:
        UsageError: They depend on something, which the message names; or the target scores no trees, which the check
            needs.
    """
    if not target.has_trees:
        raise UsageError(f"exact is checked with trees, and the backend {target.backend} scores chains only.")
    difference = [cause for number in range(len(CONTEXTS)) for cause in _causes(target, number)]
    # In float32, sums in float64 round differently by chance in one context of thousands.
    needed = 1 if target.dtype.itemsize < torch.float32.itemsize else 2
    causes = [cause for cause in sorted(set(difference)) if difference.count(cause) >= needed]
    if causes:
        raise UsageError(
            f"exact is refused for {target.path or 'this target'} ({target.running}, {target.dtype}, "
            f"{torch.get_num_threads()} threads): the numbers of a token depend on {' and on '.join(causes)}. {REMEDY}."
        )


PLACE = "its place among the nodes"
NEIGHBOURS = "the nodes beside it"
LENGTH = "how many keys there are and where they lie"


@torch.no_grad()
def _causes(target: Target, number: int) -> set[str]:
    """Return the causes, other than its context, of differences between the values of a token."""
    random = torch.Generator().manual_seed(number)
    target_layers = range(target.num_layers + 1)

    def draw(*shape: int) -> Tensor:
        return torch.randint(target.vocab_size, shape, generator=random).to(target.device)

    def score(rows: Sequence[int], tokens: Tensor, parents: Tensor) -> Tensor:
        """Return logits and hidden states, concatenated, `[B, N, V + m * H]`."""
        output = target.forward(tokens, parents, cache.of(rows), target_layers)
        assert output.hidden_states is not None
        return torch.cat([output.logits, output.hidden_states], dim=-1)

    lengths = [min(length, max(target.max_context - 2, 1)) for length in (CONTEXTS * 2)[number:][: len(CONTEXTS)]]
    capacity = max(lengths) + CHECKED_TREE
    cache = target.new_cache(len(lengths) + 1, capacity)
    rows = [number * capacity for number in range(len(lengths))]
    spare = len(lengths) * capacity
    for row, length in zip(rows, lengths, strict=True):
        target.forward(draw(1, length), chain_parents(1, length), cache.of([row]))
        cache.of([row]).commit([range(length)])
    own, tokens = rows[0], draw(len(rows), 1)
    token, next_token = tokens[:1], draw(1, 1)
    node, roots = chain_parents(1, 1), torch.full((1, EXACT_NODES), -1)
    beside = draw(1, EXACT_NODES)
    beside[:, 0] = token
    tree = draw(1, CHECKED_TREE)
    tree[:, 0], tree[:, -1] = token, next_token
    parents = torch.tensor([[-1, *(int(torch.randint(i, (), generator=random)) for i in range(1, CHECKED_TREE))]])
    parents[:, -1] = 0

    copies = score([own], token.expand(1, EXACT_NODES), roots)[0]
    among = score([own], beside, roots)[0, 0]
    together = score(rows[::-1], tokens.flip(0), node.expand(len(rows), 1))[-1, 0]
    in_tree = score([own], tree, parents)[0]
    if target.can_truncate:
        cache.copy(own, spare, lengths[0])
        moved = score([spare], token, node)[0, 0]
    alone = score([own], token, node)[0, 0]
    cache.of([own]).commit([[0]])
    after = score([own], next_token, node)[0, 0]
    pairs = [
        (PLACE, copies, copies[0].expand_as(copies)),
        (NEIGHBOURS, among, copies[0]),
        (NEIGHBOURS, together, alone),
        (LENGTH, copies[0], alone),
        (LENGTH, in_tree[0], alone),
        (LENGTH, in_tree[-1], after),
        *([(LENGTH, moved, alone)] if target.can_truncate else []),
    ]
    return {cause for cause, mine, expected in pairs if not torch.equal(mine, expected)}
