"""What a recipe leaves open, by target and data."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from copies import copy_with

from blockdraft.targets import Target, load_target
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.documents import Document, TokenData, read_data
from blockdraft_train.data.writer import DataWriter
from blockdraft_train.defaults import Resolved, resolve
from blockdraft_train.variants.dflash import DFlashRecipe


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


def data(folder: Path, count: int, length: int) -> TokenData:
    writer = DataWriter(folder, {"tokenizer": "any"})
    writer.begin()
    for row in range(count):
        writer.add(row, [Document(torch.arange(5, 5 + length), torch.ones(length, dtype=torch.bool))])
    writer.finish()
    return read_data(folder)


def resolved(target: Target, documents: TokenData, processes: int = 1, earlier: Any = None, **given: Any) -> Resolved:
    complaints = Complaints()
    result = resolve("dflash", DFlashRecipe(**given), target, documents, processes, complaints, earlier)
    complaints.check()
    assert result is not None
    return result


def test_a_small_target_and_few_data(target: Target, tmp_path: Path) -> None:
    result = resolved(target, data(tmp_path, 30, 20))
    values = asdict(result.variant.recipe)
    expected = {"length": 256, "anchors": 42, "held_out": 3, "batch": 3, "target_layers": (0, 1, 2), "layers": 5}
    assert {name: values[name] for name in expected} == expected and values["mask_token_id"] == 3
    assert len(result.trained) == 27 and len(result.held_out) == 3
    assert result.notes == [
        "length 256: the target's context is 256 tokens",
        "held out 3: a tenth of the 30 documents",
        "batch 3: the documents fill 3 sequences of 256 tokens",
        "target layers 0, 1, 2: the target has 3 layers",
    ]
    assert result.variant.config(target).target_layers == (0, 1, 2)


def test_where_there_is_enough_of_all_they_are_the_papers(target: Target, tmp_path: Path) -> None:
    result = resolved(copy_with(target, max_context=40960, num_layers=36), data(tmp_path, 700, 60))
    recipe = result.variant.recipe
    assert (recipe.length, recipe.batch, recipe.anchors, recipe.held_out) == (3072, 8, 512, 64)
    assert recipe.target_layers == (1, 9, 17, 25, 33) and result.notes == []


def test_what_is_given_stays(target: Target, tmp_path: Path) -> None:
    given = {
        "length": 40,
        "anchors": 7,
        "held_out": 0,
        "batch": 5,
        "target_layers": 1,
        "mask_token_id": 260,
        "layers": 1,
    }
    result = resolved(target, data(tmp_path, 30, 20), **given)
    values = asdict(result.variant.recipe)
    assert {name: values[name] for name in given} == {**given, "target_layers": (1,)}
    assert result.notes == [] and len(result.trained) == 30


def test_what_a_run_began_with_stays_where_it_is_left_open(target: Target, tmp_path: Path) -> None:
    earlier = {
        "length": 30,
        "batch": 2,
        "held_out": 1,
        "anchors": 9,
        "target_layers": (2,),
        "mask_token_id": 200,
        "layers": 2,
    }
    result = resolved(target, data(tmp_path, 30, 20), earlier=earlier, anchors=4)
    values = asdict(result.variant.recipe)
    assert {name: values[name] for name in earlier} == {**earlier, "anchors": 4} and result.notes == []


def test_a_drafter_to_begin_with_decides_its_shape(target: Target, tmp_path: Path, tiny_drafter_dir: Path) -> None:
    result = resolved(target, data(tmp_path, 30, 20), init=str(tiny_drafter_dir))
    assert (result.variant.recipe.layers, result.variant.recipe.target_layers) == (2, (0, 1))
    result.variant.network(result.variant.config(target))


def test_a_batch_is_shared_evenly(target: Target, tmp_path: Path) -> None:
    documents = data(tmp_path, 30, 20)
    assert resolved(target, documents, processes=4).variant.recipe.batch == 4
    assert resolved(target, documents, processes=2, accumulation=2, length=40).variant.recipe.batch == 8
    with pytest.raises(ValueError, match="batch must be a multiple of 4 processes times accumulation 1.*, got 6"):
        resolved(target, documents, processes=4, batch=6)


def test_all_that_does_not_fit_is_reported_together(target: Target, tmp_path: Path) -> None:
    complaints = Complaints()
    recipe = DFlashRecipe(length=1000, target_layers=(0, target.num_layers), mask_token_id=99_999, held_out=99, batch=3)
    assert resolve("dflash", recipe, target, data(tmp_path, 30, 20), 2, complaints) is None
    assert sorted(text.split()[0] for text in complaints.messages) == [
        "batch",
        "held_out",
        "length",
        "mask_token_id",
        "target_layers",
    ]


@pytest.mark.parametrize("count", [1, 2, 9])
def test_one_document_is_enough(count: int, target: Target, tmp_path: Path) -> None:
    result = resolved(target, data(tmp_path, count, 20))
    assert len(result.trained) == max(count - 1, 1) and len(result.held_out) == min(count - 1, 1)
