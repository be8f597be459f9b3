"""Pieces of answers."""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from blockdraft.serving.answers import Pieces
from blockdraft.types import TokenLogprob


def test_tokens_keep_their_spaces() -> None:
    """Decoders like Llama 2's leave out the space at the beginning of a text."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "\u2581the": 1, "\u2581ant": 2, "s": 3}, "[UNK]"))
    words.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1, 2, 3]) == "the ants"
    pieces = Pieces(tokenizer)
    assert [pieces.text(token) for token in (1, 2, 3)] == [" the", " ant", "s"]


def test_parts_of_characters_have_no_known_bytes() -> None:
    words = Tokenizer(models.BPE({"a": 0, "\u00e3": 1}, []))
    words.decoder = decoders.ByteLevel()
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=words))
    told = pieces.chat_logprobs([TokenLogprob(token, -1.0) for token in (0, 1)])["content"]
    assert [(one["token"], one["bytes"]) for one in told] == [("a", [97]), ("\ufffd", None)]
