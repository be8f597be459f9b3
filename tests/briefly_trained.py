"""Drafters for the bundled target that learn for about a minute, so that some of their draft tokens are right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.server import chats
from transformers import AutoTokenizer

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import BUNDLED, load_target
from blockdraft.types import SamplingParams
from blockdraft_train.data.documents import Document, read_data
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter
from blockdraft_train.devices import make_accelerator
from blockdraft_train.job import TrainingJob
from blockdraft_train.settings_files import read_settings
from blockdraft_train.trainer import run_folder, train
from blockdraft_train.variant import find_variant

PROMPTS, TOKENS = 32, 64


def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    asked = [request["messages"] for request in chats.make(PROMPTS)]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in asked]


def briefly_trained(kind: str, folder: Path, asked: Sequence[list[int]], **flags: str) -> Path:
    """A drafter that was trained on the target's answers to some prompts, 60 steps."""
    target = load_target(BUNDLED, dtype="float32", device="cpu")
    assert target.tokenizer is not None
    with Engine(target, load_drafter("none", target=target), 8) as engine:
        answers = engine.generate([[*prompt] for prompt in asked], SamplingParams(TOKENS, temperature=0))
    writer = DataWriter(folder / "data", {"tokenizer": tokenizer_fingerprint(target.tokenizer)})
    writer.begin()
    for row, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        ids = torch.tensor([*prompt, *answer.token_ids])
        writer.add(row, [Document(ids, torch.arange(len(ids)) >= len(prompt) - 1)])
    writer.finish()
    flags |= {"length": "256", "batch": "4", "held-out": "1", "steps": "60", "learning-rate": "3e-3", "eval-every": "0"}
    flags |= {"eval-prompts": "1", "eval-tokens": "6", "save-every": "0", "trackers": ""}
    recipe = read_settings(find_variant(kind).recipe_class, flags=flags)
    out = folder / "drafter"
    accelerator = make_accelerator(recipe, run_folder(out), "cpu")
    train(TrainingJob(kind, target, read_data(folder / "data"), out, recipe, accelerator))
    return out
