from pathlib import Path

import pytest

from blockdraft.engine.text import AnswerText, TextStream, encode
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


def shown(target: Target, text: str, stop: tuple[str, ...]) -> tuple[list[str], bool, int]:
    """What is shown after each token of `text`, whether it stopped, and after how many tokens."""
    assert target.tokenizer is not None
    answer, pieces = AnswerText(target.tokenizer, stop), []
    for token in target.tokenizer(text)["input_ids"]:
        answer.push(token)
        pieces.append(answer.take())
        if answer.stopped:
            break
    answer.finish()
    pieces.append(answer.take())
    assert "".join(pieces) == answer.shown
    return pieces, answer.stopped, len(pieces) - 1


def test_what_may_begin_a_stop_string_is_held_back(target: Target) -> None:
    pieces, stopped, _ = shown(target, "xaby", ("abc",))
    assert (pieces, stopped) == (["x", "", "", "aby", ""], False)
    pieces, stopped, _ = shown(target, "xab", ("abc",))
    assert (pieces, stopped) == (["x", "", "", "ab"], False)  # the answer ends, so nothing can complete it
    pieces, stopped, count = shown(target, "xabcdef", ("abc",))
    assert (pieces, stopped, count) == (["x", "", "", "", ""], True, 4)


def test_a_stop_string_that_begins_anew_inside_itself(target: Target) -> None:
    assert shown(target, "aabc", ("abc",))[0] == ["", "a", "", "", ""]
    assert shown(target, "ababx", ("abx",))[0] == ["", "", "ab", "", "", ""]


def test_the_stop_string_that_begins_first_cuts(target: Target) -> None:
    pieces, stopped, _ = shown(target, "q thex", ("e", " the"))  # one token completes both
    assert ("".join(pieces), stopped) == ("q", True)


def test_a_stop_string_across_characters_of_several_bytes(target: Target) -> None:
    pieces, stopped, _ = shown(target, "aß€b", ("ß€",))
    assert ("".join(pieces), stopped) == ("a", True)
