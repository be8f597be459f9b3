"""Tokenizers of GGUF files equal those that they were made from."""

import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from gguf_writer import tiny, write_gguf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.tokenization_utils_base import generate_merges

from blockdraft.chat_text import encode_chat
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.formats.gguf import open_gguf
from blockdraft.targets import BUNDLED, TargetText, load_target, load_target_text
from blockdraft.targets.gguf.tokenizer import SPLITS, end_ids, gguf_tokenizer
from blockdraft.types import SamplingParams
from blockdraft_tools.gguf.tokenizers import tokenizer_metadata
from blockdraft_train.data.token_data import tokenizer_fingerprint

TEXTS = (
    "The lengthy, well-known story of 12345 apples; they'RE DON'T we'll It's",
    "  two spaces,   three\n\n\tand a tab\r\n   ",
    "def f(x):\n    return x ** 2  # ünïcödé, 東京, русский, العربية, 🙂👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_end|",
    "e\u0301 and é, ﬁ, 𝔘, \u0000 \u200b ２３",
    "",
    "▁ under",
)


def written(path: Path, tokenizer: PreTrainedTokenizerBase, pre: str, size: int | None = None) -> Path:
    """Write a model with this tokenizer and a larger vocabulary, and return the path."""
    config = Qwen3Config(
        vocab_size=size or len(tokenizer) + 5,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = tiny(config)
    write_gguf(path, model, "F32", tokenizer, pre)
    model.save_pretrained(path.parent / "folder")
    tokenizer.save_pretrained(path.parent / "folder")
    return path


def bundled_like(pre: str, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return the bundled tokenizer with another pre-tokenization."""
    split, tokenizer = SPLITS[pre], AutoTokenizer.from_pretrained(BUNDLED)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.NFC() if split.composed else None
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.model.ignore_merges = split.whole
    tokenizer.add_tokens(["<think>", "two words"])
    return tokenizer


@pytest.mark.parametrize("pre", ["qwen2", "deepseek-r1-qwen", "deepseek-v3", "gpt-2", "smollm"])
def test_bytes(pre: str, tmp_path: Path) -> None:
    expected = bundled_like(pre)
    path = written(tmp_path / "m.gguf", expected, pre)
    actual = load_target_text(path).tokenizer
    assert actual is not None
    for text in (*TEXTS, "a <think> of two words"):
        ids = expected(text)["input_ids"]
        assert actual(text)["input_ids"] == ids, text
        assert actual.decode(ids) == expected.decode(ids)
        assert actual.decode(ids, skip_special_tokens=True) == expected.decode(ids, skip_special_tokens=True)
    assert actual.get_vocab() == expected.get_vocab() and tokenizer_fingerprint(actual) == tokenizer_fingerprint(
        expected
    )
    assert set(actual.all_special_ids) >= {0, 2} and (actual.eos_token, actual.pad_token) == (
        "<|im_end|>",
        "<|endoftext|>",
    )
    chat: list[dict[str, str]] = [{"role": "user", "content": "Hello <|im_end|>"}]
    assert actual.apply_chat_template(chat, tokenize=False) == expected.apply_chat_template(chat, tokenize=False)


def test_fewer_types_than_tokens(tmp_path: Path) -> None:
    path, key = written(tmp_path / "m.gguf", bundled_like("qwen2"), "qwen2"), b"tokenizer.ggml.token_type"
    whole = path.read_bytes()
    assert whole.count(key) == 1
    place = whole.index(key) + len(key) + 8  # after the types of the array and of its items
    [count] = struct.unpack_from("<Q", whole, place)
    path.write_bytes(whole[:place] + struct.pack("<Q", count - 8) + whole[place + 8 + 4 * 8 :] + bytes(4 * 8))
    for load in (load_target_text, load_target):
        with pytest.raises(UsageError, match="metadata that make no model .IndexError"):
            load(path)


def test_llama3_takes_whole_words_and_begins_with_bos(tmp_path: Path) -> None:
    """A word that is in the vocabulary becomes that token, even if its pairs merge otherwise."""
    tokens = ["<|begin_of_text|>", "<|eot_id|>", *"abc", "ab", "bc", "abc", "Ġ"]
    types = [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * 7
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b", "b c"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    actual = gguf_tokenizer(metadata)
    assert actual("abc")["input_ids"] == [0, 7] and actual("abc", add_special_tokens=False)["input_ids"] == [7]
    assert actual("<|eot_id|>abca")["input_ids"] == [0, 1, 5, 4, 2]
    plain = metadata | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert gguf_tokenizer(plain)("abc")["input_ids"] == [7, 1]
    merged = gguf_tokenizer(metadata | {"tokenizer.ggml.pre": "gpt-2"})
    assert merged("abc")["input_ids"] == [5, 4]


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "tekken", "gpt-2", "smollm"])
def test_pieces_of_text(pre: str) -> None:
    """Digits, contractions and capitals are split as in the original tokenizer."""
    pieces = SPLITS[pre].pre_tokenizer().pre_tokenize_str("It'S 12345 fooBar x\n\ny")
    actual = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in pieces]
    assert (
        actual
        == {
            "qwen2": ["It", "'S", " ", "1", "2", "3", "4", "5", " fooBar", " x", "\n\n", "y"],
            "llama-bpe": ["It", "'S", " ", "123", "45", " fooBar", " x", "\n\n", "y"],
            "tekken": ["It", "'S", " ", "1", "2", "3", "4", "5", " foo", "Bar", " x", "\n\n", "y"],
            "gpt-2": ["It", "'", "S", " 12345", " fooBar", " x", "\n", "\n", "y"],
            "smollm": ["It", "'", "S", " ", "1", "2", "3", "4", "5", " fooBar", " x", "\n", "\n", "y"],
        }[pre]
    )


def test_pieces_of_deepseek() -> None:
    """Text is split in several passes. In V2 the second takes ASCII letters out of words with others."""
    text = "a = 1234 *b\n\nit's東京です!  été"
    pieces = {
        "deepseek-v3": ["a", " =", " ", "123", "4", " *", "b", "\n\n", "it", "'s", "東京です", "!", " ", " été"],
        "deepseek-llm": [
            "a",
            " =",
            " ",
            "1234",
            " *",
            "b",
            "\n",
            "\n",
            "it",
            "'",
            "s",
            "東京です",
            "!",
            " ",
            " é",
            "t",
            "é",
        ],
    }
    for pre, expected in pieces.items():
        ends = [end for _, (_, end) in SPLITS[pre].pre_tokenizer().pre_tokenize_str(text)]
        assert [text[start:end] for start, end in zip([0, *ends], ends, strict=False)] == expected


def pieces_of(texts: tuple[str, ...], specials: list[str]) -> dict[str, int]:
    """Return a vocabulary like SentencePiece's, the best pieces first, with all bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    words = [" ".join(text.split()) for text in texts] * 3
    trained.train_from_iterator(words, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    ordered = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda item: (-len(item[0]), item[1]))]
    actual = dict.fromkeys([*specials, *bytes_, *sorted(ordered, key=len, reverse=False), "▁"])
    return {token: i for i, token in enumerate(actual)}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma4"])
@pytest.mark.parametrize("spaced", [True, False])
def test_sentencepiece(family: str, spaced: bool) -> None:
    gemma = family != "llama"
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    vocab = pieces_of(TEXTS[:3], specials)
    scores = {token: -float(i) for token, i in vocab.items()}
    merges = generate_merges(vocab, scores)
    if family == "gemma4":
        merges = merges[: len(merges) * 3 // 4]  # files store merges
    if gemma:
        expected: Any = GemmaTokenizer(vocab=vocab, merges=merges)
    else:
        expected = LlamaTokenizer(vocab=vocab, merges=merges, add_prefix_space=spaced)
    special = TokenType.CONTROL
    types = dict.fromkeys(specials, special) | {"<unk>": TokenType.UNKNOWN}
    kinds = [types.get(t, TokenType.BYTE if t.startswith("<0x") else TokenType.NORMAL) for t in vocab]
    actual = gguf_tokenizer(
        {
            "general.architecture": family,
            "tokenizer.ggml.model": "gemma4" if family == "gemma4" else "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": list(vocab),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
            "tokenizer.ggml.scores": list(scores.values()),
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": vocab["<bos>" if gemma else "<s>"],
            "tokenizer.ggml.eos_token_id": vocab["<eos>" if gemma else "</s>"],
            "tokenizer.ggml.unknown_token_id": vocab["<unk>"],
            "tokenizer.ggml.add_space_prefix": spaced,
        }
    )
    assert len(actual) == len(vocab)
    begin = vocab["<bos>" if gemma else "<s>"]
    for text in (*TEXTS, "story</s>of<bos> apples"):
        ids = expected(text, add_special_tokens=False)["input_ids"]
        assert actual(text, add_special_tokens=False)["input_ids"] == ids, text
        assert actual(text)["input_ids"] == [begin, *ids]
        assert actual.decode(ids) == expected.decode(ids)
    assert len(expected(TEXTS[0])["input_ids"]) < len(TEXTS[0])  # pieces were merged


def test_gemma_spells_runs_of_spaces_as_spaces() -> None:
    tokens = ["<bos>", "<eos>", "<unk>", "▁", "  ", "    ", "a", *(f"<0x{number:02X}>" for number in range(256))]
    metadata = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [3, 3, 2, 1, 4, 4, 1, *[6] * 256],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    actual = gguf_tokenizer(metadata)
    assert actual("a  a    a a")["input_ids"] == [0, 6, 4, 6, 5, 6, 3, 6]
    assert len(actual) == len(tokens)


def test_answers_are_those_of_the_folder(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", bundled_like("qwen2"), "qwen2")
    answers = []
    for place in (path, tmp_path / "folder"):
        target = load_target(place, device="cpu", compile="off")
        with Engine(target, load_drafter("none", target=target), 2) as engine:
            params = SamplingParams(temperature=0, max_new_tokens=12)
            done = engine.generate(["What is 12 * 12?", "Sing!"], params)
        answers.append([(one.token_ids, one.text) for one in done])
    assert answers[0] == answers[1]


def test_ends(tmp_path: Path) -> None:
    """The end token of the file, and other tokens that are known to end responses."""
    path = written(tmp_path / "m.gguf", bundled_like("qwen2"), "qwen2")
    text, target = load_target_text(path), load_target(path, device="cpu", compile="off")
    assert text.eos_token_ids == target.eos_token_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert (text.path, text.max_context, text.tokenizer_reason) == (path, 128, None)


@pytest.mark.parametrize(
    ("tokens", "keys", "ends"),
    [
        ("<|endoftext|> <|im_start|> <|im_end|>", {"eos": 2}, [0, 2]),
        ("a <|im_end|> <|fim_pad|> <|repo_name|> <|file_sep|> <|fim_prefix|>", {"eos": 1}, [1, 2, 3, 4]),
        ("<fim_pad> <|fim_pad|> <reponame> <|end_of_text|>", {}, [1, 2, 3]),
        ("a b c d <|fim_pad|>", {"fim_pad": 1, "fim_rep": 2, "fim_sep": 3}, [1, 2, 3]),
        ("<|eot_id|> <|eom_id|> <|end_of_text|> a", {"eos": 2}, [0, 1, 2]),
        ("<|end|> <|start|> <|message|>", {"eos": 0}, [0]),
        ("<|end|> <|return|> <|call|>", {"eos": 1}, [1, 2]),
        ("<eos> <end_of_turn> <turn|> <|tool_response>", {}, [0, 1, 2, 3]),
        ("[EOS] [EOT] <EOT> _<EOT> <end_of_utterance> <｜end▁of▁sentence｜>", {}, [*range(6)]),
        ("a b c d", {"eos": 1, "eot": 2, "eom": 3}, [1, 2, 3]),
        ("a b", {"eos": 1, "eot": 7}, [1]),
        ("", {"eos": 5}, [5]),
    ],
)
@pytest.mark.parametrize("kind", [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL])
def test_ends_of_families(tokens: str, keys: dict[str, int], ends: list[int], kind: TokenType) -> None:
    """As in llama.cpp (ggml-org/llama.cpp#9606), tokens of any type end responses by their text."""
    metadata: dict[str, Any] = {f"tokenizer.ggml.{key}_token_id": number for key, number in keys.items()}
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": []}
    metadata |= {"tokenizer.ggml.tokens": tokens.split(), "tokenizer.ggml.token_type": [kind] * len(tokens.split())}
    assert end_ids(metadata) == ends
    if tokens:
        actual = gguf_tokenizer(metadata)
        assert actual.decode(ends, skip_special_tokens=True) == ""  # as control tokens they are not shown


def test_a_piece_of_html_ends_nothing() -> None:
    """The token </s> is text in Qwen's vocabulary, and a control token in others."""
    for kind, ends in ((TokenType.NORMAL, [1]), (TokenType.CONTROL, [0, 1])):
        tokens = {"tokens": ["</s>", "<|im_end|>"], "token_type": [kind, TokenType.CONTROL], "eos_token_id": 1}
        assert end_ids({f"tokenizer.ggml.{key}": value for key, value in tokens.items()}) == ends


def test_several_chat_templates(tmp_path: Path) -> None:
    """A file may hold one template for chats, and others for tools and documents."""
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": []}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    templates = {"default": "plain", "tool_use": "with tools", "rag": "with documents"}
    named = {f"tokenizer.chat_template.{name}": text for name, text in templates.items() if name != "default"}
    actual = gguf_tokenizer(metadata | {"tokenizer.chat_template": "plain"} | named)
    assert actual.chat_template == templates
    chat = [{"role": "user", "content": "a"}]
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert encode_chat(actual, chat) == actual("plain")["input_ids"]
    assert actual.apply_chat_template(chat, tools=tools, tokenize=False) == "with tools"
    assert gguf_tokenizer(metadata | {"tokenizer.chat_template": "plain"}).chat_template == "plain"
    assert gguf_tokenizer(metadata).chat_template is None
    expected = bundled_like("qwen2")
    expected.chat_template = templates
    again, _ = tokenizer_metadata(as_text(expected, 2), len(expected), "qwen3")
    assert gguf_tokenizer(again).chat_template == templates


@pytest.mark.parametrize("pre", ["command-r", None])
def test_unknown_ways_to_cut_text(pre: str | None, tmp_path: Path) -> None:
    """A target without a tokenizer takes token ids."""
    path = written(tmp_path / "m.gguf", bundled_like("qwen2"), pre or "")
    target = load_target(path, device="cpu", compile="off")
    assert target.tokenizer is None and target.eos_token_ids == {0, 2}
    way = "uses the pre-tokenization 'command-r'" if pre else "does not name its pre-tokenization"
    message = rf"The target has no tokenizer \(m.gguf: it {way}; supported are .*deepseek-r1-qwen"
    assert load_target_text(path).tokenizer_reason == target.tokenizer_reason
    with Engine(target, load_drafter("none", target=target), 1) as engine:
        params = SamplingParams(temperature=0, max_new_tokens=4)
        assert len(engine.generate([[5, 6, 7]], params)[0].token_ids) == 4
        with pytest.raises(UsageError, match=message):
            engine.generate(["Hi"], params)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokenizer.ggml.tokens": []}, "the file holds none"),
        ({"tokenizer.ggml.model": "bert"}, "it is of the kind 'bert'; supported are gpt2, llama and gemma4"),
        ({"tokenizer.ggml.model": "llama"}, "its tokens have no scores"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [-1000.0] * 400}, "its tokens have no scores"),
    ],
)
def test_no_tokenizer(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", bundled_like("qwen2"), "qwen2")
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer({**open_gguf(path).metadata, **changed})


def test_a_file_without_tokenizer(tmp_path: Path) -> None:
    config = Qwen3Config(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    write_gguf(tmp_path / "m.gguf", tiny(config))
    assert load_target_text(tmp_path / "m.gguf").tokenizer_reason == "m.gguf: the file holds none"


def as_text(tokenizer: PreTrainedTokenizerBase, *ends: int) -> TargetText:
    return TargetText(None, tokenizer, 128, frozenset(ends))


@pytest.mark.parametrize("pre", ["qwen2", "deepseek-r1-qwen", "gpt-2", "smollm", "llama-bpe", "tekken", "deepseek-v3"])
def test_bytes_are_written_and_read_back(pre: str) -> None:
    """The pre-tokenization is recognized by its results."""
    expected = bundled_like(pre)
    metadata, note = tokenizer_metadata(as_text(expected, 2), len(expected) + 3, "qwen3")
    assert metadata["tokenizer.ggml.pre"] == pre and note is None
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{len(expected) + 2}]"
    actual = gguf_tokenizer(metadata)
    for text in (*TEXTS, "a <think> of two words"):
        assert actual(text)["input_ids"] == expected(text)["input_ids"], text
    assert actual.get_vocab() == expected.get_vocab() and actual.chat_template == expected.chat_template
    assert (actual.eos_token, actual.pad_token, actual.mask_token) == ("<|im_end|>", "<|endoftext|>", "<|mask|>")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("spaced", [True, False])
def test_sentencepiece_is_written_and_read_back(family: str, spaced: bool) -> None:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"] if family == "gemma2" else ["<unk>", "<s>", "</s>"]
    vocab = pieces_of(TEXTS[:3], specials)
    merges = generate_merges(vocab, {token: -float(i) for token, i in vocab.items()})
    made: Any = GemmaTokenizer if family == "gemma2" else LlamaTokenizer
    expected = made(vocab=vocab, merges=merges, **({} if family == "gemma2" else {"add_prefix_space": spaced}))
    metadata, note = tokenizer_metadata(as_text(expected, vocab[specials[1]]), len(expected), family)
    assert note is None and metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_bos_token"] is (expected("a")["input_ids"][0] == expected.bos_token_id)
    kinds = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
    assert (kinds["<unk>"], kinds["<0x0A>"], kinds[specials[2]]) == (
        TokenType.UNKNOWN,
        TokenType.BYTE,
        TokenType.CONTROL,
    )
    actual = gguf_tokenizer({**metadata, "general.architecture": family})
    for text in TEXTS:
        assert actual(text)["input_ids"] == expected(text)["input_ids"], text


def test_tokenizers_that_have_no_name() -> None:
    """Tokenizers that differ on rare texts are written with a note; others are refused."""
    rare, other = bundled_like("qwen2"), bundled_like("qwen2")
    rare.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\u00a0", "isolated"), SPLITS["qwen2"].pre_tokenizer()]
    )
    metadata, note = tokenizer_metadata(as_text(rare, 2), len(rare), "qwen3")
    assert metadata["tokenizer.ggml.pre"] in ("qwen2", "deepseek-r1-qwen")
    assert note is None or "rare texts become other tokens there" in note
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("o", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with pytest.raises(UsageError, match="cannot be written as GGUF. It splits text unlike all known tokenizers"):
        tokenizer_metadata(as_text(other, 2), len(other), "qwen3")
    with pytest.raises(UsageError, match=r"The tokens \[7, 8\] end responses too, and GGUF has keys for only 3"):
        tokenizer_metadata(as_text(bundled_like("qwen2"), 2, 4, 5, 7, 8), 5000, "qwen3")
    with pytest.raises(UsageError, match="has the id 40.., and its embedding 300 entries"):
        tokenizer_metadata(as_text(bundled_like("qwen2"), 2), 300, "qwen3")
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    with pytest.raises(UsageError, match="is of the kind WordLevel; tokenizers of byte pairs"):
        tokenizer_metadata(as_text(words), 300, "qwen3")
