"""Text piece by piece, for tokenizers of every kind: the pieces are what `decode` gives, and come early."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from blockdraft.engine.detokenize import KEPT, WINDOW, TextStream, _last_cut, _write_forward
from blockdraft.engine.text import AnswerText

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
    """Random ids; some stretches repeat a few of them, as random models do."""
    ids: list[int] = []
    while len(ids) < count:
        few = [rng.randrange(size) for _ in range(rng.randint(1, 4))]
        ids += rng.choices(few if rng.random() < 0.3 else range(size), k=rng.randint(1, 30))
    return ids[:count]


def id_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """Ids that a model may yield: fast tokenizers take ids without an entry, as of a padded vocabulary."""
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
    """Settled text and tail are what the answer would be if it ended here, unfinished characters aside."""
    rng = random.Random(1)
    for _ in range(10):
        ids = some_ids(rng, id_count(tokenizer), 60)
        stream, text = TextStream(tokenizer), ""
        for count, token in enumerate(ids, start=1):
            new, tail = stream.push([token])
            text += new
            whole = decoded(tokenizer, ids[:count]).rstrip("\ufffd")
            if not stream._run:  # of bytes, whose text may be written in another way at the beginning
                assert (text + tail).rstrip("\ufffd") == whole


def test_a_step_decodes_few_tokens(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where special tokens, unknown ids or invalid bytes follow each other."""
    rng = random.Random(2)
    size, lengths, decode = id_count(tokenizer), [], type(tokenizer).decode
    special = tokenizer.convert_tokens_to_ids("</s>")
    visible = next(i for i in iter(lambda: rng.randrange(size), None) if decoded(tokenizer, [i]).strip())
    stretches = [some_ids(rng, size, 300), [special] * 300, [visible] * 300, some_ids(rng, size, 100)]
    if tokenizer.is_fast:
        stretches.insert(2, [size - 1] * 300)

    def counted(self: Any, ids: list[int], **options: Any) -> Any:
        lengths.append(len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(type(tokenizer), "decode", counted)
    stream = TextStream(tokenizer)
    longest_run, run = 0, 0
    for stretch in stretches:
        for token in stretch:
            run = run + 1 if stream._run else 0
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
        cut = _last_cut(text)
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
    assert _write_forward(kinds) == forward


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
