"""Answers of many rows at once on a GPU: one CUDA graph is a step of all rows, and rows that end are filled again.

It is for data to learn from, so nothing is drafted, and tokens are those of the target's weights in float16, which
near ties may decide otherwise than a CPU does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.engine import loops
from blockdraft.kernels.cuda.graphs import CudaRecorder
from blockdraft.nn.attention import ExactAttention
from blockdraft.nn.decoder import Decoder
from blockdraft.targets.native import NativeTarget
from blockdraft.types import SamplingParams
from blockdraft_train.data.records import Message
from blockdraft_train.data.responders import Response

STEPS = 16  # steps between two looks at what has ended
CHECKED = 64  # tokens of an answer after which it is searched for loops again
FILLED = 64  # rows that are filled at once
HALVINGS = 14  # of the interval of the least probability that top-p keeps


@dataclass
class Row:
    """A request in a row of the batch."""

    key: int
    prompt: int
    checked: int = 0


@dataclass(frozen=True)
class RowAttention(ExactAttention):
    """Attention of one node of every row to the row's own slots.

    Attributes:
        slots: Each row's node among all slots, `[R]` int64.
        lengths: Slots that each row's node sees, its own among them, `[R]` int64.
        room: Slots of a row.
    """

    lengths: Tensor
    room: int

    def write(self, memory: Tensor, nodes: Tensor) -> None:
        """Write keys and values `[1, R, heads, D]` to the memory `[heads, R * T, D]`."""
        memory.index_copy_(1, self.slots, nodes[0].transpose(0, 1))

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return `[1, R, heads * D]` for queries `[1, R, heads, D]` and keys and values `[kv_heads, R * T, D]`."""
        assert softcap is None and sinks is None
        rows, (kv_heads, _, size) = queries.size(1), keys.shape
        grouped = queries[0].reshape(rows, kv_heads, -1, size).contiguous()  # which the kernel takes for granted
        attend = kernel if keys.is_cuda else reference
        return attend(grouped, keys, values, self.lengths, self.room, scale).reshape(1, rows, -1)


def reference(queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, slots: int, scale: float) -> Tensor:
    """Compute what `kernel` computes, with torch operations."""
    rows = queries.size(0)
    keys, values = (each.unflatten(1, (rows, slots)).transpose(0, 1) for each in (keys, values))
    visible = torch.arange(slots, device=lengths.device) < lengths[:, None]
    mask = visible[:, None, None].expand(-1, keys.size(1), queries.size(2), -1)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


def kernel(queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, slots: int, scale: float) -> Tensor:
    """Attend from queries `[R, kv_heads, group, D]` to the first KV slots of each sequence; same shape."""
    from attention_kernel import attend_rows

    out = torch.empty_like(queries)
    rows, kv_heads, group, size = queries.shape
    attend_rows[rows, kv_heads](
        queries, keys, values, lengths, out, slots, keys.stride(0), values.stride(0), scale, GROUP=group, SIZE=size
    )
    return out


