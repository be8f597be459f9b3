import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from blockdraft.decode.proposal import chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.engine import Costs
from blockdraft.engine.adaptive import costs as step_costs
from blockdraft.engine.adaptive.costs import Pair, Probe
from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target

PAIR = Pair(target="/t", drafter="/d", weights="int4", threads=2)
COSTS = Costs(
    batch_sizes=(1, 4),
    plain=(10.0, 16.0),
    chain=(((1, 12.0), (3, 14.0)), ((1, 20.0), (3, 32.0))),
    tree=((), ((2, 30.0), (4, 50.0))),
    date=5.0,
)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "new" / "costs.json"


def test_costs_are_interpolated() -> None:
    assert COSTS.plain_step(1) == 10.0 and COSTS.plain_step(2) == 12.0
    assert COSTS.drafted_steps(1, 3, tree=False) == [12.0, 12.0, 13.0, 14.0]
    assert COSTS.drafted_steps(2, 3, tree=False)[2] == pytest.approx(13.0 + (26.0 - 13.0) / 3)


def test_beyond_the_known_sizes_the_last_slope_goes_on_and_never_falls() -> None:
    assert COSTS.drafted_steps(1, 5, tree=False)[5] == 16.0
    assert COSTS.plain_step(8) == 24.0
    falling = Costs((1,), (10.0,), (((1, 12.0), (2, 11.0)),), ((),))
    assert falling.drafted_steps(3, 4, tree=False) == [12.0, 12.0, 11.0, 11.0, 11.0]


def test_rows_without_times_borrow_from_those_that_have_some() -> None:
    assert (
        COSTS.drafted_steps(1, 4, tree=True) == COSTS.drafted_steps(4, 4, tree=True) == [30.0, 30.0, 30.0, 40.0, 50.0]
    )
    assert COSTS.knows(tree=True) and not Costs((1,), (1.0,), ((),), ((),)).knows(tree=True)


def test_newer_costs_take_the_place_of_older_ones() -> None:
    newer = Costs((2, 4), (11.0, 17.0), ((), ()), (((1, 13.0),), ((1, 19.0),)), 9.0)
    found = COSTS.updated(newer)
    assert (found.batch_sizes, found.plain, found.date) == ((1, 2, 4), (10.0, 11.0, 17.0), 9.0)
    assert found.chain == (COSTS.chain[0], (), COSTS.chain[1])
    assert found.tree == ((), *newer.tree)


