"""OpenVINO GenAI as outside judge: it decodes to the same tokens, and accepts as many guesses for each prompt."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from same_drafts import TOKENS, environment, ours, prompts

from blockdraft.drafters import BUNDLED_DFLASH, bundled
from blockdraft.formats import zlab
from blockdraft.targets import BUNDLED, load_target_text

pytestmark = [pytest.mark.openvino, pytest.mark.filterwarnings("ignore")]
PROGRAM = Path(__file__).parent / "openvino_pair.py"


def test_tokens_and_accepted_guesses(tmp_path: Path) -> None:
    target, drafter = BUNDLED, bundled()[BUNDLED_DFLASH]
    asked = prompts(target)
    config, _ = zlab.read_checkpoint(drafter)
    given = {
        "target": str(target),
        "drafter": str(drafter),
        "folder": str(tmp_path),
        "prompts": asked,
        "tokens": TOKENS,
        "guesses": config.block_size - 1,
        "ends": sorted(load_target_text(target).eos_token_ids),
    }
    python = environment("openvino") / "bin" / "python"
    done = subprocess.run([python, PROGRAM, json.dumps(given)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, own = json.loads(done.stdout.splitlines()[-1]), ours(asked, target, drafter)
    assert [one["tokens"] for one in theirs] == [one.tokens for one in own]
    # An answer's first token needs no draft, and each draft gives one token beside the accepted guesses.
    drafts = [len(one["tokens"]) - 1 - one["accepted"] for one in theirs]
    assert len({*drafts}) > 2  # so that equal counts mean something
    assert drafts == [one.drafts for one in own]
