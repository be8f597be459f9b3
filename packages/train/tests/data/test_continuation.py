"""Texts for a target without a chat template, which continues them: reading, loss masks and refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.engine.text import encode
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams
from blockdraft_train.data.documents import read_data
from blockdraft_train.data.prepare import Preparation, RecordReader
from blockdraft_train.data.regenerate import Continuation, beginning
from blockdraft_train.data.responders import EngineResponder, Response
from blockdraft_train.data.settings import DataSettings, RecordSettings

SAMPLED = SamplingParams(12, temperature=1.0, seed=5)
STORY = "the cat sat on the mat and then it went into the thicket to hunt for mice and voles, all night. " * 2


@pytest.fixture(scope="module")
def base_dir(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny target as a base model: without chat template, with a BOS token."""
    folder = tmp_path_factory.mktemp("base") / "target"
    shutil.copytree(tiny_target_dir, folder)
    (folder / "chat_template.jinja").unlink()
    content = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def base(base_dir: Path) -> Target:
    target = load_target(base_dir, device="cpu")
    assert target.tokenizer is not None and target.tokenizer.chat_template is None
    assert encode("the", target)[0] == 1
    return target


def settings(**named: Any) -> DataSettings:
    return DataSettings(writer="target", sampling=SAMPLED, batch_size=3, **named)


def source(folder: Path, records: list[dict[str, Any]]) -> str:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def engine(target: Target) -> EngineResponder:
    return EngineResponder(Engine(target, load_drafter("none", target=target), max_batch_size=3))


def read(folder: Path) -> list[tuple[list[int], list[int]]]:
    documents = read_data(folder)
    pairs = [(doc.tokens[~doc.supervised].tolist(), doc.tokens[doc.supervised].tolist()) for doc in documents]
    assert all(doc.tokens.tolist() == prompt + text for doc, (prompt, text) in zip(documents, pairs, strict=True))
    return pairs


def test_the_target_goes_on_as_decoding_would(tmp_path: Path, base: Target) -> None:
    """Prompt and answer are those of an engine for the same raw text."""
    records = [{"text": STORY}, {"prompt": "q: why is the sky so very blue? a:"}, {"turns": ["said the "]}]
    manifest = Preparation(
        tmp_path / "a", base, [source(tmp_path, records)], RecordSettings(), settings(continued=10)
    ).run(engine(base))
    # Ten tokens with the first, which begins each text; the story is in pieces of 4 * (10 + 12) characters.
    begun = ["the cat sat", "all night", "and voles", "q: why is", "said the "]
    assert len(read(tmp_path / "a")) == manifest["counts"]["documents"] == len(begun)
    for number, (text, (prompt, answer)) in enumerate(zip(begun, read(tmp_path / "a"), strict=True)):
        assert prompt == encode(text, base) and len(prompt) <= 10
        seed = ((5 * 1_000_003 + number) * 1_009) % 2**31
        [plain] = Engine(base, load_drafter("none", target=base)).generate(
            [text], SamplingParams(12, temperature=1.0, seed=seed)
        )
        assert answer == plain.token_ids


def test_a_prompt_is_continued_as_a_whole_by_default(tmp_path: Path, base: Target) -> None:
    records = [{"prompt": STORY[:150]}, {"text": STORY[:150]}, {"text": "  "}, {"prompt": STORY + STORY}]
    preparation = Preparation(tmp_path / "a", base, [source(tmp_path, records)], RecordSettings(), settings(length=200))
    assert preparation.reader.continued == 50  # a quarter of the length
    assert (
        "first 50 tokens of each text; a {prompt} record is continued as a whole" in preparation.reader.continued_note
    )
    counts = preparation.run(engine(base))["counts"]
    (whole, _), (cut, _) = read(tmp_path / "a")
    assert whole == encode(STORY[:150], base)
    assert 40 < len(cut) <= 50 and cut[:30] == whole[:30]
    assert counts["left_out"] == {"no supervised token": 1, "prompt too long": 1}
    assert RecordReader(base, [source(tmp_path, records)], RecordSettings(), settings()).continued == 64


