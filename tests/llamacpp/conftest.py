import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

TESTS = Path(__file__).parents[1]
sys.path[:0] = [
    str(folder) for folder in (TESTS / "llamacpp", TESTS.parent, TESTS / "targets", TESTS / "drafters" / "mtp")
]
FEW = (20, 60)  # the tokens that answers are made of, so that random draft tokens are often right


@pytest.fixture(scope="session")
def few_words(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_target_dir` with a head that says few tokens."""
    folder = tmp_path_factory.mktemp("few")
    model = Qwen3ForCausalLM.from_pretrained(tiny_target_dir)
    with torch.no_grad():
        model.lm_head.weight[list(FEW)] *= 30
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_target_dir).save_pretrained(folder)
    return folder
