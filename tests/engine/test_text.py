import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from copies import copy_with
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.engine.text import (
    KEPT,
    WINDOW,
    AnswerText,
    TextStream,
    begun,
    check_request,
    encode,
    last_cut,
    write_forward,
)
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
        expected = max(n for n in range(len(stop)) if text.endswith(stop[:n]))
        assert begun(stop, text) == expected, (text, stop)


def test_a_long_stop_string_is_not_cut_into_all_its_beginnings() -> None:
    """Looking at a piece for each of them would take seconds a token."""

    class Counted(str):
        slices = 0

        def __getitem__(self, at: Any) -> str:
            Counted.slices += isinstance(at, slice)
            return super().__getitem__(at)

    stop = Counted("ab" * 500)
    assert begun(stop, "the end is ab") == 2 and Counted.slices == 0


def test_the_stop_string_that_begins_first_cuts(target: Target) -> None:
    pieces, stopped, _ = shown(target, "q thex", ("e", " the"))  # one token completes both
    assert ("".join(pieces), stopped) == ("q", True)


def test_a_stop_string_across_characters_of_several_bytes(target: Target) -> None:
    pieces, stopped, _ = shown(target, "aß€b", ("ß€",))
    assert ("".join(pieces), stopped) == ("a", True)


@pytest.mark.parametrize("held", [(), ("never",)])
@pytest.mark.parametrize(
    ("tokens", "stop", "expected"),
    [
        (["a", "<|im_start|>", "b"], "<|im_start|>", "a"),
        (["a", "\n", "<|im_end|>", "b"], "\n<|im_end|>", "a"),
        (["a", "<|im_start|>", "u", "s", "x"], "<|im_start|>us", "a"),
        (["a", "<|im_end|>", "\n", "<|im_start|>", "x"], "<|im_end|>\n<|im_start|>", "a"),
        (["a", "<|im_start|>", "b", "c", "d"], "bc", "a"),
        (["a", "<|im_start|>", "b"], "<|im_start|>us", None),
        (["<|im_start|>", "a", "b", "b"], "<|im_start|>ac", None),
        ([*"<|im_start|>", "b"], "<|im_start|>", ""),  # spelled as text
    ],
)
def test_stop_strings_may_spell_special_tokens(
    target: Target, tokens: list[str], stop: str, expected: str | None, held: tuple[str, ...]
) -> None:
    """LostRuins/koboldcpp#791, vllm-project/vllm#2123: the text does not show special tokens, and they stop it."""
    assert target.tokenizer is not None
    answer, pieces = AnswerText(target.tokenizer, (stop, *held)), list[str]()
    for token in tokens:
        [answer.push(token_id) for token_id in target.tokenizer(token)["input_ids"]]
        pieces.append(answer.take())
        if answer.stopped:
            break
    assert answer.stopped == (expected is not None)
    answer.finish()
    pieces.append(answer.take())
    whole = "".join(token for token in tokens if len(token) == 1)
    assert "".join(pieces) == answer.shown == (whole if expected is None else expected)


def test_a_special_token_ends_a_request(target: Target) -> None:
    assert target.tokenizer is not None
    start = target.tokenizer.convert_tokens_to_ids("<|im_start|>")
    params = SamplingParams(max_new_tokens=5, stop=("<|im_start|>",), logit_bias={start: 100.0})
    with Engine(target, load_drafter("none", target=target)) as engine:
        [completion] = engine.generate(["Hi"], params)
    assert (completion.text, completion.finish_reason, completion.token_ids) == ("", "stop", [start])


