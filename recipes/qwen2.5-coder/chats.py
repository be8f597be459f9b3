"""Turn tasks and responses into the tokens that the target reads and writes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from blockdraft_train.data.documents import Document


class ChatTokens:
    """Tokens of chats in the target's template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def first_turn(self, task: dict[str, Any], text: str) -> list[int]:
        """Return a chat up to the beginning of its first response."""
        return self.encode(self._template(task.get("system"), text, task.get("tools")))

    def further_turn(self, text: str) -> list[int]:
        """Return what follows a response, up to the beginning of the next one."""
        return self.encode(f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    def opening(self, turn: dict[str, str], before: list[int]) -> list[int]:
        """Return a chat up to where the target continues the user's message."""
        if before:
            return before + self.encode(f"\n<|im_start|>user\n{turn['opening']}")
        header = self._template(turn.get("author"), "?", None).partition("?<|im_end|>")[0]
        return self.encode(header + turn["opening"])

    def stored(self, response: list[int]) -> dict[str, Any]:
        """Return the entries of a line that store a response: its text, and its tokens where the text differs."""
        text = str(self._tokenizer.decode(response))
        return {"response": text} | ({} if self.encode(text) == response else {"response_ids": response})

    def document(self, task: dict[str, Any], line: dict[str, Any]) -> Document:
        """Return a task with its stored responses as one document, whose responses are supervised."""
        tokens, supervised = list[int](), list[bool]()
        for number, turn in enumerate(line["turns"]):
            if "text" in task:
                prompt = self.encode(task["text"])
            else:
                text = turn.get("prompt") or task["turns"][number]["text"]
                prompt = self.further_turn(text) if number else self.first_turn(task, text)
            response = turn.get("response_ids") or self.encode(turn["response"])
            tokens += prompt + response
            supervised += [False] * len(prompt) + [True] * len(response)
        return Document(torch.tensor(tokens), torch.tensor(supervised))

    def _template(self, system: str | None, text: str, tools: list[dict[str, Any]] | None) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        return str(
            self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        )
