"""Texts and chats as tokens to predict."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from blockdraft.data.settings import RecordSettings
from blockdraft.diffusion.text import Rows, Tokens, gapped, read_texts, row_length, spelled, unseen
from blockdraft.errors import UsageError


def test_texts_and_chats(model_of: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the inn")
    rows = [{"prompt": "hi", "response": "the"}, {"text": "a"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = model_of()
    text, chat, short = read_texts([str(tmp_path / "text.txt"), str(tmp_path / "rows.jsonl")], RecordSettings(), model)
    decode = model.text.tokenizer.decode
    assert decode(text.ids) == "the inn" and text.eligible.all() and len(short.ids) == 1
    assert decode(chat.ids[chat.eligible]).strip() == "the<|im_end|>"
    assert decode(chat.ids).startswith("<|im_start|>user\nhi<|im_end|>")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"text": "so <|mask|> it is"}, r"record 1 holds the mask token \(id 3\), .* take it out"),
        ({"prompt": "hi"}, "record 1: this is a prompt without a response"),
    ],
)
def test_rows_that_cannot_be_used(row: Any, told: str, model_of: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(UsageError, match=told):
        read_texts([str(tmp_path / "rows.jsonl")], RecordSettings(), model_of())


def test_length_of_rows(model_of: Any) -> None:
    assert row_length(model_of(), None) == 256 and row_length(model_of(), 10) == 10
    with pytest.raises(UsageError, match="length is 257"):
        row_length(model_of(), 257)


def test_texts_with_gaps(model_of: Any) -> None:
    model = model_of(4)
    plain = model.text.tokenizer
    found = gapped("the [GAP] in[GAP]", 3, model)
    first, second = plain("the ")["input_ids"], plain(" in")["input_ids"]
    assert found == [*first, None, None, None, *second, None, None, None]
    for text in ("no gap", "[GAP] text"):
        with pytest.raises(UsageError, match=r"has no \[GAP\], or no text before it"):
            gapped(text, 3, model)


def test_tokens_are_spelled_as_behind_others() -> None:
    """A token keeps its space, which many decoders omit at the beginning of a text."""
    made = Tokenizer(models.WordLevel({"▁the": 0, "inn": 1, "▁": 2}))
    made.decoder = decoders.Metaspace()
    model: Any = SimpleNamespace(text=SimpleNamespace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=made)))
    assert [spelled(token, model) for token in (0, 1, 2)] == [" the", "inn", " "]


def test_bytes_of_a_character_are_spelled_each(model_of: Any) -> None:
    model = model_of()
    ids = model.text.tokenizer("é in")["input_ids"]
    assert len(ids) > 3 and "".join(spelled(token, model) for token in ids).startswith("\ufffd\ufffd")


def test_what_cannot_be_seen_from_a_gap() -> None:
    tokens = [1, 2, None, None, None, 3, 4, 5, 6, 7]
    assert unseen(tokens, 4) == (5, 2)  # 3, 4 and 5 share the second block with the gap
    assert unseen(tokens, 1) == (5, 5) and unseen(tokens, 16) == (5, 0)
    assert unseen([1, None], 4) == (0, 0)


def text(length: int, begin: int = 0, learned: int = 0) -> Tokens:
    """Tokens, of which those from `learned` on are to be learned."""
    ids = torch.arange(length) + begin
    return Tokens(ids, ids - begin >= learned)


def test_texts_are_joined_and_cut() -> None:
    """The first token of a row is given, and the rest at the end is dropped."""
    found = Rows([text(7, learned=3), text(4, 20, learned=9)], 5, 0.0, 0)
    assert found.all.ids.tolist() == [[0, 1, 2, 3, 4], [5, 6, 20, 21, 22]]
    assert found.all.eligible.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]
    assert (found.trained, found.held_out, found.idle) == (2, 0, 0)


def test_rows_without_a_token_to_learn_are_left_out() -> None:
    """A row in the middle of a long question holds nothing to learn, and its first token never counts."""
    found = Rows([text(11, learned=10), text(9, 20, learned=0)], 5, 0.5, 0)
    assert found.all.ids.tolist() == [[10, 20, 21, 22, 23], [24, 25, 26, 27, 28]] and found.idle == 2
    assert (found.trained, found.held_out) == (1, 1)


def test_held_out_rows_are_the_last_ones() -> None:
    found = Rows([text(50)], 5, 0.25, 0)
    assert (found.trained, found.held_out) == (7, 3)
    assert [row.ids[0].item() for row in found.held_out_rows()] == [35, 40, 45]
    seen = {int(row[0]) for step in range(7) for row in found.batch(step, 2).ids}
    assert seen == {*range(0, 35, 5)}
    assert found.held_out_batch(0, 4).ids[:, 0].tolist() == [35, 40, 45, 35]
    assert found.held_out_batch(1, 4).ids[:, 0].tolist() == [40, 45, 35, 40]
    assert Rows([text(10)], 5, 0.0, 0).held_out_batch(0, 3).ids[:, 0].tolist() == [0, 5, 0]


def test_all_rows_once_in_each_epoch() -> None:
    """The order differs by epoch and seed, also where an epoch ends in the middle of a step."""
    orders = []
    for seed in (0, 1):
        rows = Rows([text(50)], 5, 0.0, seed)
        drawn = [int(row[0]) for step in range(5) for row in rows.batch(step, 4).ids]
        assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(0, 50, 5))
        orders += [drawn[:10], drawn[10:]]
    assert len({*map(tuple, orders)}) == 4


@pytest.mark.parametrize(
    ("texts", "held_out", "told"),
    [
        ([], 0.0, "There are 0 tokens, which make 0 rows of 5 with something to learn, 0 of them held out; give more"),
        ([text(4)], 0.0, "There are 4 tokens, which make 0 rows"),
        ([text(20, learned=20)], 0.0, "There are 20 tokens, which make 0 rows"),
        ([text(20)], 0.9, "which make 4 rows of 5 with something to learn, 4 of them held out"),
    ],
)
def test_nothing_to_learn(texts: Any, held_out: float, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Rows(texts, 5, held_out, 0)
