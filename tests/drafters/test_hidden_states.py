"""The observer that keeps hidden states of running sequences."""

import torch

from blockdraft.drafters.hidden_states import HiddenStateObserver


def test_a_copied_prefix_goes_on_apart() -> None:
    observer = HiddenStateObserver((0,), hidden_size=2)
    state, hidden_states = observer.new_state(2, 8), torch.arange(12.0).view(1, 6, 2)
    observer.observe(state.of([0]), torch.arange(6)[None, :4], hidden_states[:, :4], [4])
    state.copy(0, 8, 3)
    observer.observe(state.of([0, 8]), torch.arange(4).view(2, 2), torch.full((2, 2, 2), 9.0), [2, 1])
    first, second = state.read(0), state.read(8)
    assert first is not None and second is not None
    assert torch.equal(first[:4].float(), hidden_states[0, :4]) and first[4:].tolist() == [[9, 9]] * 2
    assert torch.equal(second[:3].float(), hidden_states[0, :3]) and second[3:].tolist() == [[9, 9]]
    state.shrink(0, 2)
    assert len(state.read(0)) == 2  # type: ignore[arg-type]
    assert state.read(0).untyped_storage().nbytes() == 2 * 2 * 2  # type: ignore[union-attr]
    assert observer.state_bytes(2, 8) == 2 * 8 * 2 * 2
    state.close(8)
    state.open(8, 8)
    assert state.read(8) is None