def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer as of Llama 2 and Mistral: a text begins without the space of its first token."""
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghij", "▁one", "▁two", "▁▁▁"]
    backend = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(entry, special=True) for entry in entries[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        (["<s>", "▁one"], ["▁two", "▁one"], " two one"),
        (["<s>", "▁one", "</s>"], ["▁two"], " two"),
        (["<s>", "▁one", "<0x0A>"], ["▁▁▁", "a"], "   a"),  # the indentation of code
        (["<s>", "▁one"], ["<0xE2>", "<0x82>", "<0xAC>", "a"], "€a"),
        (["▁one", "<0xE2>", "<0x82>"], ["<0xAC>", "▁two"], "\ufffd two"),
        (["<s>"], ["▁two", "▁one"], "two one"),
        ([], ["▁two"], "two"),
    ],
)
def test_text_is_what_the_answer_adds_to_its_prompt(prompt: list[str], answer: list[str], expected: str) -> None:
    """huggingface/transformers#22710 and #28776: the first token keeps its space."""
    tokenizer = sentencepiece()
    ids, added = (list(tokenizer.convert_tokens_to_ids(tokens)) for tokens in (prompt, answer))
    streamed, pieces = AnswerText(tokenizer, ("never",), prompt=ids), list[str]()
    for token in added:
        streamed.push(token)
        pieces.append(streamed.take())
    streamed.finish()
    assert "".join([*pieces, streamed.take()]) == streamed.shown == expected
    at_once = AnswerText(tokenizer, token_ids=added, prompt=ids)
    at_once.finish()
    assert at_once.shown == expected
    stopped = AnswerText(tokenizer, (expected,), token_ids=added, prompt=ids)
    stopped.read()
    assert stopped.stopped and stopped.shown == ""


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
    """With "c" this tokenizer changes text that was sent: an error, and never another text."""
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


def test_an_interrupt_loses_no_text(target: Target) -> None:
    assert target.tokenizer is not None
    ids, decode = target.tokenizer("the tin")["input_ids"], target.tokenizer.decode
    calls = 0

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise KeyboardInterrupt
        return decode(*args, **options)

    answer = AnswerText(copy_with(target.tokenizer, decode=interrupted))
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
        ([5, 9.0], r"token ids must be whole numbers, got 9.0 \(float\)"),
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


def test_a_last_text_of_the_assistant_is_continued(target: Target) -> None:
    user, assistant = {"role": "user", "content": "the tin"}, {"role": "assistant", "content": "It is"}
    begun = encode([user], target)
    continued = encode([user, assistant], target)
    assert continued == begun + target.tokenizer("It is", add_special_tokens=False)["input_ids"]
    assert encode([user, assistant, user], target)[: len(continued)] == continued
    assert encode([user, {"role": "assistant", "content": ""}], target)[: len(begun)] == begun


def test_a_chat_that_the_template_refuses(target: Target) -> None:
    assert target.tokenizer is not None
    tokenizer = copy_with(target.tokenizer, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="refused by the chat template: .*roles must alternate"):
        encode("hello", copy_with(target, tokenizer=tokenizer))


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
    with pytest.raises(UsageError, match=f"Token id {target.vocab_size} of the prompt .*If the tokenizer made it"):
        engine.generate(["a <tool>"])


SPECIAL = ["<s>", "</s>", "<pad>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
LETTERS = list("abentsmvr.,?!'-") + ["é", "漢", "字", "\U0001f600", "\ufffd"]


def fast(model: Any, decoder: Any = None, special: Sequence[str] = SPECIAL, **more: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in special])
    tokenizer.add_tokens([AddedToken("<tool> "), AddedToken("x y")])  # added, and not special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **more)


def vocabulary(*parts: Sequence[str]) -> dict[str, int]:
    return {entry: i for i, entry in enumerate(dict.fromkeys(entry for part in parts for entry in part))}


def byte_level(**more: Any) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["Ġa", "Ã©", "aâ", "âĤ", "Ġ'", "Ġn", ""]  # with whole, half and third characters, and with nothing
    return fast(models.BPE(vocabulary(SPECIAL, alphabet, pairs), []), decoders.ByteLevel(), **more)


def word_pieces() -> dict[str, int]:
    pieces = ["[UNK]", *SPECIAL, *LETTERS, "do", "n't", "'s", "'ve", "##s", "##ing", "##'"]
    return vocabulary(pieces)


def sentence_pieces(*more: Sequence[str]) -> dict[str, int]:
    starts = ["▁", "▁▁", "▁a", "▁the", "▁'", "▁n", "▁."]
    return vocabulary(["<unk>", *SPECIAL], *more, LETTERS, starts)


def llama(**more: Any) -> PreTrainedTokenizerFast:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model = models.BPE(sentence_pieces(BYTES), [], unk_token="<unk>", byte_fallback=True)
    return fast(model, decoders.Sequence(steps), **more)


