"""Records to data folders, with the responses that they have."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockdraft.data.documents import TokenData, read_data
from blockdraft.data.prepare import Preparation
from blockdraft.data.settings import DataSettings, RecordSettings
from blockdraft.folders import held
from blockdraft.targets import TargetText, load_target_text

LONG = "the end " * 20


@pytest.fixture
def target(tiny_target_dir: Path) -> TargetText:
    return load_target_text(tiny_target_dir)


def prepared(
    folder: Path, target: TargetText, records: list[dict[str, Any]], **settings: Any
) -> tuple[Preparation, Path]:
    source = folder.parent / "records.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Preparation(folder, target, [str(source)], RecordSettings(), DataSettings(**settings)), source


def texts(target: TargetText, data: TokenData, supervised_only: bool = False) -> list[str]:
    assert target.tokenizer is not None
    tokens = [document.tokens[document.supervised] if supervised_only else document.tokens for document in data]
    return [str(target.tokenizer.decode(ids)) for ids in tokens]


def test_chats_and_texts(tmp_path: Path, target: TargetText) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "q", "response": "the answer"},
        {"text": LONG},
        {"messages": [{"role": "user", "content": "only a prompt"}]},
        {"prompt": LONG, "response": "never reached"},
        {"prompt": "r", "response": LONG},
    ]
    counts = prepared(tmp_path / "a", target, records, length=40)[0].run()["counts"]
    data = read_data(tmp_path / "a")
    decoded = texts(target, data, supervised_only=True)
    assert decoded[0] == "the answer<|im_end|>"
    parts = decoded[1:-1]
    assert "".join(parts) == LONG and len(parts) == 3  # 100 tokens, all of them supervised
    assert max(data.lengths) == 40 and data[-1].cut and LONG.startswith(decoded[-1])
    assert counts["left_out"] == {"no supervised token": 2} and counts["cut"] == 1


def test_split_turns(tmp_path: Path, target: TargetText) -> None:
    roles = ["user", "assistant"] * 2
    records = [{"messages": [{"role": role, "content": str(i)} for i, role in enumerate(roles)]}]
    prepared(tmp_path / "together", target, records)[0].run()
    assert texts(target, read_data(tmp_path / "together"), supervised_only=True) == ["1<|im_end|>3<|im_end|>"]
    prepared(tmp_path / "split", target, records, split_turns=True)[0].run()
    split = read_data(tmp_path / "split")
    assert texts(target, split, supervised_only=True) == ["1<|im_end|>", "3<|im_end|>"]
    assert "1<|im_end|>" in texts(target, split)[1]


def test_all_records_are_checked_first(tmp_path: Path, target: TargetText) -> None:
    records: list[dict[str, Any]] = [{"text": "fine"}] * 3
    with pytest.raises(ValueError, match=r"records\.jsonl, record 4: it has the fields"):
        prepared(tmp_path / "a", target, [*records, {"nothing": 1}])
    with pytest.raises(ValueError, match=r"record 4: this is a prompt without a response; add --regenerate"):
        prepared(tmp_path / "a", target, [*records, {"turns": ["q"]}])
    with pytest.raises(ValueError, match=r"record 1: this is a plain text, not a prompt"):
        prepared(tmp_path / "a", target, records, writer="target")
    assert not (tmp_path / "a").exists()


def test_more_records_are_added_and_other_records_refused(tmp_path: Path, target: TargetText) -> None:
    records = [{"text": "one"}, {"text": "two"}]
    first = prepared(tmp_path / "a", target, records)[0].run()
    assert prepared(tmp_path / "a", target, records)[0].run() == first
    for others in ([{"text": "one"}, {"text": "three"}], records[:1]):
        with pytest.raises(ValueError, match=r"was made from 2 records, and the first 2 of these \d+ differ"):
            prepared(tmp_path / "a", target, others)
    prepared(tmp_path / "a", target, [*records, {"text": "three"}])[0].run()
    assert texts(target, read_data(tmp_path / "a")) == ["one", "two", "three"]
    with pytest.raises(ValueError, match="was made with length 256, not 100"):
        prepared(tmp_path / "a", target, records, length=100)


def test_interrupted_preparation_resumes(tmp_path: Path, target: TargetText) -> None:
    records = [{"text": f"row {i}"} for i in range(5)]

    def stop(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "a", target, records)[0].run(progress=stop)
    again = prepared(tmp_path / "a", target, records)[0]
    assert again.missing == 3
    again.run()
    assert texts(target, read_data(tmp_path / "a")) == [f"row {i}" for i in range(5)]


def test_one_process_at_a_time(tmp_path: Path, target: TargetText) -> None:
    folder = tmp_path / "a"
    first, _ = prepared(folder, target, [{"text": "one"}])
    late, _ = prepared(folder, target, [{"text": "one"}])
    with held(folder, "making data"), pytest.raises(ValueError, match="in use by process .*, making data since"):
        first.run()
    first.run()
    with pytest.raises(ValueError, match="was changed by another process meanwhile; run this again"):
        late.run()


def test_no_usable_token_is_refused(tmp_path: Path, target: TargetText) -> None:
    records = [{"messages": [{"role": "user", "content": "only a prompt"}]}]
    with pytest.raises(ValueError, match="None of the 1 records has a token to learn from"):
        prepared(tmp_path / "a", target, records)[0].run()


def test_chat_that_the_template_refuses(tmp_path: Path, target: TargetText) -> None:
    assert target.tokenizer is not None
    target.tokenizer.chat_template = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}" + str(
        target.tokenizer.chat_template
    )
    chat = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    with pytest.raises(ValueError, match="record 1: the chat template refuses these messages: too many"):
        prepared(tmp_path / "a", target, [{"messages": chat}])[0].run()


def test_bad_settings_are_refused(tmp_path: Path, target: TargetText) -> None:
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        DataSettings(length=1)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        DataSettings(batch_size=0)
    with pytest.raises(ValueError, match="length is 257 and the target's context 256"):
        prepared(tmp_path / "a", target, [{"text": "x"}], length=257)
    with pytest.raises(ValueError, match="no tokenizer"):
        prepared(tmp_path / "a", TargetText(None, None, 10, frozenset()), [{"text": "x"}])
