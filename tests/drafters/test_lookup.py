"""Drafts by lookup: what is continued, how far, and from which earlier outputs."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from blockdraft.decode.proposal import ChainPlan, Plan
from blockdraft.drafters import load_drafter
from blockdraft.drafters.lookup import BLOCK_SIZE, SCOPE_TOKENS, STORE_TOKENS, LookupDrafter, LookupState
from blockdraft.engine import Engine
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

DRAFTER = LookupDrafter()
FILE = [(37 * i) % 61 + 4 for i in range(60)]  # a text that does not repeat itself


def observed(texts: Sequence[list[int]], state: LookupState | None = None) -> LookupState:
    state = state or DRAFTER.new_state(len(texts), 99)
    longest = max(map(len, texts))
    padded = torch.tensor([text + [77] * (longest - len(text)) for text in texts], dtype=torch.long)
    DRAFTER.observe(state, padded, None, [len(text) for text in texts])
    return state


def plan(block_size: int = 16, rows: int = 1, tree_budget: int = 0, scope: str | None = None) -> Plan:
    return ChainPlan(block_size, [SamplingParams(lookup_scope=scope)] * rows).as_tree(tree_budget)


def draft_tokens(state: LookupState, anchor: int, block_size: int = 16, scope: str | None = None) -> list[int]:
    proposal = DRAFTER.propose(state, torch.tensor([anchor]), plan(block_size, scope=scope))
    return proposal.tokens[0, 1:].tolist()


def test_a_long_match_is_continued_far_and_a_short_one_briefly() -> None:
    state = observed([[*FILE, *FILE[10:30]]])
    assert draft_tokens(state, FILE[30], 25) == FILE[31:55]
    assert len(draft_tokens(state, FILE[30], BLOCK_SIZE)) == BLOCK_SIZE - 1
    assert 1 <= len(draft_tokens(observed([[*FILE, 99, 98]]), FILE[5], BLOCK_SIZE)) <= 4
    assert draft_tokens(observed([FILE]), 99) == []


def test_the_longest_and_then_latest_match_is_continued() -> None:
    assert draft_tokens(observed([[1, 2, 3, 4, 9, 3, 5, 1, 2]]), 3, 2) == [4]  # three tokens match, not one
    assert draft_tokens(observed([[2, 3, 4, 9, 2, 3, 5, 8, 2]]), 3, 2) == [5]


def test_a_file_that_is_rewritten_with_one_change_takes_few_steps() -> None:
    random = Random(0)
    words = [[random.randrange(4, 300) for _ in range(3)] for _ in range(40)]
    file = [token for _ in range(200) for token in random.choice(words)]
    output = [5000, *file[:300], 5001, 5002, *file[301:], 5003]
    state = observed([file])
    done, steps = 0, 0
    while done < len(output) - 1:
        draft = [*draft_tokens(state, output[done], 17), None]
        accepted = next(i for i, token in enumerate(draft) if token is None or [token] != output[done + 1 + i :][:1])
        observed([output[done : done + 1 + accepted]], state)
        done, steps = done + 1 + accepted, steps + 1
    assert len(output) / steps > 8


def test_a_file_that_is_rewritten_with_a_name_replaced_takes_few_steps() -> None:
    random = Random(1)
    file = [random.randrange(4, 300) for _ in range(800)]
    for place in range(20, 800, 40):
        file[place] = 400
    output = [5000, *(token for old in file for token in ([401, 402] if old == 400 else [old])), 5003]
    state, done, steps = observed([[5000, *file, 5001]]), 0, 0
    while done < len(output) - 1:
        draft = [*draft_tokens(state, output[done], 17), None]
        accepted = next(i for i, token in enumerate(draft) if token is None or [token] != output[done + 1 + i :][:1])
        observed([output[done : done + 1 + accepted]], state)
        done, steps = done + 1 + accepted, steps + 1
    assert steps < len(output) / 17 + 12


def test_a_repeating_text_is_drafted_to_go_on_repeating() -> None:
    assert draft_tokens(observed([[5, 6, 7, 5, 6, 7, 5]]), 6, block_size=8) == [7, 5, 6, 7, 5, 6, 7]
    assert draft_tokens(observed([[9, 4, 4, 4, 4]]), 4) == [4] * 15


@pytest.mark.parametrize("budget", [1, 4, 12, 40])
def test_a_tree_holds_the_likeliest_continuations_of_all_matches(budget: int) -> None:
    text = torch.randint(0, 5, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    proposal = DRAFTER.propose(observed([text[:-1]]), torch.tensor(text[-1:]), plan(6, tree_budget=budget))
    tokens, parents = proposal.tokens[0].tolist(), proposal.parent_lists[0]
    paths: list[list[int]] = [[]]
    for node in range(1, len(tokens)):
        paths.append([*paths[parents[node]], tokens[node]])
    assert proposal.acceptance_probs is not None
    [probs] = proposal.acceptance_probs
    assert len({tuple(path) for path in paths}) == len(paths) == 1 + len(probs) <= 1 + budget
    assert max(map(len, paths)) <= 5
    assert all(prob <= [1.0, *probs][parent] for prob, parent in zip(probs, parents[1:], strict=True))
    children = [
        [p for p, parent in zip(probs, parents[1:], strict=True) if parent == node] for node in range(len(paths))
    ]
    assert all(sum(own) <= [1.0, *probs][node] + 1e-9 for node, own in enumerate(children))
    if budget > 1:
        chain = DRAFTER.propose(observed([text[:-1]]), torch.tensor(text[-1:]), plan(6)).tokens[0, 1:].tolist()
        assert chain[: len(paths[1])] == paths[1]
    if budget == 40:
        assert max(map(len, children)) > 1  # of several continuations


def test_rows_without_a_match_are_filled_up_and_texts_follow_their_rows() -> None:
    state = observed([[1, 2, 3], [1, 2, 1], [7]])
    proposal = DRAFTER.propose(state, torch.tensor([9, 2, 7]), plan(3, rows=3))
    assert proposal.q is None
    assert proposal.tokens.tolist() == [[9, 0, 0], [2, 1, 2], [7, 7, 7]]
    assert proposal.parents.tolist() == [[-1, -1, -1], [-1, 0, 1], [-1, 0, 1]]
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
    assert draft_tokens(second, 1, block_size=2) == [9]
    assert draft_tokens(first, 1, block_size=2) == [4]  # a copy was cut, not the text


def test_a_row_that_shrinks_knows_what_it_keeps_and_one_that_is_opened_again_nothing() -> None:
    state = observed([[1, 2, 3, 1, 4]])
    draft_tokens(state, 1)
    state.shrink(0, 5)
    assert draft_tokens(state, 1, block_size=2) == [4]
    state.shrink(0, 3)
    assert draft_tokens(state, 1, block_size=3) == [2, 3] and draft_tokens(state, 4) == []
    state.close(0)
    state.open(0, 20)
    assert draft_tokens(state, 1) == []


def test_probabilities_are_learned_from_the_text_alone() -> None:
    def first_prob(state: LookupState, anchor: int) -> float:
        proposal = DRAFTER.propose(state, torch.tensor([anchor]), plan(2))
        assert proposal.acceptance_probs is not None
        return proposal.acceptance_probs[0][0]

    whole = [(i * i) % 7 for i in range(60)]
    parts = observed([whole[:20]])
    draft_tokens(parts, 3)
    assert first_prob(observed([whole[20:]], parts), 1) == first_prob(observed([whole]), 1)
    assert first_prob(observed([[1, 2, 3] * 20]), 1) > 0.95
    assert first_prob(observed([[1, 2, 1, 3, 1, 4, 1, 5, 1, 6]]), 1) < first_prob(observed([[1, 2, 9]]), 1)
    parts.copy(0, 0, 30)
    assert first_prob(parts, 1) == first_prob(observed([whole[:30]]), 1)


def test_a_chain_ends_where_a_further_draft_token_would_not_save_time() -> None:
    state = observed([[1, 2, 3, 4, 1, 2], [7, 8, 7, 9]])
    anchors = torch.tensor([3, 5])

    def count(*seconds: float, calibration: float = 1.0) -> int:
        asked = ChainPlan(16, [SamplingParams()] * 2, step_seconds=seconds, calibration=calibration)
        proposal = DRAFTER.propose(state, anchors, asked)
        count = proposal.tokens.size(1) - 1
        assert proposal.tokens.tolist() == [[3, 4, 1, 2, 3][: 1 + count], [5, 0, 0, 0, 0][: 1 + count]]
        assert proposal.parents.tolist() == [[-1, 0, 1, 2, 3][: 1 + count], [-1] * (1 + count)]
        assert proposal.acceptance_probs is not None and proposal.acceptance_probs[1] == ()
        assert proposal.expected == pytest.approx((sum(proposal.acceptance_probs[0]), 0.0))
        return count

    assert count(1.0, 1.1, 1.2, 1.9, 1.99) == 2
    assert count(1.0, 1.4, 1.8, 2.2, 2.6) == 0
    assert count(1.0, 1.1, 1.2, 1.9, 1.99, calibration=0.1) == 0
    assert count(1.0, 1.01, 1.02) == 2  # no more than there are times for


def test_earlier_outputs_of_the_same_scope_are_continued_and_no_others() -> None:
    def state() -> LookupState:
        state = observed([[1, 2, 3]])
        DRAFTER.remember(state, "mine", FILE)
        DRAFTER.remember(state, "mine", [200, 201, 202])
        DRAFTER.remember(state, "other", [50, 51, 1, 2, 3, 52, 53])
        return observed([FILE[5:15]], state)

    assert draft_tokens(state(), FILE[15], 4, "mine") == FILE[16:19]
    assert draft_tokens(state(), FILE[15], 4) == draft_tokens(state(), FILE[15], 4, "other") == []
    assert draft_tokens(state(), FILE[-1], scope="mine") == []  # an output ends there
    end = DRAFTER.propose(state(), torch.tensor([FILE[-1]]), plan(8, tree_budget=6, scope="mine"))
    assert end.tokens.tolist() == [[FILE[-1]]]
    tree = DRAFTER.propose(state(), torch.tensor([FILE[15]]), plan(8, tree_budget=6, scope="mine"))
    assert tree.tokens[0, 1:].tolist() == FILE[16:22]


def test_the_memory_for_earlier_outputs_is_bounded() -> None:
    state = observed([[1, 2, 3]])
    outputs = [[scope * 10_000 + i for i in range(SCOPE_TOKENS // 4)] for scope in range(8)]
    for output in outputs:
        DRAFTER.remember(state, "one", output)

    def known(output: list[int], scope: str) -> bool:
        return draft_tokens(observed([output[:5]], state), output[5], 3, scope) == output[6:8]

    assert known(outputs[-1], "one") and known(outputs[-2], "one") and not known(outputs[0], "one")
    for scope in range(2 * STORE_TOKENS // SCOPE_TOKENS):
        for output in outputs[:3]:
            DRAFTER.remember(state, f"scope {scope}", output)
    assert not known(outputs[-1], "one") and known(outputs[2], f"scope {scope}")


def test_the_end_of_a_very_long_output_is_kept() -> None:
    state = observed([[1, 2, 3]])
    DRAFTER.remember(state, "other", FILE)
    output = list(range(1000, 1000 + 2 * STORE_TOKENS))
    DRAFTER.remember(state, "mine", output)
    assert draft_tokens(observed([output[-20:-10]], state), output[-10], 4, "mine") == output[-9:-6]
    assert draft_tokens(observed([output[:10]], state), output[10], 4, "mine") == []
    assert draft_tokens(observed([FILE[:10]], state), FILE[10], 4, "other") == FILE[11:14]


def test_the_least_recently_used_scope_is_dropped() -> None:
    state, count = observed([[1, 2, 3]]), STORE_TOKENS // (SCOPE_TOKENS // 4) - 1
    outputs = [[scope * 10_000 + i for i in range(SCOPE_TOKENS // 4)] for scope in range(count + 2)]

    def known(scope: int) -> bool:
        output = outputs[scope]
        return draft_tokens(observed([output[:5]], state), output[5], 3, str(scope)) == output[6:8]

    for scope in range(count):
        DRAFTER.remember(state, str(scope), outputs[scope])
    assert known(0)
    DRAFTER.remember(state, "1", [7])
    for scope in (count, count + 1):
        DRAFTER.remember(state, str(scope), outputs[scope])
    assert [known(scope) for scope in range(5)] == [True, True, False, False, True]


def test_many_small_scopes_take_little_time() -> None:
    state = observed([[1, 2, 3]])
    began = time.perf_counter()
    for scope in range(STORE_TOKENS // 2 + 2000):
        DRAFTER.remember(state, f"scope {scope}", [1])
    assert time.perf_counter() - began < 10
    DRAFTER.remember(state, "last", FILE)
    observed([FILE[:5]], state)
    assert draft_tokens(state, FILE[5], 3, "last") == FILE[6:8]


def test_looking_in_vain_takes_next_to_no_time() -> None:
    state = observed([list(range(1000, 3000))])
    DRAFTER.remember(state, "mine", list(range(5000, 9000)))
    draft_tokens(state, 7, scope="mine")
    seconds = list[float]()
    for token in range(200):
        observed([[token]], state)
        began = time.perf_counter()
        assert draft_tokens(state, 500 + token, scope="mine") == []
        seconds.append(time.perf_counter() - began)
    assert sorted(seconds)[20] < 2e-4  # 0.1 ms on an idle machine, with what surrounds it here


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.mark.parametrize(
    "drafting", [Drafting(None), Drafting(tree_budget=24), Drafting()], ids=["chain", "tree", "auto"]
)
def test_an_answer_that_was_given_before_is_drafted_from_it(target: Target, drafting: Drafting) -> None:
    params = SamplingParams(60, ignore_eos=True)
    [expected] = Engine(target).generate([FILE], params)
    scopes = [SamplingParams(60, ignore_eos=True, lookup_scope=scope) for scope in ("a", "b")]
    with Engine(target, load_drafter("lookup", target=target), drafting=drafting) as engine:
        first, other, again = (engine.generate([FILE], scopes[i])[0] for i in (0, 1, 0))
    assert first.token_ids == other.token_ids == again.token_ids == expected.token_ids
    if not drafting.automatic:
        assert first.stats.committed == other.stats.committed  # nothing came from another scope
    assert again.tau > 8 > 2 * first.tau if drafting.block_size is None else again.tau >= first.tau


def test_a_member_of_a_hybrid_drafts_from_earlier_answers_too(target: Target, tiny_drafter_dir: Path) -> None:
    params = SamplingParams(60, ignore_eos=True, lookup_scope="a")
    drafter = load_drafter(f"lookup+{tiny_drafter_dir}", target=target)
    with Engine(target, drafter, drafting=Drafting(tree_budget=24)) as engine:
        first, again = (engine.generate([FILE], params)[0] for _ in range(2))
    assert first.token_ids == again.token_ids and again.tau > 8 > 2 * first.tau
