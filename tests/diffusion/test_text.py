"""Texts and chats as tokens to predict."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from blockdraft.data.settings import RecordSettings
from blockdraft.diffusion.text import gapped, read_texts, row_length, spelled, unseen
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
    """With their space, which many decoders leave out of a text's first token."""
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
