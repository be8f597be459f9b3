"""Choice of target layers, and their hidden states."""

from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from some_hidden_states import LENGTHS, TARGET_LAYERS, alone
from torch import Tensor

from blockdraft.decode.proposal import chain
from blockdraft.settings import from_text
from blockdraft.targets import Target, TargetOutput, load_target
from blockdraft_train.data.documents import TokenData
from blockdraft_train.data.settings import HiddenStateSettings
from blockdraft_train.data.target_layers import CPU_TOKENS, chosen_target_layers, target_hidden_states


def test_hidden_states_are_the_layers_outputs(target: Target, data: TokenData) -> None:
    outputs = target_hidden_states(target, TARGET_LAYERS, [document.tokens for document in data])
    assert [tuple(states.shape) for states in outputs] == [(length, 2 * target.hidden_size) for length in LENGTHS]
    for i, states in enumerate(outputs):
        torch.testing.assert_close(states, alone(target, data, i), atol=1e-4, rtol=1e-4)


def test_forwards_on_a_cpu_take_few_documents_of_like_length(target: Target, data: TokenData) -> None:
    shapes, watched = list[tuple[int, ...]](), copy(target)
    documents = [data[i % len(data)].tokens.repeat(20)[:200] for i in range(4 * len(data))]

    def forward(tokens: Tensor, *rest: Any, **named: Any) -> TargetOutput:
        shapes.append(tuple(tokens.shape))
        return target.forward(tokens, *rest, **named)

    watched.forward = forward  # type: ignore[method-assign]
    outputs = target_hidden_states(watched, TARGET_LAYERS, documents)
    assert [len(states) for states in outputs] == [len(document) for document in documents]
    assert len(shapes) > 1 and all(rows == 1 or rows * width <= CPU_TOKENS for rows, width in shapes), shapes
    assert sum(rows for rows, _ in shapes) == len(documents)


def test_default_target_layers() -> None:
    outputs = {layers: chosen_target_layers(None, layers) for layers in (1, 2, 3, 4, 6, 7, 8, 36)}
    assert outputs == {
        1: (0,),
        2: (0, 1),
        3: (0, 1, 2),
        4: (0, 1, 2, 3),
        6: (0, 1, 2, 3, 4),
        7: (0, 1, 2, 4, 5),
        8: (1, 2, 3, 4, 5),
        36: (1, 9, 17, 25, 33),
    }
    assert [chosen_target_layers(count, 6) for count in (1, 2, 4, 5, 6)] == [
        (3,),
        (1, 3),
        (0, 1, 3, 4),
        (0, 1, 2, 3, 4),
        (0, 1, 2, 3, 4, 5),
    ]
    for count in (0, 7):
        with pytest.raises(ValueError, match=f"target_layers is {count}, a number of layers, but the target has 6"):
            chosen_target_layers(count, 6)


def test_chosen_target_layers(target: Target, data: TokenData) -> None:
    for text, layers in (("2", (1, 5)), ("1,3,5", (1, 3, 5)), ("3,", (3,)), ("[3]", (3,)), ("0,", (0,))):
        assert chosen_target_layers(from_text(HiddenStateSettings, "target_layers", text), 8) == layers
    for text in ("", "x", "1,x", ","):
        with pytest.raises(ValueError, match="must be a whole number"):
            chosen_target_layers(from_text(HiddenStateSettings, "target_layers", text), 8)
    for wrong in ((4,), (-1,), ()):
        with pytest.raises(ValueError, match="the target has 3 layers; name one or more of 0 to 2, or 3 for"):
            target_hidden_states(target, wrong, [data[0].tokens])
    with pytest.raises(ValueError, match=r"has 300 tokens and the target's context is 256"):
        target_hidden_states(target, TARGET_LAYERS, [torch.zeros(300, dtype=torch.int64)])


def test_last_layer_is_the_input_of_the_head(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    tokens = torch.arange(5, 25)
    [hidden] = target_hidden_states(target, (0, target.num_layers), [tokens])
    proposal = chain(tokens[None])
    logits = target.forward(proposal.tokens, proposal.parents, target.new_cache(1, 20)).logits[0]
    torch.testing.assert_close(target.head(hidden[:, target.hidden_size :]), logits, atol=1e-5, rtol=1e-5)
