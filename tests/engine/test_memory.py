"""Planned memory of engines."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Engine, kv_slots
from blockdraft.engine.runner import MAX_OWN_NODES, OBSERVE_TOKENS
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, compile="off")


@pytest.fixture(scope="module")
def drafter(tiny_drafter_dir: Path, target: Target) -> Drafter:
    return load_drafter(tiny_drafter_dir, target=target)


def test_room_for_as_many_longest_requests_as_run_at_once(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, 3, Drafting(tree_budget=40), prefix_tokens=77)
    assert engine.cache_tokens == 3 * target.row_slots(target.max_context + 41) + 77
    assert Engine(target, drafter, 3, cache_tokens=500, drafting=Drafting(None)).cache_tokens == 500


def test_stores_logits_features_and_forwards_count(target: Target, drafter: Drafter) -> None:
    def meanwhile(**fields: object) -> int:
        chains = {"drafting": Drafting(None)}
        engine = Engine(target, drafter, 2, cache_tokens=1000, **chains | fields)  # type: ignore[arg-type]
        stores = target.cache_bytes(1, 1000) + drafter.state_bytes(1, 1000)
        return engine.memory_bytes() - stores

    def forward(nodes: int, read: int) -> int:
        longest = target.row_slots(target.max_context + nodes)
        return max(target.forward_bytes(2, nodes, min(longest, 501)), target.forward_bytes(1, read, longest))

    def logits(nodes: int) -> int:
        # Of a step's nodes, or of those that a request drafts itself, with two copies.
        return max(2 * nodes, MAX_OWN_NODES) * target.vocab_size * (4 + 8)

    def hidden_states(tokens: int) -> int:
        return 2 * tokens * len(drafter.target_layers) * target.hidden_size * 4  # by layer and together

    assert meanwhile(prefill_tokens=20) == forward(8, 20) + logits(8) + hidden_states(20)
    assert meanwhile(prefill_tokens=20, drafting=Drafting(tree_budget=40)) == forward(41, 20) + logits(
        41
    ) + hidden_states(82)
    pause = meanwhile(prefill_tokens=20, drafting=Drafting("auto"))
    assert pause == forward(8, 20) + logits(8) + hidden_states(2 * 256)  # of steps that do not draft


def test_fewer_slots_where_the_memory_does_not_suffice(
    target: Target, drafter: Drafter, free_memory: Callable[[int], None]
) -> None:
    whole = Engine(target, drafter, drafting=Drafting(None))
    limit = whole.memory_bytes() * 2 // 3
    part = Engine(target, drafter, memory_limit=limit, drafting=Drafting(None))
    assert 0 < part.cache_tokens < whole.cache_tokens
    assert part.memory_bytes() <= limit < part.memory.bytes(part.cache_tokens + 1)
    free_memory(int(limit / kv_slots.SHARE) + 1)
    assert Engine(target, drafter, drafting=Drafting(None)).cache_tokens == part.cache_tokens


def test_fewer_slots_where_other_programs_use_the_memory(
    target: Target, drafter: Drafter, free_memory: Callable[[int], None], constants: Callable[..., None]
) -> None:
    def shared(**given: int) -> Engine:
        return Engine(target, drafter, 5, Drafting(None), shares_memory=True, **given)

    whole, longest = Engine(target, drafter, 5, Drafting(None)), Engine(target, drafter, 1, Drafting(None)).cache_tokens
    assert shared().cache_tokens == whole.cache_tokens  # a small model
    assert shared(cache_tokens=longest + 3).cache_tokens == longest + 3
    free_memory(4 * whole.memory.bytes(3 * longest))
    constants(kv_slots, USUAL_BYTES=1)
    assert shared().cache_tokens == 3 * longest  # a quarter of the free memory
    free_memory(2 * whole.memory.bytes(longest))
    constants(kv_slots, USUAL_BYTES=whole.memory.bytes(2 * longest))
    for given in ({}, {"cache_tokens": 3 * longest}, {"prefix_tokens": 100}):
        assert shared(**given).cache_tokens == 2 * longest
    constants(kv_slots, USUAL_BYTES=1)  # one request has room in any case
    assert shared().cache_tokens == longest
    free_memory(whole.memory.bytes(longest) - 1)
    assert shared().cache_tokens < longest


def test_too_little_memory_is_refused_before_decoding(target: Target, drafter: Drafter) -> None:
    with pytest.raises(ValueError, match=r"needs \d+ slots .* the cache has 0; .* more cache_tokens or memory"):
        Engine(target, drafter, memory_limit=1000, drafting=Drafting(None)).generate([[5, 6, 7]], SamplingParams(20))


def test_memory_of_a_cpu_is_taken_as_it_is_used(target: Target, drafter: Drafter) -> None:
    """Rows for ten million tokens can be planned; two short answers take what they take."""
    engine = Engine(target, drafter, cache_tokens=10**7)
    assert engine.memory_bytes() > 2**32
    assert len(engine.generate([[5, 6, 7]], SamplingParams(20, ignore_eos=True))[0].token_ids) == 20


@pytest.mark.parametrize(
    ("field", "value"), [("max_batch_size", 0), ("prefix_tokens", -1), ("cache_tokens", 0), ("prefill_tokens", 0)]
)
def test_numbers_out_of_range_are_refused(target: Target, drafter: Drafter, field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least .*, got {value}"):
        Engine(target, drafter, **{field: value})  # type: ignore[arg-type]


def test_the_memory_of_a_gpu_counts_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    from blockdraft.machine import free_bytes

    figures = {"mem_get_info": (1000, 5000), "memory_reserved": 300, "memory_allocated": 100}  # the first: free, in all
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, figure=figure: figure)
    assert free_bytes(torch.device("cuda")) == 1200


def test_what_one_request_takes(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, 3, cache_tokens=1000, drafting=Drafting(None))
    found = engine.memory.of_one(100)
    weights = sum(weight.nbytes for _, weight in target.named_weights())
    assert found["weights"] >= weights + drafter.weight_bytes() > weights
    assert found["caches"] == target.cache_bytes(1, 100) + drafter.state_bytes(1, 100)
    assert found["workspace"] == Engine(target, drafter, 1, cache_tokens=100, drafting=Drafting(None)).memory.workspace(
        100
    )


@pytest.mark.parametrize("folder", ["tiny_drafter_dir", "tiny_eagle3_dir", "tiny_medusa_dir", "tiny_mtp_dir"])
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_weights_that_are_laid_out_count_once(
    quantize: Any, folder: str, tiny_target_dir: Path, request: pytest.FixtureRequest
) -> None:
    target = load_target(tiny_target_dir, quantize=quantize, compile="on")
    drafter: Any = load_drafter(request.getfixturevalue(folder), target=target)
    assert drafter.compile_reason is None
    numbers = sum(weight.numel() for _, weight in target.named_weights())
    # A compiled drafter frees the weights of its network once they are packed.
    plain: Any = load_drafter(request.getfixturevalue(folder), target=load_target(tiny_target_dir, compile="off"))
    drafted = sum(weight.numel() for weight in plain.network.state_dict().values())
    rounds = folder != "tiny_medusa_dir"  # whose weights are not rounded
    padding = 1.3  # up to whole blocks of channels, and scales quantized
    for count, size, few in ((numbers, target.weight_bytes(), True), (drafted, drafter.weight_bytes(), rounds)):
        least, most = (4, 4) if quantize is None or not few else (0.5, 1.5)
        assert least * count <= size <= padding * most * count


@pytest.mark.parametrize("folder", ["tiny_drafter_dir", "tiny_eagle3_dir"])
def test_what_a_compiled_drafter_keeps_for_its_calls_counts(
    folder: str, tiny_target_dir: Path, request: pytest.FixtureRequest
) -> None:
    target = load_target(tiny_target_dir, compile="on")
    drafter: Any = load_drafter(request.getfixturevalue(folder), target=target)
    engine = Engine(target, drafter, 2, Drafting("auto"), cache_tokens=1000, prefill_tokens=20)
    silent = copy.copy(drafter)
    silent.workspace_bytes = lambda *_: 0
    planned = engine.memory_bytes() - replace(engine.memory, drafter=silent).bytes(1000)
    assert planned == drafter.workspace_bytes(1, OBSERVE_TOKENS, target.max_context + engine.slots_behind)
    state = drafter.new_state(2, 500)
    hidden_states = torch.randn(2, OBSERVE_TOKENS // 2, len(drafter.target_layers) * target.hidden_size)
    drafter.observe(
        state, torch.ones(hidden_states.shape[:2], dtype=torch.int64), hidden_states, [OBSERVE_TOKENS // 2] * 2
    )
    drafter.propose(state, torch.tensor([3, 4]), ChainPlan(drafter.block_size, [SamplingParams()] * 2))
    assert planned // 4 < drafter.runner.workspace.nbytes <= planned
