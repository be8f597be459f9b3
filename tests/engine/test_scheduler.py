"""Continuous batching: who runs, waits and leaves, and that no answer depends on the others."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
from copies import copy_with

from blockdraft.drafters import Drafter, load_drafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Engine, Request, scheduler
from blockdraft.engine.scheduler import MAX_PASSED
from blockdraft.nn.cache import SequenceState
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, Prompt, SamplingParams

PROMPTS = [[7, 60, 33, 12, 9], [5], [40, 41, 42, 43, 44, 45, 46, 47, 48], [20, 21, 22], [50, 60, 70, 80], [33] * 12]
MAX_STEPS = 2000  # more than any test takes, so that who waits for ever fails
LONG = [(7 * i + 3) % 200 for i in range(150)]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture(scope="module", params=["dflash", "none"])
def drafter(request: pytest.FixtureRequest, tiny_drafter_dir: Path, target: Target) -> Drafter:
    return load_drafter("none" if request.param == "none" else tiny_drafter_dir, target=target)


def greedy(count: int, **fields: object) -> SamplingParams:
    return SamplingParams(count, ignore_eos=True, **fields)  # type: ignore[arg-type]


def alone(target: Target, drafter: Drafter, prompt: list[int], params: SamplingParams) -> list[int]:
    return Engine(target, drafter, drafting=Drafting(None)).generate([prompt], params)[0].token_ids


class Spy:
    """A target that records the nodes per sequence of each forward."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.seen: list[list[int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.target, name)

    def forward(self, tokens, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.seen.append([tokens.size(1)] * tokens.size(0))
        return self.target.forward(tokens, *args, **kwargs)


class ByHand:
    """A new engine whose steps a test runs in its own thread."""

    def __init__(self, engine: Engine) -> None:
        spy = Spy(engine.target)
        engine.target = spy  # type: ignore[assignment]
        self.engine, self.scheduler, self.seen = engine, engine.scheduler, spy.seen

    def submit(self, prompt: Prompt, params: SamplingParams, urgent: bool = False) -> Request:
        request = self.engine.request(prompt, params)
        request.urgent = urgent
        self.scheduler.add([request])
        return request

    def run(self) -> None:
        self.step_until(lambda: self.scheduler.idle)

    def step_until(self, done: Callable[[], bool]) -> None:
        for _ in range(MAX_STEPS):
            if done():
                return
            self.scheduler.step()
        raise AssertionError(f"a request still waits after {MAX_STEPS} steps")


def test_requests_join_and_leave_between_steps(target: Target, drafter: Drafter) -> None:
    params = [greedy(40), greedy(9), SamplingParams(25, 0.8, seed=3), greedy(60), SamplingParams(33, 1.0, seed=4)]
    hand = ByHand(Engine(target, drafter, max_batch_size=3, drafting=Drafting(None)))
    requests: list[Request] = []
    together: set[int] = set()
    for prompt, param in zip(PROMPTS, params, strict=False):
        requests.append(hand.submit(prompt, param))
        for _ in range(3):  # so the next one arrives while this one runs
            hand.scheduler.step()
            together.add(len(hand.scheduler.running))
    hand.run()
    assert 3 in together and max(together) == 3
    for request, prompt, param in zip(requests, PROMPTS, params, strict=False):
        assert request.token_ids == alone(target, drafter, prompt, param)


def test_cancel_includes_a_request_that_is_being_admitted(target: Target) -> None:
    cancelled = list[list[Request]]()

    class State(SequenceState):
        def open(self, start: int, capacity: int) -> None:
            super().open(start, capacity)
            cancelled.append(hand.scheduler.cancel())

    class Drafter(NoDrafter):
        def new_state(self, batch: int, capacity: int) -> State:
            return State(batch, capacity)

    hand = ByHand(Engine(target, Drafter()))
    request = hand.submit(PROMPTS[0], greedy(9))
    hand.scheduler.step()
    assert cancelled == [[request]] and request.cancelled
    hand.run()
    assert request.finish_reason == "cancelled"


def test_the_first_to_come_is_the_first_to_run(target: Target, drafter: Drafter) -> None:
    hand = ByHand(Engine(target, drafter, max_batch_size=2, drafting=Drafting(None)))
    requests = [hand.submit(prompt, greedy(20)) for prompt in PROMPTS[:4]]
    hand.scheduler.step()
    assert (hand.scheduler.running, hand.scheduler.waiting) == (requests[:2], requests[2:])


def test_a_request_waits_for_slots(target: Target, drafter: Drafter) -> None:
    probe = Engine(target, drafter, drafting=Drafting(None))
    large, small = (probe.request(PROMPTS[0], greedy(count)).slots for count in (100, 10))
    hand = ByHand(Engine(target, drafter, cache_tokens=large + small, drafting=Drafting(None)))
    requests = [hand.submit(PROMPTS[0], params) for params in (greedy(100), greedy(10), greedy(10), greedy(10))]
    hand.scheduler.step()
    assert hand.scheduler.running == requests[:2]
    hand.run()
    assert [len(request.token_ids) for request in requests] == [100, 10, 10, 10]
    assert requests[0].token_ids[:10] == requests[3].token_ids
    with pytest.raises(ValueError, match=rf"needs {large} slots .* the cache has {small}; ask for fewer new tokens"):
        Engine(target, drafter, cache_tokens=small, drafting=Drafting(None)).submit(PROMPTS[0], greedy(100))


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_cancelled_request_frees_its_row_at_the_next_step(target: Target, drafter: Drafter, steps: int) -> None:
    hand = ByHand(Engine(target, drafter, max_batch_size=2, drafting=Drafting(None)))
    requests = [hand.submit(prompt, greedy(50)) for prompt in PROMPTS[:3]]
    for _ in range(steps):
        hand.scheduler.step()
    requests[0].cancel()
    before = list(requests[0].token_ids)
    assert hand.scheduler.step()[:1] == [requests[0]]
    assert requests[0] not in hand.scheduler.running + hand.scheduler.waiting
    assert (requests[0].finish_reason, requests[0].token_ids) == ("cancelled", before)
    assert requests[2] in hand.scheduler.running
    hand.run()
    for i in (1, 2):
        assert requests[i].token_ids == alone(target, drafter, PROMPTS[i], greedy(50))


def test_a_stop_string_inside_an_accepted_path_is_exact(target: Target, drafter: Drafter) -> None:
    [whole] = Engine(target, drafter, drafting=Drafting(None)).generate([PROMPTS[0]], greedy(60))
    assert target.tokenizer is not None
    middle = whole.text[len(whole.text) // 2 :][:3]
    at = whole.text.index(middle)
    [cut] = Engine(target, drafter, drafting=Drafting(None)).generate(
        [PROMPTS[0]], greedy(60, stop=(middle, "never said"))
    )
    assert (cut.text, cut.finish_reason) == (whole.text[:at], "stop")
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    decode = target.tokenizer.decode
    assert middle in decode(cut.token_ids) and middle not in decode(cut.token_ids[:-1])
    chunks = list(Engine(target, drafter, drafting=Drafting(None)).stream(PROMPTS[0], greedy(60, stop=(middle,))))
    assert "".join(chunk.text for chunk in chunks) == cut.text


# Prompts in parts.


def test_a_long_prompt_is_read_between_the_steps_of_others(target: Target, drafter: Drafter) -> None:
    hand = ByHand(Engine(target, drafter, prefill_tokens=20, drafting=Drafting(None)))
    first = hand.submit(PROMPTS[0], greedy(60))
    hand.scheduler.step()
    late = hand.submit(LONG, greedy(10))
    grown = []
    while not late.token_ids and len(grown) < MAX_STEPS:
        before = len(first.token_ids)
        hand.scheduler.step()
        grown.append(len(first.token_ids) - before)
    assert len(grown) == -(-len(LONG) // 20) and min(grown) >= 1
    hand.run()
    assert max(max(nodes) for nodes in hand.seen) == 20
    assert first.token_ids == alone(target, drafter, PROMPTS[0], greedy(60))
    assert late.token_ids == alone(target, drafter, LONG, greedy(10))


def test_short_prompts_are_read_together(target: Target, drafter: Drafter) -> None:
    hand = ByHand(Engine(target, drafter, drafting=Drafting(None)))
    requests = [hand.submit(prompt, greedy(20)) for prompt in PROMPTS]
    hand.scheduler.step()
    assert hand.seen[0] == [12] * 6
    [reading] = {request.stats.prefill_seconds for request in requests}
    assert sum(request.stats.read_seconds for request in requests) == pytest.approx(reading)


def test_prompts_that_are_read_together_keep_to_the_limit(target: Target, drafter: Drafter) -> None:
    """Padding counts."""
    hand = ByHand(Engine(target, drafter, prefill_tokens=20, drafting=Drafting(None)))
    for prompt in PROMPTS:
        hand.submit(prompt, greedy(20))
    hand.scheduler.step()
    assert all(sum(nodes) <= 20 for nodes in hand.seen) and max(map(len, hand.seen)) > 1


def test_a_short_row_is_not_read_beside_a_prompt_that_it_has_no_slots_for(target: Target, drafter: Drafter) -> None:
    target = copy_with(target, row_slots=lambda tokens: tokens)  # of some targets they are rounded up
    hand = ByHand(Engine(target, drafter, drafting=Drafting(None)))
    for prompt in (PROMPTS[0], LONG[:100]):
        hand.submit(prompt, greedy(2))
    hand.scheduler.step()
    assert hand.seen == [[5], [100]]


@pytest.mark.parametrize("backend", ["native", "off", pytest.param("hf", marks=pytest.mark.slow)])
def test_prompts_that_begin_at_different_lengths_are_read_together(tiny_target_dir: Path, backend: str) -> None:
    """A second turn that is known for the most part, and a long new prompt: their rows are of unequal length."""
    own = load_target(tiny_target_dir, backend="hf" if backend == "hf" else "native",
                      compile="off" if backend == "off" else "auto")  # fmt: skip
    engine = Engine(own, load_drafter("none", target=own), prefix_tokens=20000)
    [first] = engine.generate([LONG[:80]], greedy(60))
    turns = [LONG[:80] + first.token_ids + [31, 17], LONG[::-1]]
    for turn, completion in zip(turns, engine.generate(turns, greedy(40)), strict=True):
        assert completion.token_ids == alone(own, load_drafter("none", target=own), turn, greedy(40))


# Short requests go first. 129 new tokens make a request long.


@pytest.mark.parametrize("urgent", [False, True])
def test_a_short_request_ends_before_a_long_prompt_is_read(target: Target, drafter: Drafter, urgent: bool) -> None:
    hand = ByHand(Engine(target, drafter, prefill_tokens=5, drafting=Drafting(None)))
    long = hand.submit(LONG[:100], greedy(129))
    hand.scheduler.step()
    short = hand.submit(PROMPTS[0], greedy(150 if urgent else 20), urgent)
    hand.step_until(lambda: short.finished)
    assert long.token_ids == []
    hand.run()
    assert short.token_ids == alone(target, drafter, PROMPTS[0], short.params)
    assert long.token_ids == alone(target, drafter, LONG[:100], long.params)


def test_the_shorter_of_two_long_prompts_is_read_first(target: Target, drafter: Drafter) -> None:
    hand = ByHand(Engine(target, drafter, prefill_tokens=10, drafting=Drafting(None)))
    longer = hand.submit(LONG[:100], greedy(129))
    hand.scheduler.step()
    shorter = hand.submit(LONG[100:140], greedy(129))
    hand.step_until(lambda: bool(shorter.token_ids))
    assert longer.token_ids == []
    hand.run()


def test_requests_that_begin_alike_read_their_long_prompt_once(tiny_target_dir: Path, tmp_path: Path) -> None:
    """The second is short only once the first has read what they share."""
    copytree(tiny_target_dir, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    target = load_target(tmp_path)
    drafter = load_drafter("none", target=target)
    prompt = [(7 * i * i + 3) % 200 for i in range(300)]
    hand = ByHand(Engine(target, drafter, prefill_tokens=50, drafting=Drafting(None)))
    first, second = hand.submit(prompt, greedy(9)), hand.submit([*prompt, 5], greedy(9))
    hand.step_until(lambda: bool(first.token_ids))
    third = hand.submit([*prompt, 6], greedy(9))
    hand.run()
    assert [request.stats.remembered for request in (first, second, third)] == [0, 300, 300]
    for request in (first, second, third):
        assert request.token_ids == alone(target, drafter, request.prompt, request.params)


def test_an_urgent_request_copies_what_a_long_one_has_read(target: Target, drafter: Drafter) -> None:
    hand = ByHand(Engine(target, drafter, prefill_tokens=10, drafting=Drafting(None)))
    long = hand.submit(LONG[:120], greedy(129))
    hand.scheduler.step()
    urgent = hand.submit([*LONG[:100], 5], greedy(9), urgent=True)
    hand.step_until(lambda: urgent.finished)
    assert urgent.stats.remembered == 40 and long.token_ids == []
    hand.run()
    for request in (long, urgent):
        assert request.token_ids == alone(target, drafter, request.prompt, request.params)


def test_a_request_that_arrives_during_a_read_waits_for_that_read_only(target: Target, drafter: Drafter) -> None:
    hand = ByHand(Engine(target, drafter, prefill_tokens=10, drafting=Drafting(None)))
    long = hand.submit(LONG[:100], greedy(129))
    forward, arrived = hand.engine.target.forward, list[Request]()

    def forward_while_one_arrives(*args, **kwargs):  # type: ignore[no-untyped-def]
        if not arrived:
            arrived.append(hand.submit(PROMPTS[0], greedy(9)))
        return forward(*args, **kwargs)

    hand.engine.target.forward = forward_while_one_arrives  # type: ignore[method-assign]
    hand.scheduler.step()
    assert long.num_prefilled == 10
    hand.run()


class SlowTarget:
    """A clock on which a forward takes 0.04 s and 0.01 s for each node."""

    def __init__(self, hand: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.reads: list[tuple[float, int]] = []  # time and nodes of forwards that read more than a step does
        forward = hand.engine.target.forward

        def slow(tokens, *args, **kwargs):  # type: ignore[no-untyped-def]
            self.now += 0.04 + 0.01 * tokens.numel()
            if tokens.size(1) > 8:
                self.reads.append((self.now, tokens.numel()))
            return forward(tokens, *args, **kwargs)

        hand.engine.target.forward = slow  # type: ignore[method-assign]
        monkeypatch.setattr(scheduler, "time", self)

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.mark.parametrize("typing", [True, False])
def test_a_read_of_a_long_prompt_is_shorter_while_somebody_types(
    target: Target, drafter: Drafter, typing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = ByHand(Engine(target, drafter, drafting=Drafting(None)))
    clock = SlowTarget(hand, monkeypatch)
    hand.submit(PROMPTS[5], greedy(2), urgent=typing)
    hand.run()
    clock.reads.clear()
    long = hand.submit(LONG[:120], greedy(129))
    hand.step_until(lambda: bool(long.token_ids))
    nodes = [count for _, count in clock.reads]
    assert max(nodes) <= 25 if typing else 32 <= max(nodes) <= 50
    assert min(nodes[:-1]) >= 16
    hand.run()
    assert long.token_ids == alone(target, drafter, long.prompt, long.params)


def test_a_chat_goes_on_at_half_speed_beside_a_long_prompt(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = ByHand(Engine(target, drafter, drafting=Drafting(None)))
    clock = SlowTarget(hand, monkeypatch)
    chat = hand.submit(LONG[:20], greedy(200))
    hand.step_until(lambda: len(chat.token_ids) > 20)
    began, before = clock.now, len(chat.token_ids)
    alone_rate = before / clock.now
    clock.reads.clear()
    long = hand.submit(LONG[:30:-1], greedy(129))
    hand.step_until(lambda: bool(long.token_ids))
    assert all(nodes <= 25 for _, nodes in clock.reads)
    assert (len(chat.token_ids) - before) / (clock.now - began) > 0.4 * alone_rate
    assert clock.now - began < 2.6 * (0.01 * len(long.prompt) + 0.04 * len(clock.reads))  # nor does the prompt starve
    hand.run()
    assert chat.token_ids == alone(target, drafter, LONG[:20], chat.params)
    assert long.token_ids == alone(target, drafter, long.prompt, long.params)


def test_a_cancelled_prompt_is_read_no_further_than_the_read_in_progress(target: Target, drafter: Drafter) -> None:
    hand = ByHand(Engine(target, drafter, prefill_tokens=10, drafting=Drafting(None)))
    long = hand.submit(LONG[:120], greedy(129))
    forward = hand.engine.target.forward

    def forward_while_it_is_cancelled(*args, **kwargs):  # type: ignore[no-untyped-def]
        long.cancel()
        return forward(*args, **kwargs)

    hand.engine.target.forward = forward_while_it_is_cancelled  # type: ignore[method-assign]
    hand.scheduler.step()
    assert long.num_prefilled == 10
    hand.run()
    assert long.finish_reason == "cancelled"


def test_a_prompt_with_log_probabilities_is_read_alone(target: Target, drafter: Drafter) -> None:
    hand = ByHand(Engine(target, drafter, drafting=Drafting(None)))
    hand.submit(PROMPTS[0], greedy(9))
    scored = hand.submit(LONG[:60], greedy(9, prompt_logprobs=0))
    hand.scheduler.step()
    assert hand.seen[:2] == [[5], [60]] and len(scored.prompt_logprobs) == 60
    hand.run()


def test_copied_tokens_count_as_read_while_the_rest_waits(target: Target, drafter: Drafter) -> None:
    hand = ByHand(Engine(target, drafter, prefix_tokens=500, drafting=Drafting(None)))
    hand.submit(LONG[:60], greedy(9))
    hand.run()
    hand.submit(PROMPTS[0], greedy(20))
    hand.scheduler.step()
    long = hand.submit(LONG[:90], greedy(129))
    hand.scheduler.step()
    assert long.num_prefilled == long.stats.remembered == 60
    hand.run()
    assert long.token_ids == alone(target, drafter, long.prompt, long.params)


def test_chats_go_on_beside_short_requests(target: Target, drafter: Drafter) -> None:
    hand = ByHand(Engine(target, drafter, prefill_tokens=5, drafting=Drafting(None)))
    chat = hand.submit(LONG[:20], greedy(200))
    hand.step_until(lambda: bool(chat.token_ids))
    short = hand.submit(PROMPTS[2], greedy(9))
    while not short.finished:
        before = len(chat.token_ids)
        hand.scheduler.step()
        assert len(chat.token_ids) > before
    hand.run()
    assert chat.token_ids == alone(target, drafter, LONG[:20], chat.params)


def test_a_long_prompt_is_read_although_short_requests_keep_coming(
    target: Target, drafter: Drafter, constants: Callable[..., None]
) -> None:
    constants(scheduler, BESIDE_SECONDS=60, ALONE_SECONDS=60)  # a read that takes long makes the next ones shorter
    hand = ByHand(Engine(target, drafter, prefill_tokens=20, drafting=Drafting(None)))
    hand.submit(PROMPTS[1], greedy(9))
    hand.scheduler.step()
    long, steps = hand.submit(LONG[:100], greedy(129)), 0
    while not long.token_ids:
        if not hand.scheduler.waiting:
            hand.submit(PROMPTS[steps % 6], greedy(9))
        hand.scheduler.step()
        steps += 1
        assert steps <= -(-100 // 20) * (MAX_PASSED + 1)
    hand.run()
    assert long.token_ids == alone(target, drafter, LONG[:100], long.params)


def test_a_request_that_does_not_fit_lets_a_few_others_pass(target: Target, drafter: Drafter) -> None:
    probe = Engine(target, drafter, drafting=Drafting(None))
    large, small = (probe.request(PROMPTS[0], greedy(count)).slots for count in (200, 10))
    hand = ByHand(Engine(target, drafter, cache_tokens=large + 2 * small, drafting=Drafting(None)))
    running, waiting = hand.submit(PROMPTS[0], greedy(200)), hand.submit(PROMPTS[2], greedy(200))
    passed: list[Request] = []
    while not running.finished:
        if hand.scheduler.waiting == [waiting] * (not running.finished):
            passed.append(hand.submit(PROMPTS[3], greedy(2)))
        hand.scheduler.step()
    assert waiting.token_ids == []
    assert sum(request.finished for request in passed) == MAX_PASSED
    hand.run()
    assert waiting.token_ids == alone(target, drafter, PROMPTS[2], greedy(200))


# Prefixes.


def remembered(engine: Engine, prompt: list[int]) -> int:
    """Tokens of this prompt that the engine copies instead of reading."""
    return engine.generate([prompt], greedy(1))[0].stats.remembered


def assert_all_slots_are_free(engine: Engine, count: int) -> None:
    """As many large requests as the cache holds run at once."""
    share, new = engine.cache_tokens // count, 1
    while engine.request(PROMPTS[1], greedy(new + 1)).slots <= share:
        new += 1
    requests = [engine.request(PROMPTS[1], greedy(new)) for _ in range(count)]
    engine.scheduler.add(requests)
    engine.scheduler.step()
    assert engine.scheduler.running == requests
    engine.scheduler.cancel()
    engine.scheduler.step()


@pytest.mark.parametrize("shared", [16, 17, 40])
def test_a_known_beginning_is_not_read_again(target: Target, drafter: Drafter, shared: int) -> None:
    """The next turn of a chat: the same tokens and the same acceptance as without the memory."""
    engine = Engine(target, drafter, prefix_tokens=500, drafting=Drafting(None))
    [first] = engine.generate([PROMPTS[0]], greedy(40))
    turn = (PROMPTS[0] + first.token_ids)[:shared] + [31, 17, 55]
    [again] = engine.generate([turn], greedy(40))
    assert again.stats.remembered == shared
    [fresh] = Engine(target, drafter, drafting=Drafting(None)).generate([turn], greedy(40))
    assert again.token_ids == fresh.token_ids
    assert again.stats.committed == fresh.stats.committed


def test_a_beginning_below_a_block_is_read_again(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, prefix_tokens=500, drafting=Drafting(None))
    engine.generate([PROMPTS[5]], greedy(2))
    assert remembered(engine, PROMPTS[5] + [3]) == 0


def test_what_running_requests_have_in_common_is_read_once(target: Target, drafter: Drafter) -> None:
    """Sixteen requests with one system prompt, and no finished ones remembered."""
    hand = ByHand(Engine(target, drafter, max_batch_size=16, prefill_tokens=32, drafting=Drafting(None)))
    prompts = [LONG[:100] + [10 + i, 3] for i in range(16)]
    requests = [hand.submit(prompt, greedy(20)) for prompt in prompts]
    hand.step_until(lambda: all(request.token_ids for request in requests))
    read = sum(sum(nodes) for nodes in hand.seen if max(nodes) > 8 or len(set(nodes)) == 1 and nodes[0] in (2, 4, 6))
    assert sum(1 for nodes in hand.seen if nodes == [32]) == 3  # 96 of the 102 tokens of the first, and of it alone
    assert read < 102 + 16 * 60
    hand.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.token_ids == alone(target, drafter, prompt, greedy(20))


@pytest.mark.parametrize("prefix_tokens", [0, 500])
@pytest.mark.parametrize("late", [False, True])
def test_what_a_cancelled_request_has_read_is_not_read_again(
    target: Target, drafter: Drafter, prefix_tokens: int, late: bool
) -> None:
    """The second request, such as the next keystroke, comes before or after the first is cancelled."""
    engine = Engine(target, drafter, prefill_tokens=8, prefix_tokens=prefix_tokens, drafting=Drafting(None))
    hand = ByHand(engine)
    first = hand.submit(LONG[:100] + [4], greedy(20))
    if not late:
        second = hand.submit(LONG[:100] + [5], greedy(20))
    hand.scheduler.step()
    read = sum(sum(nodes) for nodes in hand.seen)
    first.cancel()
    if late:
        second = hand.submit(LONG[:100] + [5], greedy(20))
    hand.run()
    assert (first.finish_reason, first.token_ids) == ("cancelled", [])
    assert second.stats.remembered == (0 if late and not prefix_tokens else read)
    assert second.token_ids == alone(target, drafter, LONG[:100] + [5], greedy(20))


def test_prefix_hits_of_different_lengths_share_a_batch(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, prefix_tokens=500, drafting=Drafting(None))
    known = engine.generate(PROMPTS[:3], greedy(40))
    turns = [PROMPTS[i] + known[i].token_ids[: 20 * i] + [31, 17] for i in range(3)] + [[64, 65]]
    together = engine.generate(turns, greedy(30))
    for turn, completion in zip(turns, together, strict=True):
        [fresh] = Engine(target, drafter, drafting=Drafting(None)).generate([turn], greedy(30))
        assert completion.token_ids == fresh.token_ids
        assert completion.stats.committed == fresh.stats.committed


def test_a_prompt_that_is_known_as_a_whole_still_yields_logits(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, prefix_tokens=500, drafting=Drafting(None))
    first, again = (engine.generate([LONG[:40]], greedy(30))[0] for _ in range(2))
    assert again.token_ids == first.token_ids


def test_the_memory_of_prefixes_is_bounded(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, prefix_tokens=60, drafting=Drafting(None))
    for prompt in PROMPTS:
        engine.generate([prompt], greedy(20))
    latest, first = (
        [*prompt, *alone(target, drafter, prompt, greedy(20))[:15], 3] for prompt in (PROMPTS[-1], PROMPTS[0])
    )
    assert remembered(engine, latest) == len(latest) - 1
    assert remembered(engine, first) == 0


def test_the_beginning_that_was_used_last_is_kept(target: Target, drafter: Drafter) -> None:
    """Two are remembered; a third request begins like the older one, and remembering it evicts one of them."""
    engine = Engine(target, drafter, prefix_tokens=110, drafting=Drafting(None))
    older, newer = LONG[:40], LONG[:40:-1][:40]
    for prompt in (older, newer, [*older[:32], *newer[:8]]):
        engine.generate([prompt], greedy(8))
    assert remembered(engine, [*older, 3]) == 40
    assert remembered(engine, [*newer, 3]) == 0


def test_urgent_requests_leave_the_beginnings_of_others(target: Target, drafter: Drafter) -> None:
    """Only a share of what is remembered is theirs, but the newest in any case."""
    engine = Engine(target, drafter, prefix_tokens=280, drafting=Drafting(None))
    chat = LONG[:100]
    engine.generate([chat], greedy(8))
    for i in range(6):
        typed = [50 + i, *LONG[:60]]
        engine.submit(typed, greedy(3), urgent=True).result()
    assert remembered(engine, [*chat, 3]) == 100
    assert remembered(engine, [*typed, 3]) == len(typed)


def test_what_is_remembered_makes_room_for_who_runs(target: Target, drafter: Drafter) -> None:
    """One after the other, in a cache for one request and the rest of another."""
    probe = Engine(target, drafter, drafting=Drafting(None))
    size = probe.request(LONG, greedy(20)).slots
    engine = Engine(target, drafter, prefix_tokens=400, cache_tokens=size + 60, drafting=Drafting(None))
    for i in range(4):
        prompt = [i + 9, *LONG[1:]]
        [completion] = engine.generate([prompt], greedy(20))
        assert completion.token_ids == alone(target, drafter, prompt, greedy(20))


def test_a_request_that_needs_all_slots_goes_on_in_those_of_its_prefix(target: Target, drafter: Drafter) -> None:
    """An agent's turns without a limit of their answers, and another client's short request between them."""
    size = Engine(target, drafter, drafting=Drafting(None)).request(LONG, greedy(20)).slots
    hand = ByHand(Engine(target, drafter, prefix_tokens=400, cache_tokens=size, drafting=Drafting(None)))
    engine = hand.engine

    def turn(prompt: list[int]) -> int:
        limit = 20
        while engine.request(prompt, greedy(limit)).slots < size:
            limit += 1
        request = hand.submit(prompt, greedy(limit))
        hand.step_until(lambda: len(request.token_ids) >= 4)
        request.cancel()
        hand.run()
        assert request.token_ids == alone(target, drafter, prompt, greedy(20))[: len(request.token_ids)]
        return request.stats.remembered

    assert turn(LONG[:60]) == 0
    assert turn([*LONG[:60], 5, 6]) == 60
    hand.submit(LONG[::-1][:16], greedy(1))
    hand.run()
    assert turn([*LONG[:61], 7, 8]) == 60  # instead of 5 and 6, and the other request's tokens are in the way
    assert turn([*LONG[:40], 9]) == 40
    assert turn([*LONG[:60], 5]) == 40  # the last turn has evicted the rest
    assert turn(LONG[::-1][:20]) == 0  # all slots are free again


def test_a_prefix_is_read_again_where_a_request_cannot_go_on_in_its_slots(target: Target, drafter: Drafter) -> None:
    """Its slots are the last ones."""
    probe = Engine(target, drafter, drafting=Drafting(None))
    first, size = probe.request([9] * 20, greedy(30)).slots, probe.request(LONG[:100], greedy(20)).slots
    hand = ByHand(Engine(target, drafter, prefix_tokens=400, cache_tokens=first + size, drafting=Drafting(None)))
    before, kept = hand.submit([9] * 20, greedy(30)), hand.submit(LONG[:100], greedy(8))
    hand.step_until(lambda: kept.finished)
    before.cancel()
    hand.run()
    again = hand.submit([*LONG[:100], 3], greedy(first + 10))
    hand.run()
    assert again.stats.remembered == 0
    assert again.token_ids == alone(target, drafter, [*LONG[:100], 3], greedy(first + 10))


def test_the_prefix_of_a_failed_request_is_not_copied(target: Target) -> None:
    class Drafter(NoDrafter):
        calls = 0

        def observe(self, *args: object) -> None:
            self.calls += 1
            if self.calls == 3:
                raise ValueError("broken")

    hand = ByHand(Engine(target, Drafter(), prefill_tokens=10))
    failing, waiting = hand.submit(LONG, greedy(9)), hand.submit([*LONG, 5], greedy(9))
    hand.run()
    assert failing.finish_reason == "error" and waiting.stats.remembered == 0
    assert waiting.token_ids == alone(target, NoDrafter(), [*LONG, 5], greedy(9))


def test_what_is_remembered_stays_where_its_slots_would_not_suffice(target: Target, drafter: Drafter) -> None:
    size = Engine(target, drafter, drafting=Drafting(None)).request(LONG, greedy(20)).slots
    engine = Engine(target, drafter, prefix_tokens=400, cache_tokens=size + 60, drafting=Drafting(None))
    hand = ByHand(engine)
    hand.submit(LONG[:40], greedy(8))
    hand.run()
    requests = [hand.submit([9, *LONG[1:]], greedy(20)) for _ in range(2)]
    hand.scheduler.step()
    assert (hand.scheduler.running, hand.scheduler.waiting) == (requests[:1], requests[1:])
    hand.scheduler.cancel()
    hand.run()
    again = hand.submit([*LONG[:40], 3], greedy(1))
    hand.run()
    assert again.stats.remembered == 40


@pytest.mark.parametrize("drafting", [Drafting(None), Drafting(tree_budget=6), Drafting("auto")])
def test_rows_come_and_go_and_nothing_is_left(target: Target, drafter: Drafter, drafting: Drafting) -> None:
    """Rows of many sizes in a small cache: in the end all slots are free, and all answers are right."""
    engine = Engine(target, drafter, 4, drafting, cache_tokens=900, prefix_tokens=0)
    prompts = [LONG[i : i + 5 + 13 * (i % 7)] for i in range(24)]
    params = [greedy(5 + 11 * (i % 5)) for i in range(24)]
    for prompt, param, completion in zip(prompts, params, engine.generate(prompts, params), strict=True):
        assert completion.token_ids == alone(target, drafter, prompt, param)
    engine.close()
    with Engine(target, drafter, 4, drafting, cache_tokens=900, prefix_tokens=0) as engine:
        hand = ByHand(engine)
        for prompt, param in zip(prompts, params, strict=True):
            hand.submit(prompt, param)
        hand.run()
        assert_all_slots_are_free(engine, 4)


def test_the_log_shows_how_long_a_prompt_takes(
    target: Target,
    drafter: Drafter,
    monkeypatch: pytest.MonkeyPatch,
    constants: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    constants(scheduler, EXPLAINED_TOKENS=100, LOG_SECONDS=0.5)
    caplog.set_level("INFO", "blockdraft")
    hand = ByHand(Engine(target, drafter, prefill_tokens=50, drafting=Drafting(None)))
    SlowTarget(hand, monkeypatch)
    for prompt in (LONG[:120], LONG[-120:]):
        hand.submit(prompt, greedy(2)).instruction_tokens = 110
        hand.run()
    explained, *lines = caplog.records
    assert explained.getMessage().startswith("First request of this client: its instructions of 110 tokens are read")
    assert lines[0].getMessage() == "Prefill: 50 of 120 tokens, about 1 s left" and lines[0].progress  # type: ignore[attr-defined]
    assert all(record.getMessage().startswith("Prefill: ") for record in lines)  # it explains once
