import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parent))  # for some_documents.py and some_hidden_states.py

from some_hidden_states import made  # noqa: E402

from blockdraft.targets import Target, load_target, load_target_text  # noqa: E402
from blockdraft_train.data.documents import TokenData  # noqa: E402


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


@pytest.fixture
def data(tmp_path: Path, target: Target) -> TokenData:
    return made(tmp_path / "data", target)


@pytest.fixture
def tokenizer(tiny_target_dir: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_target_text(tiny_target_dir).tokenizer
    assert tokenizer is not None
    return tokenizer
