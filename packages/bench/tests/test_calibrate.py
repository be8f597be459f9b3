"""`blockdraft calibrate`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockdraft.decode.step_time import Costs
from blockdraft.drafters import load_drafter
from blockdraft.engine.adaptive.costs import Probe
from blockdraft.errors import UsageError
from blockdraft.targets import load_target
from blockdraft_bench import calibrate

Run = Callable[..., Any]


def test_costs_are_measured_once_and_shown(
    tiny_target_dir: Path, tiny_drafter_dir: Path, own_cache: Path, blockdraft: Run, other_work: dict[str, float | None]
) -> None:
    other_work["cores"] = 1.0
    words = ("calibrate", "--device", "cpu", "--target", tiny_target_dir, "--drafter", tiny_drafter_dir)
    words += ("--batch-size", 2)
    assert (
        "Not stored, since other programs used 1.0 cores meanwhile; calibrate while nothing else runs."
        in blockdraft(*words)[2]
    )
    other_work["cores"] = None
    code, out, err = blockdraft(*words)
    assert code == 0
    assert "R, chain of 7" in out and "R, tree of 64" in out and "batch size 2: plain step" in err
    code, out, err = blockdraft(*words, "--json")
    assert code == 0 and "--anew measures again" in err
    assert json.loads(out)["batch_sizes"] == [1, 2]
    assert "plain step" in blockdraft(*words, "--anew")[2]


def test_calibrating_a_target_without_a_bundled_drafter_takes_lookup(tiny_target_dir: Path, blockdraft: Run) -> None:
    code, out, err = blockdraft("calibrate", "--anew", "--device", "cpu", "--target", tiny_target_dir)
    assert code == 0 and "R, chain of" in out and "batch size 1: plain step" in err


def test_measuring_covers_the_largest_batch(tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    lines: list[str] = []
    target = load_target(tiny_target_dir)
    drafter = load_drafter(tiny_drafter_dir, target=target)
    found = calibrate.measure(Probe(target, drafter), drafter.block_size, 3, target.max_context, lines.append)
    assert found.batch_sizes == (1, 2, 3) and len(lines) == 3
    assert min(found.plain) > 0 and found.date > 1.7e9
    longest = drafter.block_size - 1
    for points, sizes in (
        (found.chain, {*calibrate.CHAIN_DRAFT_TOKENS, longest}),
        (found.tree, calibrate.TREE_DRAFT_TOKENS),
    ):
        for row in points:
            assert [draft_tokens for draft_tokens, _ in row] == sorted(
                n for n in sizes if points is found.tree or n <= longest
            )
            assert min(seconds for _, seconds in row) > 0


class Recorder:
    """Steps that take no time; remembers what was asked for."""

    def __init__(self, max_context: int, block_size: int) -> None:
        self.max_context, self.block_size, self.asked = max_context, block_size, list[tuple[int, int, bool]]()

    def __call__(self, rows: int, context: int, draft_tokens: int, tree: bool, count: int) -> list[tuple[int, float]]:
        assert context >= 1
        path = min(draft_tokens + 1, self.block_size)
        assert context + (count - 1) * path + draft_tokens + 1 <= self.max_context, "the last step does not fit"
        self.asked.append((rows, draft_tokens, tree))
        return [(draft_tokens, 9.0), *[(draft_tokens, 1.0 + draft_tokens)] * (count - 1)]

    def measured(self, batch_size: int = 1) -> Costs:
        return calibrate.measure(self, self.block_size, batch_size, self.max_context)


@pytest.mark.parametrize("max_context", [40, 100, 160, 161, 300, 4096])
def test_whatever_fits_the_context_is_measured(max_context: int) -> None:
    steps = Recorder(max_context, 16)
    found = steps.measured()
    assert found.drafted_steps(1, 1, tree=False)[1] == 2.0 and found.drafted_steps(1, 1, tree=True)[1] == 2.0
    assert (1, 15, False) in steps.asked or max_context < 300


def test_a_context_without_room_for_any_step_is_refused() -> None:
    with pytest.raises(UsageError, match="context of 16 tokens is too short.*need 21.*fixed block size"):
        Recorder(16, 16).measured()


def test_the_first_step_does_not_count_and_the_largest_sizes_are_left_out() -> None:
    steps = Recorder(4096, 16)
    found = steps.measured(batch_size=512)
    assert max(found.plain) == 1.0
    assert all(rows * draft_tokens <= calibrate.MAX_DRAFT_TOKENS for rows, draft_tokens, _ in steps.asked)
    assert found.batch_sizes == (*calibrate.BATCH_SIZES, 512)


def test_measuring_ends(constants: Callable[..., None]) -> None:
    constants(calibrate, LIMIT_SECONDS=0.0)
    assert Recorder(4096, 16).measured(batch_size=64).batch_sizes == (1,)


def test_a_drafter_without_draft_tokens_has_plain_steps_only() -> None:
    found = Recorder(64, 1).measured()
    assert (found.plain, found.chain, found.tree) == ((1.0,), ((),), ((),))
