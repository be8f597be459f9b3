import gc
import json
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.decode.proposal import ChainPlan, SampledPlan
from blockdraft.drafters import hits, load_drafter
from blockdraft.drafters.ahead import NAME, AheadDrafter, AheadState, _stop_all, on_its_own
from blockdraft.drafters.draft_lm import DraftLMDrafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.targets import Target, TargetOutput
from blockdraft.types import Drafting, RequestDrafting, SamplingParams

COUNT = 3  # outcomes that are drafted for
GREEDY = SamplingParams(24, ignore_eos=True)
PROMPTS = [[(5 * i * i + 7 * row) % 60 + 4 for i in range(1 + 3 * row)] for row in range(5)]


class Pace:
    """Counts the forwards of a draft model, and can delay those that draft ahead or make them fail."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._forward, self._free = model.forward, threading.Semaphore(0)
        self._waits, self._over = threading.Semaphore(0), threading.Semaphore(0)
        self.held, self.fails_at = False, 0
        self.ahead = self.usual = 0
        monkeypatch.setattr(model, "forward", self._paced)

    def _paced(self, *args: Any, **named: Any) -> TargetOutput:
        if threading.current_thread().name != NAME:
            self.usual += 1
            return self._forward(*args, **named)  # type: ignore[no-any-return]
        if self.held:
            self._waits.release()
            assert self._free.acquire(timeout=20)
        self.ahead += 1
        output: TargetOutput = self._forward(*args, **named)
        self._over.release()
        if self.ahead == self.fails_at:
            cache = args[2]
            for store in cache._stores():  # as a forward may leave it that did not come to its end
                store[..., cache.starts[0] + cache.lengths[0], :] = torch.nan
            raise MemoryError("full")
        return output

    def let(self, count: int) -> None:
        """Allow this number of forwards, and wait for their end."""
        for _ in range(count):
            assert self._waits.acquire(timeout=20)
            self._free.release()
            assert self._over.acquire(timeout=20)

    def wait_for_another(self) -> None:
        """Wait until the results of the last forward are stored, which is when the next forward begins."""
        assert self._waits.acquire(timeout=20)
        self._waits.release()

    def hurry_when_reported_to_stop(self, state: AheadState) -> None:
        """Let the delayed forward, and those after it, run as soon as the thread is asked to stop."""
        assert self._waits.acquire(timeout=20)
        stop = state.work._stop

        def go() -> None:
            assert stop.wait(20)
            self.held = False
            self._free.release()

        threading.Thread(target=go).start()


@pytest.fixture
def usual(tiny_lm_dir: Path, target: Target) -> DraftLMDrafter:
    loaded = load_drafter(tiny_lm_dir, target=target)
    assert isinstance(loaded, DraftLMDrafter)
    return loaded


@pytest.fixture
def drafter(tiny_lm_dir: Path, target: Target) -> AheadDrafter:
    loaded = load_drafter(tiny_lm_dir, target=target, device="cpu", ahead=COUNT)
    assert isinstance(loaded, AheadDrafter)
    return loaded


@pytest.fixture
def pace(drafter: AheadDrafter, monkeypatch: pytest.MonkeyPatch) -> Pace:
    return Pace(drafter._drafter.model, monkeypatch)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(20)
            assert not thread.is_alive()


def finish(state: AheadState) -> None:
    """Wait for the end of drafting ahead."""
    if state.work._thread is not None:
        state.work._thread.join(20)


def observe(drafter: Any, state: Any, rows: list[list[int]]) -> None:
    longest = max(map(len, rows))
    padded = torch.tensor([row + [77] * (longest - len(row)) for row in rows], dtype=torch.long)
    drafter.observe(state, padded, None, [len(row) for row in rows])


def foreseen_of(state: AheadState, row: int = 0) -> list[tuple[int, int]]:
    """Outcomes that were drafted for, best first: number of accepted draft tokens, and bonus token."""
    _, outcomes = state.work.drafts[row]
    return [(len(path) - 2, path[-1]) for path in outcomes][-COUNT:]


def begun(drafter: AheadDrafter, block_size: int = 5) -> tuple[AheadState, Tensor]:
    """State that was drafted ahead for, and the tokens of its proposal."""
    state = drafter.new_state(2, 60).of([60])
    observe(drafter, state, [[9, 8, 7]])
    return state, drafter.propose(state, torch.tensor([5]), ChainPlan(block_size, [GREEDY])).tokens[0]


def expected_after(usual: DraftLMDrafter, text: list[int], block_size: int = 5) -> list[int]:
    """Anchor and draft tokens behind a text whose last token is the anchor, without drafting ahead."""
    state = usual.new_state(1, 60)
    observe(usual, state, [text[:-1]])
    made: list[int] = usual.propose(state, torch.tensor(text[-1:]), ChainPlan(block_size, [GREEDY])).tokens[0].tolist()
    return made


# The draft tokens are those of the same model without drafting ahead.


@pytest.mark.parametrize("seconds", [None, [1.0, 1.1, 1.2, 1.4, 1.7]])
def test_draft_tokens_are_those_of_usual_drafting(
    drafter: AheadDrafter, usual: DraftLMDrafter, pace: Pace, seconds: list[float] | None
) -> None:
    """Also with rows that leave, come or commit nothing, outcomes drafted for or not, and unfinished drafts."""
    generator = torch.Generator().manual_seed(3)
    texts = [[9, 8, 7], [4] * 12, [30]]
    params = [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams()]
    ours, theirs = drafter.new_state(3, 90), usual.new_state(3, 90)
    rows = [0, 90, 180]
    anchor = torch.randint(4, 60, (3,), generator=generator)
    for each, state in ((drafter, ours), (usual, theirs)):
        observe(each, state, texts)
    for step in range(12):
        if step == 5:  # a row leaves, and another one comes in its place
            for state in (ours, theirs):
                state.close(90)
                state.open(90, 60)
            rows, texts = [0, 90, 180], [texts[0], list(range(20, 40)), texts[2]]
            for each, state in ((drafter, ours), (usual, theirs)):
                observe(each, state.of([90]), [texts[1]])
        if step == 8:  # another order, of fewer rows
            rows, texts, params, anchor = [180, 0], [texts[2], texts[0]], params[:2], anchor[[2, 0]]
        of_ours, of_theirs = ours.of(rows), theirs.of(rows)
        plan = ChainPlan(5 if step % 4 else 4, params[: len(rows)], step_seconds=seconds)
        hits_before = drafter.foreseen
        made = drafter.propose(of_ours, anchor, plan)
        expected = usual.propose(of_theirs, anchor, plan)
        assert made.tokens.tolist() == expected.tokens.tolist(), step
        assert torch.equal(made.parents, expected.parents)
        if expected.acceptance_probs is not None:
            assert made.acceptance_probs is not None
            torch.testing.assert_close(torch.tensor(made.acceptance_probs), torch.tensor(expected.acceptance_probs))
            torch.testing.assert_close(made.expected, expected.expected)
        if step in (1, 2, 3, 6, 7, 9, 10, 11):
            assert drafter.foreseen == hits_before + 1, step
        # Outcomes that were drafted for, except in every fourth step.
        finish(of_ours)
        new, following = list[list[int]](), list[int]()
        for place, row in enumerate(rows):
            likely = foreseen_of(of_ours, row) if row in of_ours.work.drafts else []
            accepted, token = likely[step % 3] if likely and step % 4 != 3 else (0, 63)
            new.append(made.tokens[place, : 1 + accepted].tolist())
            following.append(token)
        for each, state in ((drafter, of_ours), (usual, of_theirs)):
            observe(each, state, new)
        texts = [text + more for text, more in zip(texts, new, strict=True)]
        anchor = torch.tensor(following)
    assert 8 <= drafter.foreseen < drafter.tried


def test_sampled_draft_tokens_are_not_drafted_ahead(drafter: AheadDrafter, usual: DraftLMDrafter, pace: Pace) -> None:
    """Random numbers come with the plan. Rows at temperature 0 beside sampled ones are not drafted ahead either."""
    params = [SamplingParams(temperature=0.8), GREEDY]
    states: list[tuple[Any, Any]] = [(drafter, drafter.new_state(2, 60)), (usual, usual.new_state(2, 60))]
    for step in range(3):
        plan = SampledPlan(5, params, torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7)))
        made = [each.propose(state, torch.tensor([5, 6]), plan) for each, state in states]
        assert made[0].tokens.tolist() == made[1].tokens.tolist() and made[0].q is not None
        assert torch.equal(made[0].q[0].ids, made[1].q[0].ids) and made[0].q[1] is None
        for each, state in states:
            observe(each, state, made[0].tokens[:, : 1 + step].tolist())
    assert pace.ahead == drafter.tried == 0
    drafter.propose(states[0][1], torch.tensor([5, 6]), ChainPlan(5, [GREEDY] * 2))
    finish(states[0][1])
    assert pace.ahead == 5


# Which outcomes.


def test_the_likeliest_outcomes_are_drafted_for(drafter: AheadDrafter, usual: DraftLMDrafter) -> None:
    state, chain = begun(drafter)
    finish(state)
    alone, outcomes = usual.new_state(1, 60), list[tuple[float, int, int]]()
    text, survival = [9, 8, 7], 0.0
    for place, token in enumerate(chain.tolist()):
        text.append(token)
        dist = usual._read(alone, [text])[0].log_softmax(-1)
        following = chain[place + 1] if place + 1 < len(chain) else -1
        outcomes += [
            (survival + float(acceptance_prob), place, id) for id, acceptance_prob in enumerate(dist) if id != following
        ]
        survival += float(dist[following])
    assert foreseen_of(state, 60) == [each[1:] for each in sorted(outcomes, reverse=True)[:COUNT]]


def test_a_request_with_shorter_blocks_finds_its_outcomes_on_the_chain(drafter: AheadDrafter, pace: Pace) -> None:
    """If fewer draft tokens are verified than were made, the likeliest bonus after them is the next draft token."""
    state, chain = begun(drafter)
    finish(state)
    observe(drafter, state, [chain[:2].tolist()])
    pace.usual = 0
    assert drafter.propose(state, chain[2:3], ChainPlan(3, [GREEDY])).tokens[0].tolist() == chain[2:].tolist()
    assert (drafter.foreseen, pace.usual) == (1, 0)


# Drafts that are not ready.


@pytest.mark.parametrize("passes", range(1, 6))  # one for the outcomes, and one for each of four draft tokens
def test_what_is_not_ready_is_drafted_as_usual(
    drafter: AheadDrafter, usual: DraftLMDrafter, pace: Pace, passes: int
) -> None:
    """Only the forward that runs when the target has verified is waited for."""
    pace.held = True
    state, chain = begun(drafter)
    pace.let(1)
    pace.wait_for_another()  # it is known what is drafted for
    pace.let(passes - 1)
    place, token = foreseen_of(state, 60)[1]
    if passes < 5:
        pace.hurry_when_reported_to_stop(state)
    committed = chain[: 1 + place].tolist()
    observe(drafter, state, [committed])
    ready = min(passes, 4)
    assert pace.ahead == 1 + ready
    pace.usual, pace.held = 0, False
    made = drafter.propose(state, torch.tensor([token]), ChainPlan(5, [GREEDY])).tokens[0].tolist()
    assert made == expected_after(usual, [9, 8, 7, *committed, token])
    assert (pace.usual, drafter.foreseen, drafter.tried) == (4 - ready, 1, 1)
    finish(state)


def test_an_outcome_that_was_not_drafted_for(drafter: AheadDrafter, usual: DraftLMDrafter, pace: Pace) -> None:
    state, chain = begun(drafter)
    finish(state)
    observe(drafter, state, [chain[:2].tolist()])
    token = next(id for id in range(60) if (1, id) not in foreseen_of(state, 60) and id != chain[2])
    pace.usual = 0
    made = drafter.propose(state, torch.tensor([token]), ChainPlan(5, [GREEDY])).tokens[0].tolist()
    assert made == expected_after(usual, [9, 8, 7, *chain[:2].tolist(), token])
    assert (pace.usual, drafter.foreseen, drafter.tried) == (4, 0, 1)


def test_a_longer_block_goes_on_where_what_was_drafted_ends(
    drafter: AheadDrafter, usual: DraftLMDrafter, pace: Pace
) -> None:
    state, chain = begun(drafter, block_size=3)
    finish(state)
    place, token = foreseen_of(state, 60)[0]
    committed = chain[: 1 + place].tolist()
    observe(drafter, state, [committed])
    pace.usual = 0
    made = drafter.propose(state, torch.tensor([token]), ChainPlan(6, [GREEDY])).tokens[0].tolist()
    assert made == expected_after(usual, [9, 8, 7, *committed, token], 6)
    assert pace.usual == 3  # two of five were there


@pytest.mark.parametrize("fails_at", [1, 3])
def test_after_an_error_ahead_missing_draft_tokens_are_drafted_as_usual(
    drafter: AheadDrafter, usual: DraftLMDrafter, pace: Pace, fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    pace.fails_at = fails_at
    pace.held = True
    state, chain = begun(drafter)
    text = [9, 8, 7]
    pace.let(fails_at)
    pace.held = False
    finish(state)
    cache: Any = state.cache
    assert not any(store.isnan().any() for store in cache._stores())
    assert "Drafting ahead failed, and the next draft is made as usual: MemoryError" in caplog.text
    caplog.clear()
    for _ in range(3):
        place, token = foreseen_of(state, 60)[0] if state.work.drafts[60][1] else (1, 44)
        committed = chain[: 1 + place].tolist()
        observe(drafter, state, [committed])
        text += committed
        chain = drafter.propose(state, torch.tensor([token]), ChainPlan(5, [GREEDY])).tokens[0]
        assert chain.tolist() == expected_after(usual, [*text, token])
        finish(state)
    assert (drafter.foreseen, drafter.tried) == (3 if fails_at == 3 else 2, 3) and not caplog.text


def test_without_a_thread_drafts_are_the_usual_ones(
    drafter: AheadDrafter, usual: DraftLMDrafter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr("blockdraft.drafters.ahead.Thread.start", refuse)
    for reason, logged in (
        ("can't start new thread", True),
        ("can't create new thread at interpreter shutdown", False),
    ):
        state, chain = begun(drafter)
        observe(drafter, state, [chain[:1].tolist()])
        made = drafter.propose(state, torch.tensor([44]), ChainPlan(5, [GREEDY])).tokens[0].tolist()
        assert made == expected_after(usual, [9, 8, 7, 5, 44])
        assert (reason in caplog.text) == logged


@pytest.mark.parametrize(
    "meanwhile",
    [
        lambda state: state.open(0, 60),
        lambda state: state.close(60),
        lambda state: state.shrink(60, 2),
        lambda state: state.copy(60, 0, 3),
        lambda state: state.zero_slots(60),
        lambda state: _stop_all(),
    ],
)
def test_changes_to_a_state_wait_for_the_draft_on_it(
    drafter: AheadDrafter, usual: DraftLMDrafter, pace: Pace, meanwhile: Callable[[AheadState], None]
) -> None:
    pace.held = True
    state, _ = begun(drafter)
    pace.let(2)
    thread = state.work._thread
    assert thread is not None and thread.is_alive()
    pace.hurry_when_reported_to_stop(state)
    meanwhile(state)
    assert not thread.is_alive() and pace.ahead == 3
    pace.held = False
    other = state.of([0])
    made = drafter.propose(other, torch.tensor([17]), ChainPlan(5, [GREEDY])).tokens[0].tolist()
    copied = other.committed[0]
    assert made == expected_after(usual, [*copied, 17]) and len(copied) in (0, 3)
    finish(state)


def test_a_new_sequence_on_the_same_slots_has_no_drafts(drafter: AheadDrafter, usual: DraftLMDrafter) -> None:
    state, _ = begun(drafter)
    finish(state)
    _, outcomes = state.work.drafts[60]
    state.close(60)
    state.open(60, 60)
    assert 60 not in state.work.drafts and outcomes
    observe(drafter, state, [[9, 8, 7]])
    assert drafter.propose(state, torch.tensor([6]), ChainPlan(5, [GREEDY])).tokens[0].tolist() == expected_after(
        usual, [9, 8, 7, 6]
    )
    finish(state)


# Too few slots or positions.


def test_near_the_end_of_its_slots_fewer_draft_tokens_are_drafted_ahead(
    drafter: AheadDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    """A branch has a node for each of its draft tokens except the last."""
    caplog.clear()
    for slots, draft_tokens in ((30, 4), (8 + 3 * COUNT, 3), (8 + COUNT, 1), (7 + COUNT, 0), (8, 0), (7, None)):
        state = drafter.new_state(1, 60)
        state.close(0)
        state.open(0, slots)
        observe(drafter, state, [[9, 8, 7]])
        drafter.propose(state, torch.tensor([5]), ChainPlan(5, [GREEDY]))
        finish(state)
        outcomes = list(state.work.drafts[0][1].values())[-COUNT:]
        if draft_tokens is None:
            assert outcomes == []
        else:
            assert [len(each) for each in outcomes] == [draft_tokens] * COUNT
    assert not caplog.text


def test_near_the_end_of_its_context_nothing_is_drafted_ahead(
    target: Target, tiny_lm_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "short"
    shutil.copytree(tiny_lm_dir, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 20}))
    drafter, usual = load_drafter(folder, target=target, device="cpu", ahead=COUNT), load_drafter(folder, target=target)
    for length, begins in ((11, True), (12, False), (18, False), (25, False)):
        state, plain = drafter.new_state(1, 60), usual.new_state(1, 60)
        for each, one in ((drafter, state), (usual, plain)):
            observe(each, one, [[7 + i for i in range(length)]])
        plan, anchor = ChainPlan(5, [GREEDY]), torch.tensor([6])
        made, expected = drafter.propose(state, anchor, plan), usual.propose(plain, anchor, plan)
        assert made.tokens.tolist() == expected.tokens.tolist() and torch.equal(made.parents, expected.parents)
        assert (0 in state.work.drafts) == begins
        finish(state)


# In an engine.


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_engine_decodes_the_same_in_the_same_steps(
    target: Target, drafter: AheadDrafter, usual: DraftLMDrafter, temperature: float
) -> None:
    """Draft tokens do not depend on when the target is done, also with requests that come, go and limit drafting."""
    params = [SamplingParams(20 + 3 * i, temperature, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    bounds = [None, RequestDrafting(block_size=3), None, RequestDrafting(enabled=False), None]
    actual = []
    for each in (drafter, usual):
        with Engine(target, each, 2, Drafting(5), prefix_tokens=100) as engine:
            requests = [engine.submit(*one) for one in zip(PROMPTS, params, [None] * 5, bounds, strict=True)]
            actual.append([request.result().checked() for request in requests])
            alone = engine.generate([PROMPTS[2] + [5, 6, 7]], params[0])[0]
            actual[-1].append(alone)
    for ours, theirs in zip(*actual, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.stats.committed == theirs.stats.committed  # how many are drafted depends on requests beside it
    assert hits(drafter) == (drafter.foreseen, drafter.tried) and drafter.tried > 10
    assert hits(usual) == (0, 0)


def test_a_request_that_is_cancelled_leaves_no_thread(target: Target, drafter: AheadDrafter, pace: Pace) -> None:
    pace.held = True
    with Engine(target, drafter, 2, Drafting(5)) as engine:
        chunks = engine.stream(PROMPTS[2], SamplingParams(50, ignore_eos=True))
        next(chunks)  # of the prompt
        pace.let(1)
        pace.held = False
        pace._free.release(2)
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == NAME]


def test_a_member_of_a_hybrid_drafts_ahead(target: Target, tiny_lm_dir: Path) -> None:
    drafter = load_drafter(f"lookup+{tiny_lm_dir}", target=target, device="cpu", ahead=COUNT)
    with (
        Engine(target, drafter, drafting=Drafting(5)) as engine,
        Engine(target, load_drafter("none", target=target)) as plain,
    ):
        assert engine.generate(PROMPTS, GREEDY)[3].token_ids == plain.generate(PROMPTS, GREEDY)[3].token_ids
    assert hits(drafter)[1] > 0
    assert drafter.kind == "lookup+draft_lm"  # drafting ahead is no kind of its own


# Options.


def test_senseless_options_are_refused(
    target: Target, tiny_lm_dir: Path, tiny_drafter_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(match: str, path: Path | str = tiny_lm_dir, **given: Any) -> None:
        with pytest.raises(UsageError, match=match):
            load_drafter(path, target=target, **given)

    refused("ahead must be at least 0.*, got -1", ahead=-1)
    refused("ahead is 2, and the draft model would share cpu .*--drafter-device cuda:1", ahead=2)
    refused(f"{tiny_drafter_dir} cannot run on cpu .* only a smaller language model", tiny_drafter_dir, device="cpu")
    refused("The drafter lookup cannot run on cpu", "lookup", device="cpu", ahead=2)
    refused("Device cuda:99 is not usable here", device="cuda:99", ahead=2)
    caplog.clear()
    assert type(load_drafter(tiny_lm_dir, target=target, device="cpu")) is DraftLMDrafter
    assert not caplog.text
    load_drafter(tiny_lm_dir, target=target, device="cpu", ahead=1)
    assert "share the cores of this machine" in caplog.text


def test_one_gpu_is_not_enough(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(target, "device", gpu)
    monkeypatch.setattr("blockdraft.drafters.ahead.device_and_dtype", lambda device, _: (torch.device(device), None))
    with pytest.raises(UsageError, match="ahead is 2, and device is cuda:0, where the target runs"):
        on_its_own("cuda:0", 2, target)
    assert on_its_own("cuda:1", 2, target) == torch.device("cuda:1")
    assert on_its_own("cuda:0", 0, target) == gpu
    assert on_its_own(None, 0, target) is None


def test_models_that_cannot_draft_ahead_are_refused(
    target: Target, usual: DraftLMDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="is the target itself"):
        AheadDrafter(DraftLMDrafter(target, target), target, 2)
    monkeypatch.setattr(usual.model, "has_trees", False)
    with pytest.raises(UsageError, match=r"ahead is 2, and the backend native .* chains only"):
        AheadDrafter(usual, target, 2)


def test_an_unused_state_is_freed(drafter: AheadDrafter) -> None:
    state, _ = begun(drafter)
    finish(state)
    work = weakref.ref(state.work)
    del state
    gc.collect()
    assert work() is None
