"""Small models of every family that is read from GGUF files: llama.cpp decodes the same tokens, plain and drafted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from beside import peer
from gguf_models import MODELS, model_of, scores
from gguf_writer import write_gguf
from test_gguf_head import FAMILIES, write_file
from tiny_models import tiny_tokenizer

from blockdraft.drafters import load_drafter
from blockdraft.engine import Completion, Engine
from blockdraft.kernels.cpu.compiled_runner import CompiledDraftRunner
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

pytestmark = pytest.mark.llamacpp
TOKENS, DRAFT_TOKENS = 40, 4
NEAR_TIE = 1e-3  # difference of the two highest logits
# By name: fields of the model and metadata of the file that llama.cpp needs.
NEEDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ({}, {"rope.dimension_sections": [2, 1, 1, 0]})),
    **dict.fromkeys(("nemotron_h", "nemotron_h-dense"), ({}, {"attention.layer_norm_epsilon": 1e-3})),
    **dict.fromkeys(("olmo2", "olmo3"), ({"head_dim": 8}, {})),
    **dict.fromkeys((name for name in MODELS if "gemma4" in name), ({}, {"rope.dimension_count_swa": 16})),
    "glm4_moe_lite": ({}, {"expert_gating_func": 2}),
    "phi3": ({"sliding_window": None}, {"attention.sliding_window": 0}),
}
OTHERWISE = {  # why llama.cpp does not decode the same model
    "deepseek_v2-groups": "it takes queries of one projection in models of 26 or 27 layers only",
    "phi3-long": "it chooses the factors by the length of the context, and not of the sequence",
}
PROMPTS = torch.randint(5, 61, (4, 20), generator=torch.Generator().manual_seed(5)).tolist()


def loaded(path: Path) -> Target:
    return load_target(path, dtype="float32", kv_dtype="float32", device="cpu")


def ours(target: Target, drafter: str, drafting: Drafting) -> list[Completion]:
    params = SamplingParams(TOKENS, temperature=0, ignore_eos=True)
    with Engine(target, load_drafter(drafter, target=target), len(PROMPTS), drafting=drafting) as engine:
        return engine.generate(PROMPTS, params)


def equal(target: Target, prompt: Sequence[int], own: Sequence[int], theirs: Sequence[int]) -> bool:
    """Return whether two answers are equal up to a token at which the target's two highest logits nearly are."""
    parted = next((i for i, (a, b) in enumerate(zip(own, theirs, strict=True)) if a != b), None)
    if parted is None:
        return True
    highest = scores(target, torch.tensor([[*prompt, *own[:parted]]]))[0, -1].topk(2).values
    return bool(highest[0] - highest[1] < NEAR_TIE)


@pytest.mark.parametrize("name", MODELS)
def test_tokens(name: str, tmp_path: Path) -> None:
    if name in OTHERWISE:
        pytest.skip(f"llama.cpp decodes it otherwise: {OTHERWISE[name]}")
    path, (_, metadata, extra), (fields, needed) = tmp_path / "model.gguf", MODELS[name], NEEDS.get(name, ({}, {}))
    model = model_of(name, vocab_size=300, **fields)
    write_gguf(path, model, metadata=metadata | needed, extra=extra, tokenizer=tiny_tokenizer())
    target = loaded(path)
    own = [list(one.token_ids) for one in ours(target, "none", Drafting(None))]
    with peer(path, tmp_path / "log", flash_attention=False) as theirs:
        answers = [theirs.ask("decode", {"prompt": one, "max_new_tokens": TOKENS, "stops": []}) for one in PROMPTS]
    same = [equal(target, prompt, one, done["tokens"]) for prompt, one, done in zip(PROMPTS, own, answers, strict=True)]
    # Of experts that are nearly as likely, others may be chosen, which changes all logits.
    assert sum(same) >= len(PROMPTS) - ("expert_count" in metadata)
    assert len({token for one in own for token in one}) > 4  # so that equal tokens mean something


@pytest.fixture
def first_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let draft nodes attend to the first token, which has no hidden state before it, as in llama.cpp."""
    run = CompiledDraftRunner._in_workspace

    def seen(self: Any, function: Any, call: Any, end: int) -> None:
        call.hidden_slots = 0
        run(self, function, call, end)

    monkeypatch.setattr(CompiledDraftRunner, "_in_workspace", seen)


@pytest.mark.usefixtures("first_seen")
@pytest.mark.parametrize("family", FAMILIES)
def test_mtp_heads(family: str, tmp_path: Path) -> None:
    """llama.cpp's steps accept as many draft tokens of the head in the file."""
    needed = NEEDS.get(family, ({}, {}))[1]
    path = write_file(tmp_path / "model.gguf", family, tokenizer=tiny_tokenizer(), **needed)
    target = loaded(path)
    own, steps = ours(target, "mtp", Drafting(DRAFT_TOKENS + 1)), []
    for prompt, one in zip(PROMPTS, own, strict=True):  # the next prompt's first token would get a state of this one
        with peer(path, tmp_path / "log", None, "draft-mtp", DRAFT_TOKENS, flash_attention=False) as theirs:
            done = theirs.ask("decode", {"prompt": prompt, "max_new_tokens": TOKENS, "stops": []})
            assert equal(target, prompt, one.token_ids, done["tokens"])
            steps.append(done["steps"])
    committed = [one.stats.committed for one in own]
    assert steps == [*map(len, committed)]
    assert max(map(max, committed)) > 2
