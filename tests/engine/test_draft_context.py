"""What a drafter observes, with one that records it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.decode.proposal import Plan
from blockdraft.engine.draft_context import DraftContext
from blockdraft.engine.request import Request, Row
from blockdraft.errors import RequestError
from blockdraft.types import SamplingParams

PLAIN, DRAFTED = Plan(1, []), Plan(4, [])


class State:
    def of(self, rows: list[int]) -> list[int]:
        return rows


class Drafter:
    """Fails for rows that hold the token 99."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def observe(self, state: list[int], tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]) -> None:
        if (tokens == 99).any():
            raise ArithmeticError("99")
        self.told.append(
            (state, tokens.tolist(), None if hidden_states is None else hidden_states[:, :, 0].tolist(), lengths)
        )


def made(count: int = 2) -> tuple[DraftContext, Drafter, list[Row]]:
    requests = [Request(prompt=[1], params=SamplingParams(9)) for _ in range(count)]
    drafter = Drafter()
    rows = [Row(request, 10 * place, 10) for place, request in enumerate(requests)]
    return DraftContext(drafter, State(), torch.device("cpu")), drafter, rows  # type: ignore[arg-type]


def node(*tokens: int) -> tuple[Tensor, Tensor]:
    """One token a row, with features made from it."""
    ids = torch.tensor(tokens)[:, None]
    return ids, ids[:, :, None].expand(-1, -1, 3) + 0.5


def test_plain_cycles_are_told_all_at_once_in_their_order() -> None:
    context, drafter, rows = made()
    for tokens in ((1, 2), (3, 4), (5, 6)):
        context.keep(rows, *node(*tokens))
    assert drafter.told == []
    context.catch_up()
    context.catch_up()
    assert drafter.told == [([0, 10], [[1, 3, 5], [2, 4, 6]], [[1.5, 3.5, 5.5], [2.5, 4.5, 6.5]], [3, 3])]


def test_it_is_due_before_a_draft_before_other_rows_and_when_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.engine.draft_context.MOST_KEPT", 2)
    context, _, rows = made()
    assert not context.due(rows, DRAFTED)  # nothing is kept
    context.keep(rows, *node(1, 2))
    assert not context.due(rows, PLAIN)
    assert context.due(rows, DRAFTED) and context.due(rows[:1], PLAIN)
    context.keep(rows, *node(3, 4))
    assert context.due(rows, PLAIN)


def test_of_a_row_that_goes_nothing_is_told_where_it_was_alone() -> None:
    context, drafter, rows = made()
    context.keep(rows[:1], *node(1))
    context.forget(rows[1].start)
    context.forget(rows[0].start)
    context.catch_up()
    assert drafter.told == []
    context.keep(rows, *node(1, 2))
    context.forget(rows[0].start)
    context.catch_up()
    assert len(drafter.told) == 1


def test_of_a_tree_the_nodes_of_the_paths_are_told() -> None:
    context, drafter, rows = made()
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    context.observe(rows, tokens, tokens[:, :, None] + 0.5, [[0, 2, 3], [0, 1]])
    [(_, told, hidden_states, lengths)] = drafter.told
    assert lengths == [3, 2]
    assert told[0] == [1, 3, 4] and hidden_states[0] == [1.5, 3.5, 4.5]
    assert told[1][:2] == [5, 6] and hidden_states[1][:2] == [5.5, 6.5]


def test_a_row_for_which_the_drafter_fails_ends_alone() -> None:
    context, drafter, rows = made(3)
    context.observe(rows, torch.tensor([[1, 2], [99, 3], [4, 5]]), None, [range(2)] * 3)
    assert [state for state, *_ in drafter.told] == [[0], [20]]
    assert [row.request.finish_reason is None for row in rows] == [True, False, True]
    assert isinstance(rows[1].request.failure, RequestError)
    assert str(rows[1].request.failure) == "The drafter failed: ArithmeticError: 99"


def test_much_is_told_in_pieces_of_so_many_tokens_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.engine.draft_context.AT_ONCE", 5)
    context, drafter, rows = made()
    for tokens in ((1, 2), (3, 4), (5, 6)):
        context.keep(rows, *node(*tokens))
    context.catch_up()
    assert [tokens for _, tokens, _, _ in drafter.told] == [[[1, 3], [2, 4]], [[5], [6]]]
    assert [lengths for *_, lengths in drafter.told] == [[2, 2], [1, 1]]


def test_a_row_for_which_a_piece_fails_is_told_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.engine.draft_context.AT_ONCE", 2)
    context, drafter, rows = made()
    for tokens in ((99, 2), (3, 4)):
        context.keep(rows, *node(*tokens))
    context.catch_up()
    assert drafter.told == [([10], [[2]], [[2.5]], [1]), ([10], [[4]], [[4.5]], [1])]
    assert isinstance(rows[0].request.failure, RequestError) and rows[1].request.failure is None


def test_nothing_is_told_once_all_rows_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.engine.draft_context.AT_ONCE", 1)
    context, drafter, rows = made(1)
    for token in (99, 3):
        context.keep(rows, *node(token))
    context.catch_up()
    assert drafter.told == [] and rows[0].request.failure is not None
