import json

import psutil
import pytest
from some_results import ARGUMENTS

from blockdraft.evaluation.results import Results


def test_results_hold_the_sets_and_what_they_were_measured_with(found: Results) -> None:
    content = json.loads(found.as_json())
    assert content.keys() == {"methods", "sets", "arguments", "versions", "hardware", "profiles"}
    assert content["versions"].keys() == {"blockdraft", "torch", "transformers", "python"}
    assert content["hardware"].keys() == {"cpu", "cores", "logical_cores", "threads", "memory_bytes", "gpu"}
    assert content["hardware"]["memory_bytes"] == psutil.virtual_memory().total
    assert content["hardware"]["cpu"] and content["hardware"]["gpu"] is None
    assert {name: one["methods"]["x"]["speedup"] for name, one in content["sets"].items()} == {"first": 2, "second": 3}
    assert content["methods"]["x"]["speedup"] == pytest.approx(12 / 5)  # 12 tokens in 5 seconds against 12 in 12
    assert content["methods"]["x"]["acceptance_by_position"] == pytest.approx([2 / 3, 1 / 3, 0])
    assert found.arguments == ARGUMENTS
