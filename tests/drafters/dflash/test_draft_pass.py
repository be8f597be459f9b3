"""Draft pass of decoding, compiled and not, compared with the network of training and a readable attention."""

import gc
import re
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from thinned import LONG, thinned
from torch import Tensor

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dflash2.network import DFlash2Config, DFlash2Network
from blockdraft.kernels.cpu.build import begun, build
from blockdraft.kernels.cpu.compiled_network import CompiledHost, NotCompiled
from blockdraft.kernels.cpu.compiled_runner import CompiledDraftRunner
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft.nn.draft_network import DraftHost
from blockdraft.nn.layers import ReducedHead, RMSNorm
from blockdraft.nn.torch_runner import TorchDraftRunner
from blockdraft.targets import Target, load_target

Run: TypeAlias = TorchDraftRunner | CompiledDraftRunner

CONFIG = DraftConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    block_size=4,
    mask_token_id=1,
    target_layers=(0, 2),
    num_target_layers=4,
    rope_theta=10000.0,
    layers=(LayerAttention(False, None), LayerAttention(True, None), LayerAttention(False, 3)),
    attention_bias=True,
    input_embedding_scale=1.5,
    max_position_embeddings=64,
)


def convolved(config: DraftConfig) -> DFlash2Config:
    """DFlash2 with convolutions over more positions than some blocks have."""
    sizes = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3}
    return DFlash2Config(**vars(config), **sizes)  # type: ignore[arg-type]


TOKENS = torch.empty(0)  # which the context of these networks does not depend on


KINDS = {"plain": CONFIG, "convolved": convolved(CONFIG)}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def network(request: pytest.FixtureRequest) -> DFlashNetwork:
    return made_network(request.param)


def made_network(config: DraftConfig) -> DFlashNetwork:
    torch.manual_seed(0)
    made = (DFlash2Network if isinstance(config, DFlash2Config) else DFlashNetwork)(config).requires_grad_(False)
    for name, weight in made.named_parameters():  # as a training leaves them, not as they begin
        weight += 0.3 * torch.randn_like(weight) if re.search("norm|bias|kernel", name) else 0
    return made


def unused(given: Tensor) -> Tensor:
    raise AssertionError("neither embedding nor head is asked for here")


def uncompiled(network: DFlashNetwork) -> TorchDraftRunner:
    return TorchDraftRunner(network, DraftHost(dtype=network.fc.weight.dtype, embed=unused, target_head=unused))


def compiled(network: DFlashNetwork) -> CompiledDraftRunner:
    dtype = network.fc.weight.dtype
    decoder: Any = SimpleNamespace(library=build(dtype, dtype, 8, inputs=dtype).library())
    own = {"embed": unused, "target_head": unused, "own_head": unused}
    made: CompiledDraftRunner = CompiledDraftRunner(
        network, CompiledHost(dtype=dtype, decoder=decoder, head_dim=8, **own)
    )
    return made


@pytest.fixture(params=[uncompiled, compiled], ids=["torch", "compiled"])
def make(request: pytest.FixtureRequest) -> Callable[[DFlashNetwork], Run]:
    way: Callable[[DFlashNetwork], Run] = request.param
    return way


