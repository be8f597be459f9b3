"""An engine may be called from any thread, and from coroutines."""

import asyncio
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from scripts import run_script
from thinned import LONG

from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Chunk, Engine, Request
from blockdraft.engine.adaptive import costs
from blockdraft.engine.worker import worker_of
from blockdraft.errors import ClosedError, UsageError
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

PROMPTS = [[7 + i, 60, 33, 12 + i, 9] for i in range(12)]
GREEDY = SamplingParams(30, ignore_eos=True)


@pytest.fixture(scope="module", params=["on", pytest.param("off", marks=LONG)])
def target(tiny_target_dir: Path, request: pytest.FixtureRequest) -> Target:
    return load_target(tiny_target_dir, backend="native", compile=request.param)


@pytest.fixture(scope="module")
def drafter(tiny_drafter_dir: Path, target: Target) -> Drafter:
    return load_drafter(tiny_drafter_dir, target=target)


@pytest.fixture(scope="module")
def expected(target: Target, drafter: Drafter) -> list[list[int]]:
    return [
        Engine(target, drafter, drafting=Drafting(None)).generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS
    ]


def in_threads(*work: object) -> None:
    """Run functions at the same time, and raise what one of them raises."""
    failed: list[BaseException] = []

    def run(function) -> None:  # type: ignore[no-untyped-def]
        try:
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def decoding() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "blockdraft"]


def test_several_threads_share_an_engine(target: Target, drafter: Drafter, expected: list[list[int]]) -> None:
    found: dict[int, list[int]] = {}
    with Engine(target, drafter, 4, drafting=Drafting(None)) as engine:

        def ask(number: int) -> None:
            found[number] = engine.submit(PROMPTS[number], GREEDY).result(60).token_ids

        def stream(number: int) -> None:
            found[number] = [token for chunk in engine.stream(PROMPTS[number], GREEDY) for token in chunk.token_ids]

        in_threads(*[lambda number=i: (ask, stream)[number % 2](number) for i in range(12)])  # type: ignore[misc]
    assert [found[number] for number in range(12)] == expected


def test_several_engines_share_a_target(target: Target, drafter: Drafter, expected: list[list[int]]) -> None:
    found: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        own = drafter if number % 2 else load_drafter("none", target=target)
        found[number] = [c.token_ids for c in Engine(target, own, 3, drafting=Drafting(None)).generate(PROMPTS, GREEDY)]

    in_threads(*[lambda number=i: work(number) for i in range(4)])  # type: ignore[misc]
    assert list(found.values()) == [expected] * 4


