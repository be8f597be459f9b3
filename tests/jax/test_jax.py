"""The backend jax beside transformers and the native one: logits, tokens, cycles, shardings, and what is compiled."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("jax.numpy", reason="JAX is not installed: pip install 'blockdraft[jax]', or make test-jax")

import jax
from tiny_families import write_model

from blockdraft.decode.proposal import chain_parents
from blockdraft.decode.tree import best_first
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.jax.cache import JaxTensor
from blockdraft.jax.model import Layout, local_layout
from blockdraft.targets import Target, backends, load_target
from blockdraft.targets.base import LoadOptions
from blockdraft.types import Drafting, SamplingParams

pytestmark = pytest.mark.jax

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"]
PROMPTS = [[7, 60, 33, 12, 9], [5], [40, 41, 42, 40, 41], [(7 * i + 3) % 60 + 4 for i in range(70)]]
PARAMS = [SamplingParams(14, (0.0, 0.0, 0.8, 0.0)[row], seed=row, ignore_eos=True) for row in range(4)]
# A tree, and parents of a chain of two beside one of three.
TREE = torch.tensor([[7, 60, 33, 12, 9, 11]]), torch.tensor([[-1, 0, 1, 0, 3, 4]])


def load(path: Path, layout: Layout | None = None, dtype: torch.dtype = torch.float32) -> Any:
    return backends()["jax"].load(path, LoadOptions(dtype=dtype, device=torch.device("cpu")), layout)


@pytest.fixture(scope="module")
def native(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, backend="native", compile="off")


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Any:
    """On one device."""
    return load(tiny_target_dir, local_layout(jax.local_devices()[:1]))


def answers(target: Target, drafter: Any, drafting: Drafting | None = None, rows: int = 4) -> list[Any]:
    with Engine(target, load_drafter(drafter, target=target), rows, drafting or Drafting(None)) as engine:
        requests = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        return [each.result().checked() for each in requests]


@pytest.fixture(scope="module")
def plain(native: Target) -> list[list[int]]:
    return [each.token_ids for each in answers(native, "none", rows=1)]


def real(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, JaxTensor)
    return tensor.real


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Of a tree behind a prompt that is longer than windows are."""
    folder = write_model(family, tmp_path)
    ours, theirs = load(folder), load_target(folder, "float32", "cpu", backend="hf")
    target_layers = (0, ours.num_layers)
    found = []
    for each in (ours, theirs):
        cache = each.new_cache(1, 40)
        prompt = torch.tensor([[(5 * i + 3) % 60 + 4 for i in range(19)]])
        each.forward(prompt, chain_parents(1, 19), cache)
        cache.commit([range(19)])
        found.append(each.forward(*TREE, cache, target_layers))
    torch.testing.assert_close(real(found[0].logits), found[1].logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(real(found[0].hidden_states), found[1].hidden_states, rtol=1e-4, atol=1e-4)


def test_trees_of_the_program_are_those_of_best_first() -> None:
    from blockdraft.drafters.dflash.jax import best_tree

    logits, anchors = torch.randn(2, 9, 20, generator=torch.Generator().manual_seed(0)), torch.tensor([7, 8])
    logits[:, :, 3] += 6  # one guess of each depth is nearly certain, so that paths are long
    best = logits.log_softmax(dim=-1).topk(20)
    expected = best_first(anchors, best.values, best.indices, 40)
    given = jax.numpy.asarray(logits.numpy()), jax.numpy.asarray([7, 8])
    tokens, parents, depths = best_tree(*given, size=10, budget=40, temperature=jax.numpy.zeros(2))
    assert (tokens.tolist(), parents.tolist()) == (expected.tokens.tolist(), expected.parents.tolist())
    assert int(depths.max()) == 9


def test_draft_passes_are_those_of_torch(target: Target, native: Target, tiny_drafter_dir: Path) -> None:
    """Of a block that does not fill its bucket, behind a prompt and behind what a cycle as one program has observed."""
    found: list[list[torch.Tensor]] = []
    told: Any = None
    for each in (target, native):
        drafter: Any = load_drafter(tiny_drafter_dir, target=each)
        run, cache = drafter._run, each.new_cache(1, 32)
        state, block = run.new_state(1, 32), torch.full((1, 5), drafter.config.mask_token_id)
        block[0, 0] = 11

        def read(tokens: list[int]) -> None:
            output = each.forward(torch.tensor([tokens]), chain_parents(1, len(tokens)), cache, drafter.target_layers)  # noqa: B023
            run.observe(state, output.hidden_states)  # noqa: B023
            for store in (cache, state):  # noqa: B023
                store.commit([range(len(tokens))])

        read(PROMPTS[0])
        hidden = [run.draft_tokens(state, block, 1)[0]]
        if told is None:
            told = run.cycle(cache, state, [11], None, block_size=5, tree_budget=0, temperatures=[0.0])
        else:
            read([told.tokens[0][node] for node in told.paths[0]])
        found.append([*hidden, run.draft_tokens(state, block, 1)[0]])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(real(ours), theirs, rtol=1e-4, atol=1e-4)


def test_laws_at_temperature_one(target: Any, native: Target, tiny_drafter_dir: Path) -> None:
    """One token of many seeds in one cycle: frequencies are those of the target's distribution."""
    run = target.runner(load_drafter(tiny_drafter_dir, target=native).network)  # type: ignore[attr-defined]
    prompt, rows, seeds = torch.tensor([PROMPTS[0]]), 64, 40
    cache, state = target.new_cache(rows, 16), run.new_state(rows, 16)
    first = target.forward(prompt.expand(rows, -1), chain_parents(rows, 5), cache, run.config.target_layers)
    cache.commit([range(5)] * rows)
    run.observe(state, first.hidden_states)
    state.commit([range(5)] * rows)
    generator, counts = torch.Generator().manual_seed(5), torch.zeros(target.vocab_size)
    for _ in range(seeds):
        uniforms = torch.rand(rows, 4, generator=generator, dtype=torch.float64)
        found = run.cycle(cache, state, [11] * rows, uniforms, block_size=4, tree_budget=0, temperatures=[1.0] * rows)
        counts += torch.bincount(torch.tensor(found.following)[:, 0], minlength=target.vocab_size)
        for each in (cache, state):
            each.truncate([5] * rows)
    own = native.new_cache(1, 16)
    native.forward(prompt, chain_parents(1, 5), own)
    own.commit([range(5)])
    p = native.forward(torch.tensor([[11]]), chain_parents(1, 1), own).logits[0, 0].softmax(-1)
    total, likely = rows * seeds, p > 0.01
    # Chi-squared of some dozens of cells: 8 standard deviations.
    cells = int(likely.sum()) + 1
    seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
    wanted = torch.cat([p[likely], p[~likely].sum()[None]]) * total
    assert cells > 10 and float(((seen - wanted) ** 2 / wanted).sum()) < cells + 8 * (2 * cells) ** 0.5


def test_each_bucket_is_compiled_once_and_a_cycle_transfers_nothing(
    tiny_target_dir: Path, tiny_drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of every length below the smallest window, engines, and blocks of 5 to 8 share one program. What is put on
    the device before it and fetched after it is explicit, and in it nothing is. Caches are written in place."""
    target = load(tiny_target_dir, local_layout(jax.local_devices()[:1]))
    drafter: Any = load_drafter(tiny_drafter_dir, target=target)
    run, cycles = drafter._run, 0
    own = run.jax_cycle

    def guarded(*args: Any) -> Any:
        nonlocal cycles
        cycles += 1
        with jax.transfer_guard("disallow_explicit"):
            found = own(*args)
        assert all(array.is_deleted() for memory in args[4:6] for array in memory)  # both caches were donated
        return found

    monkeypatch.setattr(run, "jax_cycle", guarded)
    for size in (None, 5):
        with Engine(target, drafter, 1, Drafting(size)) as engine:
            for prompt in PROMPTS[:3]:
                engine.generate([prompt], SamplingParams(24, ignore_eos=True))
    assert cycles > 60
    assert own._cache_size() <= 3  # blocks of up to 8, and up to 4 and of 2 where an answer ends
    assert target.jax_forward._cache_size() <= 2  # prompts of 5 and of 1 token


def test_sharded_equals_single(
    target: Any, tiny_target_dir: Path, tiny_drafter_dir: Path, plain: list[list[int]]
) -> None:
    """On two of eight devices, which divide heads and key/value heads, and on all eight, which divide the MLP and the
    vocabulary alone."""
    assert len(jax.local_devices()) == 8, "XLA_FLAGS came too late"
    logits = real(target.forward(*TREE, target.new_cache(1, 8)).logits)
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
        assert [each.data.shape for each in weight.addressable_shards] == [(64 // count, 32)] * count
        cache = sharded.new_cache(1, 8)
        cached = (None, attention) if attention else ()
        assert tuple(cache.arrays[0].sharding.spec) == cached
        torch.testing.assert_close(real(sharded.forward(*TREE, cache).logits), logits, rtol=1e-4, atol=1e-4)
        cache.commit([[0, 3, 4]])
        assert tuple(cache.arrays[0].sharding.spec) == cached
        if count == 2:
            assert [each.token_ids for each in answers(sharded, tiny_drafter_dir)] == plain


def test_several_rows_in_bfloat16(tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    """XLA's products of bfloat16 into float32 on a CPU are not there for every number of rows."""
    half = load(tiny_target_dir, local_layout(jax.local_devices()[:1]), torch.bfloat16)
    assert all(len(each.token_ids) == 14 for each in answers(half, tiny_drafter_dir, rows=3))
