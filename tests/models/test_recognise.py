"""Names of files and repositories find their models."""

import pytest

from blockdraft.models import alike, known, made_for, recognised


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen3-Coder-30B-A3B-Instruct-Q4_K_M.gguf", "qwen3-coder-30b-a3b"),
        ("Qwen3-30B-A3B-Instruct-2507-UD-Q4_K_XL.gguf", "qwen3-30b-a3b-instruct-2507"),
        ("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "llama-3.1-8b"),
        ("Qwen3 Coder 30B A3B Instruct", "qwen3-coder-30b-a3b"),
        ("LFM2.5-1.2B-Instruct-Q8_0.gguf", "lfm2.5-1.2b"),
        ("DeepSeek-R1-Distill-Llama-8B", "r1-distill-llama-8b"),
        ("unsloth/gemma-4-E2B-it", "gemma4-e2b"),
        ("model.gguf", None),
    ],
)
def test_model_of_a_name(name: str, model: str | None) -> None:
    result = recognised(name)
    assert (result and result.id) == model


def test_target_of_a_published_drafter() -> None:
    for name in ("z-lab/Qwen3-8B-DFlash-b16", "models/Qwen3-8B-DFlash-b16", "Qwen3-8B-DFlash-b16.gguf"):
        assert made_for(name) == known("qwen3-8b")
    assert made_for("bundled") is made_for("drafter") is made_for("Qwen/Qwen3-8B") is None


def test_variants_of_a_model_are_alike() -> None:
    assert alike(known("codellama-7b"), known("codellama-7b-instruct"))
    assert not alike(known("qwen3-30b-a3b"), known("qwen3-coder-30b-a3b"))
