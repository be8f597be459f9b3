"""Rows, anchors and labels; all of them follow from the seed."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from blockdraft_train.batches import Batch, Batches, Documents, eligible, pack, place_anchors, shares, split
from blockdraft_train.data.documents import Document
from blockdraft_train.recipe import Recipe


def document(length: int, begin: int, end: int | None = None, first: int = 100) -> Document:
    places = torch.arange(length)
    return Document(first + places, (places >= begin) & (places < (end or length)))


# Every fourth one is supervised from its first token on, as plain text is.
DATA = [document(6 + i % 7, 0 if i % 4 == 0 else 2 + i % 3, first=100 * i) for i in range(30)] + [
    document(5, 4),
    document(40, 3),
    *(document(12 + i, 3, end=7 + i, first=5000 + 100 * i) for i in range(6)),  # a chat that goes on behind its answer
]
RECIPE = Recipe(length=24, batch=4, anchors=5, block_size=4, epochs=2, held_out=6)


def batches(recipe: Recipe = RECIPE, slots: int = 3) -> Batches:
    documents = Documents(DATA, recipe.length)
    return Batches(documents, split(documents, recipe.held_out, recipe.seed)[0], recipe, slots)


def test_documents_are_cut_and_counted() -> None:
    documents = Documents(DATA, 24)
    assert documents.cut == 1 and len(documents[31].tokens) == documents.lengths[31] == 24
    assert documents.useless == 1 and 30 not in documents.usable  # one supervised token alone is not usable
    assert documents.supervised == sum(int(documents[i].supervised.sum()) for i in documents.usable)


def test_split_is_a_partition_that_depends_on_the_seed_alone() -> None:
    documents = Documents(DATA, 24)
    trained, held_out = split(documents, 5, 1)
    assert sorted(trained + held_out) == documents.usable and len(held_out) == 5
    assert split(documents, 5, 1) == (trained, held_out) != split(documents, 5, 2)
    with pytest.raises(ValueError, match="held_out is 37 and the data hold 37"):
        split(documents, 37, 1)


def test_what_was_trained_on_is_never_held_out_when_data_grow() -> None:
    few, many = [DATA[:20], [*DATA[20:], *DATA[:20]]]
    for seed in range(5):
        known = [few[i].tokens for i in split(Documents(few, 24), 5, seed)[0]]
        later = [many[i].tokens for i in split(Documents(many, 24), 5, seed)[1]]
        assert later and not any(torch.equal(first_run, other) for first_run in known for other in later)


def test_packing_keeps_every_document_once_and_wastes_little() -> None:
    lengths = torch.randint(3, 25, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = pack(range(300), lengths, 24)
    assert sorted(i for row in rows for i in row) == list(range(300))
    assert all(sum(lengths[i] for i in row) <= 24 for row in rows)
    assert sum(lengths) > 0.93 * 24 * len(rows)


def test_shares_are_in_proportion() -> None:
    assert shares([10, 20, 30], 6) == [1, 2, 3]
    assert shares([1, 2], 10) == [1, 2]
    assert shares([5, 5, 1], 4) == [2, 2, 0]
    assert sum(shares([7, 11, 13, 2], 17)) == 17


def test_anchors_stand_before_a_supervised_token_of_the_same_document() -> None:
    documents = [document(8, 3), document(9, 4, end=6), document(6, 0)]
    places = place_anchors(documents, 100, None, torch.Generator())
    assert places == [3, 4, 5, 6, 12, 17, 18, 19, 20, 21]
    for seed in range(20):
        drawn = place_anchors(documents, 5, None, torch.Generator().manual_seed(seed))
        assert drawn == sorted(set(drawn)) and set(drawn) <= set(places)
        assert sum(p < 8 for p in drawn) == 2  # each document has its share
    assert len({tuple(place_anchors(documents, 5, None, torch.Generator().manual_seed(s))) for s in range(20)}) > 5


def test_fixed_anchors_follow_each_other() -> None:
    places = place_anchors([document(20, 5), document(9, 2)], 100, 4, torch.Generator())
    assert places == [5, 9, 13, 17, 22, 26]


def test_eligible_needs_two_in_a_row() -> None:
    assert eligible(torch.tensor([True, False, True, True, False])).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("anchors", [5, 30])  # the latter are more than a row has room for
def test_batches_say_what_the_documents_say(anchors: int) -> None:
    run = batches(replace(RECIPE, anchors=anchors))
    for _, batch in islice(run.run(0), run.steps_of(0)):
        check_batch(batch)


def check_batch(batch: Batch) -> None:
    assert batch.tensors.tokens_BS.shape == (4, 24) and batch.tensors.taught_BAK.shape[::2] == (4, 3)
    documents = Documents(DATA, 24)
    for row, contents in enumerate(batch.contents):
        expected_slots = [(n, p, i) for n, i in enumerate(contents) for p in range(documents.lengths[i])]
        for place, (number, position, index) in enumerate(expected_slots):
            assert (
                batch.tensors.documents_BS[row, place] == number and batch.tensors.positions_BS[row, place] == position
            )
            assert batch.tensors.tokens_BS[row, place] == documents[index].tokens[position]
        assert (batch.tensors.documents_BS[row, len(expected_slots) :] == -1).all()
        for block, anchor in enumerate(batch.tensors.anchors_BA[row].tolist()):
            if anchor < 0:
                assert not batch.tensors.taught_BAK[row, block].any()
                continue
            _, position, index = expected_slots[anchor]
            assert batch.tensors.tokens_BAL[row, block, 0] == documents[index].tokens[position]
            assert batch.tensors.taught_BAK[row, block, 0]
            for k in (1, 2, 3):
                inside = position + k < documents.lengths[index]
                taught = inside and bool(documents[index].supervised[position + k])
                assert batch.tensors.taught_BAK[row, block, k - 1] == taught
                if taught:
                    assert batch.tensors.tokens_BAL[row, block, k] == documents[index].tokens[position + k]


def test_an_epoch_takes_every_document_once_and_the_next_one_draws_anew() -> None:
    run, first_run = batches(), batches()
    counts = [first_run.steps_of(0), first_run.steps_of(1)]
    assert first_run.steps() == sum(counts)
    steps = list(islice(run.run(0), sum(counts)))
    for epoch, part in ((0, steps[: counts[0]]), (1, steps[counts[0] :])):
        assert {e for e, _ in part} == {epoch}
        taken = sorted(i for _, batch in part for row in batch.contents for i in row)
        assert taken == split(Documents(DATA, 24), 6, 0)[0]
        rows = [sum(map(bool, batch.contents)) for _, batch in part]
        assert max(rows) - min(rows) <= 1
    first, again = steps[0][1], steps[counts[0]][1]
    assert first.contents != again.contents


@pytest.mark.parametrize("start", [1, 4, 9])
def test_a_run_goes_on_where_it_stopped(start: int) -> None:
    whole, rest = list(islice(batches().run(0), 11)), list(islice(batches().run(start), 11 - start))
    for (epoch, ours), (theirs_epoch, theirs) in zip(whole[start:], rest, strict=True):
        assert epoch == theirs_epoch and ours.contents == theirs.contents
        assert torch.equal(ours.tensors.anchors_BA, theirs.tensors.anchors_BA) and torch.equal(
            ours.tensors.taught_BAK, theirs.tensors.taught_BAK
        )


def test_the_first_slot_alone_has_as_many_more_anchors() -> None:
    recipe = Recipe(length=40, batch=1, anchors=4, block_size=4, held_out=1, steps=8)
    run = Batches(Documents(DATA, 40), [31], recipe, 3, alone=0.5)
    shapes = [tuple(batch.tensors.taught_BAK.shape) for _, batch in islice(run.run(0), 8)]
    assert shapes == 4 * [(1, 12, 1)] + 4 * [(1, 4, 3)]
    resumed = [tuple(batch.tensors.taught_BAK.shape) for _, batch in islice(run.run(3), 3)]
    assert resumed == shapes[3:6]
    long = Batches(Documents(DATA, 40), [31], replace(recipe, anchors=20), 3, alone=1.0)
    assert next(long.run(0))[1].tensors.anchors_BA.shape == (1, 40)  # a row has no more tokens


def test_anchors_of_the_same_row_are_drawn_anew_in_each_epoch() -> None:
    recipe = Recipe(length=40, batch=1, anchors=4, block_size=4, held_out=1)
    run = Batches(Documents(DATA, 40), [31], recipe, 3).run(0)
    assert len({tuple(batch.tensors.anchors_BA[0].tolist()) for _, batch in islice(run, 8)}) > 5


def test_rows_of_a_batch() -> None:
    batch = next(iter(batches().run(0)))[1]
    part = batch.part(1, 3)
    assert torch.equal(part.tensors.anchors_BA, batch.tensors.anchors_BA[1:3]) and part.contents == batch.contents[1:3]


def test_measuring_has_the_same_anchors_each_time() -> None:
    first, second = batches().fixed(3), batches().fixed(3)
    assert all(torch.equal(a.tensors.anchors_BA, b.tensors.anchors_BA) for a, b in zip(first, second, strict=True))
    assert all(len(batch.contents) == 3 for batch in first)