def twin(network: DFlashNetwork, hidden_states_TF: Tensor, block_NH: Tensor, window: int | None) -> Tensor:
    """Readable twin of attention: one row, slot by slot."""
    length, count = len(hidden_states_TF), len(block_NH)
    context = network.context(hidden_states_TF[None], torch.arange(length)[None])

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = (torch.cat([old[layer], new], dim=2) for old, new in zip(context, (keys, values), strict=True))
        kind, out = network.config.layers[layer], torch.zeros_like(queries)
        for slot in range(count):
            seen = [
                at
                for at in range(length + count)
                if (at >= length or window is None or at >= length - window)
                and not (kind.causal and at > length + slot)
                and not (kind.window is not None and abs(length + slot - at) >= kind.window)
            ]
            for head in range(queries.size(1)):
                scores = keys[0, head // 2, seen] @ queries[0, head, slot] * 8**-0.5
                out[0, head, slot] = scores.softmax(0) @ values[0, head // 2, seen]
        return out

    return network(block_NH[None], torch.arange(length, length + count)[None], attend)[0]


@pytest.mark.parametrize(
    ("window", "lengths", "plain_layers"),
    thinned([None, 1, 4, 99], [[5], [7, 7], [3, 9, 6]], [False, True], keep=3, marks=LONG),
)
def test_the_same_as_the_network(
    network: DFlashNetwork,
    lengths: list[int],
    window: int | None,
    plain_layers: bool,
    make: Callable[[DFlashNetwork], Run],
) -> None:
    if plain_layers:  # those of most checkpoints, which go without a mask where rows are of one length
        network = made_network(replace(network.config, layers=(LayerAttention(False, None),) * 3))
    hidden_states, blocks = torch.randn(len(lengths), 9, 32), torch.randn(len(lengths), 4, 16)
    expected = [twin(network, f[:n], b, window) for f, b, n in zip(hidden_states, blocks, lengths, strict=True)]
    run = make(network)
    state = run.new_state(len(lengths), 16)
    for begin, end in ((0, 3), (3, 9)):  # the rows part in the second half
        run.observe(state, TOKENS, hidden_states[:, begin : max(min(max(lengths), end), begin + 1)])
        state.commit([range(max(min(length, end) - begin, 0)) for length in lengths])
    assert state.lengths == lengths
    for _ in range(2):  # a pass leaves no trace
        torch.testing.assert_close(run.block_pass(state, blocks, window), torch.stack(expected), atol=1e-5, rtol=1e-4)


def test_norms_before_fc(make: Callable[[DFlashNetwork], Run]) -> None:
    """Norms of the target's hidden states, which a description may add to any network."""
    network: Any = made_network(CONFIG)
    network.input_norm = RMSNorm(32, 1e-6).requires_grad_(False)
    network.input_norm.weight += 0.3 * torch.randn(32)
    network.description = replace(network.description, fusing_norms=("input_norm",))
    hidden_states, block = 4 * torch.randn(1, 9, 32), torch.randn(1, 4, 16)
    expected = twin(network, network.input_norm(hidden_states)[0], block[0], None)
    run = make(network)
    state = run.new_state(1, 16)
    run.observe(state, TOKENS, hidden_states)
    state.commit([range(9)])
    torch.testing.assert_close(run.block_pass(state, block)[0], expected, atol=1e-5, rtol=1e-4)


def test_more_context_than_rotary_angles_were_made_for(
    network: DFlashNetwork, make: Callable[[DFlashNetwork], Run]
) -> None:
    run = make(network)
    for capacity in (16, 2000):
        state, hidden_states, block = (
            run.new_state(1, capacity),
            torch.randn(1, capacity - 4, 32),
            torch.randn(1, 4, 16),
        )
        run.observe(state, TOKENS, hidden_states)
        state.commit([range(capacity - 4)])
        assert torch.isfinite(run.block_pass(state, block, window=8)).all()
    last = twin(network, hidden_states[0], block[0], window=8)
    torch.testing.assert_close(run.block_pass(state, block, window=8)[0], last, atol=1e-4, rtol=1e-3)


def test_memory_is_shared_and_checkpoints_stay(network: DFlashNetwork) -> None:
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    run = uncompiled(network)
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    fused = run.network.layers[0].self_attn.qkv.weight  # type: ignore[union-attr]
    assert after["layers.0.self_attn.k_proj.weight"].untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("head_dim", "count", "dtype", "kind"),
    thinned([8, 12, 32, 64], [1, 2, 7, 16, 19], [torch.float32, torch.bfloat16], KINDS, keep=5, marks=LONG),
)
def test_compiled_it_computes_what_torch_computes(head_dim: int, count: int, dtype: torch.dtype, kind: str) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 0.15
    kinds = [LayerAttention(causal, window) for causal in (False, True) for window in (None, 5)]
    config = replace(CONFIG, head_dim=head_dim, num_hidden_layers=4, layers=tuple(kinds), attention_bias=count % 2 == 0)
    network = made_network(convolved(config) if kind == "convolved" else config).to(dtype)
    lengths, hidden_states, blocks = (
        [31, 1, 20],
        torch.randn(3, 31, 32, dtype=dtype),
        torch.randn(3, count, 16, dtype=dtype),
    )
    actual = []
    for run in (compiled(network), uncompiled(network)):
        state = run.new_state(3, 64)
        run.observe(state, TOKENS, hidden_states)
        state.commit([range(length) for length in lengths])
        outputs = [run.block_pass(state, blocks, window) for window in (None, 1, 6, 25)]
        stores = [state.of([row]).view(state.stores[0], 0)[0] for row in state.starts]
        outputs.append(torch.cat([store.flatten() for store in stores]))
        actual.append(outputs)
    tolerance *= 5 if kind == "convolved" else 1  # products of products grow what rounding leaves
    for ours, theirs in zip(*actual, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_compiled_sequences_have_the_same_bits_alone_and_in_a_batch(network: DFlashNetwork) -> None:
    run, lengths = compiled(network), [3, 40, 17]
    hidden_states, blocks = torch.randn(3, 40, 32), torch.randn(3, 4, 16)
    state = run.new_state(3, 64)
    run.observe(state, TOKENS, hidden_states)
    state.commit([range(length) for length in lengths])
    together = run.block_pass(state, blocks)
    for row, length in enumerate(lengths):
        alone = run.new_state(1, 64)
        for slot in range(length):
            run.observe(alone, TOKENS, hidden_states[row : row + 1, slot : slot + 1])
            alone.commit([[0]])
        assert torch.equal(run.block_pass(alone, blocks[row : row + 1])[0], together[row])


def test_threads_share_the_work_without_meeting(network: DFlashNetwork) -> None:
    run, threads = compiled(network), torch.get_num_threads()
    hidden_states, blocks = torch.randn(3, 9, 32), torch.randn(3, 4, 16)
    state = run.new_state(3, 16)
    run.observe(state, TOKENS, hidden_states)
    state.commit([range(9)] * 3)
    expected = run.block_pass(state, blocks)
    try:
        torch.set_num_threads(4)
        assert all(torch.equal(run.block_pass(state, blocks), expected) for _ in range(50))
    finally:
        torch.set_num_threads(threads)


PLACES = ((70, 40), (3, 20), (24, 46))


@pytest.mark.parametrize("window", [None, 4])
def test_sequences_at_any_slots_equal_those_side_by_side(
    network: DFlashNetwork, window: int | None, make: Callable[[DFlashNetwork], Run], scatter: Callable[..., Any]
) -> None:
    """Rows between others, whose numbers must not be read. Compiled, the bits are the same."""
    run, hidden_states, blocks = make(network), torch.randn(3, 13, 32), torch.randn(3, 4, 16)
    together, apart = run.new_state(3, 46), scatter(run.new_state(1, 120), *PLACES)
    run.observe(apart, TOKENS, hidden_states[:, :1])  # so that it has memory
    store = apart.stores[0]
    inside = torch.zeros(120, dtype=torch.bool)
    for row, capacity in PLACES:
        inside[row : row + capacity] = True
    store[:, :, ~inside] = torch.nan
    for begin, end, lengths in ((0, 7, [7, 3, 5]), (7, 13, [6, 1, 2])):
        for state in (together, apart):
            run.observe(state, TOKENS, hidden_states[:, begin:end])
            state.commit([range(length) for length in lengths])
        expected, actual = run.block_pass(together, blocks, window), run.block_pass(apart, blocks, window)
        tolerance = 1e-5 if isinstance(run, TorchDraftRunner) else 0.0
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
        one = run.block_pass(apart.of([3]), blocks[1:2], window)
        torch.testing.assert_close(one, expected[1:2], atol=tolerance, rtol=tolerance)
    assert store[:, :, ~inside].isnan().all()


def test_a_context_that_does_not_fit_is_refused(
    network: DFlashNetwork, make: Callable[[DFlashNetwork], Run], scatter: Callable[..., Any]
) -> None:
    """Slots of another row behind it must not be written."""
    run = make(network)
    state = scatter(run.new_state(1, 60), (20, 30), (4, 16))
    with pytest.raises(AssertionError, match="17 slots needed, 16 allocated"):
        run.observe(state, TOKENS, torch.randn(2, 17, 32))
    run.observe(state, TOKENS, torch.randn(2, 13, 32))
    state.commit([range(13)] * 2)
    with pytest.raises(AssertionError, match="17 slots needed, 16 allocated"):
        run.block_pass(state, torch.randn(2, 4, 16))
    run.block_pass(state, torch.randn(2, 3, 16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_draft_tokens_are_the_pass_and_the_head_in_one_call(
    dtype: str, first: int, kind: str, tiny_target_dir: Path
) -> None:
    target = load_target(tiny_target_dir, dtype=dtype, device="cpu", backend="native", compile="on")
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "head_dim": 8}
    network = made_network(replace(KINDS[kind], **sizes)).to(target.dtype)  # type: ignore[arg-type]
    run = target.runner(network)
    assert isinstance(run, CompiledDraftRunner)
    state = run.new_state(2, 64)
    run.observe(state, TOKENS, torch.randn(2, 9, 2 * target.hidden_size))
    state.commit([range(9), range(4)])
    tokens = torch.tensor([[7, 1, 1, 1, 1], [9, 1, 1, 1, 1]])
    for window in (None, 3):
        expected = run.block_pass(state, target.embed(tokens), window)[:, first:]
        hidden, logits = run.draft_tokens(state, tokens, first, window)
        assert torch.equal(hidden, expected) and logits.dtype == torch.float32
        # A head outside the call reads hidden states that are rounded to the dtype.
        tolerance = 0.0 if target.dtype == torch.float32 else 0.1
        torch.testing.assert_close(logits, target.head(expected).float(), atol=tolerance, rtol=tolerance)


def compiled_pass(
    network: DFlashNetwork,
    target: Target,
    head: Any = None,
    owned: bool = False,
    dtype: torch.dtype | None = None,
    bits: int | None = None,
) -> CompiledDraftRunner:
    """Return the compiled runner, with options that need not be the target's."""
    own: Any = vars(target.draft_host(head)) | {"dtype": dtype or network.fc.weight.dtype}
    host = CompiledHost(**own, decoder=target.compiled, head_dim=8, bits=bits)  # type: ignore[attr-defined]
    made: CompiledDraftRunner = CompiledDraftRunner(network, host, owned)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_part_of_the_vocabulary_is_packed_into_the_same_call(
    dtype: str, kind: str, tiny_target_dir: Path
) -> None:
    target = load_target(tiny_target_dir, dtype=dtype, device="cpu", backend="native", compile="on")
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "head_dim": 8}
    network = made_network(replace(KINDS[kind], **sizes)).to(target.dtype)  # type: ignore[arg-type]
    kept = torch.randperm(target.vocab_size)[:37]
    own = ReducedHead(torch.randn(37, target.hidden_size).bfloat16().to(target.dtype), kept, target.vocab_size)
    before, tokens = deepcopy(own), torch.tensor([[7, 1, 1, 1]])
    run = compiled_pass(network, target, own, owned=True)
    assert own.nbytes == 0  # its weight is freed
    state = run.new_state(1, 20)
    run.observe(state, TOKENS, torch.randn(1, 9, 2 * target.hidden_size))
    state.commit([range(9)])
    hidden, logits = run.draft_tokens(state, tokens, 1)
    assert torch.equal(hidden, run.block_pass(state, target.embed(tokens))[:, 1:]) and logits.shape == (
        1,
        3,
        target.vocab_size,
    )
    assert (logits[..., kept] > -torch.inf).all() and (logits > -torch.inf).sum() == 3 * 37
    tolerance = 1e-4 if target.dtype == torch.float32 else 0.1
    expected = before(hidden).float()[..., kept]
    torch.testing.assert_close(logits[..., kept].float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("own_head", [False, True])
def test_a_head_that_is_not_in_the_library_is_called(own_head: bool, tiny_target_dir: Path) -> None:
    """The head of a target with another dtype, or the drafter's own."""
    dtype = "float32" if own_head else "bfloat16"
    target = load_target(tiny_target_dir, dtype=dtype, device="cpu", backend="native", compile="on")
    network = made_network(replace(CONFIG, hidden_size=target.hidden_size, head_dim=8))
    head = (lambda hidden: 3 * hidden) if own_head else None
    if not own_head:
        target.head = lambda hidden: 3 * hidden  # type: ignore[method-assign]
    run = compiled_pass(network, target, head, dtype=torch.float32)
    state, tokens = run.new_state(1, 20), torch.tensor([[7, 1, 1]])
    run.observe(state, TOKENS, torch.randn(1, 9, 2 * target.hidden_size))
    state.commit([range(9)])
    hidden, logits = run.draft_tokens(state, tokens, 1)
    assert torch.equal(hidden, run.block_pass(state, target.embed(tokens))[:, 1:]) and torch.equal(logits, 3 * hidden)


@pytest.mark.parametrize(("head_dim", "bits"), [(8, 4), (4, None)])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_if_the_targets_library_supports_the_head_size(
    head_dim: int, bits: int | None, kind: str, tiny_target_dir: Path
) -> None:
    """The target's attention heads have size 8."""
    target = load_target(
        tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on", quantize="int4"
    )
    network = made_network(replace(KINDS[kind], hidden_size=target.hidden_size, head_dim=head_dim))
    run = compiled_pass(network, target, bits=4)
    assert run.bits == bits
    state = run.new_state(1, 20)
    run.observe(state, TOKENS, torch.randn(1, 9, 2 * target.hidden_size))
    state.commit([range(9)])
    assert run.draft_tokens(state, torch.tensor([[7, 1, 1]]), 1)[1].isfinite().all()


def test_what_is_compiled_and_what_is_not(
    network: DFlashNetwork, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on")
    plain = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="off")
    assert isinstance(target.runner(deepcopy(network)), CompiledDraftRunner)
    assert isinstance(plain.runner(deepcopy(network)), TorchDraftRunner)
    bare = DFlashNetwork(CONFIG)
    bare.description = replace(bare.description, fused_norm=None)
    assert target.runner(bare).compile_reason == "it does not know contexts without a norm"
    odd = target.runner(DFlashNetwork(replace(CONFIG, head_dim=6)))
    assert isinstance(odd, TorchDraftRunner) and "heads of 6" in (odd.compile_reason or "")
    with pytest.raises(NotCompiled, match="float16"):
        compiled_pass(DFlashNetwork(CONFIG), target, dtype=torch.float16)

    other = DFlashNetwork(CONFIG)
    other.description = replace(other.description, torch_only="recurrent layers")
    run = target.runner(other)
    assert isinstance(run, TorchDraftRunner) and run.compile_reason == "it does not know recurrent layers"
    assert not caplog.messages
    monkeypatch.setenv("CC", "no-such-compiler")
    begun.cache_clear()
    try:
        assert isinstance(target.runner(network), TorchDraftRunner)
    finally:
        begun.cache_clear()
    [message] = caplog.messages
    assert "The drafter runs uncompiled" in message and "no C compiler" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_an_owned_network_are_freed(tiny_target_dir: Path, dtype: torch.dtype) -> None:
    target = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on")
    torch.manual_seed(3)
    network = DFlashNetwork(CONFIG).eval().to(dtype)
    before, weights = deepcopy(network), [weakref.ref(weight) for weight in network.parameters() if weight.ndim == 2]
    run = compiled_pass(network, target, owned=True, dtype=torch.float32)
    kept = compiled_pass(before, target, dtype=torch.float32)
    gc.collect()
    assert weights and not any(weight() is not None for weight in weights)
    assert all(parameter.ndim == 1 for parameter in network.parameters())
    hidden_states = torch.randn(1, 7, len(CONFIG.target_layers) * CONFIG.hidden_size)
    block = torch.randn(1, 5, CONFIG.hidden_size)
    states = [runner.new_state(1, 32) for runner in (run, kept)]
    for runner, state in zip((run, kept), states, strict=True):
        runner.observe(state, TOKENS, hidden_states)
        state.commit([range(7)])
    assert (
        torch.equal(run.block_pass(states[0], block), kept.block_pass(states[1], block))
        and run.weight_bytes() == kept.weight_bytes()
    )
