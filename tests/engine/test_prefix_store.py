"""Prefixes on disk: a new engine loads what an earlier one has stored, and its output is the same.

`drafters/test_lossless.py` tests it with every drafter.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scripts import run_script

from blockdraft.drafters import Drafter, load_drafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine import Engine, Request, prefix_store
from blockdraft.machine import cache_folder
from blockdraft.nn.cache import SequenceState
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

INSTRUCTIONS = [(7 * i * i + 3) % 60 + 4 for i in range(120)]
PROMPT = [*INSTRUCTIONS, 9, 30, 31, 12]
PARAMS = SamplingParams(24, ignore_eos=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    libraries = cache_folder() / "libraries"
    libraries.mkdir(parents=True, exist_ok=True)
    (tmp_path / "libraries").symlink_to(libraries)
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    return tmp_path / "prefixes"


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


def ask(target: Target, drafter: Drafter, prompt: list[int] = PROMPT, stored: int = 64, known: int = 120) -> Request:
    """Answer a prompt twice with a new engine, as after a restart, and return the first request.

    The second one stores the instructions.
    """
    with Engine(target, drafter, drafting=Drafting(min(4, drafter.block_size)), stored_prefix_tokens=stored) as engine:
        requests = [engine.submit(prompt, PARAMS, instruction_tokens=known) for _ in range(2)]
        for request in requests:
            request.result(60)
    return requests[0]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*")) if folder.exists() else []


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"kv_dtype": "int8"}, {"backend": "hf"}], ids=str)
def test_dtypes_and_backends(tiny_target_dir: Path, tiny_drafter_dir: Path, options: dict[str, str]) -> None:
    if "dtype" in options:
        options = options | {"dtype": getattr(torch, options["dtype"])}
    target = load_target(tiny_target_dir, **options)  # type: ignore[arg-type]
    drafter = load_drafter(tiny_drafter_dir, target=target)
    expected, first, second = (ask(target, drafter, stored=stored) for stored in (0, 64, 64))
    assert second.stats.remembered == 120
    assert first.token_ids == second.token_ids == expected.token_ids
    assert second.stats.committed == expected.stats.committed


def test_a_prompt_that_begins_alike_loads_the_common_part(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    ask(target, drafter)
    other = [*INSTRUCTIONS[:90], *[5] * 50]
    expected, loaded = ask(target, drafter, other, stored=0), ask(target, drafter, other)
    assert loaded.stats.remembered == 90 and loaded.token_ids == expected.token_ids
    whole = ask(target, drafter, INSTRUCTIONS)  # its last token must be read
    assert whole.stats.remembered == 119 and whole.token_ids == ask(target, drafter, INSTRUCTIONS, stored=0).token_ids


def test_only_long_new_instructions_are_stored(target: Target, folder: Path) -> None:
    drafter = load_drafter("none", target=target)
    ask(target, drafter, known=0)
    ask(target, drafter, known=63)
    assert files(folder) == []
    ask(target, drafter, known=100)
    (stored,) = files(folder)
    assert stored.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    ask(target, drafter, known=120)  # 20 tokens more are not worth a file
    assert files(folder) == [stored]
    ask(target, drafter, [*INSTRUCTIONS, *INSTRUCTIONS[:80]], known=200)  # in place of the one that it begins with
    assert len(files(folder)) == 1 and files(folder) != [stored]


def answer_all(target: Target, prompts: list[list[int]], known: int = 120) -> list[int]:
    """Answer prompts one after another with one engine, and return how many tokens each found in memory or on disk."""
    with Engine(target, load_drafter("none", target=target), prefix_tokens=0, stored_prefix_tokens=64) as engine:
        requests = []
        for prompt in prompts:
            requests.append(engine.submit(prompt, PARAMS, instruction_tokens=known))
            requests[-1].result(60)
    return [request.stats.remembered for request in requests]


def test_instructions_are_stored_when_they_come_again(target: Target, folder: Path) -> None:
    answer_all(target, [PROMPT, [5, 6, 7]])
    assert files(folder) == []
    answer_all(target, [PROMPT, [*INSTRUCTIONS, 8, 8]])
    assert len(files(folder)) == 1 and answer_all(target, [PROMPT]) == [120]


def test_instructions_that_begin_with_a_changing_value_write_no_files(target: Target, folder: Path) -> None:
    answer_all(target, [[time, *INSTRUCTIONS[1:]] for time in range(4, 30)])
    assert files(folder) == []


def test_of_instructions_that_end_with_a_changing_value_the_part_before_is_stored(target: Target, folder: Path) -> None:
    prompts = [[*INSTRUCTIONS[:100], time, *INSTRUCTIONS[101:], 9] for time in range(4, 9)]
    answer_all(target, prompts)
    assert len(files(folder)) == 1 and answer_all(target, prompts[:1]) == [100]


def test_the_least_recently_used_are_deleted(target: Target, folder: Path) -> None:
    drafter = load_drafter("none", target=target)
    ask(target, drafter)
    (first,) = files(folder)
    (folder.parent / "weights-limit").write_text(str(5 * (2 * first.stat().st_size + 100)))
    ask(target, drafter, [1, *PROMPT])
    assert len(files(folder)) == 2
    assert ask(target, drafter).stats.remembered == 120  # the first is used again
    ask(target, drafter, [2, *PROMPT])
    assert len(files(folder)) == 2 and first in files(folder)
    (folder.parent / "weights-limit").write_text("0")
    ask(target, drafter, [3, *PROMPT])
    assert len(files(folder)) == 2


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def other_tokens(path: Path) -> None:
    content = path.read_bytes()
    at = content.index(torch.tensor(INSTRUCTIONS, dtype=torch.int32).numpy().tobytes())
    path.write_bytes(content[:at] + content[at : at + 476] + b"\x05" + content[at + 477 :])


@pytest.mark.parametrize(
    "spoil",
    [flip, other_tokens, lambda path: path.write_bytes(path.read_bytes()[:-100]), lambda path: path.write_text("x")],
    ids=["changed", "other tokens", "truncated", "foreign"],
)
def test_invalid_files_are_logged_and_deleted(
    target: Target, folder: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    drafter = load_drafter("none", target=target)
    expected = ask(target, drafter)
    (stored,) = files(folder)
    spoil(stored)
    with caplog.at_level(logging.WARNING):
        again = ask(target, drafter, known=0)
    assert again.stats.remembered == 0 and again.token_ids == expected.token_ids
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert files(folder) == [] and str(stored) in record.getMessage()


def test_a_file_of_another_model_is_not_used(target: Target, folder: Path, tiny_drafter_dir: Path) -> None:
    ask(target, load_drafter("none", target=target))
    assert ask(target, load_drafter(tiny_drafter_dir, target=target), known=0).stats.remembered == 0
    assert len(files(folder)) == 1


@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"dtype": torch.bfloat16}, {"backend": "hf"}], ids=str)
def test_a_file_of_other_options_is_not_used(target: Target, tiny_target_dir: Path, options: dict[str, Any]) -> None:
    other = load_target(tiny_target_dir, **options)
    ask(other, load_drafter("none", target=other))
    assert ask(target, load_drafter("none", target=target), known=0).stats.remembered == 0


def test_exchanged_files_are_not_used(target: Target, folder: Path) -> None:
    drafter = load_drafter("none", target=target)
    other = [*reversed(INSTRUCTIONS), 9]
    expected = [ask(target, drafter, prompt).token_ids for prompt in (PROMPT, other)]
    with Engine(target, drafter, stored_prefix_tokens=64) as engine:
        assert engine.scheduler.idle  # it has read which tokens the files hold
        one, two = files(folder)
        one.rename(folder / "third")
        two.rename(one)
        (folder / "third").rename(two)
        completions = engine.generate([PROMPT, other], PARAMS)
    assert [completion.token_ids for completion in completions] == expected
    assert [completion.stats.remembered for completion in completions] == [0, 0]


def test_a_file_of_other_options_under_the_same_name_is_not_used(
    target: Target, tiny_target_dir: Path, folder: Path
) -> None:
    other = load_target(tiny_target_dir, dtype=torch.bfloat16)
    ask(other, load_drafter("none", target=other))
    (foreign,) = files(folder)
    drafter = load_drafter("none", target=target)
    expected = ask(target, drafter)
    (own,) = set(files(folder)) - {foreign}
    with Engine(target, drafter, stored_prefix_tokens=64) as engine:
        assert engine.scheduler.idle
        foreign.rename(own)
        request = engine.submit(PROMPT, PARAMS)
        assert request.result(60).token_ids == expected.token_ids
    assert request.stats.remembered == 0 and files(folder) == []


def test_a_request_that_failed_is_not_stored(target: Target, folder: Path) -> None:
    class Drafter(NoDrafter):
        broken = False

        def observe(self, *args: object) -> None:
            if self.broken:
                raise ValueError("broken")

    drafter = Drafter()
    with Engine(target, drafter, stored_prefix_tokens=64) as engine:
        engine.submit(PROMPT, PARAMS, instruction_tokens=120).result(60)
        drafter.broken = True
        request = engine.submit(PROMPT, PARAMS, instruction_tokens=120)
        assert request.result(60).finish_reason == "error"
    assert request.num_prefilled == len(PROMPT) and files(folder) == []


def test_prompts_with_log_probabilities_are_scored(target: Target) -> None:
    drafter, params = load_drafter("none", target=target), SamplingParams(4, prompt_logprobs=0)
    ask(target, drafter)
    with Engine(target, drafter, stored_prefix_tokens=64) as engine, Engine(target, drafter) as plain:
        [scored], [expected] = engine.generate([PROMPT], params), plain.generate([PROMPT], params)
    assert scored.prompt_logprobs == expected.prompt_logprobs and scored.stats.remembered == 0


@pytest.mark.parametrize(("urgent", "steps"), [(False, 3), (False, 1), (True, 3)], ids=["read", "short", "typed"])
def test_what_was_read_of_a_cancelled_prompt_is_stored(target: Target, folder: Path, urgent: bool, steps: int) -> None:
    with Engine(target, prefill_tokens=8, prefix_tokens=0, stored_prefix_tokens=64) as engine:
        request = engine.request(PROMPT, PARAMS)
        request.urgent = urgent
        engine.scheduler.add([request])
        for _ in range(steps):
            engine.scheduler.step()
        request.cancel()
        engine.scheduler.step()
    assert request.num_prefilled == 32 * steps
    stored = not urgent and steps > 1
    assert len(files(folder)) == stored and answer_all(target, [PROMPT]) == [96 * stored]


def test_a_deleted_file_is_prefilled(target: Target, folder: Path) -> None:
    drafter = load_drafter("none", target=target)
    expected = ask(target, drafter)
    with Engine(target, drafter, stored_prefix_tokens=64) as engine:
        assert engine.scheduler.idle
        for path in files(folder):
            path.unlink()
        assert engine.generate([PROMPT], PARAMS)[0].token_ids == expected.token_ids


def test_requests_beside_each_other(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    prompts = [PROMPT, [*INSTRUCTIONS, 8], [4, 5, 6], [*INSTRUCTIONS[:70], 9, 9]]
    expected = [ask(target, drafter, prompt, stored=0).token_ids for prompt in prompts]
    ask(target, drafter)
    with Engine(target, drafter, stored_prefix_tokens=64) as engine:
        completions = engine.generate(prompts, PARAMS)
    assert [completion.token_ids for completion in completions] == expected
    assert [completion.stats.remembered for completion in completions[:3]] == [120, 120, 0]


def test_two_engines_at_once_store_one_file(target: Target, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    drafter = load_drafter("none", target=target)
    with caplog.at_level(logging.WARNING):
        engines = [Engine(target, drafter, stored_prefix_tokens=64) for _ in range(4)]
        requests = [engine.submit(PROMPT, PARAMS, instruction_tokens=120) for engine in 2 * engines]
        for request in requests:
            request.result(60)
        for engine in engines:
            engine.close()
    assert len(files(folder)) == 1 and not caplog.records
    assert ask(target, drafter).stats.remembered == 120


def test_what_ended_processes_left_is_deleted(target: Target, folder: Path) -> None:
    drafter = load_drafter("none", target=target)
    ask(target, drafter)
    stored, old, new = *files(folder), folder / "a.1.partial", folder / "b.2.partial"
    for path in (old, new):
        path.write_text("begun")
    os.utime(old, (0, 0))
    ask(target, drafter)
    assert files(folder) == sorted([stored, new])  # the new one may be another process's


def test_a_folder_that_cannot_be_written_is_logged_once(
    target: Target, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("not a folder")
    with (
        caplog.at_level(logging.WARNING),
        Engine(target, load_drafter("none", target=target), stored_prefix_tokens=64) as engine,
    ):
        for _ in range(3):
            request = engine.submit(PROMPT, PARAMS, instruction_tokens=120)
            assert request.result(60).finish_reason == "length"
    assert caplog.text.count("cannot be stored") == 1


def test_a_state_that_cannot_be_copied_is_not_stored(
    target: Target, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class State(SequenceState):
        def export(self, start: int, length: int) -> dict[str, torch.Tensor]:
            raise MemoryError

    class Drafter(NoDrafter):
        def new_state(self, batch: int, capacity: int) -> State:
            return State(batch, capacity)

    with caplog.at_level(logging.WARNING):
        assert ask(target, Drafter()).finish_reason == "length"
    assert files(folder) == [] and "cannot be stored" in caplog.text


def test_short_requests_run_while_a_prefix_is_read(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, reading, go_on = load_drafter("none", target=target), threading.Event(), threading.Event()
    expected = ask(target, drafter)

    def slow_load(path: Path) -> dict[str, torch.Tensor]:
        reading.set()
        assert go_on.wait(60)
        return load_file(path)

    monkeypatch.setattr(prefix_store, "load_file", slow_load)
    with Engine(target, drafter, stored_prefix_tokens=64) as engine:
        scheduler = engine.scheduler
        cancelled, other, short = (engine.request(prompt, PARAMS) for prompt in (PROMPT, PROMPT, [4, 5, 6]))
        scheduler.add([cancelled, short])
        while not short.finished:
            scheduler.step()
        assert reading.wait(60) and cancelled.num_prefilled == 0
        cancelled.cancel()
        scheduler.step()
        assert cancelled.finish_reason == "cancelled" and scheduler.idle
        scheduler.add([other])
        go_on.set()
        while not scheduler.idle:
            scheduler.step()
    assert other.token_ids == expected.token_ids and other.stats.remembered == 120


FORKED = """
import os, sys, time
from blockdraft import Engine, SamplingParams, load_target
from blockdraft.machine import cache_folder
prompt, params = [(7 * i * i + 3) % 60 + 4 for i in range(124)], SamplingParams(9, ignore_eos=True)
engine = Engine(load_target(sys.argv[1]), stored_prefix_tokens=64)
for _ in range(2):
    engine.submit(prompt, params, instruction_tokens=120).result()
while not any(cache_folder().glob("prefixes/*.prefix")):  # written by a thread that the child lacks
    time.sleep(0.01)
child = os.fork()
# One call of the system for both processes' lines, which share the pipe.
os.write(1, b"%d\\n" % engine.submit(prompt, params).result().stats.remembered)
if not child:
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_reads_prefixes(tiny_target_dir: Path) -> None:
    done = run_script(FORKED, tiny_target_dir)
    assert (done.returncode, done.stdout, done.stderr) == (0, "120\n120\n", "")
