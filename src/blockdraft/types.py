"""The values that pass between users and the engine, and the shape legend of the code.

Letters in names and docstrings: B rows of the batch, N nodes of a proposal, V vocabulary, H hidden size, T cached
tokens, D head size, m taps. A tensor named `logits_BNV` has that shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Message: TypeAlias = dict[str, str]
# A text, a chat (a list of {"role", "content"}) or token ids.
Prompt: TypeAlias = "str | Sequence[Message] | Sequence[int]"
FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    Attributes:
        max_new_tokens: Number of tokens after which the answer is cut, exact to the token.
        temperature: 0 decodes greedily; otherwise the divisor of the logits.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the most probable tokens that together reach this probability; 1 keeps all.
        seed: Same seed, same tokens, whichever drafter and block size; None draws one.
        stop_token_ids: Tokens that end the answer besides the target's own end tokens.
        stop: Texts that end the answer, which is cut before them.
        ignore_eos: Go on past the target's end tokens, to `max_new_tokens`.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number.")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (keep all) or more.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (keep all).")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2**63 - 1.")


@dataclass(frozen=True)
class Drafting:
    """How far an engine drafts. It changes the speed and never the law of the output.

    Attributes:
        block_size: Tokens of a block, anchor included; None is the drafter's trained size. "auto" lets each cycle use
            as many of them as pay, or none.
        tree_budget: Most guesses of a draft tree, the anchor not counted; 0 drafts chains. "auto" lets each cycle
            use as many as pay, or none.
    """

    block_size: int | Literal["auto"] | None = None
    tree_budget: int | Literal["auto"] = 0

    def __post_init__(self) -> None:
        for name, value, least, meaning in (
            ("block_size", self.block_size, 1, "no drafting"),
            ("tree_budget", self.tree_budget, 0, "chains"),
        ):
            if value in (None, "auto"):
                continue
            if not isinstance(value, int):
                raise ValueError(f"{name} is {value!r}; it must be a number or 'auto'.")
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least} ({meaning}).")
