import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.diffusion.settings import StrategySettings, TextSettings
from benchmarks.diffusion.strategies import ITSELF, sample, samples_of
from benchmarks.diffusion.text import Corpus, model_folder, text_runs
from blockdraft.diffusion.folder import load_model
from blockdraft.diffusion.likelihood import likelihood
from blockdraft.diffusion.settings import LikelihoodSettings
from blockdraft.diffusion.text import Tokens
from blockdraft.errors import UsageError

HOW = StrategySettings(sampled=("block 4", "whole clipped"), strategies=("static=2", "threshold=0"), samples=2, given=4)


@pytest.mark.slow
def test_each_way_samples_each_row(text_folder: Path, corpus: Corpus, tiny: TextSettings, tmp_path: Path) -> None:
    runs = text_runs(text_folder).all
    few = replace(HOW, samples=1)
    sample(corpus, tiny, few, text_folder, runs, tmp_path, lambda *told: None)
    asked = list[str]()
    kept = sample(corpus, tiny, HOW, text_folder, runs, tmp_path, lambda stage, *counts: asked.append(stage))
    assert len(kept.all) == 2 * 2 * 6 == 2 * len(asked)  # rows, seeds and ways; half of them were there
    for one in kept.all:
        assert one.new_tokens == len(json.loads(one.text)) == 12
        if one.model == ITSELF:
            assert one.forwards == one.seconds == 0
        elif one.model == "autoregressive":  # the last token of what is given tells of the first one
            assert (one.strategy, one.forwards) == ("left_to_right", 11)
        elif one.strategy == "threshold=0":  # a pass settles a whole block, another one keeps it
            assert one.forwards == {"block 4": 5, "whole clipped": 1}[one.model]
        else:
            assert one.forwards == {"block 4": 8, "whole clipped": 6}[one.model]
    texts = {(one.model, one.seed, one.number): one.text for one in kept.all if one.model == ITSELF}
    text = corpus.tokenizer.decode(corpus.held_out.ids)
    at = HOW.given + int(0.618034 * (200 - tiny.length))
    assert [json.loads(texts[ITSELF, 0, number]) for number in (0, 1)] == [text[4:16], text[at : at + 12]]
    assert samples_of(tmp_path).all == kept.all


@pytest.mark.slow
def test_the_judge_is_another_model_and_judges_what_was_written(
    text_folder: Path, corpus: Corpus, tiny: TextSettings, tmp_path: Path
) -> None:
    kept = sample(corpus, tiny, HOW, text_folder, text_runs(text_folder).all, tmp_path, lambda *told: None)
    one = next(one for one in kept.all if one.model == "autoregressive" and one.seed == 0 and one.number == 0)
    ids = torch.cat(
        [corpus.held_out.ids[: HOW.given], torch.tensor(corpus.tokenizer(json.loads(one.text))["input_ids"])]
    )
    tokens = Tokens(ids, torch.arange(len(ids)) >= HOW.given)
    bits = [
        likelihood(
            load_model(model_folder(text_folder, one.model, seed), "cpu"), [tokens], LikelihoodSettings(length=16)
        )
        for seed in (0, 1)
    ]
    assert one.bits == pytest.approx(bits[1].bits_per_token) != pytest.approx(bits[0].bits_per_token)


@pytest.mark.slow
def test_what_cannot_be_sampled(text_folder: Path, corpus: Corpus, tiny: TextSettings, tmp_path: Path) -> None:
    runs = text_runs(text_folder).all

    def refused(settings: StrategySettings, message: str, runs: list[object] = runs) -> None:  # type: ignore[assignment]
        with pytest.raises(UsageError, match=message):
            sample(corpus, tiny, settings, text_folder, runs, tmp_path, lambda *told: None)  # type: ignore[arg-type]

    refused(HOW, "There is no autoregressive model", [run for run in runs if run.model != "autoregressive"])
    refused(replace(HOW, given=16), "given is 16, and rows have 16 characters")
    with pytest.raises(UsageError, match="did you mean static"):
        replace(HOW, strategies=("static=2", "statik"))
    refused(replace(HOW, sampled=("block 3",)), "There is no model 'block 3'")
