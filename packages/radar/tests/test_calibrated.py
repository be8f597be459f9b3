"""Step times measured on this machine replace the roofline model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blockdraft.decode.step_time import CONTEXT, Costs
from blockdraft.engine.adaptive.costs import Pair, store
from blockdraft.models import bundled_drafter, catalogue, known, models_folder
from blockdraft.models.places import file_place
from blockdraft_radar.calibrated import calibrated
from blockdraft_radar.devices import find, machine_of
from blockdraft_radar.project import project
from blockdraft_radar.shape import Shape, read_shape

COSTS = Costs(
    batch_sizes=(1, 4), plain=(0.01, 0.02), chain=(((1, 0.012), (4, 0.015)), ((1, 0.03), (4, 0.06))), tree=((), ())
)
HERE = machine_of(find("M4"))


@pytest.fixture
def smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of SmolLM2's pulled file."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    models_folder().mkdir(parents=True)
    path = file_place(known("smollm2"))
    assert path is not None
    path.touch()
    return path


def store_costs(target: Path, drafter: Path | None, weights: str = "file", date: float = 0.0, threads: int = 0) -> None:
    costs = Costs(COSTS.batch_sizes, COSTS.plain, COSTS.chain, COSTS.tree, date)
    pair = Pair(str(target), drafter and str(drafter), weights, threads or torch.get_num_threads())
    store(target.parent.parent / "costs" / f"{date}.json", costs, pair)


def test_costs_of_the_bundled_drafter(smollm2: Path) -> None:
    shape = read_shape("smollm2")
    store_costs(smollm2, bundled_drafter(known("smollm2")))
    result = calibrated(shape, "Q4_1")
    assert result is not None and result[0] == COSTS and result[1] in shape.drafters
    assert calibrated(shape, "bf16") is None  # other weights


def test_costs_of_other_drafters_have_plain_steps_only(smollm2: Path) -> None:
    store_costs(smollm2, None, date=1.0)
    store_costs(smollm2, bundled_drafter(known("smollm2")), threads=64, date=2.0)
    result = calibrated(read_shape("smollm2"), "Q4_1")
    assert result is not None and result[1] is None
    assert result[0].plain == COSTS.plain and not result[0].knows(tree=False)


def test_costs_of_a_folder(tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    shape = read_shape(str(tiny_target_dir))
    assert calibrated(shape, "int8") is None
    pair = Pair(str(tiny_target_dir), None, "bfloat16", torch.get_num_threads())
    store(tmp_path / "costs" / "a.json", COSTS, pair)
    assert calibrated(shape, "bf16") is not None and calibrated(shape, "int8") is None


def bundled() -> tuple[Shape, ...]:
    return tuple(read_shape(model.id) for model in catalogue() if bundled_drafter(model))


@pytest.mark.parametrize("shape", bundled(), ids=lambda shape: shape.name)
@pytest.mark.parametrize("batch", [1, 4])
def test_projection_uses_the_costs(shape: Shape, batch: int) -> None:
    [drafter] = shape.drafters
    row = project(shape, HERE, "Q4_1", CONTEXT, batch, drafter=drafter, block_size=5, tau=2.0, costs=COSTS)
    assert row.confidence == "calibrated" and row.drafted is not None
    assert row.plain.mid == pytest.approx(batch / COSTS.plain_step(batch))
    assert row.drafted.mid == pytest.approx(2.0 * batch / COSTS.drafted_steps(batch, 4, tree=False)[4])
    longer = project(shape, HERE, "Q4_1", 8 * CONTEXT, batch, drafter=drafter, block_size=5, tau=2.0, costs=COSTS)
    assert longer.plain.mid < row.plain.mid and longer.drafted.mid < row.drafted.mid  # type: ignore[union-attr]


def test_drafted_steps_without_costs_are_scaled() -> None:
    [shape, *_] = bundled()
    plain = Costs(COSTS.batch_sizes, COSTS.plain, ((), ()), ((), ()))
    options = {"weights": "Q4_1", "context": CONTEXT, "block_size": 5, "tau": 2.0}
    roofline, scaled = project(shape, HERE, **options), project(shape, HERE, **options, costs=plain)  # type: ignore[arg-type]
    assert roofline.drafted is not None and scaled.drafted is not None
    assert scaled.drafted.mid / scaled.plain.mid == pytest.approx(roofline.drafted.mid / roofline.plain.mid)
