"""Events to answers of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from blockdraft.engine import Chunk
from blockdraft.engine.detokenize import REPLACEMENT
from blockdraft.serving.events import Finished
from blockdraft.types import TokenLogprob


class Head:
    """What all pieces of an answer begin with."""

    def __init__(self, kind: str, prefix: str, model: str) -> None:
        self._kind, self._model = kind, model
        self._id, self._created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())

    def body(self, choices: Sequence[dict[str, Any]], suffix: str = "") -> dict[str, Any]:
        kind = f"{self._kind}{suffix}"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }


def usage_of(ends: Sequence[Finished], n: int) -> dict[str, Any]:
    """Tokens of a request with `n` choices for each prompt, which counts once; `ends` is in the order of the
    choices."""
    prompt, cached = (sum(getattr(end.usage, name) for end in ends[::n]) for name in ("prompt", "cached"))
    completion, reasoning, accepted, rejected = (
        sum(getattr(end.usage, name) for end in ends) for name in ("completion", "reasoning", "accepted", "rejected")
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def metrics_of(ends: Sequence[Finished], most_guesses: int) -> dict[str, Any]:
    """Statistics of drafting, under the names of vLLM.

    Args:
        most_guesses: That a cycle may have.
    """
    guesses, accepted = list[int](), list[int]()
    for end in ends:
        cycles = list(zip(end.stats.committed, end.stats.drafted, strict=True))
        counts = [min(tokens - 1, drafted) for tokens, drafted in cycles]
        if counts:  # the last cycle may have been cut, its bonus included
            counts[-1] = end.usage.accepted - sum(counts[:-1])
        drafts = [(drafted, count) for (_, drafted), count in zip(cycles, counts, strict=True) if drafted]
        guesses += [drafted for drafted, _ in drafts]
        accepted += [count for _, count in drafts]
    histogram = Counter(accepted)
    seconds = {
        "prompt": sum(end.stats.prefill_seconds for end in ends),
        "draft": sum(end.stats.draft_seconds for end in ends),
        "verify": sum(end.stats.verify_seconds for end in ends),
        "total": sum(end.stats.total_seconds for end in ends),
    }
    committed = sum(sum(end.stats.committed) for end in ends)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else 1.0,
            "draft_acceptance_rate": sum(accepted) / sum(guesses) if guesses else 0.0,
            "acceptance_histogram": [histogram[count] for count in range(max(accepted, default=-1) + 1)],
            "num_spec_steps": len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": sum(guesses),
            "num_spec_tokens": most_guesses,
        },
        "seconds": seconds,
        "tokens_per_second": committed / seconds["total"] if seconds["total"] else 0.0,
    }


class Pieces:
    """What single tokens look like.

    Args:
        tokenizer: None where the target has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        if token not in self._known:
            once, twice = (str(self._tokenizer.decode([token] * count)) for count in (1, 2))
            # Some tokenizers leave out the space before the first word of a text.
            self._known[token] = twice[len(once) :] if twice.startswith(once) else once
        return self._known[token]

    def trace(self, chunk: Chunk) -> dict[str, Any]:
        """What was guessed in the cycle of a chunk."""
        cycle = chunk.cycle
        return {
            "tokens": [
                {"id": token, "text": self.text(token), "drafted": drafted}
                for token, drafted in zip(chunk.token_ids, chunk.drafted, strict=True)
            ],
            "cycle": None
            if cycle is None
            else {
                "tokens": [{"id": token, "text": self.text(token)} for token in cycle.tokens],
                "parents": list(cycle.parents),
                "path": list(cycle.path),
                "seconds": cycle.seconds,
            },
        }

    def chat_logprobs(self, values: Sequence[TokenLogprob]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self.text(token)
            # Tokens may be parts of characters, whose text does not tell which.
            known = None if REPLACEMENT in text else list(text.encode())
            return {"token": text, "logprob": finite(logprob), "bytes": known}

        content = [
            {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*other) for other in one.top]} for one in values
        ]
        return {"content": content, "refusal": None}

    def text_logprobs(self, values: Sequence[tuple[int, TokenLogprob | None]], offset: int) -> dict[str, Any]:
        """In the form of /v1/completions.

        Args:
            values: Tokens, with what is known of each; nothing is of a prompt's first.
            offset: Characters of the text before them.
        """
        tokens = [self.text(token) for token, _ in values]
        offsets = []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [None if one is None else finite(one.logprob) for _, one in values],
            "top_logprobs": [None if one is None else self._likeliest(one) for _, one in values],
            "text_offset": offsets,
        }

    def _likeliest(self, one: TokenLogprob) -> dict[str, float]:
        """Of tokens that look alike, the likeliest."""
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(self.text(token), finite(logprob))
        return found


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API has -9999 for what is impossible."""
    return max(logprob, -9999.0)