def unigram(**more: Any) -> PreTrainedTokenizerFast:
    entries = [(entry, -1.0) for entry in sentence_pieces()]
    return fast(models.Unigram(entries, unk_id=0, byte_fallback=False), decoders.Metaspace(), **more)


def word_piece(cleanup: bool, **more: Any) -> PreTrainedTokenizerFast:
    return fast(models.WordPiece(word_pieces(), unk_token="[UNK]"), decoders.WordPiece(cleanup=cleanup), **more)


def with_decoder(decoder: Any, **more: Any) -> PreTrainedTokenizerFast:
    return fast(models.BPE(sentence_pieces(), []), decoder, **more)


class SlowTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python, of one entry a token."""

    def __init__(self, entries: Sequence[str], joined: Callable[[list[str]], str], **more: Any) -> None:
        self._entries, self._joined = list(entries), joined
        super().__init__(eos_token="</s>", **more)

    @property
    def vocab_size(self) -> int:
        return len(self._entries)

    def get_vocab(self) -> dict[str, int]:
        return {entry: i for i, entry in enumerate(self._entries)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._entries.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._entries[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._joined(tokens)


def slow_words(**more: Any) -> SlowTokenizer:
    """As BERT's: the text is stripped, so a space at its end comes with the next token."""
    return SlowTokenizer(list(word_pieces()), lambda tokens: " ".join(tokens).replace(" ##", "").strip(), **more)


def slow_stripped() -> SlowTokenizer:
    entries = ["</s>", *LETTERS, " ", " a", "a ", "\n"]
    return SlowTokenizer(entries, lambda tokens: "".join(tokens).strip())


def slow_joined() -> SlowTokenizer:
    """As CTRL's: "@@" says that the word goes on, so the next token changes the text of the last one."""
    entries = ["</s>", *LETTERS, "a@@", "the@@"]
    return SlowTokenizer(entries, lambda tokens: " ".join(tokens).replace("@@ ", "").strip())


def slow_bytes() -> SlowTokenizer:
    """As GPT-2's."""
    values = {chr(256 + value): value for value in range(256)}

    def joined(tokens: list[str]) -> str:
        return bytes(values[token] for token in tokens).decode("utf-8", errors="replace")

    return SlowTokenizer([*values, "</s>"], joined)


def slow_sentences() -> SlowTokenizer:
    """As Llama's was: all bytes of a run are replaced if one is invalid."""
    fallback = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    entries = ["</s>", *BYTES, *LETTERS, "▁", "▁a"]
    return SlowTokenizer(entries, lambda tokens: fallback.decode(tokens).removeprefix(" "))


