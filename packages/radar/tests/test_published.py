"""The table of published speeds: it follows its schema, names what the other tables know, and holds to physics."""

from collections import Counter
from typing import Any

import pytest
from benchmarks.radar.published import Measured, published
from pydantic import ValidationError

from blockdraft.models import known
from blockdraft_radar.devices import find
from blockdraft_radar.step import BITS

ROW: dict[str, Any] = {
    "device": "RTX 4090",
    "model": "qwen3-4b",
    "weights": "bf16",
    "context": 512,
    "batch": 1,
    "task": "mean",
    "method": "plain",
    "engine": "vLLM",
    "plain": 100.0,
    "source": "https://example.org",
}
DRAFTED = {**ROW, "method": "dflash", "block_size": 16, "drafted": 300.0}


def test_the_table_is_wide() -> None:
    table = published()
    figures = [figure for measured in table for figure in measured.figures()]
    assert len(figures) >= 150 and len({measured.source for measured in table}) >= 20
    assert {measured.kind for measured in table} >= {"nvidia-datacentre", "nvidia-consumer", "apple", "tpu", "cpu"}
    assert max(Counter((*measured.model_dump().values(),) for measured in table).values()) == 1
    halves = Counter(measured.fitted for measured in table for _ in measured.figures())
    assert min(halves.values()) >= 0.35 * len(figures)


def test_measurements_are_possible() -> None:
    rows = published()
    assert rows
    for row in rows:
        possible(row)


def possible(measured: Measured) -> None:
    device, model = find(measured.device), known(measured.model)
    assert model.parameters and model.hidden_size and measured.context <= (model.context or 1 << 30)
    bytes_per_weight = BITS[measured.weights] / 8
    weights = (model.active_parameters or model.parameters) * bytes_per_weight
    if device.memory_gb:
        assert model.parameters * bytes_per_weight < 2**30 * device.memory_gb
    if measured.plain:  # no sequence decodes faster than the weights are read
        assert measured.plain / measured.batch < 1.25 * 1e9 * device.bandwidth_gbs / weights
    if measured.plain and measured.drafted and measured.block_size:
        assert measured.drafted / measured.plain < measured.block_size


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "plain": None}, "nothing was measured"),
        ({**ROW, "plain": -1.0}, "plain"),
        ({**ROW, "drafted": 5.0}, "does not go with"),
        ({**DRAFTED, "drafted": None}, "does not go with"),
        ({**DRAFTED, "speedup": 3.0}, "already"),
        ({**DRAFTED, "tau": 17.0}, "more than a block holds"),
        ({**ROW, "source": "a friend"}, "source"),
        ({**ROW, "colour": "red"}, "colour"),
    ],
)
def test_what_does_not_follow_the_schema_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Measured.model_validate(row)
