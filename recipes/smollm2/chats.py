"""Chats of SmolLM2 as tokens, and the lines that keep them.

A line is the JSON object of one task:

    {"task": 3, "source": "gsm8k_train", "line": 17, "sha": "0f3a...", "turns": [{"answer": "..."}]}
    {"task": 4, "source": "magpie", "turns": [{"prompt": "...", "answer": "...", "temperature": 0.7, "looped": "..."}]}
    {"task": 5, "source": "magpie", "dropped": "length"}

`prompt` is absent where the first one is a line of a public set; `sha` are the first digits of its SHA-256. `looped` is
what the greedy answer said before it began to loop, where another one was drawn in its place. An `answer` of which
`open` is true has no end token: it was cut at its longest or before its loop. Texts become the very tokens that were
decoded; where they do not, `answer_ids` or `looped_ids` holds these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from blockdraft_train.data.documents import Document
from blockdraft_train.data.loops import KEPT_TOKENS


class Chat:
    """A chat that grows turn by turn.

    Attributes:
        ids: Its tokens so far.
        written: For each, whether the target wrote it as its answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._system, self.ids, self.written = system, list[int](), list[bool]()

    def user_header(self) -> list[int]:
        """Return the tokens before the user's next message, which the target then writes itself."""
        return self.ids + self._encode(self._before_user())

    def ask(self, prompt: str) -> None:
        """Add a message of the user and the header of the answer."""
        added = self._encode(f"{self._before_user()}{prompt}<|im_end|>\n<|im_start|>assistant\n")
        self.ids = self.ids + added
        self.written = self.written + [False] * len(added)

    def answer(self, ids: list[int]) -> None:
        self.ids = self.ids + ids
        self.written = self.written + [True] * len(ids)

    def document(self) -> Document:
        return Document(torch.tensor(self.ids), torch.tensor(self.written))

    def copy(self) -> Chat:
        other = Chat(self._tokenizer, self._system)
        other.ids, other.written = self.ids, self.written
        return other

    def _before_user(self) -> str:
        if self.ids:
            return "\n<|im_start|>user\n"
        # The template puts its own system message before a chat that has none.
        messages = [{"role": "system", "content": self._system}] if self._system else []
        text = self._tokenizer.apply_chat_template([*messages, {"role": "user", "content": "?"}], tokenize=False)
        return str(text).removesuffix("?<|im_end|>\n")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def kept(tokenizer: PreTrainedTokenizerBase, name: str, ids: list[int]) -> dict[str, Any]:
    """Return the entries of a turn that hold tokens without an end token."""
    text = str(tokenizer.decode(ids))
    again = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return {name: text} if again == ids else {name: text, f"{name}_ids": ids}


def kept_ids(tokenizer: PreTrainedTokenizerBase, name: str, turn: dict[str, Any]) -> list[int]:
    """Return the tokens of the entries of `kept`."""
    ids = turn.get(f"{name}_ids")
    return list(tokenizer(turn[name], add_special_tokens=False)["input_ids"]) if ids is None else ids


def sha(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


def documents(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], first: str | None) -> Iterator[Document]:
    """Yield the documents of a line: the chat, and the chat up to each repetitive greedy output.

    Args:
        first: First prompt, if it is of a public set.

    Raises:
        ValueError: The public prompt is another than the one that was answered.
    """
    chat = Chat(tokenizer)
    for turn in row["turns"]:
        prompt = turn.get("prompt", first)
        if prompt is None or "prompt" not in turn and sha(prompt) != row["sha"]:
            raise ValueError(
                f"line {row['line'] + 1} of {row['source']} is not the prompt that was answered; give the folder that "
                "README.md names."
            )
        chat.ask(prompt)
        if "looped" in turn and len(ids := kept_ids(tokenizer, "looped", turn)) >= KEPT_TOKENS:
            other = chat.copy()
            other.answer(ids)
            yield other.document()
        ids = kept_ids(tokenizer, "answer", turn)
        chat.answer(ids if turn.get("open") else [*ids, tokenizer.eos_token_id])
    yield chat.document()
