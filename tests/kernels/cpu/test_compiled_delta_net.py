"""Compiled gated delta nets and Mamba-2: bits that do not depend on other nodes, and states after any commit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blockdraft.decode.proposal import chain, chain_parents
from blockdraft.kernels.cpu import recurrent_cache
from blockdraft.kernels.cpu.recurrent_cache import MAX_TRAIL
from blockdraft.targets import TargetOutput, load_target

LAYERS = (1, 3)
FIELDS: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
NARROW = {"linear_key_head_dim": 8, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 2}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 32}
MAMBA2 |= {"num_local_experts": 0, "shared_intermediate_size": 96, "residual_multiplier": 0.5}
NEMOTRON = {"mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 3, "ssm_state_size": 16, "conv_kernel": 2}
NEMOTRON |= {"n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 24}
NEMOTRON |= {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"]}
MODELS = {
    "dense": ("qwen3_5_text", {}),
    "narrow": ("qwen3_5_text", NARROW),
    "experts": ("qwen3_5_moe_text", EXPERTS),
    "mamba2": ("granitemoehybrid", MAMBA2),
    "mamba2 experts": ("nemotron_h", NEMOTRON),
    "last layer": ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}),
}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "int8 keys and values": {"kv_dtype": "int8"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, (family, fields) in MODELS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FIELDS | fields))
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
        folders[name] = tmp_path_factory.mktemp("model")
        model.save_pretrained(folders[name])
    return folders


def load(folders: dict[str, Path], name: str = "dense", **options: Any) -> Any:
    target: Any = load_target(folders[name], **{"dtype": "float32", "device": "cpu", "compile": "on"} | options)
    assert target.compiled is not None
    return target


@pytest.fixture(params=["dense, float32", "dense, int4", "narrow, float32", "mamba2, int4", "mamba2 experts, float32"])
def target(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Any:
    name, _, way = request.param.partition(", ")
    return load(folders, name, **WAYS[way])


def text(count: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 80, (rows, count), generator=torch.Generator().manual_seed(seed))


def read(target: Any, tokens: torch.Tensor, pieces: list[int] | None = None) -> Any:
    """Return a cache that has read tokens as prompts, or else in pieces that are scored whole."""
    cache, first = target.new_cache(len(tokens), 400), 0
    for size in pieces or [tokens.size(1)]:
        part = tokens[:, first : first + size]
        last = None if pieces else torch.full((len(tokens),), size - 1)
        target.forward(part, chain(part).parents, cache, LAYERS, last)
        cache.commit([range(size)] * len(tokens))
        first += size
    return cache


def score(target: Any, cache: Any, tokens: torch.Tensor, parents: list[list[int]] | None = None) -> TargetOutput:
    above = chain(tokens).parents if parents is None else torch.tensor(parents)
    output: TargetOutput = target.forward(tokens, above, cache, LAYERS)
    return output


def same(ours: TargetOutput, theirs: TargetOutput) -> bool:
    assert ours.hidden_states is not None and theirs.hidden_states is not None
    return torch.equal(ours.logits, theirs.logits) and torch.equal(ours.hidden_states, theirs.hidden_states)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_block_and_a_prompt_have_the_bits_of_their_tokens_one_by_one(
    folders: dict[str, Path], name: str, way: str
) -> None:
    target, tokens, block = load(folders, name, **WAYS[way]), text(30), text(9, 1)
    together = score(target, read(target, tokens), block)
    for pieces in ([1] * 30, [2, 7, 21], [30]):
        cache = read(target, tokens, pieces)
        for node in range(9):
            alone = score(target, cache, block[:, node : node + 1])
            cache.commit([[0]])
            assert torch.equal(alone.logits[0, 0], together.logits[0, node]), (pieces, node)


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_transformers_computes(folders: dict[str, Path], name: str) -> None:
    target, tokens = load(folders, name), text(150)
    dtype = torch.float32 if name == "experts" else torch.float64  # torch has no grouped products in float64
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=dtype)
    with torch.no_grad():
        expected = model(tokens).logits.float()
    logits = score(target, target.new_cache(1, 200), tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


def test_trees_have_the_bits_of_their_paths_and_any_path_can_be_committed(target: Any) -> None:
    random, tokens = torch.Generator().manual_seed(3), text(20)
    for trial in range(6):
        count = [1, 5, 9, 16, 40, 90][trial]
        nodes = text(count, trial)
        parents = [int(torch.randint(max(-1, node - 4), node, (), generator=random)) for node in range(count)]
        cache = read(target, tokens)
        score(target, cache, text(3, 70))
        cache.commit([[0, 1]])  # the tree begins behind nodes that are not in the state yet
        tree, after = score(target, cache, nodes, [parents]), text(3, trial + 50)
        path = [int(torch.randint(count, (), generator=random))]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        kept = path[: max(1, len(path) - trial % 2)]
        cache.commit([kept])
        other = read(target, torch.cat([tokens, text(3, 70)[:, :2]], dim=1))
        line = score(target, other, nodes[:, path])
        other.commit([range(len(kept))])
        assert torch.equal(tree.logits[0, path], line.logits[0])
        assert same(score(target, cache, after), score(target, other, after))


def test_sequences_have_the_same_bits_alone_and_in_a_batch(target: Any, scatter: Callable[..., Any]) -> None:
    tokens, block, parents = text(12, rows=3), text(6, 1, rows=3), [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [-1] * 6]
    paths, after = [[0, 2, 5], [0, 1, 2, 3], [4]], text(2, 2, rows=3)
    cache = scatter(target.new_cache(1, 200), (90, 50), (10, 60), (150, 40))
    rows = cache.of([10, 150, 90])
    lengths = [12, 7, 1]  # of prompts of one batch
    target.forward(tokens, chain(tokens).parents, rows, LAYERS, torch.tensor(lengths) - 1)
    rows.commit([range(length) for length in lengths])
    first = score(target, rows, block, parents)
    rows.commit(paths)
    second = score(target, cache.of([150, 10]), after[[1, 0]])
    for row, length in enumerate(lengths):
        alone = read(target, tokens[row : row + 1, :length])
        own = score(target, alone, block[row : row + 1], [parents[row]])
        assert torch.equal(first.logits[row], own.logits[0])
        alone.commit([paths[row]])
        if row < 2:
            assert torch.equal(score(target, alone, after[row : row + 1]).logits[0], second.logits[1 - row])


def test_a_long_line_may_be_committed_in_part(target: Any) -> None:
    count = 2 * MAX_TRAIL + 3
    tokens, after = text(count, rows=4), text(1, 1, rows=4)
    for reads in (False, True):
        cache, kept = target.new_cache(4, count + 8), [count, count - 1, 3, 0]
        last = torch.full((4,), count - 1) if reads else None
        target.forward(tokens, chain(tokens).parents, cache, LAYERS, last)
        cache.commit([range(length) for length in kept])
        following = score(target, cache, after)
        for row, length in enumerate(kept):
            other = read(target, tokens[row : row + 1, :length]) if length else target.new_cache(1, 8)
            assert torch.equal(score(target, other, after[row : row + 1]).logits[0], following.logits[row])


def test_a_forward_pass_changes_no_state(target: Any) -> None:
    """Nodes that nobody commits leave nothing, and a sequence begins anew without tokens."""
    tokens, block = text(10), text(4, 1)
    cache = read(target, tokens)
    expected = score(target, cache, block)
    for _ in range(2):
        score(target, cache, text(7, 2), [[-1, -1, 0, 1, 1, 2, 5]])
        assert same(score(target, cache, block), expected)
        cache.commit([[]])
    cache.truncate([0])
    target.forward(tokens, chain(tokens).parents, cache, LAYERS)
    cache.commit([range(10)])
    assert same(score(target, cache, block), expected)


def test_a_call_that_c_refuses_leaves_the_states(folders: dict[str, Path]) -> None:
    target, block = load(folders), text(4, 1)
    cache = read(target, text(10))
    score(target, cache, block)
    cache.commit([[0, 1]])
    with pytest.raises(ValueError, match="Token id 998"):
        score(target, cache, block + 995)
    other = read(target, torch.cat([text(10), block[:, :2]], dim=1))
    assert same(score(target, cache, block), score(target, other, block))


def test_memory_is_planned(folders: dict[str, Path]) -> None:
    target = load(folders)
    cache, tokens = target.new_cache(3, 10), torch.full((3, 2), 5)
    target.forward(tokens, chain_parents(3, 2), cache)
    cache.commit([[0, 1]] * 3)
    checkpoints = target.compiled.states.checkpoint_bytes(30)
    assert target.cache_bytes(3, 10) == cache.nbytes + cache.state_bytes + checkpoints
    rows = cache.rows.values()
    trails = sum(row.past.nbytes + row.trail.nbytes for row in rows)
    assert 0 < trails < target.forward_bytes(3, 2, 10) - target.compiled.workspace_bytes(3, 2, 10)


def test_rows_are_copied_at_checkpoints_and_exported_and_loaded(target: Any) -> None:
    tokens, block = text(60), text(5, 1)
    cache = target.new_cache(4, 100)
    own, sizes = cache.of([0]), [30, 20, 10]
    for first, size in zip((0, 30, 50), sizes, strict=True):
        part = tokens[:, first : first + size]
        target.forward(part, chain(part).parents, own, LAYERS, torch.tensor([size - 1]))
        own.commit([range(size)])
    score(target, own, block)
    own.commit([[0, 1]])
    assert [cache.reusable(0, length) for length in (29, 30, 49, 50, 61, 62, 99)] == [0, 30, 30, 50, 60, 62, 62]
    expected = {}
    for start, length in ((100, 50), (200, 62), (300, 30)):
        cache.copy(0, start, length)
        assert cache.of([start]).lengths == [length]
        whole = torch.cat([tokens, block[:, :2]], dim=1)[:, :length]
        expected[start] = score(target, read(target, whole), block)
    for _ in range(2):  # a forward pass changes neither the source nor the checkpoint
        for start in expected:
            assert same(score(target, cache.of([start]), block), expected[start])
    cache.of([100]).commit([[0, 1, 2]])
    score(target, cache.of([100]), block)
    cache.close(100)
    cache.open(100, 100)
    cache.copy(0, 100, 50)
    assert same(score(target, cache.of([100]), block), expected[100])
    assert cache.reusable(200, 55) == 50  # checkpoints are copied too
    for length in (50, 62):
        tensors = cache.export(0, length)
        other = target.new_cache(1, 100)
        other.load(0, [0] * length, tensors)
        assert other.lengths == [length]
        assert same(score(target, other, block), expected[100 if length == 50 else 200])
    cache.close(0)
    assert same(score(target, cache.of([200]), block), expected[200])


def test_checkpoints_are_far_apart_and_within_a_limit(folders: dict[str, Path], constants: Callable[..., None]) -> None:
    constants(recurrent_cache, CHECKPOINT_TOKENS=64)
    target = load(folders)
    cache, size = target.new_cache(1, 400), target.compiled.states.nbytes

    def reads(count: int) -> None:
        part = text(count)
        target.forward(part, chain(part).parents, cache, LAYERS, torch.tensor([count - 1]))
        cache.commit([range(count)])

    for _ in range(12):
        reads(30)
    assert cache.checkpoint_lengths(0) == [60, 120, 180, 240, 300, 330, 360]
    constants(recurrent_cache, CHECKPOINT_BYTES=2 * size)
    reads(10)
    assert cache.checkpoint_lengths(0) == [360, 370] and cache.checkpoint_bytes == 2 * size


def test_checkpoints_of_copies_and_cuts(folders: dict[str, Path], constants: Callable[..., None]) -> None:
    target = load(folders)
    cache, size = target.new_cache(3, 100), target.compiled.states.nbytes

    def reads(start: int, count: int) -> None:
        part, own = text(count, start), cache.of([start])
        target.forward(part, chain(part).parents, own, LAYERS, torch.tensor([count - 1]))
        own.commit([range(count)])

    reads(0, 30)
    reads(100, 30)
    cache.copy(0, 200, 30)
    assert cache.checkpoint_bytes == 2 * size  # copies share them
    constants(recurrent_cache, CHECKPOINT_BYTES=2 * size)
    reads(100, 10)  # the one that was copied was used later
    assert [cache.checkpoint_lengths(start) for start in (0, 100, 200)] == [[30], [40], [30]]
    constants(recurrent_cache, CHECKPOINT_BYTES=9 * size)
    reads(200, 10)
    cache.shrink(200, 30)
    cache.grow(200, 100)
    reads(200, 15)
    assert cache.reusable(200, 44) == 30  # that after 40 tokens was of others


def test_a_finished_sequence_is_copied_only(folders: dict[str, Path]) -> None:
    target, tokens, block = load(folders), text(40), text(5, 1)
    cache = target.new_cache(3, 100)
    own = cache.of([0])
    for part in (tokens[:, :30], tokens[:, 30:]):
        target.forward(part, chain(part).parents, own)
        own.commit([range(part.size(1))])
    cache.shrink(0, 40)
    assert cache.state_bytes == 0 and cache.checkpoint_bytes >= target.compiled.states.nbytes
    for start in (100, 200):  # what comes behind one copy does not change another
        cache.copy(0, start, 40)
        copy = cache.of([start])
        assert same(score(target, copy, block), score(target, read(target, tokens), block))
        copy.commit([[0]])
        score(target, copy, block[:, :1])
    with pytest.raises(AssertionError, match="no state after 39 tokens"):
        cache.shrink(100, 39)
