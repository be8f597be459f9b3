from pathlib import Path

import pytest

from blockdraft.engine.prompts import TextStream, encode
from blockdraft.targets import Target, load_target


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


def test_text_is_sent_as_a_users_message(target: Target) -> None:
    assert target.tokenizer is not None
    expected = target.tokenizer("<|im_start|>user\nthe tin<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert encode("the tin", target) == encode([{"role": "user", "content": "the tin"}], target) == expected
    assert encode(expected, target) == expected


def test_stream_never_sends_half_a_character(target: Target) -> None:
    assert target.tokenizer is not None
    text = "aß€\U0001f600 the end"
    stream, pieces = TextStream(target.tokenizer), []
    for token in target.tokenizer(text)["input_ids"]:
        pieces.append(stream.push([token]))
    pieces.append(stream.finish())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert "\U0001f600" in pieces  # four tokens, sent with the last of them


def test_an_unfinished_character_comes_at_the_end(target: Target) -> None:
    assert target.tokenizer is not None
    tokens = target.tokenizer("ab€")["input_ids"][:-1]
    stream = TextStream(target.tokenizer)
    sent = stream.push(tokens)
    assert sent == "ab"
    assert sent + stream.finish() == stream.text == target.tokenizer.decode(tokens)
