import json
from pathlib import Path

import pytest

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.engine import costs as costs_module
from blockdraft.engine.costs import Costs, _line, cache_folder, load_or_measure, measure
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting

COSTS = Costs(
    nodes=(1, 4, 8),
    forward=(10.0, 13.0, 21.0),
    rows=(1, 4),
    plain=(11.0, 14.0),
    chain=((3.0, 1.0), (5.0, 2.0)),
    tree=((4.0, 1.5), (6.0, 2.0)),
)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rough figures will do."""
    monkeypatch.setattr(costs_module, "REPEATS", 1)
    monkeypatch.setattr(costs_module, "TREE_GUESSES", (1, 8))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    return tmp_path


def test_a_cycle_costs_plain_decoding_drafting_and_the_guesses() -> None:
    assert COSTS.cycle(1, 3, tree=False) == [14.0, 15.0, 16.0, 17.0]
    assert COSTS.cycle(1, 3, tree=True) == [15.0, 16.5, 18.0, 19.5]
    assert COSTS.plain_cycle(2) == 12.0


def test_rows_share_the_weights() -> None:
    # Four rows of 2 nodes are as many as one row of 8, of which the four anchors are in the plain cycle.
    assert COSTS.cycle(4, 1, tree=False) == [19.0, 19.0 + 2 * (21.0 - 13.0)]
    assert COSTS.cycle(2, 1, tree=False)[1] == pytest.approx(15.0 + (35.0 - 15.0) / 3)


def test_beyond_the_measured_sizes_the_last_slope_goes_on() -> None:
    assert COSTS.cycle(1, 9, tree=False)[-1] == 14.0 + 11.0 + 2 * 2.0
    assert COSTS.plain_cycle(8) == 18.0


def test_a_forward_that_was_measured_too_short_is_no_gain() -> None:
    noisy = Costs((1, 2), (10.0, 9.0), (1,), (11.0,), ((1.0, 1.0),), ((1.0, 1.0),))
    assert noisy.cycle(1, 5, tree=False) == [12.0] * 6


def test_a_line_goes_through_most_of_the_points() -> None:
    xs = [0.0, 1.0, 2.0, 4.0, 7.0]
    assert _line(xs, [3 + 2 * x + (20 if x == 2 else 0) for x in xs]) == (3.0, 2.0)
    assert _line(xs, [5 - x for x in xs]) == (3.0, 0.0)  # more work is never faster
    assert _line([1.0, 1.0], [4.0, 6.0]) == (4.0, 1.0)  # a drafter that found no guesses: the target's own slope


def test_measuring_covers_the_largest_batch(target: Target, tiny_drafter_dir: Path) -> None:
    lines: list[str] = []
    engine = Engine(target, load_drafter(tiny_drafter_dir, target=target), max_batch_size=3)
    costs = measure(engine, lines.append)
    assert costs.rows == (1, 2, 3)
    assert costs.nodes[:3] == (1, 2, 4) and max(costs.nodes) + 64 <= target.max_context
    assert min(*costs.forward, *costs.plain) > 0
    assert len(costs.chain) == len(costs.tree) == 3
    assert all(extra >= 0 and scale >= 0 for extra, scale in costs.chain + costs.tree)
    assert len(lines) == len(costs.nodes) + 3


def test_measuring_teaches_the_controller_nothing(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    engine = Engine(target, drafter, max_batch_size=1, drafting=Drafting("auto"))
    before = dict(vars(engine.controller))
    measure(engine)
    assert vars(engine.controller) == before


def test_a_pair_is_measured_once(target: Target, tiny_target_dir: Path, tiny_drafter_dir: Path, cache: Path) -> None:
    def load(drafter: str, target: Target = target, **options: int) -> tuple[Costs, bool]:
        lines: list[str] = []
        engine = Engine(target, load_drafter(drafter, target=target), **options)  # type: ignore[arg-type]
        return load_or_measure(engine, lines.append), bool(lines)

    first, measured = load(str(tiny_drafter_dir), max_batch_size=1)
    assert measured
    assert load(str(tiny_drafter_dir), max_batch_size=1) == (first, False)
    assert load(str(tiny_drafter_dir), max_batch_size=2)[1]
    assert load("none", max_batch_size=1)[1]
    assert load(str(tiny_drafter_dir), load_target(tiny_target_dir, backend="hf"), max_batch_size=1)[1]
    files = list((cache / "costs").iterdir())
    assert len(files) == 4 and all(file.suffix == ".json" for file in files)


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
