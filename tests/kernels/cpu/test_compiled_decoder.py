"""The compiled forward pass against torch, and against itself with other nodes next to a token."""

import math
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockdraft.decode.proposal import chain
from blockdraft.errors import UsageError
from blockdraft.targets import Target, TargetOutput, load_target

TARGET_LAYERS = (0, 2, 3)
PROMPTS = [list(range(5, 25)), list(range(40, 47)), list(range(60, 91))]


def read(target: Target, prompts: Sequence[Sequence[int]]) -> tuple[object, TargetOutput]:
    """Return a cache with these prompts as one batch, and the output of the last tokens."""
    cache = target.new_cache(len(prompts), 128)
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    output = target.forward(
        *pair(chain(tokens)), cache, TARGET_LAYERS, torch.tensor([len(prompt) - 1 for prompt in prompts])
    )
    cache.commit([list(range(len(prompt))) for prompt in prompts])
    return cache, output


def pair(proposal: object) -> tuple[torch.Tensor, torch.Tensor]:
    return proposal.tokens, proposal.parents  # type: ignore[attr-defined]


@pytest.fixture(params=["float32", "bfloat16", "int8", "int4", "int8 keys and values", "bfloat16 keys and values"])
def target(request: pytest.FixtureRequest, tiny_target_dir: Path) -> Target:
    if request.param in ("int8", "int4"):
        loaded = load_target(
            tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on", quantize=request.param
        )
    elif "keys" in request.param:
        kind = request.param.split()[0]
        loaded = load_target(
            tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on", kv_dtype=kind
        )
    else:
        loaded = load_target(tiny_target_dir, dtype=request.param, device="cpu", backend="native", compile="on")
    assert loaded.compiled is not None  # type: ignore[attr-defined]
    return loaded


def assert_same_bits(ours: TargetOutput, theirs: TargetOutput) -> None:
    assert torch.equal(ours.logits, theirs.logits)
    assert ours.hidden_states is not None and theirs.hidden_states is not None
    assert torch.equal(ours.hidden_states, theirs.hidden_states)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 16, 33])
def test_a_block_has_the_bits_of_its_tokens_alone(target: Target, count: int) -> None:
    block = torch.arange(100, 100 + count)[None]
    cache, _ = read(target, PROMPTS[:1])
    together = target.forward(*pair(chain(block)), cache, TARGET_LAYERS)  # type: ignore[arg-type]
    cache.truncate([len(PROMPTS[0])])  # type: ignore[attr-defined]
    for i in range(count):
        alone = target.forward(*pair(chain(block[:, i : i + 1])), cache, TARGET_LAYERS)  # type: ignore[arg-type]
        assert together.hidden_states is not None
        assert_same_bits(alone, TargetOutput(together.logits[:, i : i + 1], together.hidden_states[:, i : i + 1]))
        cache.commit([[0]])  # type: ignore[attr-defined]


def test_a_tree_has_the_bits_of_each_of_its_paths(target: Target) -> None:
    tokens = torch.tensor([[9, 10, 11, 12, 13, 14]])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4]])
    cache, _ = read(target, PROMPTS[:1])
    tree = target.forward(tokens, parents, cache, TARGET_LAYERS)  # type: ignore[arg-type]
    for path in ([0, 1, 3], [0, 2, 4, 5]):
        cache, _ = read(target, PROMPTS[:1])
        line = target.forward(*pair(chain(tokens[:, path])), cache, TARGET_LAYERS)  # type: ignore[arg-type]
        assert tree.hidden_states is not None
        assert_same_bits(line, TargetOutput(tree.logits[:, path], tree.hidden_states[:, path]))