class Doubling:
    """A decoder in Python, whose steps cannot be known."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return [token.replace("a", "aa") for token in tokens]


def decoder_in_python() -> PreTrainedTokenizerFast:
    tokenizer = llama()
    tokenizer.backend_tokenizer.decoder = decoders.Decoder.custom(Doubling())
    return tokenizer


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level": byte_level,
    "byte-level, cleaned": lambda: byte_level(
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    ),
    "byte-level, not cleaned": lambda: byte_level(clean_up_tokenization_spaces=True),  # BPE ignores it
    "llama": llama,
    "llama, cleaned": lambda: llama(
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    ),
    "word pieces": lambda: word_piece(False),
    "word pieces, cleaned once": lambda: word_piece(True),
    "word pieces, cleaned twice": lambda: word_piece(True, clean_up_tokenization_spaces=True),
    "word pieces, cleaned at the end": lambda: word_piece(False, clean_up_tokenization_spaces=True),
    "unigram": unigram,
    "unigram, cleaned": lambda: unigram(clean_up_tokenization_spaces=True),
    "no decoder": lambda: with_decoder(None),
    "suffixes": lambda: with_decoder(decoders.BPEDecoder("e")),
    "stripped at the end": lambda: with_decoder(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 0, 1)])
    ),
    "replaced across tokens": lambda: with_decoder(
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁a", "A")])
    ),
    "repeats dropped": lambda: with_decoder(decoders.CTC("<pad>", "▁", True)),
    "decoder in Python": decoder_in_python,
    "slow words": slow_words,
    "slow words, cleaned": lambda: slow_words(clean_up_tokenization_spaces=True),
    "slow stripped": slow_stripped,
    "slow joined": slow_joined,
    "slow bytes": slow_bytes,
    "slow sentences": slow_sentences,
}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return KINDS[request.param]()


def some_ids(rng: random.Random, size: int, count: int) -> list[int]:
    """Random ids, with parts that repeat a few of them, as random models do."""
    ids: list[int] = []
    while len(ids) < count:
        few = [rng.randrange(size) for _ in range(rng.randint(1, 4))]
        ids += rng.choices(few if rng.random() < 0.3 else range(size), k=rng.randint(1, 30))
    return ids[:count]


def id_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """Ids that a model may yield; fast tokenizers also take ids beyond the vocabulary, since models pad it."""
    return len(tokenizer) + 5 * tokenizer.is_fast


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def check_random_answers(tokenizer: PreTrainedTokenizerBase, count: int) -> None:
    rng = random.Random(0)
    for _ in range(count):
        ids = some_ids(rng, id_count(tokenizer), rng.randint(1, 120))
        answer, pieces = AnswerText(tokenizer), [""]
        begin = 0
        while begin < len(ids):
            end = begin + rng.choice([1, 1, 2, 5])
            for token in ids[begin:end]:
                answer.push(token)
            begin = end
            pieces.append(answer.take())
        answer.finish()  # raises where what was taken is no beginning of the whole
        pieces.append(answer.take())
        assert "".join(pieces) == answer.shown == decoded(tokenizer, ids)


def test_pieces_are_the_text_of_all_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    check_random_answers(tokenizer, 20)


@pytest.mark.slow
def test_pieces_of_many_answers_are_the_text_of_all_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    check_random_answers(tokenizer, 400)


def test_what_follows_the_settled_text_is_known(tokenizer: PreTrainedTokenizerBase) -> None:
    """Settled text and tail are the answer if it ended here, without unfinished characters."""
    rng = random.Random(1)
    for _ in range(10):
        ids = some_ids(rng, id_count(tokenizer), 60)
        stream, text = TextStream(tokenizer), ""
        for count, token in enumerate(ids, start=1):
            new, tail = stream.push([token])
            text += new
            whole = decoded(tokenizer, ids[:count]).rstrip("\ufffd")
            if not stream.byte_run:  # of bytes, whose text may be written in another way at the beginning
                assert (text + tail).rstrip("\ufffd") == whole


def test_a_step_decodes_few_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Also where special tokens, unknown ids or invalid bytes follow each other."""
    rng = random.Random(2)
    size, lengths, decode = id_count(tokenizer), [], tokenizer.decode
    special = tokenizer.convert_tokens_to_ids("</s>")
    visible = next(i for i in iter(lambda: rng.randrange(size), None) if decoded(tokenizer, [i]).strip())
    stretches = [some_ids(rng, size, 300), [special] * 300, [visible] * 300, some_ids(rng, size, 100)]
    if tokenizer.is_fast:
        stretches.insert(2, [size - 1] * 300)

    def counted(ids: list[int], **options: Any) -> Any:
        lengths.append(len(ids))
        return decode(ids, **options)

    stream = TextStream(copy_with(tokenizer, decode=counted))
    longest_run, run = 0, 0
    for stretch in stretches:
        for token in stretch:
            run = run + 1 if stream.byte_run else 0
            longest_run = max(longest_run, run)
            before = len(lengths)
            stream.push([token])
            assert len(lengths) - before <= 5
    blanks = 30  # of some tokenizers, which show a run of them when it ends
    assert max(lengths) <= WINDOW + KEPT + longest_run + blanks


def test_every_token_of_ordinary_text_is_shown_at_once() -> None:
    for make in (byte_level, llama, unigram, lambda: word_piece(True)):
        tokenizer = make()
        stream, ids = TextStream(tokenizer), tokenizer.convert_tokens_to_ids(["a", "b", "e"])
        assert [len(stream.push([token])[0]) > 0 for token in ids] == [True] * 3