def test_measuring_covers_the_largest_batch(target: Target, tiny_drafter_dir: Path) -> None:
    lines: list[str] = []
    drafter = load_drafter(tiny_drafter_dir, target=target)
    found = step_costs.measure(Probe(target, drafter), drafter.block_size, 3, target.max_context, lines.append)
    assert found.batch_sizes == (1, 2, 3) and len(lines) == 3
    assert min(found.plain) > 0 and found.date > 1.7e9
    longest = drafter.block_size - 1
    for points, sizes in (
        (found.chain, {*step_costs.CHAIN_DRAFT_TOKENS, longest}),
        (found.tree, step_costs.TREE_DRAFT_TOKENS),
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
        return step_costs.measure(self, self.block_size, batch_size, self.max_context)


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
    assert all(rows * draft_tokens <= step_costs.MAX_DRAFT_TOKENS for rows, draft_tokens, _ in steps.asked)
    assert found.batch_sizes == (*step_costs.BATCH_SIZES, 512)


def test_measuring_ends(constants: Callable[..., None]) -> None:
    constants(step_costs, LIMIT_SECONDS=0.0)
    assert Recorder(4096, 16).measured(batch_size=64).batch_sizes == (1,)


def test_a_drafter_without_draft_tokens_has_plain_steps_only() -> None:
    found = Recorder(64, 1).measured()
    assert (found.plain, found.chain, found.tree) == ((1.0,), ((),), ((),))


def test_a_pair_has_a_file_of_its_own(target: Target, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    none = load_drafter("none", target=target)
    files = [
        step_costs.path(target, load_drafter(tiny_drafter_dir, target=target)),
        step_costs.path(target, none),
        step_costs.path(load_target(tiny_target_dir, backend="hf"), none),
    ]
    assert len(set(files)) == 3 and step_costs.path(target, none) == files[1]


def test_what_is_stored_is_found_again(file: Path) -> None:
    assert step_costs.load(file) is None
    step_costs.store(file, COSTS, PAIR)
    assert step_costs.load(file) == COSTS
    step_costs.store(file, COSTS.updated(COSTS), PAIR)
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_costs_are_found_by_their_target(
    target: Target, tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    drafters = [load_drafter(place, target=target) for place in (tiny_drafter_dir, "none")]
    for date, drafter in enumerate(drafters):
        costs = replace(COSTS, date=float(date))
        step_costs.store(step_costs.path(target, drafter), costs, step_costs.pair_of(target, drafter))
    older = {"layout": step_costs.LAYOUT, **asdict(COSTS)}
    (tmp_path / "costs" / "older.json").write_text(json.dumps(older))
    found = list(step_costs.of_target(tiny_target_dir))
    assert [pair.drafter for pair, _ in found] == [None, str(tiny_drafter_dir)]
    assert [costs.date for _, costs in found] == [1, 0]
    assert {pair.weights for pair, _ in found} == {str(target.dtype).removeprefix("torch.")}
    assert not list(step_costs.of_target(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[1]",
        "\xff",
        json.dumps({"layout": step_costs.LAYOUT, "batch_sizes": [1]}),
        json.dumps({"layout": step_costs.LAYOUT - 1, **asdict(COSTS)}),
    ],
)
def test_what_cannot_be_read_is_as_nothing(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_bytes(content.encode("latin-1"))
    assert step_costs.load(file) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), "1"])
def test_times_that_are_none_are_not_read(file: Path, seconds: float) -> None:
    step_costs.store(file, Costs((1,), (seconds,), (((1, 1.0),),), ((),)), PAIR)
    assert step_costs.load(file) is None
    step_costs.store(file, Costs((1,), (1.0,), (((1, seconds),),), ((),)), PAIR)
    assert step_costs.load(file) is None


@pytest.mark.parametrize(("rows", "draft_tokens", "tree"), [(1, 0, False), (3, 5, False), (2, 30, True)])
def test_steps_have_the_draft_tokens_that_are_asked_for(
    tiny_target_dir: Path, tiny_drafter_dir: Path, rows: int, draft_tokens: int, tree: bool
) -> None:
    target = load_target(tiny_target_dir)
    found = Probe(target, load_drafter(tiny_drafter_dir, target=target))(rows, 20, draft_tokens, tree, 3)
    assert [count for count, _ in found] == [draft_tokens] * 3 and all(seconds > 0 for _, seconds in found)


def test_rows_have_read_their_prompts(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    runner, rows = Probe(target, load_drafter("none", target=target)).open_sequences(3, 50, 9)
    assert [runner.committed_length(row.start) for row in rows] == [50] * 3
    assert not any(row.in_prefill for row in rows) and len({tuple(row.request.token_ids) for row in rows}) == 1
    cache = target.new_cache(1, 50)
    tokens = torch.tensor([rows[0].request.prompt])
    last = target.forward(tokens, chain_parents(1, 50), cache, logits_at=torch.tensor([49])).logits
    assert rows[0].request.token_ids == [int(last.argmax())]


def test_more_nodes_than_the_context_holds_are_measured_nevertheless(
    tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    """Nodes past its end are never committed by an engine, and a forward takes them."""
    target = load_target(tiny_target_dir)
    probe = Probe(target, load_drafter(tiny_drafter_dir, target=target))
    assert [count for count, _ in probe(1, target.max_context // 2, 200, True, 2)] == [200] * 2
