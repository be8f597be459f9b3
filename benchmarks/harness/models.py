"""Models under measurement: whether they run compiled, and calls of their forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from blockdraft.decode.proposal import chain

CHUNK = 512  # tokens of a context that are read


def why_uncompiled(target: Any, *drafters: Any) -> str | None:
    """Return why a target or one of its drafters does not run compiled, or None if all do."""
    if not target.is_compiled:
        return f"the target is not compiled: {target.backend_reason or 'there is no reason'}"
    for drafter in drafters:
        if reason := getattr(drafter, "compile_reason", None):  # of a drafter with a network
            return f"the drafter is not compiled: {reason}"
    return None


def forward_calls(target: Any, context: int, nodes: Iterable[int]) -> dict[int, Callable[[], Any]]:
    """Return calls of the target's forward pass over chains of each number of nodes, behind a context.

    The context is random text. A long one has the keys and values of its beginning again and again, since reading it
    would take minutes.
    """
    nodes, generator = list(nodes), torch.Generator().manual_seed(0)
    cache = target.new_cache(1, context + max(nodes))
    count = min(CHUNK, context)
    text = chain(torch.randint(target.vocab_size, (1, count), generator=generator))
    target.forward(text.tokens, text.parents, cache, (), torch.tensor([count - 1]))
    cache.commit([range(count)])
    if context > count:
        parts, times = cache.export(0, count), -(-context // count)
        cache.truncate([0])
        tensors = {name: torch.cat([part] * times, -2)[..., :context, :] for name, part in parts.items()}
        cache.load(0, range(context), tensors)
    chains = {count: chain(torch.arange(count)[None] % target.vocab_size) for count in nodes}
    return {count: partial(target.forward, each.tokens, each.parents, cache) for count, each in chains.items()}
