from pathlib import Path

import pytest
import torch

from benchmarks.diffusion.characters import MASK, Corpus
from benchmarks.diffusion.settings import TextSettings
from blockdraft.errors import UsageError


def test_a_token_is_a_character(text_file: Path, corpus: Corpus) -> None:
    text = text_file.read_text()
    ids = torch.cat([corpus.trained.ids, corpus.held_out.ids])
    assert len(corpus.held_out.ids) == 200
    assert corpus.tokenizer.decode(ids) == text and corpus.tokenizer(text)["input_ids"] == ids.tolist()


def test_models_differ_by_the_seed_alone(corpus: Corpus, tiny: TextSettings) -> None:
    first, other, third = (
        corpus.random_model(tiny, seed, size, shift)
        for seed, size, shift in ((0, 1, True), (0, 4, False), (1, 4, False))
    )
    weights = [
        torch.cat([weight.flatten() for weight in model.network.parameters()]) for model in (first, other, third)
    ]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert (other.config.block_size, other.config.token_shift) == (4, False)
    assert other.config.mask_token_id == corpus.tokenizer.convert_tokens_to_ids(MASK)
    assert not other.files


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--text takes a file of UTF-8 text"):
        Corpus(tmp_path / "none", 0.1)
