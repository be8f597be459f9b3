"""Sizes that `blockdraft inspect` reports without loading weights, beside those of the loaded target."""

from pathlib import Path

import pytest
from tiny_families import write_model

from blockdraft.targets import load_target
from blockdraft_tools.inspect import inspect


@pytest.mark.parametrize("family", ["lfm2", "gemma4_text", "gpt_oss"])
def test_bytes_of_keys_and_values_are_those_of_a_cache(family: str, tmp_path: Path) -> None:
    write_model(family, tmp_path)
    about = inspect(tmp_path).about
    target = load_target(tmp_path, dtype="float32", device="cpu", backend="native", compile="off")
    per_token = target.cache_bytes(1, 200) - target.cache_bytes(1, 199)
    assert about["key_value_bytes_per_token"]["float32"] == per_token
    assert ("experts" in about) == (family == "gpt_oss")
