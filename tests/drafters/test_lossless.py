"""Tests of every drafter, whatever it drafts. A new one in `drafters/` needs a line in `FOLDERS`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_gpu import pretended_gpu
from thinned import LONG as LONG_MARKS
from thinned import thinned
from torch import Tensor

from blockdraft import drafters
from blockdraft.decode.proposal import ChainPlan, Plan, Proposal
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Costs, Engine
from blockdraft.engine.adaptive.policy import Controller
from blockdraft.nn.cache import SequenceState
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, LoadOptions, SamplingParams

# Fixture with a small checkpoint or a combination, by kind; None for a drafter that is loaded by name.
FOLDERS = {
    "block_diffusion": "tiny_block_dir",
    "hybrid": "tiny_combination",
    "dflash": "tiny_drafter_dir",
    "dflash2": "tiny_dflash2_dir",
    "draft_lm": "tiny_lm_dir",
    "dspark": "tiny_dspark_dir",
    "eagle3": "tiny_eagle3_dir",
    "flow": "tiny_flow_dir",
    "medusa": "tiny_medusa_dir",
    "mtp": "tiny_mtp_dir",
    "none": None,
    "lookup": None,
    "period": None,  # of examples/plugin
}
FILES = sorted(drafters.entries())
DRAFTINGS = {"chain": Drafting(None), "tree": Drafting(tree_budget=12), "auto": Drafting(tree_budget="auto")}
# Drafting costs little here, so that "auto" drafts, pauses where nothing is accepted, and tries again.
COSTS = Costs(
    batch_sizes=(1, 100),
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


class RecordingState(SequenceState):
    """Observed tokens of each sequence, and the state of the drafter that is recorded."""

    def __init__(self, recorded: Any, texts: list[list[int]], batch: int, capacity: int) -> None:
        self.texts = texts
        super().__init__(batch, capacity, [recorded])

    def new_value(self) -> list[int]:
        self.texts.append([])
        return self.texts[-1]

    def copy(self, source: int, start: int, length: int) -> None:
        text = self.values[start]
        super().copy(source, start, length)
        assert len(self.values[source]) >= length and not text
        text += self.values[source][:length]
        self.values[start] = text


class Recorder(Drafter):
    """Drafter that records what the engine passes to another one.

    Attributes:
        texts: Observed tokens of each row, in the order in which rows were opened.
        proposals: What was drafted.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.target_layers, self.block_size = drafter, drafter.target_layers, drafter.block_size
        self.chooses_tree_size, self.path = drafter.chooses_tree_size, drafter.path
        self.chooses_length = drafter.chooses_length
        self.texts: list[list[int]] = []
        self.proposals: list[Proposal] = []

    def new_state(self, batch: int, capacity: int) -> RecordingState:
        return RecordingState(self.drafter.new_state(batch, capacity), self.texts, batch, capacity)

    def state_bytes(self, batch: int, capacity: int) -> int:
        return self.drafter.state_bytes(batch, capacity)

    def weight_bytes(self) -> int:
        return self.drafter.weight_bytes()

    def propose(self, state: RecordingState, anchor: Tensor, plan: Plan) -> Proposal:
        self.proposals.append(self.drafter.propose(state.inner[0], anchor, plan))
        assert self.proposals[-1].tokens[:, 0].tolist() == anchor.tolist()
        return self.proposals[-1]

    def observe(
        self, state: RecordingState, tokens: Tensor, hidden_states: Tensor | None, lengths: Sequence[int]
    ) -> None:
        for start, ids, length in zip(state.starts, tokens.tolist(), lengths, strict=True):
            state.values[start] += ids[:length]
        self.drafter.observe(state.inner[0], tokens, hidden_states, lengths)


