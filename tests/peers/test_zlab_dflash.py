"""z-lab's own package as outside judge: it loads our checkpoints, decodes to the same tokens, and accepts as we do."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets.hf import HFTarget
from blockdraft.types import Drafting, SamplingParams

dflash = pytest.importorskip("dflash.model", reason="needs the extra `peers`")
pytestmark = pytest.mark.peers

PAIR = Path(__file__).parents[2] / "src/blockdraft/pair"
QUESTIONS = [
    "A robe needs 3 bolts of blue cloth and twice as much white cloth. How many bolts does it need in all?",
    "Sara has 24 stickers. She gives 6 to each of her 3 friends. How many stickers does she have left?",
    "Write a function that returns the sum of the even numbers of a list.",
]


def questions() -> list[str]:
    """Some of our own, and benchmark prompts where `BLOCKDRAFT_DATA` tells where they are."""
    found = list(QUESTIONS)
    data = os.environ.get("BLOCKDRAFT_DATA")
    for name in ("gsm8k", "humaneval") if data else ():
        with Path(str(data), f"prompts/{name}.jsonl").open(encoding="utf-8") as file:
            found += [json.loads(line)["turns"][0] for line in file][:20]
    return found


def both(
    target: HFTarget, draft_folder: Path, prompt: list[int], block_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dflash, "_cuda_time", time.perf_counter)  # its timer asks for a GPU
    draft = dflash.DFlashDraftModel.from_pretrained(draft_folder, dtype=torch.float32).eval()
    model: PreTrainedModel = target.model
    stops = sorted(target.eos_token_ids)
    theirs = dflash.dflash_generate(
        draft, model, torch.tensor([prompt]), 96, stops, block_size=block_size, return_stats=True
    )
    drafter = load_drafter(draft_folder, target=target)
    [ours] = Engine(target, drafter, drafting=Drafting(block_size)).generate([prompt], SamplingParams(96))
    assert ours.token_ids == theirs.output_ids[0, len(prompt) :].tolist()
    assert ours.stats.committed == theirs.acceptance_lengths


@pytest.mark.parametrize("question", questions())
def test_bundled_pair(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    both(HFTarget(model, tokenizer), PAIR / "drafter", prompt, None, monkeypatch)


@pytest.mark.parametrize("block_size", [None, 3])
def test_random_pair(
    tiny_target_dir: Path, tiny_drafter_dir: Path, block_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32)
    both(HFTarget(model), tiny_drafter_dir, [7, 60, 33, 12, 9], block_size, monkeypatch)
