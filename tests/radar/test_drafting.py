"""What drafters weigh, by their kind."""

from blockdraft.drafters import DraftCost
from blockdraft.radar.drafting import cost_of, draft_weights, head_weights
from blockdraft.radar.memory import memory_of
from blockdraft.radar.shape import read_shape

QWEN = read_shape("qwen3-8b")


def test_a_kind_says_what_it_costs() -> None:
    assert cost_of("dflash").block_size == 16 and not cost_of("dflash").serial
    assert cost_of("mtp") == DraftCost(layers=1, block_size=4, serial=True)
    assert cost_of("unheard-of") == DraftCost()


def test_layers_and_taps_make_the_weights() -> None:
    one, two = (draft_weights(QWEN, DraftCost(layers=layers, target_layers=0)) for layers in (1, 2))
    assert two == 2 * one
    assert draft_weights(QWEN, DraftCost(layers=1, target_layers=3)) == one + 3 * QWEN.hidden**2


def test_a_head_of_its_own_is_smaller_and_takes_memory() -> None:
    own, shared = cost_of("eagle3"), cost_of("mtp")
    assert head_weights(QWEN, own) == 32_000 * QWEN.hidden < head_weights(QWEN, shared) == QWEN.vocabulary * QWEN.hidden
    assert head_weights(QWEN, DraftCost(head_vocabulary=10**6)) == QWEN.vocabulary * QWEN.hidden
    taken = [memory_of(QWEN, 16, 4096, 1, 4, cost)["drafter"] for cost in (own, shared)]
    assert taken[0] - taken[1] == 2 * 32_000 * QWEN.hidden