@pytest.mark.parametrize("length", [0, 5, 41, 59, 64, 100])
def test_a_path_through_a_tree_has_the_bits_of_a_line_wherever_its_nodes_lie(target: Target, length: int) -> None:
    """Sums over KV slots, 64 of which share a scale, must not depend on where ancestors lie."""
    generator = torch.Generator().manual_seed(length)
    for _ in range(3):
        path = torch.randint(4, 200, (8,), generator=generator).tolist()
        tokens, parents, places = list[int](), list[int](), list[int]()
        for depth, token in enumerate(path):
            for _ in range(int(torch.randint(0, 8, (), generator=generator))):  # of other branches
                tokens.append(int(torch.randint(4, 200, (), generator=generator)))
                parents.append(int(torch.randint(-1, len(parents), (), generator=generator)))
            tokens.append(token)
            parents.append(places[-1] if depth else -1)
            places.append(len(tokens) - 1)
        text = torch.randint(4, 200, (1, length), generator=generator)
        actual = []
        for proposal in ((torch.tensor([tokens]), torch.tensor([parents])), pair(chain(torch.tensor([path])))):
            cache = target.new_cache(1, 256)
            if length:
                target.forward(*pair(chain(text)), cache)
                cache.commit([list(range(length))])
            actual.append(target.forward(*proposal, cache, TARGET_LAYERS))
        tree, line = actual
        assert torch.equal(tree.logits[0, places], line.logits[0])
        assert tree.hidden_states is not None and line.hidden_states is not None
        assert torch.equal(tree.hidden_states[0, places], line.hidden_states[0])


def test_what_is_committed_of_a_tree_has_the_bits_of_a_line(target: Target) -> None:
    tokens, parents = torch.tensor([[9, 10, 11, 12, 13]]), torch.tensor([[-1, 0, 0, 1, 2]])
    after = pair(chain(torch.tensor([[50, 51]])))
    of_tree, _ = read(target, PROMPTS[:1])
    target.forward(tokens, parents, of_tree)  # type: ignore[arg-type]
    of_tree.commit([[0, 2, 4]])  # type: ignore[attr-defined]
    of_line, _ = read(target, PROMPTS[:1])
    target.forward(*pair(chain(tokens[:, [0, 2, 4]])), of_line)  # type: ignore[arg-type]
    of_line.commit([[0, 1, 2]])  # type: ignore[attr-defined]
    assert_same_bits(target.forward(*after, of_tree, TARGET_LAYERS), target.forward(*after, of_line, TARGET_LAYERS))  # type: ignore[arg-type]


def test_a_row_has_the_same_bits_alone_and_in_a_batch(target: Target) -> None:
    blocks = torch.tensor([[9, 10, 11], [12, 13, 14], [15, 16, 17]])
    cache, read_together = read(target, PROMPTS)
    together = target.forward(*pair(chain(blocks)), cache, TARGET_LAYERS)  # type: ignore[arg-type]
    for row, prompt in enumerate(PROMPTS):
        cache, alone = read(target, [prompt])
        assert torch.equal(alone.logits[0], read_together.logits[row])
        one = target.forward(*pair(chain(blocks[row : row + 1])), cache, TARGET_LAYERS)  # type: ignore[arg-type]
        assert together.hidden_states is not None
        assert_same_bits(one, TargetOutput(together.logits[row : row + 1], together.hidden_states[row : row + 1]))


def test_the_prompt_has_the_bits_of_its_tokens_one_by_one(target: Target) -> None:
    _, whole = read(target, PROMPTS[:1])
    cache = target.new_cache(1, 64)
    for token in PROMPTS[0]:
        last = target.forward(*pair(chain(torch.tensor([[token]]))), cache, TARGET_LAYERS)
        cache.commit([[0]])
    assert torch.equal(last.logits, whole.logits)


def test_it_computes_what_the_decoder_computes(tiny_target_dir: Path) -> None:
    """Weights quantized are in tests/kernels/cpu/test_odd_shapes.py."""
    ways: list[Literal["on", "off"]] = ["on", "off"]
    ours, theirs = (
        load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile=way) for way in ways
    )
    (cache, a), (other, b) = read(ours, PROMPTS), read(theirs, PROMPTS)
    torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=1e-4)
    nodes = torch.tensor([[9, 10, 11]] * 3), torch.tensor([[-1, 0, 0]] * 3)
    a, b = ours.forward(*nodes, cache, TARGET_LAYERS), theirs.forward(*nodes, other, TARGET_LAYERS)  # type: ignore[arg-type]
    torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(a.hidden_states, b.hidden_states, rtol=0, atol=1e-4)


