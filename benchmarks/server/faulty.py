"""`blockdraft serve` of the bundled pair with a target that fails on purpose where a token of `MARKER` is read: whoever
sends or says it has a failing request, and nobody else. The arguments are those of `blockdraft serve`."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.soak.faults import Faults, InjectedFault, Wrapped
from blockdraft import targets
from blockdraft.cli import main

MARKER = "\x07"


class Failing(Wrapped):
    """A target."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, Faults(0.0))
        self.marked = torch.tensor(inner.tokenizer(MARKER, add_special_tokens=False)["input_ids"])

    def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.isin(tokens, self.marked.to(tokens.device)).any():
            raise InjectedFault("the marker was read")
        return self._inner.forward(tokens, *args, **kwargs)


def load_failing(*args: Any, **kwargs: Any) -> Any:
    return Failing(load(*args, **kwargs))


if __name__ == "__main__":
    load, targets.load_target = targets.load_target, load_failing  # type: ignore[assignment]
    main()
