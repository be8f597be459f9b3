"""Targets in JAX: logits, shardings, compilation and memory."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("jax.numpy", reason="JAX is not installed: make test-jax")

import jax
from tiny_families import write_model

from blockdraft.decode.proposal import chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.nn.foreign_tensor import in_torch
from blockdraft.targets import Target, backends, load_target
from blockdraft.types import Drafting, LoadOptions, SamplingParams
from blockdraft_jax.model import ShardedLayout, local_layout

pytestmark = pytest.mark.jax

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"]
PROMPTS = [[7, 60, 33, 12, 9], [5], [40, 41, 42, 40, 41]]
# Tokens and parents of a tree: a path of two nodes next to one of three.
TREE = torch.tensor([[7, 60, 33, 12, 9, 11]]), torch.tensor([[-1, 0, 1, 0, 3, 4]])


def load(path: Path, layout: ShardedLayout | None = None, dtype: torch.dtype = torch.float32) -> Any:
    layout = layout or local_layout(jax.local_devices()[:1])
    return backends()["jax"].load(path, LoadOptions(dtype=dtype, device="cpu"), layout)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Any:
    return load(tiny_target_dir)


def outputs(target: Target, drafter: Any, temperature: float = 0.0) -> list[list[int]]:
    params = [SamplingParams(14, temperature, seed=seed, ignore_eos=True) for seed in range(3)]
    with Engine(target, load_drafter(drafter, target=target), 3, Drafting(None)) as engine:
        return [completion.checked().token_ids for completion in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_hidden_states_equal_transformers(family: str, tmp_path: Path) -> None:
    """Scores a tree behind a prompt that is longer than the sliding windows."""
    folder = write_model(family, tmp_path)
    ours, theirs = load(folder), load_target(folder, dtype="float32", device="cpu", backend="hf")
    target_layers, scored = (0, ours.num_layers), []
    for target in (ours, theirs):
        cache = target.new_cache(1, 40)
        prompt = torch.tensor([[(5 * i + 3) % 60 + 4 for i in range(19)]])
        target.forward(prompt, chain_parents(1, 19), cache)
        cache.commit([range(19)])
        scored.append(target.forward(*TREE, cache, target_layers))
    for name in ("logits", "hidden_states"):
        mine, reference = (in_torch(getattr(output, name)) for output in scored)
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)


def test_similar_requests_share_compiled_code(
    tiny_target_dir: Path, tiny_drafter_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Shapes are rounded up, so another engine and another prompt length compile nothing."""
    target = load(tiny_target_dir)
    drafter = load_drafter(tiny_drafter_dir, target=target)
    compiled = []
    for prompt, block_size in ([7, 60, 33, 12, 9], 8), ([40, 41, 42, 40, 41, 42, 43], 7):
        caplog.clear()
        jax.config.update("jax_log_compiles", True)  # in all threads
        with caplog.at_level(logging.WARNING), Engine(target, drafter, 1, Drafting(block_size)) as engine:
            engine.generate([prompt], SamplingParams(24, ignore_eos=True))
        jax.config.update("jax_log_compiles", False)
        compiled.append([record.message for record in caplog.records if record.message.startswith("Compiling")])
    forwards = [[message for message in messages if "forward" in message] for messages in compiled]
    assert forwards[0] and not forwards[1], forwards


def test_commits_write_the_cache_in_place(target: Any) -> None:
    cache = target.new_cache(1, 8)
    target.forward(*TREE, cache)
    before = cache.arrays
    cache.commit([[0, 3, 4]])
    assert cache.lengths == [3] and all(array.is_deleted() for array in before)


def test_sharded_equals_single(target: Any, tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    """Two of the eight devices divide heads and key/value heads; all eight divide the MLP and the vocabulary only."""
    assert len(jax.local_devices()) == 8, "XLA_FLAGS was set too late"
    logits = in_torch(target.forward(*TREE, target.new_cache(1, 8)).logits)
    for count in (2, 8):
        sharded = load(tiny_target_dir, local_layout(jax.local_devices()[:count]))
        specs = {name: tuple(value.sharding.spec) for name, value in sharded.params.items()}
        attention = "tensor" if count == 2 else None
        for part, spec in {
            "self_attn.q_proj": (attention,) if attention else (),
            "self_attn.o_proj": (None, attention) if attention else (),
            "mlp.gate_proj": ("tensor",),
            "mlp.down_proj": (None, "tensor"),
        }.items():
            assert specs[f"model.layers.0.{part}.weight"] == spec
        weight = sharded.params["model.layers.0.mlp.gate_proj.weight"]
        assert [shard.data.shape for shard in weight.addressable_shards] == [(64 // count, 32)] * count
        cache = sharded.new_cache(1, 8)
        cached = (None, attention) if attention else ()
        assert tuple(cache.arrays[0].sharding.spec) == cached
        torch.testing.assert_close(in_torch(sharded.forward(*TREE, cache).logits), logits, rtol=1e-4, atol=1e-4)
        cache.commit([[0, 3, 4]])
        assert tuple(cache.arrays[0].sharding.spec) == cached
        if count == 2:
            assert outputs(sharded, tiny_drafter_dir, 0.8) == outputs(target, "none", 0.8)


def test_several_sequences_in_bfloat16(tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    """On a CPU, XLA lacks products of bfloat16 into float32 for some batch sizes."""
    half = load(tiny_target_dir, dtype=torch.bfloat16)
    assert [len(tokens) for tokens in outputs(half, tiny_drafter_dir)] == [14] * 3
