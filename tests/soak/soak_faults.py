"""Wrappers of targets, drafters and tokenizers that fail at random."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import torch


class InjectedFault(Exception):
    """Raised on purpose."""


class Faults:
    """Decides when something fails.

    Args:
        share: Of the calls of each kind that fail; 0 lets nothing fail.

    Attributes:
        counts: Faults so far, by kind.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        self.share, self.counts = share, Counter[str]()
        self.random, self._lock = Random(seed), threading.Lock()

    def strikes(self, kind: str) -> bool:
        with self._lock:
            if self.random.random() >= self.share:
                return False
            self.counts[kind] += 1
            return True

    def check(self, kind: str) -> None:
        if self.strikes(kind):
            raise InjectedFault(f"{kind}, on purpose")


class Wrapped:
    """Another object, some of whose methods are this one's."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FaultyTokenizer(Wrapped):
    def decode(self, *args: Any, **kwargs: Any) -> Any:
        self._faults.check("tokenizer raises")
        return self._inner.decode(*args, **kwargs)


class FaultyTarget(Wrapped):
    def __init__(self, inner: Any, faults: Faults) -> None:
        super().__init__(inner, faults)
        self.tokenizer = FaultyTokenizer(inner.tokenizer, faults)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._faults.check("target raises")
        output = self._inner.forward(*args, **kwargs)
        return poisoned(output, self._faults.random) if self._faults.strikes("NaN") else output


class FaultyDrafter(Wrapped):
    def propose(self, *args: Any, **kwargs: Any) -> Any:
        self._faults.check("drafter raises in propose")
        return self._inner.propose(*args, **kwargs)

    def observe(self, *args: Any, **kwargs: Any) -> Any:
        self._faults.check("drafter raises in observe")
        return self._inner.observe(*args, **kwargs)


def poisoned(output: Any, random: Random) -> Any:
    """Return the output of a forward pass with a NaN among the logits of a random node of a random sequence."""
    logits, best = output.logits.clone(), output.best
    row, node = random.randrange(logits.size(0)), random.randrange(logits.size(1))
    logits[row, node, random.randrange(logits.size(2))] = torch.nan
    if best is not None:
        best = best.clone()
        best[row, node] = -1
    return replace(output, logits=logits, best=best)