def test_keys_and_values_in_8_bits_are_near_and_take_half_the_memory_of_bfloat16(tiny_target_dir: Path) -> None:
    ours: Any = load_target(
        tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on", kv_dtype="int8"
    )
    theirs: Any = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on")
    assert "int8 keys and values" in ours.running and "keys" not in theirs.running
    (cache, a), (other, b) = read(ours, PROMPTS), read(theirs, PROMPTS)
    nodes = torch.tensor([[9, 10, 11]] * 3), torch.tensor([[-1, 0, 0]] * 3)
    a, b = ours.forward(*nodes, cache, TARGET_LAYERS), theirs.forward(*nodes, other, TARGET_LAYERS)
    assert 0 < float((a.logits - b.logits).norm() / b.logits.norm()) < 0.02
    size = ours.decoder.config.head_dim
    assert ours.cache_bytes(3, 128) * 4 * size == theirs.cache_bytes(3, 128) * (size + 4)
    memory = cache.stores[0]  # type: ignore[attr-defined]
    assert memory.dtype == torch.int8 and memory.nbytes == ours.cache_bytes(1, memory.size(2))


def test_a_row_with_nan_in_its_8_bit_keys_is_alone_with_it(tiny_target_dir: Path) -> None:
    target: Any = load_target(
        tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on", kv_dtype="int8"
    )
    blocks = torch.tensor([[9, 10, 11], [12, 13, 14], [15, 16, 17]])
    cache, _ = read(target, PROMPTS)
    right = target.forward(*pair(chain(blocks)), cache, TARGET_LAYERS).logits
    cache, _ = read(target, PROMPTS)
    memory = cache.stores[0]  # type: ignore[attr-defined]
    memory[:, :, cache.starts[1], -4:] = torch.tensor([0, 0, -64, 127], dtype=torch.int8)  # the factor is NaN
    actual = target.forward(*pair(chain(blocks)), cache, TARGET_LAYERS).logits
    assert actual[1].isnan().any() and torch.equal(actual[[0, 2]], right[[0, 2]])


def test_keys_and_values_in_8_bits_are_for_compiled_targets(tiny_target_dir: Path) -> None:
    for ways, words in (
        ({"compile": "off"}, "has none: compile is off"),
        ({"backend": "hf"}, "no choice of the type of keys"),
    ):
        with pytest.raises(ValueError, match=words):
            load_target(tiny_target_dir, dtype="float32", device="cpu", kv_dtype="int8", **ways)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_dtype must be 'float32', 'bfloat16' or 'int8', got 'int4'"):
        load_target(tiny_target_dir, kv_dtype="int4")  # type: ignore[arg-type]


