from pathlib import Path

import pytest

from blockdraft.prompt_sets import PromptSet, read_prompt_sets

GOOD = '{"turns": ["one", "two"], "id": 7}\n{"prompt": "three\\u2028four"}\n{"turns": ["ü"]}'


def test_first_turns_and_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"prompt": "five"}\n', encoding="utf-8")
    assert read_prompt_sets([tmp_path / "b.jsonl", tmp_path / "a.jsonl"]) == [
        PromptSet("b", ("five",)),
        PromptSet("a", ("one", "three\u2028four", "ü")),
    ]
    assert read_prompt_sets([tmp_path / "a.jsonl"], limit=2) == [PromptSet("a", ("one", "three\u2028four"))]


def test_files_of_windows_programs(tmp_path: Path) -> None:
    (tmp_path / "UPPER.JSONL").write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two\\r\\n"}\r\n  \r\n')
    assert read_prompt_sets([tmp_path / "UPPER.JSONL"]) == [PromptSet("UPPER", ("one", "two\r\n"))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hello", "no JSON"),
        ('["hello"]', 'either "turns" or "prompt"'),
        ("{}", 'either "turns" or "prompt"'),
        ('{"turns": ["a"], "prompt": "a"}', 'either "turns" or "prompt"'),
        ('{"turns": "a"}', "must be a list of texts"),
        ('{"turns": []}', "must be a list of texts"),
        ('{"turns": [1]}', "the prompt must be a text that is not empty, got 1"),
        ('{"turns": [{"role": "user"}]}', "must be a text"),
        ('{"prompt": " "}', "the prompt must be a text that is not empty, got ' '"),
        ('{"prompt": "\\ud83d"}', "no valid Unicode text (surrogates not allowed)"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n{{"prompt": "b"}}\n', encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        read_prompt_sets([path], limit=1)  # lines behind the limit count too
    assert str(caught.value).startswith(f"{path}, line 2: ") and message in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    with pytest.raises(ValueError, match=r"set\.jsonl cannot be read \(No such file"):
        read_prompt_sets([path])
    with pytest.raises(ValueError, match="cannot be read"):
        read_prompt_sets([tmp_path])
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"set\.jsonl holds no prompts"):
        read_prompt_sets([path])
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"set\.jsonl is not UTF-8 text"):
        read_prompt_sets([path])
    path.write_text('{"prompt": "a"}')
    with pytest.raises(ValueError, match="Two prompt files are called 'set'"):
        read_prompt_sets([path, path])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        read_prompt_sets([path], limit=0)
    with pytest.raises(ValueError, match="no prompts"):
        read_prompt_sets([])