def test_a_target_with_a_template_continues_where_it_is_asked_to(
    tmp_path: Path, tiny_target_dir: Path, base: Target
) -> None:
    target = load_target(tiny_target_dir, device="cpu")
    where = [source(tmp_path, [{"text": STORY[:40]}])]
    Preparation(tmp_path / "a", target, where, RecordSettings(), settings(continued=10)).run(engine(target))
    assert read(tmp_path / "a")[0][0] == encode("the cat sat", base)[1:]
    with pytest.raises(ValueError, match=r"record 1: this is a plain text, not a prompt; .* --continue N"):
        Preparation(tmp_path / "b", target, where, RecordSettings(), settings())
    with pytest.raises(ValueError, match="made with continued .*'tokens': 10.* not .*'tokens': 11"):
        Preparation(tmp_path / "a", target, where, RecordSettings(), settings(continued=11))


def test_what_cannot_be_continued_is_refused(tmp_path: Path, base: Target) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    where = [source(tmp_path, [{"messages": chat}] * 3)]
    wrong = r"(?s)3 of 3 records cannot .*record 3: this is a chat, whose roles only a chat template can spell"
    with pytest.raises(ValueError, match=wrong):
        Preparation(tmp_path / "a", base, where, RecordSettings(), settings())
    with pytest.raises(ValueError, match=r"^The target's tokenizer has no chat template; add --chat-template"):
        Preparation(tmp_path / "a", base, where, RecordSettings(), DataSettings())
    assert not (tmp_path / "a").exists()


def test_lengths_must_fit(tmp_path: Path, base: Target) -> None:
    where = [source(tmp_path, [{"text": "the end"}])]
    with pytest.raises(ValueError, match="20 tokens of each text are to be continued and a document has at most 20"):
        Preparation(tmp_path / "a", base, where, RecordSettings(), settings(continued=20, length=20))
    with pytest.raises(ValueError, match="continued must be at least 1, got 0"):
        settings(continued=0)
    with pytest.raises(ValueError, match='writer is "text", which writes nothing'):
        DataSettings(continued=3)


@pytest.fixture(scope="module")
def ids(base_dir: Path) -> Callable[[str], list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    return lambda text: list(tokenizer(text)["input_ids"])


@pytest.mark.parametrize(
    ("text", "max_tokens", "expected"),
    [
        ("the end", 9, "the end"),
        ("the end\n\n", 8, "the end\n\n"),  # unchanged if short enough
        ("the end\n\n", 7, "the end"),
        ("the then there", 6, "the then"),
        ("the then there", 5, "the then"),
        ("the then there", 4, "the"),
        ("x" * 30, 5, "xxxx"),
        ("x yyyyyyyyyyyyyy", 10, "x yyyyyyy"),
        ("日本語の文章です", 8, "日本"),  # three bytes a character
    ],
)
def test_beginnings(ids: Callable[[str], list[int]], text: str, max_tokens: int, expected: str) -> None:
    assert beginning(text, max_tokens, ids) == expected
    assert len(ids(expected)) <= max_tokens


def test_a_text_without_a_short_beginning_is_left_out(ids: Callable[[str], list[int]]) -> None:
    assert beginning("the end", 1, ids) == ""
    text = Continuation("the end", 1, ids, 100)
    assert text.next_prompt() is None and text.reason == "prompt too long"


def test_a_long_text_is_not_read_as_a_whole(ids: Callable[[str], list[int]]) -> None:
    longest = 0

    def spied(text: str) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return ids(text)

    beginning("the end " * 100_000, 10, spied)
    assert longest < 1000


def test_only_the_continuation_is_learned_and_loops_are_not(ids: Callable[[str], list[int]]) -> None:
    text = Continuation("the end", None, ids, 100)
    prompt = text.next_prompt()
    assert prompt == ids("the end") and text.begun == "the end"
    text.take(Response("", [7, 8, 9], ended=False))
    assert text.next_prompt() is None and text.messages == []
    [document] = text.documents
    assert document.tokens.tolist() == [*prompt, 7, 8, 9]
    assert document.supervised.tolist() == [False] * len(prompt) + [True] * 3
    looping = Continuation("the end", None, ids, 100)
    looping.next_prompt()
    looping.take(Response("", [7] * 30, ended=False))
    assert (looping.documents, looping.reason) == ([], "repetitive response")


def test_a_server_must_tell_tokens(ids: Callable[[str], list[int]]) -> None:
    for answer, message in (
        (Response("x", None, True), "does not report the ids of the tokens"),
        (Response("x", [7], True, [1, 2]), "reads a text as 2 tokens that differ from the"),
    ):
        text = Continuation("the end", None, ids, 100)
        text.next_prompt()
        with pytest.raises(ValueError, match=message):
            text.take(answer)
