"""Load of an engine: chats with known outputs, from several threads, some of them cancelled."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from blockdraft import Completion, Engine, SamplingParams, Target
from blockdraft.errors import BlockdraftError

TURN = "Now do the same with other numbers, and say how you got there."


@dataclass(frozen=True)
class Known:
    """A prompt and its plain output, decoded alone; shorter outputs are prefixes of it."""

    prompt: list[int]
    answer: list[int]


def known_answers(plain: Engine, texts: Sequence[str], turns: int, tokens: int, seed: int = 0) -> list[Known]:
    """Decode chats of some turns, each of which continues the one before, and a few prompts of random length."""
    random, found = Random(seed), list[Known]()
    target: Target = plain.target
    tokenizer: Any = target.tokenizer

    def add(ids: list[int]) -> list[int]:
        found.append(Known(ids, plain.generate([ids], SamplingParams(tokens, ignore_eos=True))[0].token_ids))
        return ids + found[-1].answer

    for text in texts:
        chat = [{"role": "user", "content": text}]
        ids = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        for _ in range(turns):
            ids = add(ids) + list(tokenizer(TURN)["input_ids"])
    whole = [token for known in found for token in known.prompt]
    for _ in range(len(texts)):
        length = round(2 ** random.uniform(0, 9))
        start = random.randrange(max(1, len(whole) - length))
        add(whole[start : start + length])
    return found


@dataclass
class Tally:
    """Outcomes of the requests.

    Attributes:
        outcomes: By finish reason, and "error", "wrong", "hung".
        wrong: Descriptions of answers that are not as known, and of whatever else went wrong.
        open: Requests that are under way.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    open: int = 0
    tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Load:
    """Threads that submit requests.

    Args:
        engine: What is under load.
        at_a_time: Requests under way, of all threads together.
        patience: Seconds after which a request counts as hung.
    """

    def __init__(
        self, engine: Engine, known: Sequence[Known], at_a_time: int, threads: int, patience: float, seed: int = 0
    ) -> None:
        self.tally = Tally()
        self._engine, self._known, self._patience = engine, known, patience
        self._until = 0.0
        self.threads = [
            threading.Thread(target=self._submit, args=(seed + i, max(1, at_a_time // threads)), name=f"load {i}")
            for i in range(threads)
        ]

    def start(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        for thread in self.threads:
            thread.start()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def _submit(self, seed: int, at_a_time: int) -> None:
        random, handles = Random(seed), list[tuple[Any, Known, SamplingParams, bool]]()
        try:
            while time.monotonic() < self._until or handles:
                while len(handles) < at_a_time and time.monotonic() < self._until:
                    handles.append(self._one(random))
                handle, known, params, cancels = handles.pop(random.randrange(len(handles)))
                if cancels:
                    time.sleep(random.uniform(0, 0.2))
                    handle.cancel()
                self._judge(handle, known, params, cancels)
        except Exception:  # must not end silently
            with self.tally.lock:
                self.tally.wrong.append(traceback.format_exc())

    def _one(self, random: Random) -> tuple[Any, Known, SamplingParams, bool]:
        known = random.choice(self._known)
        temperature = 1.0 if random.random() < 0.2 else 0.0
        params = SamplingParams(random.randint(1, len(known.answer)), temperature, ignore_eos=True)
        handle = self._engine.submit(known.prompt, params)
        with self.tally.lock:
            self.tally.open += 1
        return handle, known, params, random.random() < 0.1

    def _judge(self, handle: Any, known: Known, params: SamplingParams, cancels: bool) -> None:
        ids, wrong = list[int](), ""
        try:
            completion = outcome(handle, self._patience)
        except TimeoutError:
            came = "hung"
        else:
            came = "error" if completion is None else completion.finish_reason
            if completion is not None:
                ids = completion.token_ids
                right = params.temperature > 0 or ids == known.answer[: len(ids)]
                if not right or not (len(ids) == params.max_new_tokens or (cancels and came == "cancelled")):
                    wrong = f"{came} {ids} of {params.max_new_tokens} instead of {known.answer}, prompt {known.prompt}"
        with self.tally.lock:
            self.tally.open -= 1
            self.tally.tokens += len(ids)
            self.tally.outcomes["wrong" if wrong else came] += 1
            self.tally.wrong += [wrong] if wrong else []


def outcome(handle: Any, seconds: float) -> Completion | None:
    """Return the completion, or None if the request failed. Raises TimeoutError if it does not end."""
    try:
        completion: Completion = handle.result(seconds)
    except BlockdraftError:
        return None
    return None if completion.finish_reason == "error" else completion
