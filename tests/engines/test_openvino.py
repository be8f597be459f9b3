"""OpenVINO GenAI as outside judge: it decodes to the same tokens, and accepts as many draft tokens for each prompt."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from same_drafts import TOKENS, environment, ours, prompts

from blockdraft.drafters import TINY_DRAFTER
from blockdraft.formats import zlab
from blockdraft.formats.starting import openvino
from blockdraft.targets import BUNDLED, load_target_text

pytestmark = [pytest.mark.openvino, pytest.mark.filterwarnings("ignore")]
PROGRAM = Path(__file__).parent / "openvino_pair.py"


def test_tokens_and_accepted_draft_tokens(tmp_path: Path) -> None:
    target, drafter = BUNDLED, TINY_DRAFTER
    asked = prompts(target)
    config, _ = zlab.read_checkpoint(drafter)
    given = {
        "target": str(target),
        "drafter": str(drafter),
        "folder": str(tmp_path),
        "prompts": asked,
        "tokens": TOKENS,
        "draft_tokens": config.block_size - 1,
        "ends": sorted(load_target_text(target).eos_token_ids),
    }
    python = environment("openvino") / "bin" / "python"
    done = subprocess.run([python, PROGRAM, json.dumps(given)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, own = json.loads(done.stdout.splitlines()[-1]), ours(asked, target, drafter)
    assert [one["tokens"] for one in theirs] == [one.tokens for one in own]
    # An answer's first token needs no draft, and each draft gives one token beside the accepted draft tokens.
    drafts = [len(one["tokens"]) - 1 - one["accepted"] for one in theirs]
    assert len({*drafts}) > 2  # so that equal counts mean something
    assert drafts == [one.drafts for one in own]


def test_what_inspect_says_converts_drafters() -> None:
    """The options of the line are the exporter's."""
    line = shlex.split(openvino("DRAFTER").remedy or "")
    program = environment("openvino") / "bin" / line[0]
    done = subprocess.run([program, *line[1:3], "--help"], capture_output=True, text=True, check=True)
    options = [word for word in line if word.startswith("--")]
    assert options and [word for word in options if word not in done.stdout] == []
