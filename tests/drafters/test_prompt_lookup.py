from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from blockdraft.decode.proposal import ChainPlan, Plan
from blockdraft.drafters.prompt_lookup import (
    DRAFT_PER_MATCHED,
    LONGEST,
    RECENT,
    START,
    PromptLookupDrafter,
    Text,
    Texts,
)
from blockdraft.types import SamplingParams

DRAFTER = PromptLookupDrafter()


def observed(texts: Sequence[list[int]], state: Texts | None = None) -> Texts:
    state = state or DRAFTER.new_state(len(texts), 99)
    longest = max(map(len, texts))
    padded = torch.tensor([text + [77] * (longest - len(text)) for text in texts], dtype=torch.long)
    DRAFTER.observe(state, padded, None, [len(text) for text in texts])
    return state


def plan(block_size: int = 16, rows: int = 1, tree_budget: int = 0) -> Plan:
    return ChainPlan(block_size, [SamplingParams()] * rows).as_tree(tree_budget)


def draft_tokens(state: Texts, anchor: int, block_size: int = 16) -> list[int]:
    return DRAFTER.propose(state, torch.tensor([anchor]), plan(block_size)).tokens[0, 1:].tolist()


def matches(text: list[int]) -> list[tuple[int, int]]:
    """Earlier matches of the text's end, found by reading all of it: `(length, position behind it)`, best first."""
    found = []
    for length in range(LONGEST, 0, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        found += [(length, end) for end in reversed(ends[-RECENT:])]
    return found


def copied(text: list[int], length: int, end: int, most: int) -> list[int]:
    longer = list(text)
    for i in range(min(most, DRAFT_PER_MATCHED * length)):
        longer.append(longer[end + i])
    return longer[len(text) :]


def test_the_longest_and_then_latest_match_is_continued() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    lengths = set()
    for letters in (2, 3, 4, 6, 9) * 3:
        text: list[int] = []
        state = DRAFTER.new_state(1, 99)
        for most in range(25):
            new = random(0, letters, random(1, 4)[0])
            text += new
            observed([new], state)
            [anchor] = random(0, letters + 1)
            found = matches([*text, anchor])
            expected = copied([*text, anchor], *found[0], most) if found else []
            assert draft_tokens(state, anchor, most + 1) == expected
            lengths.add(found[0][0] if found else 0)
        index = state.texts[0]._ends
        assert sum(map(len, index.values())) == sum(min(LONGEST, end) for end in range(1, len(text) + 1))  # each once
    assert lengths == {0, 1, 2, 3, 4}


def test_a_repeating_text_is_drafted_to_go_on_repeating() -> None:
    assert draft_tokens(observed([[5, 6, 7, 5, 6, 7, 5]]), 6, block_size=8) == [7, 5, 6, 7, 5, 6, 7]
    assert draft_tokens(observed([[9, 4, 4, 4, 4]]), 4) == [4] * 15


@pytest.mark.parametrize("budget", [1, 4, 12, 40])
def test_a_tree_merges_the_continuations_of_the_best_matches(budget: int) -> None:
    text = torch.randint(0, 5, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    proposal = DRAFTER.propose(observed([text[:-1]]), torch.tensor(text[-1:]), plan(6, tree_budget=budget))
    tokens, parents = proposal.tokens[0].tolist(), proposal.parents[0].tolist()
    paths: list[list[int]] = [[]]
    for node in range(1, len(tokens)):
        paths.append([*paths[parents[node]], tokens[node]])
    expected: list[list[int]] = [[]]
    for length, end in matches(text):
        continuation = copied(text, length, end, 5)
        expected += [p for n in range(1, len(continuation) + 1) if (p := continuation[:n]) not in expected]
    assert paths == expected[: budget + 1]


def test_rows_without_a_match_are_filled_up_and_texts_follow_their_rows() -> None:
    state = observed([[1, 2, 3], [1, 2, 1], [7]])
    proposal = DRAFTER.propose(state, torch.tensor([9, 2, 7]), plan(4, rows=3))
    assert proposal.q is None
    assert proposal.tokens.tolist() == [[9, 0, 0, 0], [2, 1, 2, 1], [7, 7, 7, 7]]
    assert proposal.parents.tolist() == [[-1, -1, -1, -1], [-1, 0, 1, 2], [-1, 0, 1, 2]]
    state.close(198)
    state.open(250, 40)
    observed([[8, 3, 8]], state.of([250]))
    state = state.of([99, 0, 250])
    proposal = DRAFTER.propose(state, torch.tensor([2, 1, 3]), plan(3, rows=3))
    assert proposal.tokens.tolist() == [[2, 1, 2], [1, 2, 3], [3, 8, 3]]
    assert DRAFTER.propose(state, torch.tensor([9, 9, 9]), plan(rows=3)).tokens.tolist() == [[9]] * 3


def test_a_copy_knows_only_its_beginning(scatter: Callable[..., Any]) -> None:
    state = scatter(DRAFTER.new_state(1, 60), (30, 20), (7, 10))
    first, second = state.of([30]), state.of([7])
    observed([[1, 2, 3, 1, 4]], first)
    draft_tokens(first, 1)
    state.copy(30, 7, 3)
    assert draft_tokens(second, 1, block_size=3) == [2, 3]
    assert draft_tokens(second, 4) == []
    observed([[1, 9]], second)
    assert draft_tokens(second, 1, block_size=3) == [9, 1]
    assert draft_tokens(first, 1, block_size=3) == [4, 1]  # a copy was cut, not the text


def test_a_row_that_shrinks_knows_what_it_keeps_and_one_that_is_opened_again_nothing() -> None:
    state = observed([[1, 2, 3, 1, 4]])
    draft_tokens(state, 1)
    state.shrink(0, 5)
    assert draft_tokens(state, 1, block_size=3) == [4, 1]
    state.shrink(0, 3)
    assert draft_tokens(state, 1, block_size=3) == [2, 3] and draft_tokens(state, 4) == []
    state.close(0)
    state.open(0, 20)
    assert draft_tokens(state, 1) == []


def test_how_often_matches_come_true_is_learned_from_the_text_alone() -> None:
    def text(state: Texts) -> Text:
        draft_tokens(state, 0)
        return state.texts[0]

    whole = [(i * i) % 7 for i in range(60)]
    parts = observed([whole[:20]])
    draft_tokens(parts, 3)
    rates = text(observed([whole[20:]], parts)).rates
    assert rates == text(observed([whole])).rates
    assert text(observed([[1, 2, 3] * 20])).rates[LONGEST - 1] > 0.95 > START[-1]
    assert text(observed([[1, 2, 1, 3, 1, 4, 1, 5] * 2])).rates[0] < START[0]
    parts.copy(0, 0, 30)
    assert text(parts).rates == text(observed([whole[:30]])).rates


def test_acceptance_probs_are_those_of_matches_that_grow_and_of_what_siblings_leave() -> None:
    state = observed([[8, 1, 2, 3, 4, 9, 2, 3, 5]])
    draft_tokens(state, 2)  # has read the text
    one, two, three, _ = state.texts[0].rates = [0.1, 0.4, 0.5, 0.8]
    found = DRAFTER.propose(state, torch.tensor([2]), plan(4, tree_budget=9))  # matches of one token
    assert found.tokens.tolist() == [[2, 3, 5, 2, 4, 9]]
    assert found.parents.tolist() == [[-1, 0, 1, 2, 1, 4]]
    first = one
    expected = [first, first * two, first * two * three, first * (1 - two) * two, first * (1 - two) * two * three]
    assert found.acceptance_probs is not None and found.acceptance_probs[0] == pytest.approx(expected)
    chain = DRAFTER.propose(state, torch.tensor([2]), plan(3))
    assert chain.acceptance_probs == (pytest.approx((first, first * two)),)


def test_a_chain_ends_where_a_further_draft_token_would_not_save_time() -> None:
    state = observed([[1, 2, 3, 4, 1, 2], [7, 8, 7, 9]])
    anchors = torch.tensor([3, 5])
    DRAFTER.propose(state, anchors, plan(rows=2))  # has read the texts
    for text in state.texts:
        text.rates = [0.1, 0.4, 0.5, 0.8]

    def counts(*seconds: float, calibration: float = 1.0) -> int:
        asked = ChainPlan(16, [SamplingParams()] * 2, step_seconds=seconds, calibration=calibration)
        found = DRAFTER.propose(state, anchors, asked)
        count = found.tokens.size(1) - 1
        assert found.tokens.tolist() == [[3, 4, 1, 2, 3][: 1 + count], [5, 0, 0, 0, 0][: 1 + count]]
        assert found.parents.tolist() == [[-1, 0, 1, 2, 3][: 1 + count], [-1] * (1 + count)]
        acceptance_probs = (0.5, 0.4, 0.32, 0.256)[:count]  # of a match of three tokens, which then has four
        assert found.acceptance_probs == (pytest.approx(acceptance_probs), ())
        assert found.expected == pytest.approx((sum(acceptance_probs), 0.0))
        return count

    assert counts(1.0, 1.1, 1.2, 1.9, 1.99) == 2
    assert counts(1.0, 1.3, 1.6, 1.9, 2.2) == 0
    assert counts(1.0, 1.1, 1.2, 1.9, 1.99, calibration=0.1) == 0
    assert counts(1.0, 1.01, 1.02) == 2  # no more than there are times for
