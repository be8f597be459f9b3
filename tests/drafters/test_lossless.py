"""What must hold for every drafter, whatever it guesses. A new file in `drafters/` needs a line in `FOLDERS`."""

import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from blockdraft import drafters
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Costs, Engine
from blockdraft.engine.controller import Controller
from blockdraft.proposal import Plan, Proposal
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

# By file name, the fixture with a small checkpoint; None for a drafter that goes by its name.
FOLDERS = {
    "dflash": "tiny_drafter_dir",
    "dflash2": "tiny_dflash2_dir",
    "draft_lm": "tiny_lm_dir",
    "dspark": "tiny_dspark_dir",
    "none": None,
    "prompt_lookup": None,
}
FILES = [module.name for module in pkgutil.iter_modules(drafters.__path__) if module.name != "base"]
DRAFTINGS = {"chain": Drafting(), "tree": Drafting(tree_budget=12), "auto": Drafting("auto", 12)}
# Drafting costs little here, so that "auto" drafts, pauses where nothing is accepted, and tries again.
COSTS = Costs(
    rows=(1, 100),
    plain=(1.0, 1.1),
    chain=(((1, 1.1), (15, 1.2)), ((1, 1.2), (15, 1.3))),
    tree=(((1, 1.2), (99, 1.4)), ((1, 1.3), (99, 1.5))),
)

PROMPTS = [[(7 * i * i + 3 * row) % 60 + 4 for i in range(1 + (5 * row) % 23)] for row in range(16)]
# Every third request is greedy.
PARAMS = [
    SamplingParams(1 + (11 * row) % 23, (0.0, 0.7, 1.0)[row % 3], top_k=20 * (row % 2), seed=row, ignore_eos=True)
    for row in range(16)
]
LONG = SamplingParams(18, ignore_eos=True)


class RecordingState:
    def __init__(self, inner: Any, texts: list[list[int]]) -> None:
        self.inner, self.texts = inner, texts

    def select(self, rows: Sequence[int]) -> None:
        self.inner.select(rows)
        self.texts = [self.texts[row] for row in rows]

    def join(self, other: "RecordingState", capacity: int) -> None:
        self.inner.join(other.inner, capacity)
        self.texts += other.texts

    def prefix(self, row: int, length: int) -> "RecordingState":
        return RecordingState(self.inner.prefix(row, length), [self.texts[row][:length]])


class Recorder:
    """A drafter that writes down what the engine tells another one.

    Attributes:
        texts: What was observed, for each row in the order in which they came.
        proposals: What was guessed.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.taps, self.block_size = drafter, drafter.taps, drafter.block_size
        self.knows_probabilities, self.path = drafter.knows_probabilities, drafter.path
        self.texts: list[list[int]] = []
        self.proposals: list[Proposal] = []

    def new_state(self, batch: int, capacity: int) -> RecordingState:
        new: list[list[int]] = [[] for _ in range(batch)]
        self.texts += new
        return RecordingState(self.drafter.new_state(batch, capacity), new)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return self.drafter.state_bytes(batch, capacity)

    def propose(self, state: RecordingState, anchor: Tensor, plan: Plan) -> Proposal:
        self.proposals.append(self.drafter.propose(state.inner, anchor, plan))
        assert self.proposals[-1].tokens[:, 0].tolist() == anchor.tolist()
        return self.proposals[-1]

    def observe(self, state: RecordingState, tokens: Tensor, features: Tensor | None, lengths: Sequence[int]) -> None:
        for text, row, length in zip(state.texts, tokens.tolist(), lengths, strict=True):
            text += row[:length]
        self.drafter.observe(state.inner, tokens, features, lengths)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture(scope="module", params=FILES)
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    fixture = FOLDERS[request.param]
    return load_drafter(request.getfixturevalue(fixture) if fixture else request.param, target=target)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    """The answers without a drafter, each request alone."""
    engine = Engine(target, load_drafter("none", target=target))
    return [engine.generate([prompt], params)[0].token_ids for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def test_every_drafter_is_tested() -> None:
    assert sorted(FOLDERS) == sorted(FILES)


@pytest.mark.parametrize("drafting", DRAFTINGS.values(), ids=DRAFTINGS)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_answers_are_those_of_plain_decoding(
    rows: int,
    drafting: Drafting,
    target: Target,
    drafter: Drafter,
    plain: list[list[int]],
) -> None:
    """Greedy and sampled side by side, in batches whose rows come and go; and what the drafter hears and says."""
    count = {1: 3, 3: 7, 16: 16}[rows]
    recorder = Recorder(drafter)
    engine = Engine(target, recorder, max_batch_size=rows, drafting=drafting)
    engine.controller = Controller(recorder, drafting, lambda: COSTS)
    completions = engine.generate(PROMPTS[:count], PARAMS[:count])
    heard = [text for text in recorder.texts if text]
    for prompt, params, expected, completion, text in zip(PROMPTS, PARAMS, plain, completions, heard, strict=False):
        assert completion.token_ids == expected
        assert (len(completion.token_ids), completion.finish_reason) == (params.max_new_tokens, "length")
        # All that was committed, once, in order. The last path may reach past the end, and what has not been drafted
        # from is told later or never.
        told = prompt + completion.token_ids[:-1]
        assert text[: len(told)] == told[: len(text)]
        assert len(text) < len(told) + drafter.block_size
        if drafter.block_size > 1 and drafting.block_size != "auto":
            assert len(text) >= len(told)
    assert len(heard) == len(completions) == count
    for proposal in recorder.proposals:
        for tokens, parents in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
            check_tree(tokens, parents, drafting.tree_budget or drafter.block_size - 1, drafter.block_size)


def check_tree(tokens: list[int], parents: list[int], most: int, block_size: int) -> None:
    """At most `most` guesses, no path of more than `block_size` tokens, and no two children of one token."""
    guesses = [(parent, token) for parent, token in zip(parents, tokens, strict=True) if parent >= 0]
    assert len(set(guesses)) == len(guesses) <= most
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        assert parent == -1 or 0 <= parent < node
        depths[node] = depths[parent] + 1 if parent >= 0 else 0
    assert max(depths) < block_size


def test_a_stop_token_ends_the_answer(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter)
    [whole] = engine.generate([PROMPTS[3]], LONG)
    for stop in whole.token_ids[2], whole.token_ids[11]:
        [stopped] = engine.generate([PROMPTS[3]], replace(LONG, stop_token_ids=(stop,)))
        assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        assert stopped.finish_reason == "stop"


def test_a_remembered_beginning_changes_nothing(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, prefix_tokens=2000)
    known = engine.generate(PROMPTS[1:3], LONG)
    turns = [PROMPTS[i + 1] + known[i].token_ids[: 7 * i] + [31, 17] for i in range(2)]
    for turn, completion in zip(turns, engine.generate(turns, LONG), strict=True):
        [fresh] = Engine(target, drafter).generate([turn], LONG)
        assert completion.token_ids == fresh.token_ids
        assert completion.stats.committed == fresh.stats.committed
