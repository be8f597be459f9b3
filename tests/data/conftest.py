import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from blockdraft.targets import load_target_text

sys.path.insert(0, str(Path(__file__).parent))  # for the templates of test_chats.py


@pytest.fixture
def tokenizer(tiny_target_dir: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_target_text(tiny_target_dir).tokenizer
    assert tokenizer is not None
    return tokenizer
