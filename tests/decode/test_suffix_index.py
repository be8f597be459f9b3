"""Longest matches in a growing sequence, compared with a search of the whole sequence."""

from random import Random

import pytest

from blockdraft.decode.suffix_index import NEWEST, MatchRates, SuffixIndex

START = (0.2, 0.4, 0.6, 0.75, 0.85, 0.9, 0.95, 0.97)


def longest_match(context: list[int], tokens: list[int], before: int) -> tuple[int, set[int]]:
    """Return the length of the longest suffix of the context in `tokens`, and its ends up to `before`."""
    for length in range(min(len(context), len(tokens)), 0, -1):
        ends = {end for end in range(length, before + 1) if tokens[end - length : end] == context[-length:]}
        if ends:
            return length, ends
    return 0, set()


@pytest.mark.parametrize("letters", [1, 2, 3, 5, 9])
def test_the_longest_match_is_found_at_each_length(letters: int) -> None:
    random, tokens, index = Random(letters), list[int](), SuffixIndex()
    for _ in range(80):
        tokens.append(random.randrange(letters))
        index.append(tokens[-1])
        length, ends = longest_match(tokens, tokens, len(tokens) - 1)
        assert index.longest.length == length
        assert not length or index.end(index.longest) in ends
        token = random.randrange(letters + 1)
        extended = index.extend(index.longest, token)
        length, ends = longest_match([*tokens, token], tokens, len(tokens))
        assert extended.length == length
        assert not length or index.end(extended) in ends
        context = [random.randrange(letters + 1) for _ in range(12)]
        assert index.match(context).length == longest_match(context, tokens, len(tokens))[0]
    assert SuffixIndex(tokens).longest == index.longest


def test_a_match_ends_at_its_latest_occurrence() -> None:
    index = SuffixIndex([1, 2, 3, 1, 2, 4, 1, 2, 5, 1])
    assert index.end(index.extend(index.longest, 2)) == 8
    assert index.tokens[index.end(index.longest)] == 2


def test_followers_come_from_longer_matches_first_and_recent_ones_before_others() -> None:
    index = SuffixIndex([7, 1, 2, 3, 8, 1, 2, 4, 9, 2, 5, 9])
    assert list(index.followers(index.match([8, 1, 2]))) == [(3, 4), (2, 4), (2, 3), (1, 5), (1, 4), (1, 3)]
    assert list(index.followers(index.match([6]))) == []


def test_rates_are_learned_by_the_length_of_the_match() -> None:
    rates = MatchRates(START)
    assert [rates[length] for length in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 999)] == [
        *(0.2, 0.4, 0.6, 0.75, 0.85, 0.85, 0.9, 0.9, 0.95, 0.95, 0.97, 0.97)
    ]
    rates.learn(7, True)
    rates.learn(2, False)
    assert rates[5] == pytest.approx(0.85 + NEWEST * 0.15) and rates[2] == pytest.approx(0.4 * (1 - NEWEST))
    assert rates[1] == 0.2 and rates[9] == 0.9


def test_a_path_ends_where_it_is_unlikely_to_be_accepted() -> None:
    rates = MatchRates(START)
    assert rates.path_probs(3, 3, 0.0) == pytest.approx([0.6, 0.6 * 0.75, 0.6 * 0.75 * 0.85])
    assert rates.path_probs(3, 3, 0.4) == pytest.approx([0.6, 0.6 * 0.75])
    assert rates.path_probs(1, 9, 0.3) == []
    assert len(rates.path_probs(40, 99, 0.5)) == 22