def test_a_checkpoint_in_bfloat16_is_kept_in_it_for_the_same_float32_numbers(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "narrow")
    model.float().save_pretrained(tmp_path / "wide")
    kept, widened = (
        load_target(tmp_path / name, dtype="float32", device="cpu", backend="native", compile="on")
        for name in ("narrow", "wide")
    )
    assert "weights kept in bfloat16" in kept.running and "bfloat16" not in widened.running
    (_, ours), (_, theirs) = read(kept, PROMPTS), read(widened, PROMPTS)
    assert_same_bits(ours, theirs)
    for (name, one), (_, other) in zip(kept.named_weights(), widened.named_weights(), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_token_is_the_first_of_the_largest_logits_or_none(
    tiny_target_dir: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=dtype)
    shutil.copytree(tiny_target_dir, tmp_path, dirs_exist_ok=True)
    head, last = model.get_output_embeddings().weight.data, model.config.vocab_size - 1

    def output() -> TargetOutput:
        model.save_pretrained(tmp_path)
        target = load_target(tmp_path, dtype="float32", device="cpu", backend="native", compile="on")
        nodes = chain(torch.arange(1, 101)[None])
        return target.forward(nodes.tokens, nodes.parents, target.new_cache(1, 128), ())

    actual = output()
    assert actual.best is not None and actual.best.tolist() == actual.logits.argmax(-1).tolist()
    assert actual.best.unique().numel() > 10
    first = int(actual.best[0, 0])
    for twin in (last, last - 9):  # in what is left over of the vectors, and in them
        head[twin] = head[first]
    actual = output()
    largest = actual.logits == actual.logits.amax(-1, keepdim=True)
    assert int(largest[0, 0].sum()) == 3 and actual.best is not None
    assert actual.best.tolist() == largest.int().argmax(-1).tolist()
    for token in (last, 3):
        kept, head[token] = head[token].clone(), math.nan
        actual = output()
        assert actual.logits[..., token].isnan().all() and actual.best is not None and bool((actual.best == -1).all())
        head[token] = kept * 1e38  # infinite where it is positive
        actual = output()
        infinite = (actual.logits == torch.inf).any(-1) | actual.logits.isnan().any(-1)
        assert 0 < int(infinite.sum()) < 100 and actual.best is not None
        assert torch.equal(actual.best == -1, infinite)
        head[token] = kept


def test_texts_may_outgrow_the_tables_of_angles(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]
) -> None:
    constants("blockdraft.kernels.cpu.compiled_decoder", FIRST_POSITIONS=8)
    target = load_target(tiny_target_dir, compile="on")
    _, short = read(target, [PROMPTS[0][:3]])
    _, long = read(target, PROMPTS[:1])
    monkeypatch.undo()
    assert torch.equal(read(load_target(tiny_target_dir, compile="on"), PROMPTS[:1])[1].logits, long.logits)
    assert torch.equal(read(target, [PROMPTS[0][:3]])[1].logits, short.logits)


