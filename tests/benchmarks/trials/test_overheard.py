"""What the target said after rejected guesses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.trials.overheard import Heard, Overheard, Rejected, rejected
from blockdraft.proposal import chain
from blockdraft.targets import load_target


def laws(*said: int) -> Tensor:
    """Logits after each node that name one token, and the next id as the second likeliest."""
    logits = torch.zeros(1, len(said), 50)
    for node, token in enumerate(said):
        logits[0, node, token], logits[0, node, token + 1] = 9.0, 8.0
    return logits


TREE = torch.tensor([[5, 10, 20, 11, 21, 12]]), torch.tensor([[-1, 0, 0, 1, 3, 4]])
HEARD = Heard([7], *TREE, laws(10, 30, 31, 32, 33, 34))


def test_what_was_rejected_is_the_likeliest_path_behind_what_was_committed() -> None:
    found = rejected(HEARD, 0, [5])
    assert found.guesses == [10, 11, 21, 12]
    assert [[token for token, _ in after[:2]] for after in found.after] == [[30, 31], [32, 33], [33, 34], [34, 35]]
    assert found.after[0][0][1] == pytest.approx(float(HEARD.logits[0, 1].softmax(dim=-1)[30]))
    assert rejected(HEARD, 0, [5, 10]).guesses == [11, 21, 12]
    assert rejected(HEARD, 0, [5, 20]).guesses == []  # nothing stood behind it
    for other in ([6], [5, 13]):  # of another cycle
        assert rejected(HEARD, 0, other) == Rejected([], [])


def test_the_last_forward_over_a_proposal_is_kept(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir, compile="off")
    heard: Any = Overheard(target)
    cache = target.new_cache(1, 64)
    prompt, guesses = torch.tensor([[5, 9, 30, 8]]), torch.tensor([[40, 41, 42]])
    heard.forward(prompt, chain(prompt).parents, cache, (), torch.tensor([3]))
    assert heard.last is None
    cache.commit([range(4)])
    output = heard.forward(guesses, chain(guesses).parents, cache)
    assert torch.equal(heard.last.logits, output.logits) and heard.last.tokens.tolist() == guesses.tolist()
    [row] = heard.last.likely
    assert [node[0][0] for node in row] == output.logits[0].argmax(dim=-1).tolist()
