"""What is taken for a target."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from blockdraft.errors import UsageError
from blockdraft.targets import as_target, load_target, transformers_model


def test_models_of_transformers_and_targets_are_targets(tiny_target_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir).train()
    target = as_target(model)
    assert target.vocab_size == model.config.vocab_size and not model.training
    assert transformers_model(target) is model
    native = load_target(tiny_target_dir, backend="native")
    assert as_target(native) is native and transformers_model(native) is None
    with pytest.raises(UsageError, match="The target is a str; give a model of transformers or use load_target"):
        as_target("folder")  # type: ignore[arg-type]
