"""Prompts from data, and those that a target writes itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import Target, load_target
from blockdraft_train.data.settings import RecordSettings
from blockdraft_train.fit import prompts
from blockdraft_train.fit.prompts import HELD_OUT, PROMPTS, beginnings, read_prompts, store, write_prompts
from blockdraft_train.fit.settings import PromptSettings

SETTINGS = PromptSettings(count=100, held_out=2, prompt_tokens=8)


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


@pytest.fixture
def base(target: Target) -> Target:
    """A target without a chat template."""
    assert target.tokenizer is not None
    target.tokenizer.chat_template = None
    return target


@pytest.fixture
def ending(target: Target) -> Target:
    """One that ends its answers at one in ten tokens; at random it would hardly ever."""
    target.eos_token_ids = frozenset({2, *range(10, target.vocab_size, 10)})
    return target


def source(folder: Path, records: list[dict[str, Any]]) -> list[str]:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [str(path)]


def test_each_prompt_once_and_some_held_out(tmp_path: Path, target: Target) -> None:
    records = [{"prompt": f"say {i % 7}", "response": f"answer {i}"} for i in range(20)]
    found = read_prompts(source(tmp_path, records), RecordSettings(), target, SETTINGS)
    texts = [record["prompt"] for record in found.records]
    assert found.available == 7 and len(found.held_out) == 2
    assert sorted([*texts, *found.held_out]) == [f"say {i}" for i in range(7)]
    again = read_prompts(source(tmp_path, records), RecordSettings(), target, SETTINGS)
    assert again == found
    other = read_prompts(source(tmp_path, records), RecordSettings(), target, PromptSettings(100, 2, 8, seed=1))
    assert other.records != found.records


def test_chats_lose_their_answers_and_keep_their_turns(tmp_path: Path, target: Target) -> None:
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "somebody else's answer"},
        {"role": "user", "content": "two"},
    ]
    records = [{"messages": chat}, {"turns": ["three"]}, {"turns": ["four", "five"]}]
    found = read_prompts(source(tmp_path, records), RecordSettings(), target, PromptSettings(10, 1, 8))
    assert found.available == 3
    assert "somebody" not in json.dumps(found.records)
    assert found.held_out[0] in ("one", "three", "four")
    every = read_prompts(source(tmp_path, records), RecordSettings(), target, PromptSettings(10, 0, 8)).records
    kept = [
        record["messages"] for record in every if "messages" in record and record["messages"][0]["role"] == "system"
    ]
    assert [message["content"] for message in kept[0]] == ["be brief", "one", "", "two"]


def test_held_out_prompts_leave_room_for_answers(tmp_path: Path, target: Target) -> None:
    """Of a context of 256 tokens half; blank ones are none."""
    records = [{"prompt": f"{i} {'inn ' * 60}"} for i in range(9)] + [{"prompt": "short"}, {"prompt": " "}]
    found = read_prompts(source(tmp_path, records), RecordSettings(), target, PromptSettings(20, 4, 8))
    assert found.held_out == ("short",) and found.available == 10
    with pytest.raises(ValueError, match="All prompts have more than 128 tokens"):
        read_prompts(source(tmp_path, records[:9]), RecordSettings(), target, PromptSettings(20, 4, 8))


def test_a_target_without_template_gets_beginnings(tmp_path: Path, base: Target) -> None:
    records = [{"prompt": f"{word} and a long tail of words behind it"} for word in ("one", "two", "three")]
    found = read_prompts(source(tmp_path, records), RecordSettings(), base, SETTINGS)
    assert base.tokenizer is not None
    assert {len(base.tokenizer(record["prompt"])["input_ids"]) for record in found.records} == {8}
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "2"}]
    with pytest.raises(ValueError, match="record 1: this is a chat of several messages"):
        read_prompts(source(tmp_path, [{"messages": chat}]), RecordSettings(), base, SETTINGS)


def test_a_text_gives_many_beginnings(base: Target) -> None:
    paragraphs = [f"{i} {'the inn ' * 20}" for i in range(30)]
    text = "\n\n".join(paragraphs)
    found = list(beginnings(text, base, 8))
    assert found[0].startswith("0 the") and len(found) > 10
    assert all(one in text and text[: text.index(one)].endswith(("", "\n\n")) for one in found)
    gaps = [text.index(b) - text.index(a) for a, b in zip(found, found[1:], strict=False)]
    assert min(gaps) >= 256
    assert list(beginnings("short", base, 8)) == []


def test_too_few_prompts_are_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(ValueError, match=r"hold 1 different prompts, and 2 are held out"):
        read_prompts(source(tmp_path, [{"prompt": "one"}]), RecordSettings(), target, SETTINGS)


def test_a_chat_target_writes_its_prompts(ending: Target) -> None:
    plain = load_drafter("none", target=ending)
    with Engine(ending, plain, max_batch_size=8) as engine:
        found = write_prompts(engine, PromptSettings(count=12, held_out=3))
        again = write_prompts(engine, PromptSettings(count=12, held_out=3))
    assert found == again and found.available is None
    texts = [record["prompt"] for record in found.records]
    assert len(texts) == len(set(texts)) == 12 and len(found.held_out) == 3
    assert not {*texts} & {*found.held_out}
    assert not any("<|im_" in text for text in texts)


def test_a_base_model_begins_texts(base: Target) -> None:
    with Engine(base, load_drafter("none", target=base), max_batch_size=8) as engine:
        found = write_prompts(engine, PromptSettings(count=6, held_out=1))
    assert len({record["prompt"] for record in found.records}) == 6


def test_a_target_that_writes_no_prompts_is_refused(target: Target, constants: Callable[..., None]) -> None:
    """What is not ended after so many tokens is no prompt."""
    constants(prompts, OWN_TOKENS=1)
    with (
        Engine(target, load_drafter("none", target=target), max_batch_size=8) as engine,
        pytest.raises(ValueError, match=r"usable prompts of 8; name data"),
    ):
        write_prompts(engine, PromptSettings(count=8, held_out=0))


def test_stored(tmp_path: Path, target: Target) -> None:
    records = [{"prompt": f"say {i} ü"} for i in range(5)]
    found = read_prompts(source(tmp_path, records), RecordSettings(), target, SETTINGS)
    store(tmp_path / "out", found)
    read = [json.loads(line) for line in (tmp_path / "out" / PROMPTS).read_text(encoding="utf-8").splitlines()]
    assert read == list(found.records)
    held_out = [json.loads(line) for line in (tmp_path / "out" / HELD_OUT).read_text(encoding="utf-8").splitlines()]
    assert [record["prompt"] for record in held_out] == list(found.held_out)
