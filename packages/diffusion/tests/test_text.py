"""Texts and chats as token ids, and packed training sequences."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from blockdraft.errors import UsageError
from blockdraft_diffusion.text import (
    PackedTexts,
    TextTokens,
    count_unseen,
    encode_gaps,
    read_texts,
    sequence_length,
    token_text,
)
from blockdraft_train.data.settings import RecordSettings


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
    ("record", "message"),
    [
        ({"text": "so <|mask|> it is"}, r"record 1 contains the mask token \(id 3\), .* remove it"),
        ({"prompt": "hi"}, "record 1: this is a prompt without a response"),
    ],
)
def test_invalid_records(record: Any, message: str, model_of: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(record))
    with pytest.raises(UsageError, match=message):
        read_texts([str(tmp_path / "rows.jsonl")], RecordSettings(), model_of())


def test_sequence_length(model_of: Any) -> None:
    assert sequence_length(model_of(), None) == 256 and sequence_length(model_of(), 10) == 10
    with pytest.raises(UsageError, match="length must be at most 256"):
        sequence_length(model_of(), 257)


def test_texts_with_gaps(model_of: Any) -> None:
    model = model_of(4)
    tokenizer = model.text.tokenizer
    tokens = encode_gaps("the [GAP] in[GAP]", 3, model)
    first, second = tokenizer("the ")["input_ids"], tokenizer(" in")["input_ids"]
    assert tokens == [*first, None, None, None, *second, None, None, None]
    for text in ("no gap", "[GAP] text"):
        with pytest.raises(UsageError, match=r"has no \[GAP\], or no text before it"):
            encode_gaps(text, 3, model)


def test_token_text_keeps_its_space() -> None:
    """Many decoders omit the space at the beginning of a text."""
    tokenizer = Tokenizer(models.WordLevel({"▁the": 0, "inn": 1, "▁": 2}))
    tokenizer.decoder = decoders.Metaspace()
    model: Any = SimpleNamespace(text=SimpleNamespace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer)))
    assert [token_text(token, model) for token in (0, 1, 2)] == [" the", "inn", " "]


def test_token_text_of_incomplete_characters(model_of: Any) -> None:
    model = model_of()
    ids = model.text.tokenizer("é in")["input_ids"]
    assert len(ids) > 3 and "".join(token_text(token, model) for token in ids).startswith("\ufffd\ufffd")


def test_count_unseen() -> None:
    tokens = [1, 2, None, None, None, 3, 4, 5, 6, 7]
    assert count_unseen(tokens, 4) == (5, 2)  # 3, 4 and 5 share the second block with the gap
    assert count_unseen(tokens, 1) == (5, 5) and count_unseen(tokens, 16) == (5, 0)
    assert count_unseen([1, None], 4) == (0, 0)


def text(length: int, begin: int = 0, first_eligible: int = 0) -> TextTokens:
    ids = torch.arange(length) + begin
    return TextTokens(ids, ids - begin >= first_eligible)


def test_texts_are_packed() -> None:
    """The first token of a sequence is given, and the rest at the end is dropped."""
    data = PackedTexts([text(7, first_eligible=3), text(4, 20, first_eligible=9)], 5, 0.0, 0)
    assert data.all.ids.tolist() == [[0, 1, 2, 3, 4], [5, 6, 20, 21, 22]]
    assert data.all.eligible.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]
    assert (data.num_train, data.num_held_out, data.num_skipped) == (2, 0, 0)


def test_sequences_without_a_token_to_learn_are_skipped() -> None:
    """The first token of a sequence never counts as a token to learn."""
    data = PackedTexts([text(11, first_eligible=10), text(9, 20, first_eligible=0)], 5, 0.5, 0)
    assert data.all.ids.tolist() == [[10, 20, 21, 22, 23], [24, 25, 26, 27, 28]] and data.num_skipped == 2
    assert (data.num_train, data.num_held_out) == (1, 1)


def test_last_sequences_are_held_out() -> None:
    data = PackedTexts([text(50)], 5, 0.25, 0)
    assert (data.num_train, data.num_held_out) == (7, 3)
    assert [sequence.ids[0].item() for sequence in data.held_out()] == [35, 40, 45]
    seen = {int(row[0]) for step in range(7) for row in data.batch(step, 2).ids}
    assert seen == {*range(0, 35, 5)}


def test_each_epoch_has_all_sequences_once() -> None:
    """The order differs by epoch and seed, even if an epoch ends within a step."""
    orders = []
    for seed in (0, 1):
        data = PackedTexts([text(50)], 5, 0.0, seed)
        order = [int(ids[0]) for step in range(5) for ids in data.batch(step, 4).ids]
        assert sorted(order[:10]) == sorted(order[10:]) == list(range(0, 50, 5))
        orders += [order[:10], order[10:]]
    assert len({*map(tuple, orders)}) == 4


@pytest.mark.parametrize(
    ("texts", "held_out", "message"),
    [
        (
            [],
            0.0,
            "There are 0 tokens, which make 0 sequences of 5 with something to learn, 0 of them held out; give more",
        ),
        ([text(4)], 0.0, "There are 4 tokens, which make 0 sequences"),
        ([text(20, first_eligible=20)], 0.0, "There are 20 tokens, which make 0 sequences"),
        ([text(20)], 0.9, "which make 4 sequences of 5 with something to learn, 4 of them held out"),
    ],
)
def test_nothing_to_learn(texts: Any, held_out: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PackedTexts(texts, 5, held_out, 0)
