from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from benchmarks.rivals import train
from benchmarks.rivals.kinds import SmallLMRecipe, small_lm_config
from blockdraft.data.documents import TokenData, read_data
from blockdraft.targets import Target, load_target
from blockdraft.training.batches import generator

RECIPE = SmallLMRecipe(
    layers=1, hidden_size=16, length=64, batch=2, held_out=4, steps=6, learning_rate=1e-2, save_every=2, anchors=1
)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, compile="off")


@pytest.fixture(scope="module")
def data(tiny_data_dir: Path) -> TokenData:
    return read_data(tiny_data_dir)


def test_documents_of_a_row_do_not_see_each_other(target: Target, data: TokenData) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(small_lm_config(RECIPE, target)).eval()
    made = train.batches(data, RECIPE)[0]
    together = train.loss(model, data, made.batch([(3, 5), (8,)], generator(0), 1))
    losses = []
    for index in (3, 5, 8):
        document = data[index]
        logits = model(document.tokens[None]).logits[0, :-1]
        wanted = document.supervised[1:]
        losses.append(torch.nn.functional.cross_entropy(logits[wanted], document.tokens[1:][wanted], reduction="none"))
    assert together.item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_it_learns_and_an_interrupted_run_goes_on(target: Target, data: TokenData, tmp_path: Path) -> None:
    told: list[str] = []

    def tell(stage: str, done: int, total: int) -> None:
        told.append(stage)
        if len(told) == 3 and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train_small_lm(target, data, tmp_path / "cut", RECIPE, tell)
    for name in ("cut", "whole"):
        train.train_small_lm(target, data, tmp_path / name, RECIPE, lambda stage, done, total: told.append(stage))
    assert [stage.partition(",")[0] for stage in told[3:7]] == [f"step {n} of 6" for n in (3, 4, 5, 6)]
    cut, whole = (Qwen3ForCausalLM.from_pretrained(tmp_path / name) for name in ("cut", "whole"))
    assert all(torch.equal(a, b) for a, b in zip(cut.parameters(), whole.parameters(), strict=True))
    losses = [float(stage.rpartition(" ")[2]) for stage in told[7:]]
    assert losses[-1] < losses[0]


def test_equal_tokens_are_equal_rows_for_drafters_and_the_model(data: TokenData) -> None:
    ours, tokens = train.batches(data, RECIPE)
    theirs, _ = train.batches(data, replace(RECIPE, anchors=32), slots=7)
    for (_, one), (_, other), _ in zip(ours.run(0), theirs.run(0), range(5), strict=False):
        assert one.contents == other.contents
    assert tokens == sum(len(document.tokens) for document in data) - sum(
        len(data[i].tokens) for i in train.split(train.Documents(data, 64), 4, 0)[1]
    )
