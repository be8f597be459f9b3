import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.engine.text import AnswerText, check_request, encode
from blockdraft.errors import RequestError, UsageError
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams


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
    answer, pieces = AnswerText(target.tokenizer), []
    for token in target.tokenizer(text)["input_ids"]:
        answer.push(token)
        pieces.append(answer.take())
    answer.finish()
    pieces.append(answer.take())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert "\U0001f600" in pieces  # four tokens, sent with the last of them


def test_an_unfinished_character_comes_at_the_end(target: Target) -> None:
    assert target.tokenizer is not None
    tokens = target.tokenizer("ab€")["input_ids"][:-1]
    answer = AnswerText(target.tokenizer)
    for token in tokens:
        answer.push(token)
    assert answer.take() == "ab"
    answer.finish()
    assert answer.shown == target.tokenizer.decode(tokens) == "ab" + answer.take()


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


def test_as_much_is_held_back_as_may_begin_a_stop_string() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        text, stop = ("".join(draw.choices("ab", k=draw.randrange(low, 8))) for low in (0, 1))
        answer = AnswerText(None, [stop])
        answer._text = text
        expected = max(n for n in range(len(stop)) if text.endswith(stop[:n]))
        assert answer._beginning(stop) == expected, (text, stop)


def test_a_long_stop_string_is_not_cut_into_all_its_beginnings() -> None:
    """With a piece for each of them a token would take seconds."""

    class Counted(str):
        slices = 0

        def __getitem__(self, at: Any) -> str:
            Counted.slices += isinstance(at, slice)
            return super().__getitem__(at)

    stop = Counted("ab" * 500)
    answer = AnswerText(None, [stop])
    answer._text = "the end is ab"
    assert answer._beginning(stop) == 2 and Counted.slices == 0


def test_the_stop_string_that_begins_first_cuts(target: Target) -> None:
    pieces, stopped, _ = shown(target, "q thex", ("e", " the"))  # one token completes both
    assert ("".join(pieces), stopped) == ("q", True)


def test_a_stop_string_across_characters_of_several_bytes(target: Target) -> None:
    pieces, stopped, _ = shown(target, "aß€b", ("ß€",))
    assert ("".join(pieces), stopped) == ("a", True)


