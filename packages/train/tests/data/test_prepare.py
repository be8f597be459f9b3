"""Records to data folders, with the responses that they have."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockdraft.folders import held
from blockdraft.targets import TargetText, load_target_text
from blockdraft_train.data.documents import TokenData, grown_since, read_data
from blockdraft_train.data.prepare import Preparation
from blockdraft_train.data.settings import DataSettings, RecordSettings

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
    with pytest.raises(ValueError, match=r"(?s)3 of 3 records .*record 1: this is a plain text, not a prompt"):
        prepared(tmp_path / "a", target, records, writer="target")
    assert not (tmp_path / "a").exists()


def test_documents_stay_with_their_record(tmp_path: Path, target: TargetText) -> None:
    """Records may be added, changed, moved and removed; only new contents are processed."""
    folder = tmp_path / "a"
    records = [{"text": "one"}, {"text": "two"}, {"text": "two"}, {"text": "three"}]
    first = prepared(folder, target, records)[0].run()
    assert prepared(folder, target, records)[0].run() == first
    changed = [{"text": "zero"}, {"text": "two"}, {"text": "two"}, {"text": "two"}, {"text": "one"}]
    again, _ = prepared(folder, target, changed)
    assert (again.total, again.missing) == (5, 2)
    manifest = again.run()
    assert texts(target, read_data(folder)) == ["one", "two", "two", "zero", "two"]
    assert manifest["counts"]["documents"] == manifest["counts"]["rows"] == 5
    assert manifest["counts"]["tokens"] == sum(read_data(folder).lengths)
    assert grown_since(read_data(folder), first["fingerprint"]) is None  # "three" is missing
    back, _ = prepared(folder, target, records)
    assert back.missing == 0 and back.run()["fingerprint"] == first["fingerprint"]
    assert texts(target, read_data(folder)) == ["one", "two", "two", "three"]


def test_other_records_and_settings_are_refused(tmp_path: Path, target: TargetText) -> None:
    prepared(tmp_path / "a", target, [{"text": "one"}, {"text": "two"}])[0].run()
    with pytest.raises(ValueError, match="holds 2 records, and these sources hold none of them"):
        prepared(tmp_path / "a", target, [{"text": "three"}])
    with pytest.raises(ValueError, match="was made with length 256, not 100"):
        prepared(tmp_path / "a", target, [{"text": "one"}], length=100)


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


def chat(*contents: str, first: str = "user") -> dict[str, Any]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


@pytest.mark.parametrize("writer", ["text", "target"])
def test_what_the_template_refuses_is_found_before_any_work(tmp_path: Path, target: TargetText, writer: str) -> None:
    """All such records are named at once, or skipped and counted."""
    assert target.tokenizer is not None
    target.tokenizer.chat_template = (
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + str(target.tokenizer.chat_template)
    )
    records: list[dict[str, Any]] = [chat(f"q{i}", "a") for i in range(60)]
    records[40] = chat("hello", "q", "a", first="assistant")
    records[50] = {"conversations": [{"from": "oracle", "value": "x"}]}
    wrong = (
        r"(?s)^2 of 60 records cannot be used; mend them, or add --skip-faulty.*"
        r"record 41: messages are refused by the chat template: .*roles must alternate.*record 51: the role .*'oracle'"
    )
    faulty = r"records\.jsonl, record 50: the role of a message must be .*'oracle'.* Add --skip-faulty"
    with pytest.raises(ValueError, match=wrong):
        prepared(tmp_path / "a", target, records, writer=writer)
    with pytest.raises(ValueError, match=faulty):
        prepared(tmp_path / "a", target, records[:40] + records[41:], writer=writer)
    assert not (tmp_path / "a").exists()
    skipping, _ = prepared(tmp_path / "a", target, records, writer=writer, skip_faulty=True)
    assert (skipping.total, skipping.missing) == (58, 58)


def test_skipped_records_are_counted_and_may_be_mended(tmp_path: Path, target: TargetText) -> None:
    records = [chat("q", "a"), {"nothing": 1}, chat("r", "b")]
    manifest = prepared(tmp_path / "a", target, records, skip_faulty=True)[0].run()
    assert (manifest["skipped"], manifest["counts"]["rows"]) == (1, 2)
    records[1] = chat("s", "c")
    mended, _ = prepared(tmp_path / "a", target, records)
    assert mended.missing == 1
    assert mended.run()["skipped"] == 0
    assert texts(target, read_data(tmp_path / "a"), True) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]


def test_bad_settings_are_refused(tmp_path: Path, target: TargetText) -> None:
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        DataSettings(length=1)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        DataSettings(batch_size=0)
    with pytest.raises(ValueError, match="length is 257 and the target's context 256"):
        prepared(tmp_path / "a", target, [{"text": "x"}], length=257)
    with pytest.raises(ValueError, match="no tokenizer"):
        prepared(tmp_path / "a", TargetText(None, None, 10, frozenset()), [{"text": "x"}])