def test_threads_may_call_at_once_and_get_the_bits_they_get_alone(
    tiny_target_dir: Path, constants: Callable[..., None]
) -> None:
    constants(
        "blockdraft.kernels.cpu.compiled_decoder", FIRST_POSITIONS=8
    )  # so that tables grow while others read them
    target = load_target(tiny_target_dir, compile="on")

    def answer(number: int) -> list[torch.Tensor]:
        actual: list[Any] = []
        for step in range(20):
            cache, count = target.new_cache(1, 256), 60 + 25 * number + step
            for nodes in (chain(torch.arange(count)[None]), chain(torch.arange(number, number + 5)[None])):
                output = target.forward(*pair(nodes), cache, TARGET_LAYERS)  # type: ignore[arg-type]
                actual += [output.logits, output.hidden_states, output.best]
                cache.commit([range(nodes.tokens.size(1))])
        return actual

    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(answer, range(6)))
    for number, actual in enumerate(together):
        assert all(map(torch.equal, actual, answer(number)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_node_without_numbers_harms_none_that_do_not_see_it(target: Any, value: float) -> None:
    """If a draft token has NaN, its siblings, its ancestors and other sequences keep their numbers."""
    tokens, parents = torch.tensor([[9, 10, 11, 12, 13, 14]] * 2), torch.tensor([[-1, 0, 0, 1, 2, 4]] * 2)
    cache, _ = read(target, PROMPTS[:2])
    right = target.forward(tokens, parents, cache, TARGET_LAYERS)
    cache, _ = read(target, PROMPTS[:2])
    weight, _ = target.decoder.embedding.pack(target.compiled.library).owners
    place = weight if isinstance(weight, torch.Tensor) else weight.scale
    place[250 // place.size(2), :, 250 % place.size(2)] = value
    tokens[0, 1] = 250  # which node 3 sees, and no other
    actual = target.forward(tokens, parents, cache, TARGET_LAYERS)
    assert not actual.logits[0, [1, 3]].isfinite().any() and actual.best[0, [1, 3]].tolist() == [-1, -1]
    for ours, theirs in ((actual.logits, right.logits), (actual.hidden_states, right.hidden_states)):
        assert torch.equal(ours[0, [0, 2, 4, 5]], theirs[0, [0, 2, 4, 5]]) and torch.equal(ours[1], theirs[1])
    cache.commit([[0, 2, 4], [0, 1]])  # type: ignore[attr-defined]
    assert target.forward(tokens[:, :1], parents[:, :1], cache, TARGET_LAYERS).logits.isfinite().all()


def test_tokens_must_be_known(target: Target) -> None:
    for wrong in (-1, target.vocab_size, 999):
        cache, _ = read(target, PROMPTS[:2])
        block = torch.tensor([[1, 2], [wrong, 3]])
        with pytest.raises(
            UsageError, match=f"Token id {wrong} is none of the {target.vocab_size} .* use the tokenizer"
        ):
            target.forward(*pair(chain(block)), cache)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=f"Token id {wrong} is none of"):
            target.embed(block)
    assert target.embed(torch.tensor([0, target.vocab_size - 1])).isfinite().all()


def test_no_nodes_and_no_rows_are_nothing_to_do(target: Any) -> None:
    for batch, count in ((2, 0), (0, 3), (0, 0)):
        nodes, cache = torch.zeros(batch, count, dtype=torch.int64), target.new_cache(2, 8)
        cache.commit([range(5)] * 2)
        rows = cache.of(cache.starts[:batch])
        output = target.forward(nodes, nodes, rows, TARGET_LAYERS)
        assert output.logits.shape == (batch, count, target.vocab_size) and output.best.shape == nodes.shape
        assert output.hidden_states.shape == (batch, count, 3 * target.hidden_size)
        assert not cache.stores[0].any()


def test_a_call_stays_within_the_workspace_that_it_asks_for(target: Target) -> None:
    compiled: Any = target.compiled
    for batch, count in ((1, 1), (2, 7), (1, 33), (3, 16)):
        cache, _ = read(target, PROMPTS[:batch])
        end = max(map(len, PROMPTS[:batch])) + count
        needed = compiled.workspace_bytes(batch, count, end) // 4
        for room in (needed, needed - 1):
            memory = torch.full((room + 64,), 7.5)
            compiled.workspace = memory[:room]
            target.forward(*pair(chain(torch.arange(count)[None].expand(batch, -1))), cache)  # type: ignore[arg-type]
            assert (memory[room:] == 7.5).all()
            assert (compiled.workspace.data_ptr() == memory.data_ptr()) == (room == needed)
        assert compiled.workspace.numel() == needed


def test_the_workspace_grows_with_nodes_and_slots_and_not_with_their_product(target: Target) -> None:
    compiled: Any = target.compiled
    sizes = [compiled.workspace_bytes(1, count, count) for count in (1024, 2048, 4096)]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


def test_without_a_compiler_the_decoder_runs_uncompiled_and_says_so(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from blockdraft.kernels.cpu.build import begun

    monkeypatch.setenv("CC", "no-such-compiler")
    begun.cache_clear()
    try:
        target = load_target(tiny_target_dir, device="cpu")
        assert target.compiled is None and "no C compiler" in target.compile_reason  # type: ignore[attr-defined]
        assert caplog.messages == [f"The target runs uncompiled, which is slower: {target.compile_reason}."]  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="no C compiler .*compile auto or off"):
            load_target(tiny_target_dir, device="cpu", compile="on")
        assert load_target(tiny_target_dir, device="cpu", compile="off").compiled is None  # type: ignore[attr-defined]
    finally:
        begun.cache_clear()
    with pytest.raises(ValueError, match="float16"):
        load_target(tiny_target_dir, dtype="float16", device="cpu", compile="on")
    with pytest.raises(ValueError, match="compile must be 'auto', 'on' or 'off', got 'yes'"):
        load_target(tiny_target_dir, compile="yes")  # type: ignore[arg-type]


def test_transformers_rounds_no_weights(tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match="hf backend cannot run .*: it does not quantize weights"):
        load_target(tiny_target_dir, device="cpu", quantize="int8", backend="hf")
