"""Little data for little runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import AutoTokenizer

from blockdraft.training.data import DataWriter, Document, tokenizer_fingerprint


@pytest.fixture(scope="session")
def tiny_data_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """40 documents of 12 to 30 tokens for `tiny_target_dir`, the answer of each from its middle on."""
    folder = tmp_path_factory.mktemp("tiny") / "data"
    writer = DataWriter(folder, {}, tokenizer_fingerprint(AutoTokenizer.from_pretrained(tiny_target_dir)))
    writer.begin()
    random = torch.Generator().manual_seed(3)
    for row in range(40):
        length = int(torch.randint(12, 31, (), generator=random))
        tokens = torch.randint(5, 200, (length,), generator=random)
        writer.add(row, [Document(tokens, torch.arange(length) >= length // 2)])
    writer.finish()
    return folder


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps the state of a process; each test begins without."""
    yield
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