def test_a_run_of_bytes_is_shown_when_it_ends() -> None:
    tokenizer = llama()
    euro = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>"])
    a, bad = tokenizer.convert_tokens_to_ids(["▁a", "<0xFF>"])
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in [a, *euro, a]] == [("a", ""), ("", ""), ("", ""), ("", "€"), ("€ a", "")]
    assert [stream.push([token])[1] for token in [*euro, bad, *euro]] == ["", "", "€", "", "", "", ""]
    assert stream.push([a]) == ("\ufffd" * 7 + " a", "")


def test_invalid_bytes_are_shown_once_they_cannot_be_a_character() -> None:
    tokenizer = byte_level()
    continuation, first, second, a = tokenizer.convert_tokens_to_ids(["Ģ", "Ã", "©", "a"])  # 0x80, 0xC3, 0xA9
    stream = TextStream(tokenizer)
    shown = [stream.push([token])[0] for token in [continuation, continuation, first, second, first, a]]
    assert shown == ["", "\ufffd", "\ufffd", "é", "", "\ufffda"]


def test_spaces_are_cleaned_up_before_they_are_shown() -> None:
    tokenizer = word_piece(False, clean_up_tokenization_spaces=True)
    ids = tokenizer.convert_tokens_to_ids(["do", "n't", "b", ".", "n", "'", "t"])
    stream = TextStream(tokenizer)
    text = "".join(stream.push([token])[0] for token in ids)
    assert decoded(tokenizer, ids) == "don't b.n't"
    assert text == "don't b."


def test_an_overridden_decode_is_not_trusted() -> None:
    class Capitalising(PreTrainedTokenizerFast):
        """Its text depends on the tokens that follow."""

        def _decode(self, *args: Any, **options: Any) -> str:
            text = super()._decode(*args, **options)
            return text[:-1] + text[-1:].upper()

    tokenizer = Capitalising(tokenizer_object=byte_level().backend_tokenizer, eos_token="</s>")
    ids = tokenizer.convert_tokens_to_ids(list("abent"))
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in ids[:3]] == [("", "A"), ("", "aB"), ("a", "bE")]


def test_an_empty_token_finishes_no_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.convert_tokens_to_ids(["Ã", "", "©"])
    stream = TextStream(tokenizer)
    assert [stream.push([token])[0] for token in ids] == ["", "", "é"]


def test_a_text_is_cut_only_where_its_parts_are_cleaned_as_the_whole() -> None:
    clean, rng = byte_level().clean_up_tokenization, random.Random(0)
    cuts = 0
    for _ in range(30_000):
        text, more = ("".join(rng.choices("   ''ntvmsre.,a", k=rng.randint(0, 9))) for _ in range(2))
        cut = last_cut(text)
        cuts += cut > 0
        assert clean(text[:cut]) + clean(text[cut:] + more) == clean(text + more)
    assert cuts > 15_000


@pytest.mark.parametrize(
    ("kinds", "forward"),
    [
        ([], True),
        ([{"type": "ByteLevel"}], True),
        ([{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "stop": 0}], True),
        ([{"type": "Replace"}, {"type": "Fuse"}, {"type": "Strip", "stop": 1}], False),
        ([{"type": "Fuse"}, {"type": "Replace"}], False),
        ([{"type": "ByteLevel"}, {"type": "Replace"}], False),
        ([{"type": "CTC"}], False),
    ],
)
def test_which_decoders_are_known_to_write_forward(kinds: list[dict[str, Any]], forward: bool) -> None:
    assert write_forward(kinds) == forward


def test_a_decoder_that_strips_the_end() -> None:
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
    tokenizer = with_decoder(decoders.Sequence(steps))
    stream = TextStream(tokenizer)
    shown = [stream.push([token]) for token in tokenizer.convert_tokens_to_ids(["a", "▁", "b", "▁▁", "e"])]
    assert shown == [("", "a"), ("a", ""), ("", " b"), (" b", " "), (" ", " e")]


def test_byte_tokens_of_an_unknown_decoder_are_what_it_writes() -> None:
    tokenizer = decoder_in_python()
    a, byte = tokenizer.convert_tokens_to_ids(["▁a", "<0x41>"])
    stream = TextStream(tokenizer)
    assert [stream.push([token])[1] for token in (a, byte)] == ["▁aa", "▁aa<0x41>"]
