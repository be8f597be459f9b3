"""Compiled EAGLE-3 and MTP heads against torch, and errors that only they can make."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from node_logits import logits_of, target_layers, two_texts
from thinned import LONG, thinned
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM

from blockdraft import Drafting, Engine, SamplingParams, load_drafter
from blockdraft.decode.drafting import GrowingChain
from blockdraft.decode.proposal import TreePlan
from blockdraft.drafters import slots_behind
from blockdraft.drafters.eagle3.drafter import Eagle3Drafter
from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network
from blockdraft.drafters.hybrid import HybridDrafter
from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork
from blockdraft.errors import UsageError
from blockdraft.kernels.cpu import growing_head
from blockdraft.kernels.cpu.compiled_runner import CompiledDraftRunner
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_network import LayeredNetwork
from blockdraft.nn.torch_runner import TorchDraftRunner
from blockdraft.targets import embedding_and_head, load_target

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 265,
    "num_target_layers": 3,
    "block_size": 8,
    "max_position_embeddings": 128,
}
EAGLE = SHAPE | {"draft_vocab_size": 61, "target_layers": (0, 1)}
CONFIGS: dict[str, Eagle3Config | MTPConfig] = {
    "eagle3": Eagle3Config(**EAGLE, head_dim=8),
    "eagle3 with heads of its own": Eagle3Config(**EAGLE, head_dim=16, qk_norm=True, attention_bias=True),
    "eagle3 with norms": Eagle3Config(**EAGLE, head_dim=8, norm_before_residual=True, norm_output=True, fc_norm=True),
    "mtp": MTPConfig(**SHAPE, head_dim=8),
    "mtp with heads of its own": MTPConfig(**SHAPE, head_dim=4),
    "mtp that feeds its stream on": MTPConfig(**SHAPE, head_dim=4, normed_feedback=False),
}
# Options of loading the target, and the tolerance of logits in standard deviations.
STORES: dict[str, tuple[Any, float]] = {
    "float32": ({}, 4e-4),
    "bfloat16": ({"dtype": "bfloat16", "round_drafters": False}, 0.24),
    "bfloat16 keys and values": ({"kv_dtype": "bfloat16"}, 0.1),
    "int8": ({"kv_dtype": "int8"}, 0.4),
    "weights of 8 bits": ({"quantize": "int8"}, 4e-4),
}


def network_of(name: str) -> LayeredNetwork:
    config = CONFIGS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = Eagle3Network(config) if isinstance(config, Eagle3Config) else MTPNetwork(config)
        for weight in network.parameters():
            weight.data += 0.2 * torch.randn_like(weight)
    if isinstance(network, Eagle3Network):
        network.keep(4 * torch.arange(len(network.kept)) + 1)
    return network


@pytest.mark.parametrize(("name", "window", "store"), thinned(CONFIGS, [None, 7], STORES, keep=3, marks=LONG))
def test_logits_are_torchs(name: str, window: int | None, store: str, tiny_target_dir: Path) -> None:
    target: Any = load_target(tiny_target_dir, backend="native", compile="on", **STORES[store][0])
    network = network_of(name).to(target.dtype)
    exact = logits_of(TorchDraftRunner(network, target.draft_host()), network, window)
    run = target.runner(network_of(name).to(target.dtype), owned=True)
    assert isinstance(run, CompiledDraftRunner)
    assert run.library.store_dtype == target.compiled.library.store_dtype
    assert store == "weights of 8 bits" or (run.lender is None) == (network.config.head_dim != 8)
    for ours, theirs in zip(logits_of(run, network, window), exact, strict=True):
        scale = float(theirs.float().std())
        assert ours.shape == theirs.shape and float((ours - theirs).abs().max()) < STORES[store][1] * scale


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_logits_of_a_target_with_factors_are_torchs(name: str, tiny_target_dir: Path, tmp_path: Path) -> None:
    """As in Granite, whose layers and head have multipliers."""
    shutil.copytree(tiny_target_dir, tmp_path, dirs_exist_ok=True)
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.25, "logits_scaling": 4.0}
    sizes = {"vocab_size": 265, "num_hidden_layers": 3, "max_position_embeddings": 256}
    same = {key: SHAPE[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GraniteForCausalLM(GraniteConfig(**sizes, **same, **factors, initializer_range=0.3)).save_pretrained(tmp_path)
    plain, target = (
        load_target(tmp_path, dtype="float32", device="cpu", backend="native", compile=mode) for mode in ("off", "on")
    )
    tokens = torch.arange(9)[None]
    outputs = [
        own.forward(tokens, torch.arange(-1, 8)[None], own.new_cache(1, 9), (0, 1, 2, 3)) for own in (plain, target)
    ]
    for ours, theirs in zip(*((output.logits, output.hidden_states) for output in outputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    nothing = torch.zeros(0, 9, dtype=torch.int64)
    output = target.forward(nothing, nothing, target.new_cache(1, 9).of([]), (0, 3))
    assert output.hidden_states is not None and output.hidden_states.shape == (0, 9, 64)
    exact, ours = (logits_of(own.runner(network_of(name)), network_of(name)) for own in (plain, target))
    for own, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=4e-4 * float(expected.std()))


# Seconds of a step by number of draft tokens, and the calibration.
COSTS: dict[str, tuple[list[float] | None, float]] = {
    "all draft tokens": (None, 1.0),
    "cheap ones": ([1.0, 1.01, 1.02, 1.03, 1.04, 1.05], 1.0),
    "one that costs": ([1.0, 1.03, 1.06, 1.5, 1.6, 1.7], 1.0),
    "none that pays": ([1.0, 3.0, 6.0, 9.0, 12.0, 15.0], 1.0),
    "little trust": ([1.0, 1.01, 1.02, 1.03, 1.04, 1.05], 0.1),
}


@torch.no_grad()
def from_draft(
    run: Any, state: KVCache, anchor: Tensor, window: int | None, seconds: list[float] | None, calibration: float
) -> tuple[Tensor, Tensor]:
    """Return a chain of up to five draft tokens, node by node, and the expected number of accepted ones."""
    nodes, tokens = run.nodes(state, 8, 1, window), [anchor]
    growing = GrowingChain(torch.ones(2), seconds, calibration)
    while len(tokens) <= 5 and growing.pays():
        logits = nodes(tokens[-1][:, None])[:, 0].float()
        growing.add(logits.softmax(-1).amax(-1))
        tokens.append(run.network.kept[logits.argmax(-1)])
    return torch.stack(tokens, dim=1), growing.expected


@pytest.mark.parametrize(
    ("name", "window", "store", "costs"), thinned(["eagle3", "mtp"], [None, 7], STORES, COSTS, keep=4, marks=LONG)
)
def test_a_chain_in_one_call_is_that_of_its_nodes(
    name: str, window: int | None, store: str, costs: str, tiny_target_dir: Path
) -> None:
    target: Any = load_target(tiny_target_dir, backend="native", compile="on", **STORES[store][0])
    network, (seconds, calibration) = network_of(name).to(target.dtype), COSTS[costs]
    run = target.runner(network)
    state, anchor = two_texts(run, network), torch.tensor([40, 41])
    wanted, upper_bound = from_draft(run, state, anchor, window, seconds, calibration)
    actual = run.chain(state, anchor, 5, window, seconds, calibration)
    if run.lender is None:  # with weights of other bits than the target's
        assert actual is None
        return
    assert torch.equal(actual[0], wanted) and wanted.size(1) <= 6
    assert (actual[1] is None) == (seconds is None)
    assert seconds is None or torch.allclose(actual[1], upper_bound, rtol=1e-4)
    assert torch.equal(
        run.chain(state, anchor, 5, window, seconds, calibration)[0], wanted
    )  # it has left nothing behind


def test_a_chain_through_numbers_that_are_none(tiny_target_dir: Path) -> None:
    target: Any = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on")
    network = network_of("eagle3")
    run = target.runner(network)
    state = two_texts(run, network)
    state.stores[-1][:] = float("nan")
    tokens, expected = run.chain(state, torch.tensor([40, 41]), 3, None, [1.0, 1.0, 1.0, 1.0])
    assert set(tokens[:, 1:].flatten().tolist()) <= set(network.kept.tolist())


def test_what_a_chain_refuses(tiny_target_dir: Path) -> None:
    target: Any = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on")
    run = target.runner(network_of("eagle3"))
    state = two_texts(run, run.network)
    with pytest.raises(UsageError, match="Token id 265 is none of the 265"):
        run.chain(state, torch.tensor([40, 265]), 3)
    with pytest.raises(AssertionError, match="slots needed"):
        run.chain(state, torch.tensor([40, 41]), 60)


@pytest.mark.parametrize("bits", [8, 4, None])
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_weights_are_rounded_as_the_targets_unless_they_are_to_be_kept(
    name: str, bits: int | None, tiny_target_dir: Path
) -> None:
    config = replace(CONFIGS[name], intermediate_size=64, head_dim=16)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = Eagle3Network(config) if isinstance(config, Eagle3Config) else MTPNetwork(config)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(weight)))
    target = load_target(
        tiny_target_dir, device="cpu", quantize=f"int{bits or 4}", round_drafters=bits is not None, compile="on"
    )
    network.qat_bits = 8  # which asks for no more bits than the target has
    run: Any = target.runner(network)
    assert isinstance(run, CompiledDraftRunner) and {each.bits for each in run.packed} == {bits}
    plain = TorchDraftRunner(network, target.draft_host())
    for ours, theirs in zip(logits_of(run, network), logits_of(plain, network), strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        assert error < {8: 0.05, 4: 0.6, None: 1e-3}[bits] and (error > 1e-3 or bits is None)


@pytest.fixture(params=["eagle3", "mtp with heads of its own"])
def run(tiny_target_dir: Path, request: pytest.FixtureRequest) -> CompiledDraftRunner:
    target: Any = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on")
    actual = target.runner(network_of(request.param))
    assert isinstance(actual, CompiledDraftRunner)
    return actual


def test_threads_may_call_at_once_and_get_the_bits_they_get_alone(run: CompiledDraftRunner) -> None:
    def answer(number: int) -> list[Tensor]:
        return logits_of(run, run.network, number + 1)

    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(answer, range(6)))
    for number, actual in enumerate(together):
        assert all(map(torch.equal, actual, answer(number)))


def test_bits_do_not_depend_on_the_number_of_threads(
    run: CompiledDraftRunner, set_threads: Callable[[int], None]
) -> None:
    outputs = []
    for threads in (1, 4):
        set_threads(threads)
        outputs.append(logits_of(run, run.network))
    assert all(map(torch.equal, *outputs))


def test_calls_stay_within_the_workspace_that_they_ask_for(run: CompiledDraftRunner) -> None:
    needed = run.workspace_bytes(2, 30, 60) // 4
    memory = torch.full((needed + 64,), 7.5)
    run.workspace = memory[:needed]
    logits_of(run, run.network)
    assert (memory[needed:] == 7.5).all() and run.workspace.data_ptr() == memory.data_ptr()


def test_a_row_without_slots_for_more_rows_says_so(run: CompiledDraftRunner) -> None:
    state = run.new_state(1, 12)
    run.observe(state, torch.ones(1, 5, dtype=torch.int64), target_layers(run.network, 1, 5, 0))
    state.commit([range(5)])
    nodes = run.nodes(state, 8, 10)
    assert nodes.room == 7
    nodes(torch.tensor([[4]]))
    assert nodes.room == 6
    with pytest.raises(AssertionError, match="13 slots needed, 12 allocated"):
        nodes(torch.ones(1, 7, dtype=torch.int64), torch.zeros(1, 7, dtype=torch.int64))


def test_tokens_must_be_known(run: CompiledDraftRunner) -> None:
    for wrong in (-1, 265):
        with pytest.raises(UsageError, match=f"Token id {wrong} is none of the 265"):
            run.nodes(run.new_state(1, 16), 8, 1)(torch.tensor([[wrong]]))


def test_what_is_not_compiled_says_why(tiny_target_dir: Path) -> None:
    target: Any = load_target(tiny_target_dir, backend="native", compile="off")
    assert target.runner(network_of("eagle3")).compile_reason == "its target is not compiled"
    target = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="on")
    odd = Eagle3Network(Eagle3Config(**EAGLE, head_dim=6))
    assert target.runner(odd).compile_reason == "heads of 6 are no multiple of 4"

    other = Eagle3Network(Eagle3Config(**EAGLE, head_dim=8))
    other.description = replace(other.description, torch_only="recurrent layers")
    run = target.runner(other)
    assert isinstance(run, TorchDraftRunner)
    assert run.compile_reason == "it does not know recurrent layers"


@pytest.mark.parametrize("folder", ["tiny_eagle3_dir", "tiny_mtp_dir"])
def test_a_tree_has_slots_until_the_last_token(
    folder: str, tiny_target_dir: Path, request: pytest.FixtureRequest
) -> None:
    """A sequence has enough KV slots for its trees, so that the last steps draft as deep as the first."""
    target: Any = load_target(tiny_target_dir, backend="native", compile="on")
    drafter: Any = load_drafter(request.getfixturevalue(folder), target=target)
    assert slots_behind(drafter, 5) == drafter.slots_beside == 1 + 10 * (drafter.block_size - 2) > 13
    assert slots_behind(HybridDrafter([load_drafter("lookup", target=target), drafter]), 5) == drafter.slots_beside
    engine = Engine(target, drafter, drafting=Drafting(tree_budget=12))
    assert engine.slots_behind == drafter.slots_beside
    [answer] = engine.generate([[7, 60, 33]], SamplingParams(20, ignore_eos=True))
    [plain] = Engine(target).generate([[7, 60, 33]], SamplingParams(20, ignore_eos=True))
    assert answer.token_ids == plain.token_ids
    assert Engine(target, drafter).slots_behind == drafter.block_size
    alone = Engine(target, drafter, 1, Drafting(tree_budget=3))
    assert alone.request([5] * 9, SamplingParams(target.max_context - 9)).slots == alone.cache_tokens


def test_chains_of_rows_of_different_kinds_are_those_alone(tiny_target_dir: Path, tiny_eagle3_dir: Path) -> None:
    """A sequence gets the same bits alone and in a batch."""
    target: Any = load_target(tiny_target_dir, backend="native", compile="on")
    drafter: Any = load_drafter(tiny_eagle3_dir, target=target)

    def proposed(texts: Sequence[Sequence[int]]) -> list[list[int]]:
        state = drafter.new_state(len(texts), 80)
        longest = max(map(len, texts))
        tokens = torch.tensor([[*text, *[77] * (longest - len(text))] for text in texts])
        hidden_states = torch.randn(1, longest, 64, generator=torch.Generator().manual_seed(5))
        drafter.observe(state, tokens, hidden_states.expand(len(texts), -1, -1), [len(text) for text in texts])
        plan = TreePlan(6, [SamplingParams()] * len(texts), 12)
        actual: list[list[int]] = drafter.propose(state, torch.full((len(texts),), 40), plan).tokens.tolist()
        return actual

    texts = [[9, 8, 7, 20], [31, 5], [60, 61, 62, 63, 64, 65, 66]]
    assert proposed(texts) == [proposed([text])[0] for text in texts]


@pytest.mark.parametrize("store", STORES)
@torch.no_grad()
def test_a_tied_head_grows_with_the_tokens_of_sequences(store: str, tiny_target_dir: Path) -> None:
    """Its logits are those of the target's rows, in blocks of the library's lanes, the oldest of which are replaced."""
    target: Any = load_target(tiny_target_dir, backend="native", compile="on", **STORES[store][0])
    head = embedding_and_head(target)[1]
    network = Eagle3Network(Eagle3Config(**EAGLE | {"draft_vocab_size": 64}, head_dim=8, tied_head=True))
    kept = 2 * torch.arange(64)
    network.keep(kept)
    network.lm_head.weight.data = head[kept].clone()
    expected = deepcopy(network).to(target.dtype)
    run = target.runner(network.to(target.dtype), owned=True)
    state = run.new_state(1, 150)
    hidden_states = target_layers(expected, 1, 40, 0)
    assert run.grown_vocabulary.tolist() == kept.tolist()
    new = torch.arange(1, 80, 2)[None]  # 40 tokens outside of the draft vocabulary
    run.observe(state, new, hidden_states)
    state.commit([range(40)])
    count = 40 - 40 % run.library.lanes
    assert run.grown_vocabulary.tolist() == [*kept.tolist(), *new[0, :count].tolist()]
    run.observe(state, new[:, :9], hidden_states[:, :9])  # known, but for those without a row
    state.commit([range(9)])
    assert len(run.grown_vocabulary) == 64 + count
    [nodes] = [run.nodes(state, 8, 3)]
    logits = nodes(torch.tensor([[40]]))
    vocabulary = run.grown_vocabulary
    whole = deepcopy(expected)
    whole.lm_head = nn.Linear(32, len(vocabulary), bias=False).to(target.dtype)
    whole.lm_head.weight.data = head[vocabulary].to(target.dtype)
    exact = TorchDraftRunner(whole, target.draft_host())
    same = exact.new_state(1, 150)
    exact.observe(same, torch.cat([new, new[:, :9]], 1), torch.cat([hidden_states, hidden_states[:, :9]], 1))
    same.commit([range(49)])
    theirs = exact.nodes(same, 8, 3)(torch.tensor([[40]]))
    assert (logits - theirs).abs().max() < STORES[store][1] * max(1, float(theirs.std()))
    if chain := run.chain(state, torch.tensor([40]), 1):
        assert chain[0][0, 1] == vocabulary[logits[0, 0].argmax()]


def test_the_oldest_tokens_of_a_growing_head_are_replaced(
    tiny_target_dir: Path, constants: Callable[..., None]
) -> None:
    constants(growing_head, ROWS=32)
    target: Any = load_target(tiny_target_dir, backend="native", compile="on")
    network = Eagle3Network(Eagle3Config(**EAGLE | {"draft_vocab_size": 64}, head_dim=8, tied_head=True))
    network.keep(torch.arange(64))
    run = target.runner(network)
    for begin in (64, 96, 128):
        run.observe(run.new_state(1, 150), torch.arange(begin, begin + 32)[None], target_layers(network, 1, 32, 0))
        assert run.grown_vocabulary[64:].tolist() == [*range(begin, begin + 32)]
    run.observe(run.new_state(1, 150), torch.arange(64, 96)[None], target_layers(network, 1, 32, 0))
    assert run.grown_vocabulary[64:].tolist() == [*range(64, 96)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_growing_head_changes_no_token(temperature: float, tiny_target_dir: Path) -> None:
    target: Any = load_target(tiny_target_dir, backend="native", compile="on")
    network = Eagle3Network(Eagle3Config(**EAGLE | {"draft_vocab_size": 64}, head_dim=8, tied_head=True))
    network.keep(4 * torch.arange(64) + 1)
    network.lm_head.weight.data = embedding_and_head(target)[1][network.kept].clone()
    drafter, prompts = Eagle3Drafter(network, target), [[*range(3, 90)], [*range(100, 160)]]
    params, answers = SamplingParams(40, temperature, seed=1, ignore_eos=True), []
    for drafting in (Drafting(1), Drafting(6), Drafting(6, tree_budget=12)):
        with Engine(target, drafter, 2, drafting) as engine:
            answers.append([completion.checked().token_ids for completion in engine.generate(prompts, params)])
    assert answers[0] == answers[1] == answers[2]
    assert len(drafter.kept) > 64 + 100