class BatchedResponder:
    """Responder, as `blockdraft_train.data.responders` has them, on a GPU; elsewhere the same without graphs.

    Args:
        rows: Rows of the batch.
        slots: Most tokens of a row, prompt and answer; an answer that would be longer is cut there.
        ends: Tokens that end an answer; None is the tokenizer's end token.
        halvings: Steps of the search for the tokens that top-p keeps, each a pass over all logits; 0 ignores top-p.
    """

    def __init__(
        self,
        target: NativeTarget,
        rows: int,
        slots: int,
        seed: int = 0,
        ends: Sequence[int] | None = None,
        halvings: int = HALVINGS,
    ) -> None:
        assert target.tokenizer is not None
        self.at_once = 2 * rows  # so that a prompt is always waiting for a free row
        self._decoder: Decoder = target.decoder
        self._slots, self._halvings = slots, halvings
        self._ends = [target.tokenizer.eos_token_id] if ends is None else list(ends)
        config, device = self._decoder.config, self._decoder.device
        torch.manual_seed(seed)
        self._end_tokens = torch.tensor(self._ends, device=device)
        shape = (len(config.layers), 1, 2 * config.num_kv_heads, rows * slots, config.head_dim)
        self._store = torch.zeros(shape, dtype=self._decoder.dtype, device=device)
        self._tokens = torch.zeros(rows, slots, dtype=torch.int64, device=device)
        self._lengths = torch.ones(rows, dtype=torch.int64, device=device)  # tokens that are known
        self._limits = torch.ones(rows, dtype=torch.int64, device=device)
        self._heat = torch.zeros(rows, device=device)
        self._top_p = torch.ones(rows, device=device)
        self._open = torch.zeros(rows, dtype=torch.bool, device=device)
        self._begins = torch.arange(rows, device=device) * slots
        self._rows: list[Row | None] = [None] * rows
        self._waiting: deque[tuple[int, list[int], SamplingParams]] = deque()
        self._replay: Callable[[], Any] = self._step
        if device.type == "cuda":
            self._replay = CudaRecorder(device).capture(self._step)[1]

    @torch.inference_mode()
    def _step(self) -> list[Tensor]:
        """Decode one token of every open sequence."""
        at = self._lengths - 1
        attention = RowAttention(self._begins + at, (), self._lengths, self._slots)
        tokens = self._tokens.gather(1, at[:, None]).T
        masks = [attention] * len(self._decoder.config.windows)
        logits, _ = self._decoder(tokens, at[None], at[None], masks, self._store.unbind(0))
        chosen = draw(logits[0].float(), self._heat, self._top_p, self._halvings)
        room = self._lengths.clamp(max=self._slots - 1)[:, None]
        kept = torch.where(self._open[:, None], chosen[:, None], self._tokens.gather(1, room))
        self._tokens.scatter_(1, room, kept)
        self._lengths += self._open
        ended = (chosen[:, None] == self._end_tokens).any(dim=1)
        self._open &= ~ended & (self._lengths < self._limits)
        return [chosen]

    def submit(self, key: int, messages: Sequence[Message], prompt: list[int], params: SamplingParams) -> None:
        if len(prompt) >= self._slots:
            raise ValueError(f"A prompt has {len(prompt)} tokens, and a row has {self._slots} slots; make rows longer.")
        self._waiting.append((key, prompt, params))

    def responses(self) -> list[tuple[int, Response]]:
        while True:
            self._fill()
            for _ in range(STEPS):
                self._replay()
            if found := self._ended():
                return found

    def unfinished(self) -> list[tuple[int, list[int]]]:
        """Return the keys and the tokens so far of the responses that have not ended."""
        tokens, lengths = self._tokens.tolist(), self._lengths.tolist()
        rows = [(number, row) for number, row in enumerate(self._rows) if row is not None]
        return [(row.key, tokens[number][row.prompt : lengths[number]]) for number, row in rows]

    def close(self) -> None:
        self._waiting.clear()

    @torch.inference_mode()
    def _fill(self) -> None:
        """Give waiting prompts to free rows, and read all of them but their last tokens."""
        free = [number for number, row in enumerate(self._rows) if row is None]
        while free and self._waiting:
            asked = [self._waiting.popleft() for _ in range(min(FILLED, len(free), len(self._waiting)))]
            asked.sort(key=lambda each: len(each[1]))
            numbers, free = free[: len(asked)], free[len(asked) :]
            longest = -(-len(asked[-1][1]) // 32) * 32
            padded = torch.zeros(len(asked), min(longest, self._slots), dtype=torch.int64)
            for row, (_, prompt, _) in zip(padded, asked, strict=True):
                row[: len(prompt)] = torch.tensor(prompt)
            device = self._tokens.device
            rows, tokens = torch.tensor(numbers, device=device), padded.to(device)
            self._read(rows, tokens)
            self._tokens[rows, : tokens.size(1)] = tokens
            lengths = [len(prompt) for _, prompt, _ in asked]
            limits = [min(len(prompt) + params.max_new_tokens, self._slots) for _, prompt, params in asked]
            for into, values in (
                (self._lengths, lengths),
                (self._limits, limits),
                (self._heat, [params.temperature for *_, params in asked]),
                (self._top_p, [params.top_p for *_, params in asked]),
                (self._open, [True] * len(asked)),
            ):
                into[rows] = torch.tensor(values, dtype=into.dtype, device=device)
            for number, (key, prompt, _) in zip(numbers, asked, strict=True):
                self._rows[number] = Row(key, len(prompt))

    def _read(self, rows: Tensor, tokens: Tensor) -> None:
        """Keys and values of prompts `[B, N]`; what is behind the shorter ones is overwritten before it is seen."""
        (batch, count), (layers, _, heads, _, size) = tokens.shape, self._store.shape
        stores = self._store.new_zeros(layers, batch, heads, count, size)
        places = torch.arange(count, device=tokens.device)
        masks = [None] * len(self._decoder.config.windows)
        self._decoder(tokens, places[None], places, masks, stores.unbind(0), logits_at=places.new_zeros(batch))
        into = self._store.view(layers, heads, len(self._rows), self._slots, size)
        into[:, :, rows, :count] = stores.transpose(1, 2)

    def _ended(self) -> list[tuple[int, Response]]:
        """Answers that have ended or begun to loop; their rows are free."""
        lengths, opened, found = self._lengths.tolist(), self._open.tolist(), []
        looked = {
            number: row
            for number, row in enumerate(self._rows)
            if row is not None and (not opened[number] or lengths[number] - row.prompt >= row.checked + CHECKED)
        }
        if not looked:
            return []
        chosen = torch.tensor(list(looked), device=self._tokens.device)
        for (number, row), tokens in zip(looked.items(), self._tokens[chosen].tolist(), strict=True):
            ids = tokens[row.prompt : lengths[number]]
            row.checked = len(ids)
            if not opened[number] or loops(ids):
                found.append((row.key, Response("", ids, ids[-1] in self._ends)))
                self._rows[number] = None
                if opened[number]:
                    self._open[number] = False
        return found


def draw(logits: Tensor, heat: Tensor, top_p: Tensor, halvings: int = HALVINGS) -> Tensor:
    """Sample tokens `[R]` from logits `[R, V]`.

    Args:
        heat: Temperatures `[R]`; 0 is greedy.
        top_p: Probability `[R]` that the tokens to sample from must reach together.
        halvings: Steps of the search for them; 0 ignores `top_p`.
    """
    greedy = heat == 0
    scaled = logits / torch.where(greedy, 1.0, heat)[:, None]
    probs = scaled.softmax(dim=-1)
    low, high = torch.zeros_like(heat), probs.amax(dim=-1)
    for _ in range(halvings):  # in logarithms would be finer; the tail below is what top-p cuts
        middle = (low + high) / 2
        enough = (probs * (probs >= middle[:, None])).sum(dim=-1) >= top_p
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    noise = torch.empty_like(scaled).exponential_()
    drawn = (probs.masked_fill(probs < low[:, None], 0) / noise).argmax(dim=-1)
    return torch.where(greedy, logits.argmax(dim=-1), drawn)
