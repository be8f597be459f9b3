"""A tokenizer whose chat template the tests set."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast


@pytest.fixture
def tokenizer(tiny_target_dir: Path) -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(tiny_target_dir)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded
