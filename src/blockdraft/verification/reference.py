"""The slow readable twin of `verify`, used by tests as an oracle: one row, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def verify_row(tokens: Sequence[int], parents: Sequence[int], draw_at: Callable[[int], int]) -> tuple[list[int], int]:
    """Walk the tree from the anchor; `draw_at(node)` draws the target's token after a node.

    Returns:
        The accepted nodes, anchor first, and the bonus token.
    """
    path, node = [0], 0
    while True:
        token = draw_at(node)
        matching = [i for i in range(len(tokens)) if parents[i] == node and tokens[i] == token]
        if not matching:
            return path, token
        node = matching[0]
        path.append(node)
