"""Weights and memory of drafters by kind."""

from blockdraft.drafters import DraftCost
from blockdraft_radar.drafting import cost_of, draft_weights, head_weights
from blockdraft_radar.memory import memory_of
from blockdraft_radar.shape import read_shape

QWEN = read_shape("qwen3-8b")


def test_cost_of_a_kind() -> None:
    assert cost_of("dflash").block_size == 16 and not cost_of("dflash").serial
    assert cost_of("mtp") == DraftCost(layers=1, block_size=4, serial=True)
    assert cost_of("unheard-of") == DraftCost()


def test_weights_of_layers_and_fusion() -> None:
    single, double = (draft_weights(QWEN, DraftCost(layers=layers, target_layers=0)) for layers in (1, 2))
    assert double == 2 * single
    assert draft_weights(QWEN, DraftCost(layers=1, target_layers=3)) == single + 3 * QWEN.hidden**2


def test_own_output_head_is_smaller_and_takes_memory() -> None:
    own, shared = cost_of("eagle3"), cost_of("mtp")
    assert head_weights(QWEN, own) == 32_000 * QWEN.hidden < head_weights(QWEN, shared) == QWEN.vocabulary * QWEN.hidden
    assert head_weights(QWEN, DraftCost(head_vocabulary=10**6)) == QWEN.vocabulary * QWEN.hidden
    sizes = [memory_of(QWEN, 16, 4096, 1, 4, cost)["drafter"] for cost in (own, shared)]
    assert sizes[0] - sizes[1] == 2 * 32_000 * QWEN.hidden
