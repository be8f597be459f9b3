"""The gated delta net against its recurrence, token after token."""

import pytest
import torch
from torch import Tensor

from blockdraft.decode.proposal import chain_parents, tree_mask
from blockdraft.nn.decoder_config import DeltaNet
from blockdraft.nn.recurrent_mixer import CHUNK, Entering, GatedDeltaNet, corrected, delta_rule, step

CONFIG = DeltaNet(key_heads=2, value_heads=4, key_dim=3, value_dim=5, kernel=4)


def entering(batch: int, count: int, random: torch.Generator) -> Entering:
    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, 4, count, *shape, generator=random, dtype=torch.float64)

    keys = torch.nn.functional.normalize(draw(3), dim=-1)
    return Entering(draw(3), keys, draw(5), -draw().abs(), draw().sigmoid())


def by_tokens(state: Tensor, nodes: Entering, path: list[int]) -> tuple[Tensor, Tensor]:
    """Return output and state at the end of a path, by the paper's recurrence."""
    answer = state
    for node in path:
        query, key, value, decay, share = (part[:, node, ..., None] for part in nodes)
        state = state * decay.exp()[..., None]
        heard = state.mT @ key
        state = state + share[..., None] * key @ (value - heard).mT
        answer = (state.mT @ query)[..., 0]
    return answer, state


@pytest.mark.parametrize("count", [1, 9])
def test_trees_say_what_each_of_their_paths_says(count: int) -> None:
    random = torch.Generator().manual_seed(0)
    nodes, state = entering(2, count, random), torch.randn(2, 4, 3, 5, generator=random, dtype=torch.float64)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 5, 3, 6], [-1, 0, 1, -1, 3, 3, 4, 0, 2]])[:, :count]
    answer, corrections = delta_rule(state, nodes, tree_mask(parents)[:, None])
    for row, above in enumerate(parents.tolist()):
        paths: list[list[int]] = []
        for node, parent in enumerate(above):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
            own = Entering(*(part[row] for part in nodes))
            expected, after = by_tokens(state[row], own, paths[node])
            torch.testing.assert_close(answer[row, :, node], expected)
            kept = [part[row : row + 1, :, paths[node]] for part in (nodes.keys, corrections, nodes.decays)]
            torch.testing.assert_close(corrected(state[row : row + 1], *kept)[0], after)


def test_states_behind_long_lines_keep_their_precision() -> None:
    """Decays that add up to more than float32 can tell apart."""
    random, count = torch.Generator().manual_seed(0), 2 * CHUNK + 5
    nodes, state = entering(1, count, random), torch.randn(1, 4, 3, 5, generator=random, dtype=torch.float64)
    nodes = nodes._replace(decays=torch.where(torch.arange(count) < CHUNK, -1e4, nodes.decays / 100))
    _, corrections = delta_rule(state, nodes, tree_mask(chain_parents(1, count))[:, None])
    actual = corrected(state.float(), nodes.keys.float(), corrections.float(), nodes.decays.float())
    _, expected = by_tokens(state[0], Entering(*(part[0] for part in nodes)), [*range(count)])
    torch.testing.assert_close(actual[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_single_step_is_the_recurrence() -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in CONFIG.tensors.items()
    }
    net = GatedDeltaNet(CONFIG, tensors, 1e-6)
    state = net.empty(1)
    before = type(state)(*(torch.randn(part.shape[1:], generator=random, dtype=torch.float64) for part in state))
    inputs = [torch.randn(size, generator=random, dtype=torch.float64) for size in (CONFIG.channels, 4, 4)]
    answer, after = step(net, before, *inputs)
    assert torch.equal(after.convolution, torch.cat([before.convolution[1:], inputs[0][None]]))
    convolved = (torch.cat([before.convolution, inputs[0][None]]) * tensors["conv1d.weight"][:, 0].T).sum(0)
    own = net.entering(convolved, *inputs[1:])
    torch.testing.assert_close(own.keys.norm(dim=-1), torch.ones(4, dtype=torch.float64), atol=1e-4, rtol=0)
    alone = Entering(*(part[:, None] for part in own))
    expected = by_tokens(before.recurrence, alone, [0])
    for mine, theirs in zip((answer, after.recurrence), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