def test_no_thread_is_left_when_there_is_nothing_to_do(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    engine.generate(PROMPTS[:2], GREEDY)
    for thread in decoding():
        thread.join(10)
    assert decoding() == []
    engine.generate(PROMPTS[:2], GREEDY)
    engine.close()
    assert decoding() == []


def test_a_closed_engine_cancels_what_runs_and_takes_no_more(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, 1, drafting=Drafting(None))
    requests = [engine.submit(prompt, SamplingParams(200, ignore_eos=True)) for prompt in PROMPTS[:3]]
    engine.close()
    engine.close()
    assert {request.result(0).finish_reason for request in requests} <= {"cancelled", "length"}
    assert requests[2].result(0).finish_reason == "cancelled"
    with pytest.raises(ClosedError, match="make a new one"):
        engine.submit(PROMPTS[0], GREEDY)
    with pytest.raises(ClosedError):
        engine.generate(PROMPTS[:1], GREEDY)


def test_a_listener_may_close_its_engine(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    requests = [engine.submit(prompt, SamplingParams(200, ignore_eos=True)) for prompt in PROMPTS[:2]]
    requests.append(engine.submit(PROMPTS[2], SamplingParams(200, ignore_eos=True), lambda chunk: engine.close()))
    for request in requests:
        assert request.result(60).finish_reason in ("cancelled", "length")


@pytest.mark.parametrize(("other_cores", "is_stored"), [(None, True), (1.0, False)], ids=["idle", "busy"])
def test_step_times_are_stored_for_the_next_engine_unless_the_machine_is_busy(
    other_cores: float | None,
    is_stored: bool,
    other_work: dict[str, float | None],
    target: Target,
    drafter: Drafter,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    other_work["cores"] = other_cores
    file = costs.path(target, drafter)
    with Engine(target, drafter, drafting=Drafting("auto")) as engine:
        engine.generate(PROMPTS, GREEDY)
        assert costs.load(file) is None
    assert (costs.load(file) is not None) == is_stored
    with Engine(target, drafter, drafting=Drafting(None)) as fixed:
        fixed.generate(PROMPTS[:1], GREEDY)
    assert len(list((tmp_path / "costs").iterdir()) if is_stored else []) == is_stored


def test_each_drafter_of_a_combination_begins_with_what_is_stored_of_it(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model of which nothing is stored begins with what was measured of the whole combination."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    both = load_drafter(f"lookup+{drafter.path}", target=target)
    measured, own = (costs.Costs((1,), (plain,), (((3, 2 * plain),),), ((),)) for plain in (7.0, 5.0))

    def begins_with() -> costs.Costs | None:
        return costs.load_for(target, both, both.parts[1])

    costs.store(costs.path(target, both), measured, costs.pair_of(target, both))
    assert begins_with() == measured and costs.load_for(target, both, both.parts[0]) is None
    costs.store(costs.path(target, drafter), own, costs.pair_of(target, drafter))
    assert begins_with() == own


def test_a_stream_that_is_dropped_cancels_its_request(target: Target, drafter: Drafter) -> None:
    with Engine(target, drafter, drafting=Drafting(None)) as engine:
        chunks = engine.stream(PROMPTS[0], SamplingParams(240, ignore_eos=True))
        next(chunks)
        [request] = engine.scheduler.running
        assert not request.cancelled
        chunks.close()  # type: ignore[attr-defined]
        assert request.cancelled


def test_an_interrupt_while_waiting_cancels_the_requests(target: Target, drafter: Drafter) -> None:
    with Engine(target, drafter, drafting=Drafting(None)) as engine:
        params = SamplingParams(240, ignore_eos=True)
        requests = [engine.request(prompt, params) for prompt in PROMPTS[:2]]
        engine.request = Mock(side_effect=requests)  # type: ignore[method-assign]
        requests[0].result = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:2])
        assert all(request.cancelled for request in requests)


def test_waiting_can_time_out(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    request = engine.request(PROMPTS[0], GREEDY)
    with pytest.raises(TimeoutError, match=r"not ended after 0\.01 s"):
        request.result(0.01)


def test_coroutines(target: Target, drafter: Drafter, expected: list[list[int]]) -> None:
    async def joined(engine: Engine, prompt: list[int]) -> list[int]:
        return [token async for chunk in engine.astream(prompt, GREEDY) for token in chunk.token_ids]

    async def main() -> None:
        with Engine(target, drafter, 4, drafting=Drafting(None)) as engine:
            assert await asyncio.gather(*(joined(engine, prompt) for prompt in PROMPTS)) == expected
            with pytest.raises(UsageError, match="prompt is empty"):
                await joined(engine, [])

    asyncio.run(main())


def test_a_cancelled_coroutine_cancels_its_request(target: Target, drafter: Drafter) -> None:
    async def joined(engine: Engine) -> None:
        async for _ in engine.astream(PROMPTS[0], SamplingParams(240, ignore_eos=True)):
            pass

    async def main() -> None:
        with Engine(target, drafter, drafting=Drafting(None)) as engine:
            task = asyncio.create_task(joined(engine))
            while not engine.scheduler.running:
                await asyncio.sleep(0.001)
            [running] = engine.scheduler.running
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert running.cancelled

    asyncio.run(main())


def test_a_coroutine_that_is_called_off_before_its_request_begins_leaves_none_behind(
    target: Target, drafter: Drafter
) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    inside, go_on, request = threading.Event(), threading.Event(), engine.request

    def slow(*args: object) -> Request:
        inside.set()
        go_on.wait(10)
        return request(*args)  # type: ignore[arg-type]

    async def main() -> None:
        task = asyncio.ensure_future(anext(aiter(engine.astream(PROMPTS[0], GREEDY))))
        await asyncio.to_thread(inside.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    engine.request = slow  # type: ignore[method-assign]
    asyncio.run(main())  # which waits for its threads
    assert engine._scheduler is None


def test_a_thread_that_did_not_come_along_into_a_forked_process_is_made_anew(
    target: Target, drafter: Drafter, expected: list[list[int]]
) -> None:
    engine = Engine(target, drafter, drafting=Drafting(None))
    engine.worker.join()
    engine.worker.thread = gone = threading.Thread()
    gone.start()
    gone.join()
    assert engine.submit(PROMPTS[0], GREEDY).result(20).token_ids == expected[0]


FORKED = """
import os, sys, threading, time, torch
from blockdraft import Engine, SamplingParams, load_drafter, load_target
torch.set_num_threads(2)
target = load_target(sys.argv[1])
engine = Engine(target, load_drafter("none", target=target))
if sys.argv[2] == "team":  # of OpenMP threads, in the thread that forks
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
running, inside = None, threading.Event()
if sys.argv[2] == "step":  # which the forked process must not begin in
    def listen(chunk):
        inside.set()
        time.sleep(0.05)
    running = engine.submit([5, 6, 7], SamplingParams(30, ignore_eos=True), listen)
    inside.wait()
child = os.fork()
found = engine.generate([[7, 60, 33]], SamplingParams(20, ignore_eos=True))[0].token_ids
line = " ".join(map(str, [*found, running and running.result().finish_reason]))
os.write(1, f"{line}\\n".encode())  # at once: both processes write to one pipe
if not child:
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.slow
@pytest.mark.parametrize(("when", "ends"), [("idle", ["None"]), ("team", ["None"]), ("step", ["cancelled", "length"])])
def test_a_forked_process_decodes_and_leaves_alone_what_runs(when: str, ends: list[str], tiny_target_dir: Path) -> None:
    done = run_script(FORKED, tiny_target_dir, when)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.rpartition(" ") for line in done.stdout.splitlines()]
    assert len({line[0] for line in lines}) == 1 and len(lines) == 2
    assert sorted({line[2] for line in lines}) == ends


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "time.sleep(0.01); del engine; gc.collect()"])
def test_a_process_may_end_while_it_decodes(tiny_target_dir: Path, more: str) -> None:
    code = f"""
import gc, time
from blockdraft import Engine, SamplingParams, load_drafter, load_target
target = load_target({str(tiny_target_dir)!r})
engine = Engine(target, load_drafter("none", target=target))
for _ in range(8):
    engine.submit([5, 6, 7], SamplingParams(240, ignore_eos=True))
{more}
"""
    done = run_script(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_closing_an_engine_does_not_wait_for_requests_of_another(target: Target, drafter: Drafter) -> None:
    first, second = Engine(target, drafter, drafting=Drafting(None)), Engine(target, drafter, drafting=Drafting(None))
    first.generate([PROMPTS[0]], GREEDY)
    worker, held, released = worker_of(target), threading.Event(), threading.Event()

    def wait(chunk: Chunk) -> None:
        held.set()
        released.wait(60)

    # As if requests of the other engine came while the first one waits for the end of the thread.
    inner = worker.thread.join if worker.thread else None
    assert inner is not None
    requests = []

    def join(timeout: float | None = None) -> None:
        if not requests:
            requests.append(second.submit(PROMPTS[1], GREEDY, wait))
            held.wait(60)
        inner(timeout)

    worker.thread.join = join  # type: ignore[union-attr, method-assign]
    closing = threading.Thread(target=first.close)
    closing.start()
    closing.join(20)
    ended = not closing.is_alive()
    released.set()
    assert ended and requests[0].result(60).finish_reason == "length"
    closing.join(60)