@pytest.fixture(scope="module", params=FILES)
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    fixture = FOLDERS[request.param]
    return load_drafter(request.getfixturevalue(fixture) if fixture else request.param, target=target)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    """Answers without a drafter, each request alone."""
    engine = Engine(target, load_drafter("none", target=target))
    return [engine.generate([prompt], params)[0].token_ids for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def test_every_drafter_is_tested() -> None:
    assert sorted(FOLDERS) == sorted(FILES)


QUICK = {(1, "tree"), (3, "auto"), (16, "chain")}  # each number of rows and each way once; the others repeat them


@pytest.mark.parametrize(
    ("rows", "drafting"),
    [
        pytest.param(rows, drafting, id=f"{rows}-{way}", marks=() if (rows, way) in QUICK else LONG_MARKS)
        for rows in (1, 3, 16)
        for way, drafting in DRAFTINGS.items()
    ],
)
def test_answers_are_those_of_plain_decoding(
    rows: int,
    drafting: Drafting,
    target: Target,
    drafter: Drafter,
    plain: list[list[int]],
) -> None:
    """Also checks observations and proposals. Greedy and sampled requests share batches, whose rows come and go."""
    count = {1: 3, 3: 7, 16: 16}[rows]
    recorder = Recorder(drafter)
    engine = Engine(target, recorder, max_batch_size=rows, drafting=drafting)
    engine.controller = Controller(recorder, drafting, lambda drafter: COSTS)
    completions = engine.generate(PROMPTS[:count], PARAMS[:count])
    heard = [text for text in recorder.texts if text]
    for prompt, params, expected, completion, text in zip(PROMPTS, PARAMS, plain, completions, heard, strict=False):
        assert completion.token_ids == expected
        assert (len(completion.token_ids), completion.finish_reason) == (params.max_new_tokens, "length")
        # Every committed token, once, in order. The last path may reach past the end of the answer, and the last tokens
        # may be missing, since no draft needed them.
        committed = prompt + completion.token_ids[:-1]
        assert text[: len(committed)] == committed[: len(text)]
        assert len(text) < len(committed) + drafter.block_size
        if drafter.block_size > 1 and drafting.block_size != "auto":
            assert len(text) >= len(committed)
    assert len(heard) == len(completions) == count
    for proposal in recorder.proposals:
        for tokens, parents in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
            check_tree(tokens, parents, engine.controller.max_draft_tokens, drafter.block_size)


def test_stored_prefixes_change_neither_tokens_nor_drafts(
    target: Target, drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    prompt = [(7 * i * i + 3) % 60 + 4 for i in range(120)]
    results = []
    for stored_prefix_tokens in (0, 64, 64):  # the first does not store, the second stores, the third loads
        drafting = Drafting(min(4, drafter.block_size))
        with Engine(target, drafter, drafting=drafting, stored_prefix_tokens=stored_prefix_tokens) as engine:
            results.append(engine.submit(prompt, LONG, instruction_tokens=100).result(60))
            engine.submit(prompt, LONG, instruction_tokens=100).result(60)  # stores what came twice
    assert [result.stats.remembered for result in results] == [0, 0, 100]
    assert results[0].token_ids == results[1].token_ids == results[2].token_ids
    assert results[0].stats.committed == results[2].stats.committed


def check_tree(tokens: list[int], parents: list[int], most: int, block_size: int) -> None:
    """Check for at most `most` draft tokens, paths of at most `block_size` tokens, and siblings of different tokens."""
    draft_tokens = [(parent, token) for parent, token in zip(parents, tokens, strict=True) if parent >= 0]
    assert len(set(draft_tokens)) == len(draft_tokens) <= most
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        assert parent == -1 or 0 <= parent < node
        depths[node] = depths[parent] + 1 if parent >= 0 else 0
    assert max(depths) < block_size


@pytest.mark.parametrize("drafting", [DRAFTINGS["chain"], DRAFTINGS["tree"]], ids=["chain", "tree"])
def test_predictions_change_no_answer(
    drafting: Drafting, target: Target, drafter: Drafter, plain: list[list[int]]
) -> None:
    """Greedy and sampled, in a batch with requests without a prediction. The drafter still observes all tokens."""
    recorder = Recorder(drafter)
    predictions = [tokens[1:5] + tokens if row % 2 else () for row, tokens in enumerate(plain[:6])]
    params = [replace(p, prediction=tokens) for p, tokens in zip(PARAMS, predictions, strict=False)]
    engine = Engine(target, recorder, max_batch_size=3, drafting=drafting)
    completions = engine.generate(PROMPTS[:6], params)
    assert [completion.token_ids for completion in completions] == plain[:6]
    assert sum(completion.stats.accepted_prediction for completion in completions) > 10
    texts = [text for text in recorder.texts if text]
    for prompt, completion, text in zip(PROMPTS, completions, texts, strict=False):
        assert text == (prompt + completion.token_ids)[: len(text)] and len(text) >= len(prompt)


def test_a_stop_token_ends_the_answer(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    [whole] = engine.generate([PROMPTS[3]], LONG)
    for stop in whole.token_ids[2], whole.token_ids[11]:
        [stopped] = engine.generate([PROMPTS[3]], replace(LONG, stop_token_ids=(stop,)))
        assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        assert stopped.finish_reason == "stop"


def test_a_cached_prefix_changes_nothing(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, prefix_tokens=2000, drafting=Drafting(None))
    known = engine.generate(PROMPTS[1:3], LONG)
    turns = [PROMPTS[i + 1] + known[i].token_ids[: 7 * i] + [31, 17] for i in range(2)]
    for turn, completion in zip(turns, engine.generate(turns, LONG), strict=True):
        [fresh] = Engine(target, drafter, drafting=Drafting(None)).generate([turn], LONG)
        assert completion.token_ids == fresh.token_ids
        assert completion.stats.committed == fresh.stats.committed


def learn(target: Target, drafter: Drafter, state: Any, texts: Sequence[list[int]]) -> None:
    """Let a drafter observe these tokens, with hidden states that depend on the tokens alone."""
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [77] * (longest - len(text)) for text in texts])
    hidden_states = target.embed(tokens).repeat(1, 1, len(drafter.target_layers)) if drafter.target_layers else None
    drafter.observe(state, tokens, hidden_states, [len(text) for text in texts])


def draft_tokens(drafter: Drafter, state: Any, anchors: Sequence[int], budget: int) -> list[list[int]]:
    """Paths to the nodes of each row's tree, padding excluded."""
    plan = ChainPlan(drafter.block_size, [SamplingParams()] * len(anchors)).as_tree(budget)
    proposal, actual = drafter.propose(state, torch.tensor(anchors), plan), []
    for tokens, parents in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
        kept = [node for node in range(len(tokens)) if node == 0 or parents[node] >= 0]
        actual.append([tokens[node] for node in kept] + [parents[node] for node in kept])
    return actual


@pytest.mark.parametrize("budget", [0, 12])
def test_sequences_at_any_slots_and_copies_draft_as_if_alone(
    target: Target, drafter: Drafter, budget: int, scatter: Callable[..., Any]
) -> None:
    state = scatter(drafter.new_state(1, 200), (130, 60), (3, 50), (60, 45))
    texts = {130: PROMPTS[4], 3: PROMPTS[9], 60: PROMPTS[2]}

    def same(*rows: int) -> None:
        anchors = [31 + row % 7 for row in rows]
        together = draft_tokens(drafter, state.of(rows), anchors, budget)
        for row, anchor, actual in zip(rows, anchors, together, strict=True):
            alone = drafter.new_state(1, 60)
            learn(target, drafter, alone, [texts[row]])
            assert actual == draft_tokens(drafter, alone, [anchor], budget)[0]

    def more(*rows: int, count: int) -> None:
        new = {row: [(13 * row + 5 * i) % 60 + 4 for i in range(count - place)] for place, row in enumerate(rows)}
        learn(target, drafter, state.of(rows), list(new.values()))
        for row in rows:
            texts[row] = texts[row] + new[row]

    learn(target, drafter, state, list(texts.values()))
    same(130, 3, 60)
    more(3, 130, count=6)
    same(60, 130, 3)
    state.close(60)
    state.open(55, 40)  # over slots that others' tokens are left on
    length = len(texts[130]) - 3
    state.copy(130, 55, length)
    texts[55] = texts[130][:length]
    more(55, 3, count=5)
    same(130, 55, 3)
    state.shrink(3, len(texts[3]) - 2)
    texts[3] = texts[3][:-2]
    state.close(55)
    state.open(55, 60)
    state.copy(3, 55, len(texts[3]))
    texts[55] = texts[3]
    same(55, 130)
    more(55, count=9)
    same(130, 55)


@pytest.mark.slow
@pytest.mark.parametrize("kind", thinned(FILES, keep=4, marks=[pytest.mark.long]))
def test_answers_on_a_gpu_are_those_on_a_cpu(request: pytest.FixtureRequest, tiny_target_dir: Path, kind: str) -> None:
    """On a pretended one, which refuses to mix devices."""
    fixture, params = FOLDERS[kind], [replace(each, max_new_tokens=5) for each in PARAMS[:2]]
    folder = request.getfixturevalue(fixture) if fixture else kind

    def answers(device: str) -> list[list[int]]:
        options = LoadOptions(dtype="float32", device=device, backend="native", compile="off")
        target, actual = load_target(tiny_target_dir, options), []
        for drafting in (DRAFTINGS["chain"], DRAFTINGS["tree"]):
            with Engine(target, load_drafter(folder, target=target), 2, drafting) as engine:
                actual += [each.token_ids for each in engine.generate(PROMPTS[3:5], params)]
        return actual

    expected = answers("cpu")
    with pretended_gpu():
        assert answers("cuda:0") == expected
