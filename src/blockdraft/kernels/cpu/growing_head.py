"""Output head of a draft network that grows with the tokens that its sequences hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from blockdraft.kernels.cpu.library import Library, LinearFields
from blockdraft.nn.packed import PackedLinear, PackedWeight, join_packed

ROWS = 1024  # rows of tokens seen in sequences

# Packs projections as one layer for the library.
Pack = Callable[..., PackedLinear]


class GrowingHead:
    """A head whose rows are the target's: those of the draft vocabulary, and behind them those of tokens seen last.

    Rows are added in blocks of the library's lanes, so some of the newest tokens have none yet. When all `ROWS` are in
    use, the oldest block is replaced.

    Args:
        own: Projection `[Vd, H]` of the draft vocabulary, whose rows are the target's. Vd is a multiple of the lanes.
        kept: `[Vd]` int64, its tokens.
        rows_of: Function from tokens `[n]` int64 to rows `[n, H]` of the target's head.
        pack: Function that packs a projection.

    Attributes:
        fields: The head for the library. `outputs` grows.
        kept: Tokens of all rows, those in use first.
    """

    def __init__(
        self, own: nn.Linear, kept: Tensor, rows_of: Callable[[Tensor], Tensor], pack: Pack, library: Library
    ) -> None:
        self._rows_of, self._pack, self._lanes, self._first = rows_of, pack, library.lanes, len(kept)
        assert self._first % self._lanes == 0
        self._layer = PackedLinear(join_packed([_packed(pack(own)), _packed(pack(self._projection(kept[:1], ROWS)))]))
        self.fields: LinearFields = library.linear(self._layer)
        self.fields.outputs = self._first
        self.kept = torch.cat([kept, torch.zeros(ROWS, dtype=torch.int64)])
        self._known = set(kept.tolist())
        self._waiting: dict[int, None] = {}  # tokens without a row, in order
        self._next = 0  # row behind the draft vocabulary to write next

    @property
    def nbytes(self) -> int:
        return self._layer.nbytes

    @property
    def outputs(self) -> int:
        return int(self.fields.outputs)

    def add(self, tokens: Tensor) -> bool:
        """Add rows for tokens of sequences. Return whether there are more rows than before, or others."""
        self._waiting |= dict.fromkeys(token for token in tokens.flatten().tolist() if token not in self._known)
        changed = len(self._waiting) >= self._lanes
        while len(self._waiting) >= self._lanes:
            block = [*self._waiting][: self._lanes]
            for token in block:
                del self._waiting[token]
            self._write(torch.tensor(block))
        return changed

    def _write(self, tokens: Tensor) -> None:
        begin = self._first + self._next
        place = slice(begin, begin + self._lanes)
        if begin < self.outputs:
            self._known -= set(self.kept[place].tolist())
        new, at = _packed(self._pack(self._projection(tokens, len(tokens)))).data, begin // self._lanes
        if isinstance(new, Tensor):
            self._layer.stored[at] = new[0]
        else:
            whole = self._layer.quantized.tensors()  # type: ignore[union-attr]
            for name, tensor in new.tensors().items():
                whole[name][at] = tensor[0]
        self.kept[place] = tokens
        self._known |= set(tokens.tolist())
        self.fields.outputs = max(self.outputs, begin + self._lanes)
        self._next = (self._next + self._lanes) % ROWS

    def _projection(self, tokens: Tensor, count: int) -> nn.Linear:
        """Return a projection with the rows of these tokens, repeated to `count`."""
        rows = self._rows_of(tokens)
        projection = nn.Linear(1, 1, bias=False)
        projection.weight = nn.Parameter(rows.expand(count, -1).contiguous(), requires_grad=False)
        projection.in_features, projection.out_features = rows.size(1), count
        return projection


def _packed(layer: PackedLinear) -> PackedWeight:
    data = layer.stored if layer.quantized is None else layer.quantized
    assert layer.kernels is not None
    return PackedWeight(layer.kernels, data, layer.out_features, layer.in_features)  # type: ignore[arg-type]
