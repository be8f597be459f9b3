"""Texts in the making: what is known of each, and what can be told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from blockdraft.engine.text import AnswerText


@dataclass(frozen=True)
class Step:
    """A pass that settled tokens of a text.

    Attributes:
        begin: Where in the text the block begins.
        block: The block afterwards; None for tokens that are not known yet.
        settled: Places in the block of the tokens that this pass settled.
    """

    begin: int
    block: tuple[int | None, ...]
    settled: tuple[int, ...]


# Of a row, called after each pass that settled some of its tokens: the block, with None for those not known yet.
Watch: TypeAlias = Callable[[int, Sequence[int | None]], None]


@dataclass(frozen=True)
class Chunk:
    """A block of one answer.

    Attributes:
        row: Number of the prompt.
        token_ids: New tokens, the end token included. Where gaps are filled, those that were given are told too.
        text: New text, without the end token.
        finish_reason: "stop" for an end token or a stop text, "length" for as many tokens as were asked for; None as
            long as the answer goes on.
        forwards: Passes of the network that the answer has taken so far, that over the prompt not counted.
    """

    row: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"] | None
    forwards: int


@dataclass(eq=False)
class Unfinished:
    """A text in the making.

    Attributes:
        number: Of the prompt.
        tokens: Of the whole text, at least up to the end of the block in the making; None where not known yet.
        limit: Tokens after which the text ends.
        is_filled: Whether gaps are filled: then nothing behind the limit is made, and the text does not end before.
        slot: Row of the context that it has.
        begin: Where the block in the making begins.
        told: Tokens that chunks have told or need not tell.
        order: A uniform number for each place of the block.
        history: The passes that settled tokens.
    """

    number: int
    tokens: list[int | None]
    limit: int
    generator: torch.Generator
    text: AnswerText
    is_filled: bool = False
    slot: int = 0
    begin: int = 0
    told: int = 0
    forwards: int = 0
    order: Tensor = field(default_factory=lambda: torch.empty(0))
    history: list[Step] = field(default_factory=list)

    @property
    def block(self) -> tuple[int | None, ...]:
        return tuple(self.tokens[self.begin : self.begin + len(self.order)])

    def unknown(self) -> list[int]:
        """Places in the block whose tokens are not known and are to be."""
        end = self.limit - self.begin if self.is_filled else len(self.order)
        return [place for place, token in enumerate(self.block[:end]) if token is None]

    def open_block(self, begin: int, size: int) -> None:
        self.begin = begin
        self.tokens += [None] * (begin + size - len(self.tokens))
        self.order = torch.rand(size, generator=self.generator, dtype=torch.float64)

    def settle(self, new: Mapping[int, int], watch: Watch | None) -> None:
        """A pass has settled these tokens, by their places in the block."""
        for place, token in new.items():
            self.tokens[self.begin + place] = token
        self.history.append(Step(self.begin, self.block, tuple(new)))
        if watch is not None:
            watch(self.number, self.block)

    def chunk(self, ends: frozenset[int]) -> Chunk | None:
        """What can be told now: the block once that is known, or as far as the text's end.

        Args:
            ends: Tokens that end a text, unless gaps are filled.
        """
        after = self.begin + len(self.order)
        end = next((at for at in range(self.told, after) if self.tokens[at] is None), after)
        reason: Literal["stop", "length"] | None = None
        new = [token for token in self.tokens[self.told : min(end, self.limit)] if token is not None]
        stop = next((at for at, token in enumerate(new, 1) if token in ends and not self.is_filled), None)
        if stop is not None:
            new, reason = new[:stop], "stop"
        elif end >= self.limit:
            reason = "length"
        elif end < after:
            new = new[: max(0, self.begin - self.told)]
        if reason is None and not new:
            return None
        for number, token in enumerate(new, 1):
            if stop != number:
                self.text.push(token)
            if self.text.stopped:
                new, reason = new[:number], "stop"
                break
        self.told += len(new)
        if reason is not None:
            self.text.finish()
        return Chunk(self.number, tuple(new), self.text.take(), reason, self.forwards)
