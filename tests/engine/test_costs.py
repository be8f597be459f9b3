import json
from pathlib import Path

import pytest

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.engine.costs import Costs, cache_folder, load_or_measure, measure
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting

COSTS = Costs(
    nodes=(1, 4, 8),
    forward=(10.0, 13.0, 21.0),
    rows=(1, 4),
    plain=(11.0, 14.0),
    chain=(((1, 14.0), (3, 16.0)), ((1, 19.0),)),
    tree=(((1, 15.0), (2, 19.0)), ((1, 20.0),)),
)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    return tmp_path


def test_between_measured_cycles_the_time_is_interpolated() -> None:
    assert COSTS.cycle(1, 3, tree=False) == [14.0, 14.0, 15.0, 16.0]
    assert COSTS.cycle(1, 2, tree=True) == [15.0, 15.0, 19.0]
    assert COSTS.plain_cycle(2) == 12.0
    assert COSTS.cycle(2, 1, tree=False)[1] == pytest.approx(14 + (19 - 14) / 3)


def test_beyond_the_measured_cycles_guesses_cost_what_the_forwards_say() -> None:
    assert COSTS.cycle(1, 7, tree=False)[3:] == [16.0, 18.0, 20.0, 22.0, 24.0]  # forwards of 5 to 8 nodes: 2 each
    assert COSTS.cycle(1, 9, tree=False)[-1] == 16.0 + 8.0 + 2 * 2.0
    # 4 rows of 3 nodes are as many as one row of 12, of 2 as many as one of 8.
    assert COSTS.cycle(4, 2, tree=True)[-1] == 20.0 + 4 * 2.0
    assert COSTS.plain_cycle(8) == 18.0


def test_a_forward_that_was_measured_too_short_is_no_gain() -> None:
    noisy = Costs((1, 2), (10.0, 9.0), (1,), (11.0,), (((0, 12.0),),), (((0, 12.0),),))
    assert noisy.cycle(1, 5, tree=False) == [12.0] * 6


def test_measuring_covers_the_largest_batch(target: Target, tiny_drafter_dir: Path) -> None:
    lines: list[str] = []
    engine = Engine(target, load_drafter(tiny_drafter_dir, target=target), max_batch_size=3)
    costs = measure(engine, lines.append)
    assert costs.rows == (1, 2, 3)
    assert costs.nodes[:3] == (1, 2, 4) and max(costs.nodes) + 64 <= target.max_context
    assert min(*costs.forward, *costs.plain) > 0
    for size, points in zip(costs.rows * 2, costs.chain + costs.tree, strict=True):
        assert [count for count, _ in points] == sorted({count for count, _ in points})
        assert [seconds for _, seconds in points] == sorted(seconds for _, seconds in points)
        assert costs.cycle(size, points[-1][0], points in costs.tree)[-1] == points[-1][1]
    assert len(lines) == len(costs.nodes) + 3


def test_measuring_teaches_the_controller_nothing(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    engine = Engine(target, drafter, max_batch_size=1, drafting=Drafting("auto"))
    before = dict(vars(engine.controller))
    measure(engine)
    assert vars(engine.controller) == before


def test_a_pair_is_measured_once(target: Target, tiny_drafter_dir: Path, cache: Path) -> None:
    def load(drafter: str, **options: int) -> tuple[Costs, bool]:
        lines: list[str] = []
        engine = Engine(target, load_drafter(drafter, target=target), **options)  # type: ignore[arg-type]
        return load_or_measure(engine, lines.append), bool(lines)

    first, measured = load(str(tiny_drafter_dir), max_batch_size=1)
    assert measured
    assert load(str(tiny_drafter_dir), max_batch_size=1) == (first, False)
    assert load(str(tiny_drafter_dir), max_batch_size=2)[1]
    assert load("none", max_batch_size=1)[1]
    files = list((cache / "costs").iterdir())
    assert len(files) == 3 and all(file.suffix == ".json" for file in files)


@pytest.mark.parametrize("content", ["{", "[1]", json.dumps({"nodes": [1]})])
def test_an_unreadable_measurement_is_made_anew(
    target: Target, tiny_drafter_dir: Path, cache: Path, content: str
) -> None:
    engine = Engine(target, load_drafter(tiny_drafter_dir, target=target), max_batch_size=1)
    load_or_measure(engine)
    [file] = (cache / "costs").iterdir()
    file.write_text(content)
    lines: list[str] = []
    costs = load_or_measure(engine, lines.append)
    assert "cannot be read" in lines[0]
    assert json.loads(file.read_text())["rows"] == list(costs.rows)
