from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.diffusion.settings import TextSettings
from benchmarks.diffusion.text import ALL, KINDS, MASK, Corpus, compare, model_folder, text_runs
from blockdraft.diffusion.folder import load_model
from blockdraft.diffusion.likelihood import likelihood
from blockdraft.diffusion.settings import LikelihoodSettings
from blockdraft.diffusion.text import Tokens
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


def test_all_models_of_all_seeds_are_equal_but_for_their_blocks(text_folder: Path, tiny: TextSettings) -> None:
    runs = text_runs(text_folder).all
    assert [(run.model, run.seed) for run in runs] == [(name, seed) for seed in (0, 1) for name in tiny.models]
    assert {(run.parameters, run.tokens, run.scored) for run in runs} == {(runs[0].parameters, 96, 99)}
    assert [run.block_size for run in runs[:4]] == [1, 1, 4, 16]
    assert [(run.low, run.high) for run in runs[:4]] == [(1, 1), ALL, ALL, (0.001, 0.5)]
    for run in runs:
        assert run.bits_low <= run.bits <= run.bits_high
        assert (run.bits_low == pytest.approx(run.bits_high)) == (run.block_size == 1)
        assert run.loss_deviation > 0


def test_bits_are_those_of_the_model_that_is_kept(text_folder: Path, corpus: Corpus) -> None:
    """Bits are of held-out text, which training does not see."""
    run = next(run for run in text_runs(text_folder).all if run.model == "autoregressive")
    model = load_model(model_folder(text_folder, run.model, run.seed), "cpu")
    text = Tokens(*(part[:100] for part in corpus.held_out))
    assert likelihood(model, [text], LikelihoodSettings(length=16)).bits_per_token == pytest.approx(run.bits, abs=1e-6)


def test_only_the_autoregressive_model_says_the_next_token(text_folder: Path) -> None:
    shifts = {
        name: load_model(model_folder(text_folder, name, 0)).config.token_shift
        for name in ("autoregressive", "block 1")
    }
    assert shifts == {"autoregressive": True, "block 1": False}
    assert [name for name, kind in KINDS.items() if kind.token_shift] == ["autoregressive"]


def test_a_comparison_goes_on_where_it_was(
    text_folder: Path, corpus: Corpus, tiny: TextSettings, tmp_path: Path
) -> None:
    """A resumed run has the same figures, and repeats nothing."""
    told = list[tuple[str, int, int]]()

    def interrupt(stage: str, done: int, total: int) -> None:
        told.append((stage, done, total))
        if len(told) == 5:
            raise KeyboardInterrupt

    few = replace(tiny, models=("block 4", "autoregressive"), seeds=1)
    with pytest.raises(KeyboardInterrupt):
        compare(corpus, few, tmp_path, interrupt)
    assert [run.model for run in text_runs(tmp_path).all] == ["block 4"]
    begun = len(told)
    runs = compare(corpus, few, tmp_path, lambda *each: told.append(each))
    assert told[begun][0].startswith("autoregressive, seed 0 (2 of 2)") and [each[1:] for each in told[begun:]][-1] == (
        3,
        3,
    )
    expected = {run.model: run.bits for run in text_runs(text_folder).all if run.seed == 0}
    assert {run.model: run.bits for run in runs.all} == pytest.approx({name: expected[name] for name in few.models})
    assert not list(tmp_path.rglob("checkpoints"))
    again = list[object]()
    compare(corpus, few, tmp_path, lambda *each: again.append(each))
    assert not again


def test_an_unknown_model(corpus: Corpus, tiny: TextSettings, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no model 'block 5'; there are autoregressive, block 1"):
        compare(corpus, replace(tiny, models=("block 5",)), tmp_path, lambda *told: None)
