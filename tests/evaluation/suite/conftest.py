"""Copies of the datasets as the hub lays them out, each with a few records."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

Records = Sequence[Mapping[str, Any]]
Write = Callable[[str, Records], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Function that writes a file of the data folder, `tmp_path / "data"`, as Parquet or JSON lines."""

    def written(name: str, records: Records) -> Path:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*records]), path)
        else:
            path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return written


@pytest.fixture
def data(write: Write, tmp_path: Path) -> Path:
    """GSM8K and MT-Bench."""
    write("openai/gsm8k/main/test-00000-of-00001.parquet", [{"question": f"Sum {i}?", "answer": "1"} for i in range(5)])
    write("openai/gsm8k/main/train-00000-of-00001.parquet", [{"question": "never", "answer": "1"}])
    write("openai/gsm8k/socratic/test-00000-of-00001.parquet", [{"question": "never", "answer": "1"}])
    write("mt_bench_prompts/raw/question.jsonl", [{"turns": ["Say one.", "And two."]}])
    return tmp_path / "data"