class Spelling(PreTrainedTokenizer):
    """A tokenizer in Python, of letters, and with one token that it cannot decode. As one of CTRL's tokens, "@" joins
    its token to the next."""

    entries = [*"abcx", "a@", "never", "</s>"]
    vocab_size = len(entries)

    def get_vocab(self) -> dict[str, int]:
        return {entry: i for i, entry in enumerate(self.entries)}

    def _convert_id_to_token(self, index: int) -> str:
        return self.entries[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        if "never" in tokens:
            raise KeyError("never")
        return "".join(tokens).replace("@", "", 1 if "c" in tokens else 0)


@pytest.fixture(scope="module")
def spelling() -> Spelling:
    return Spelling(eos_token="</s>")


def read(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[str, int | None]:
    """The text of an answer, and with which token it stopped."""
    answer = AnswerText(tokenizer, stop)
    for count, token in enumerate(ids, start=1):
        answer.push(token)
        if answer.stopped:
            return answer.shown, count
    answer.finish()
    return answer.shown, None


def test_a_tokenizer_in_python_stops_at_the_token_that_completes_the_stop_string(spelling: Spelling) -> None:
    assert read(spelling, [3, 0, 1, 2, 3, 3], ("abc",)) == ("x", 4)
    assert read(spelling, [3, 0, 1, 3, 3], ("abc",)) == ("xabxx", None)


def test_a_run_of_bytes_stops_at_the_byte_that_completes_the_stop_string() -> None:
    entries = [f"<0x{value:02X}>" for value in range(256)]
    tokenizer = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert read(fast, list("xab€cd".encode()), ("b€", "€c")) == ("xa", 6)
    assert read(fast, list(b" x ab"), (" ",)) == ("x", 3)  # the first space is none of the text
    assert read(fast, [*b"xab", 0xFF, 0x61], ("b\ufffd", "ba")) == ("\ufffd" * 5, None)  # all are replaced


def test_what_was_taken_cannot_change(spelling: Spelling) -> None:
    """With "c" this tokenizer changes text long past, which no one can foresee: an error, and never another text."""
    ids = [4, *[3] * 9]
    assert read(spelling, [*ids, 2]) == ("axxxxxxxxxc", None)  # nothing was taken
    answer = AnswerText(spelling)
    for token in ids:
        answer.push(token)
    taken = answer.take()
    assert taken == "a@" + "x" * 8
    answer.push(2)
    with pytest.raises(RequestError, match="Spelling changed text of this answer that was already sent"):
        answer.finish()
    answer.finish()
    assert answer.shown == taken + answer.take()


def test_an_exception_of_the_tokenizer_comes_through_once(spelling: Spelling) -> None:
    for stop in ((), ("bb",)):
        answer = AnswerText(spelling, stop)
        for token in [0, 1, 0]:
            answer.push(token)
        before = answer.take()
        with pytest.raises(KeyError, match="never"):
            answer.push(5)
            answer.take()
        answer.push(0)
        answer.finish()
        assert before + answer.take() == answer.shown == "ab"  # the last token of such a tokenizer is held back
    answer = AnswerText(spelling)
    answer.push(5)
    with pytest.raises(KeyError, match="never"):
        answer.finish()
    answer.finish()
    assert answer.shown == ""


def test_a_panic_of_rust_is_an_error_of_the_request() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "": 1}, []))
    tokenizer.decoder = decoders.Strip(" ", 0, 2)  # indexes an empty text
    answer = AnswerText(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    answer.push(0)
    answer.push(1)
    with pytest.raises(RequestError, match="The tokenizer failed at this answer: .*out of bounds"):
        answer.finish()


def test_an_interrupt_loses_no_text(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert target.tokenizer is not None
    ids, decode = target.tokenizer("the tin")["input_ids"], type(target.tokenizer).decode
    answer = AnswerText(target.tokenizer)
    calls = 0

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise KeyboardInterrupt
        return decode(*args, **options)

    monkeypatch.setattr(type(target.tokenizer), "decode", interrupted)
    text = ""
    for token in ids:
        answer.push(token)
        with pytest.raises(KeyboardInterrupt):
            answer.take()
        text += answer.take()
    assert text == "the tin"


@pytest.mark.parametrize("ids", [np.array([5, 9]), torch.tensor([5, 9]), (5, 9), [np.int64(5), np.int32(9)]])
def test_arrays_of_token_ids(target: Target, ids: Any) -> None:
    encoded = encode(ids, target)
    assert encoded == [5, 9] and {type(token) for token in encoded} == {int}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 9.0], r"9.0 \(float\) among its token ids"),
        ([5, True], r"True \(bool\)"),
        ([5, "9"], r"'9' \(str\)"),
        (np.array([5.0]), r"5.0 \(float\)"),
        (torch.tensor([True]), r"True \(bool\)"),
        (torch.tensor([[5, 9]]), r"\[5, 9\] \(list\)"),
        (torch.tensor(5), r"The prompt is 5 \(int\)"),
        (5, r"The prompt is 5 \(int\)"),
        (None, r"The prompt is None \(NoneType\)"),
        (b"hello", r"The prompt is b'hello' \(bytes\)"),
        (np.array([]), "The prompt is empty"),
        ([{"role": "user", "content": "a"}, 5], r"The chat holds 5 \(int\)"),
    ],
)
def test_other_prompts_are_refused(target: Target, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode(prompt, target)


def test_a_chat_that_the_template_refuses(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert target.tokenizer is not None
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="refuses the chat: roles must alternate"):
        encode("hello", target)


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], SamplingParams(), "its text has no tokens"),
        ([5, 400], SamplingParams(), "Token id 400 of the prompt is outside the target's vocabulary of 300 tokens"),
        ([5, -1], SamplingParams(), "Token id -1 of the prompt"),
        ([5], SamplingParams(logit_bias={299: 1, 300: 1}), "logit_bias names the token 300.*from 0 to 299"),
        ([5], SamplingParams(stop_token_ids=(4, 999)), "stop_token_ids names the token 999"),
        ([5], SamplingParams(5, stop=("a",)), "no tokenizer, so it cannot stop at a text"),
        ([5] * 50, SamplingParams(), "prompt has 50 tokens and the target's context 50"),
        ([5] * 10, SamplingParams(41), "ask for at most 40"),
    ],
)
def test_what_the_target_cannot_decode_is_refused(ids: list[int], params: SamplingParams, message: str) -> None:
    small: Any = SimpleNamespace(vocab_size=300, max_context=50, tokenizer=None, tokenizer_reason=None)
    with pytest.raises(UsageError, match=message):
        check_request(ids, params, small)


def test_what_just_fits_is_taken() -> None:
    small: Any = SimpleNamespace(vocab_size=300, max_context=50, tokenizer=None, tokenizer_reason=None)
    check_request([0, 299] * 5, SamplingParams(40, logit_bias={299: 1, 0: 1}, stop_token_ids=(299,)), small)


@pytest.mark.parametrize("fields", [{"logit_bias": {4000: 5.0}}, {"stop_token_ids": (4000,)}])
def test_a_bad_request_is_refused_at_submit(target: Target, fields: dict[str, Any]) -> None:
    engine = Engine(target, load_drafter("none", target=target))
    with pytest.raises(UsageError, match="names the token 4000"):
        engine.generate([[5, 6], [5, 6]], [SamplingParams(5), SamplingParams(5, **fields)])


def test_tokens_that_only_the_tokenizer_has_are_refused(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    assert target.tokenizer is not None
    target.tokenizer.add_tokens(["<tool>"])
    engine = Engine(target, load_drafter("none", target=target))
    with pytest.raises(UsageError, match=f"Token id {target.vocab_size} of the prompt .*Where the tokenizer made it"):
        engine.generate(["a <tool>"])
