import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from blockdraft.decode.proposal import chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.engine import Costs
from blockdraft.engine.adaptive import costs as step_costs
from blockdraft.engine.adaptive.costs import Pair, Probe
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
