"""llama.cpp as outside judge of EAGLE-3 in GGUF files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import briefly_trained
import pytest
import smollm2
import torch
from beside import TOKENS, Ours, accepts_alike, peer
from briefly_trained import PROMPTS
from transformers import AutoTokenizer, Qwen3ForCausalLM

from blockdraft.drafters.eagle3.layout import tensor_shapes
from blockdraft.formats import Checkpoint, find_layout, read_drafter
from blockdraft.targets import BUNDLED as TARGET
from blockdraft_tools.export import export_gguf

pytestmark = pytest.mark.llamacpp
DRAFT_CHOICE, NEAR = 7, 0.03
QUESTIONS = ["Name three rivers of Europe.", "What is 12 * 12?", "Write a function that adds two numbers."]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {},
    "residual": {"norm_before_residual": True},
    "normed target layers": {"norm_before_fc": True},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {"rope_scaling": YARN},
    "llama3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}},
    "without a tokenizer": {},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str, eagle3_of_three_target_layers: Path, few_words: Path, tmp_path: Path) -> None:
    """Random layers below the target's own head, so that draft tokens are often right. Each goes on from the state of
    the one before and carries its rounding along."""
    found = read_drafter(eagle3_of_three_target_layers, None, 3)
    head = Qwen3ForCausalLM.from_pretrained(few_words).lm_head.weight.detach()
    kept = torch.arange(0, len(head), 20 if variant == "reduced" else 1)
    shape = {"draft_vocab_size": len(kept), "target_layers": (1, 0, 0), "block_size": DRAFT_CHOICE + 1}
    config = replace(found.config, **shape, **VARIANTS[variant])
    tensors = {**found.tensors, "lm_head.weight": head[kept].clone(), "d2t": kept - torch.arange(len(kept))}
    random = torch.Generator().manual_seed(1)
    for name in {*tensor_shapes(config)} - {*tensors}:
        tensors[name] = 1 + 0.5 * torch.randn(tensor_shapes(config)[name], generator=random)
    find_layout("eagle3").write(tmp_path / "drafter", Checkpoint(config, tensors))
    with_tokenizer = variant != "without a tokenizer"
    done = export_gguf(tmp_path / "drafter", tmp_path / "gguf", few_words, "f32", with_tokenizer=with_tokenizer)
    accepts_alike(done, few_words, tmp_path / "drafter", "draft-eagle3", DRAFT_CHOICE, tmp_path / "log", share=0.8)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return briefly_trained.prompts()


@pytest.fixture(scope="module")
def trained(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return briefly_trained.briefly_trained("eagle3", folder, prompts, **{"draft-vocab": "1500"})


def test_draft_tokens_of_a_trained_one(prompts: list[list[int]], trained: Path, tmp_path: Path) -> None:
    ours = Ours(prompts, TARGET, trained)
    assert ours.tau > 1.3  # so that equal counts mean something; a brief training differs by machine
    done = export_gguf(trained, tmp_path, TARGET, "f32")
    answers = []
    with peer(done.target, tmp_path / "log", done.drafter, "draft-eagle3", DRAFT_CHOICE) as theirs:
        for prompt in prompts:
            answers.append(theirs.ask("decode", {"prompt": prompt, "max_new_tokens": TOKENS, "stops": [2]}))
    equal = [i for i, answer in enumerate(answers) if answer["tokens"] == ours.tokens[i]]
    assert len(equal) >= 0.94 * PROMPTS  # its blocks take other kernels than single tokens, which rounds otherwise
    steps = sum(answers[i]["steps"] for i in equal)
    assert steps == pytest.approx(sum(len(ours.committed[i]) for i in equal), rel=NEAR)


def test_smollm2_with_its_bundled_drafter(tmp_path: Path) -> None:
    folder = smollm2.write_folder(tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    asked = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    done = export_gguf(smollm2.DRAFTER, tmp_path / "gguf", folder, "f32")
    ours = Ours(asked, folder, done.drafter)
    drafted = read_drafter(done.drafter, None, 30).config.block_size - 1
    with peer(done.target, tmp_path / "log", done.drafter, "draft-eagle3", drafted, flash_attention=False) as theirs:
        for place, prompt in enumerate(asked):
            answer = theirs.ask("decode", {"prompt": prompt, "max_new_tokens": TOKENS, "stops": [2]})
            assert answer["tokens"] == ours.tokens[place] and answer["steps"] == len(ours.committed[place])


def test_rounded_ones_load(trained: Path, tmp_path: Path) -> None:
    """Tokens may be others, but both forwards run."""
    for weights in ("f16", "bf16", "q8_0", "q4_0"):
        done = export_gguf(trained, tmp_path, TARGET, weights)  # type: ignore[arg-type]
        with peer(done.target, tmp_path / "log", done.drafter, "draft-eagle3", DRAFT_CHOICE) as theirs:
            answer = theirs.ask("decode", {"prompt": [1, 60, 70, 80], "max_new_tokens": 24, "stops": []})
            assert len(answer["tokens"]) >= 24 and answer["steps"] <= 24
