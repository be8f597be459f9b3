"""What tests of the trainer and of its variants share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import Drafter, load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams
from blockdraft_train.batches import PackedSequences
from blockdraft_train.data.documents import Document
from blockdraft_train.data.target_layers import target_hidden_states
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter
from blockdraft_train.objectives import Slots
from blockdraft_train.variant import Variant

LENGTHS, ANCHORS = (17, 30, 23), ((3, 11, 16), (1, 9, 22, 29), (8, 20))


@pytest.fixture(autouse=True)
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's picture takes longer than its few steps. Who looks at it asks for the fixture `with_pictures`."""
    if "with_pictures" not in request.fixturenames:
        monkeypatch.setattr("blockdraft_train.trainer.draw_curves", lambda log, path: True)


@pytest.fixture
def with_pictures() -> None:
    """See `without_pictures`."""


def after_step(step: int, action: Callable[[], object]) -> Callable[[str, int, int], None]:
    """Return a callback for a run's progress that does this once the step is done, and saved if it is to be."""

    def report(stage: str, done: int, total: int) -> None:
        if stage.startswith(f"step {step} of ") and ", loss " in stage:
            action()

    return report


def press_ctrl_c() -> None:
    raise KeyboardInterrupt


class Drafted(NamedTuple):
    """What a drafter proposes behind an anchor, and its state before it."""

    anchor: int
    draft_tokens: list[int]
    state: Any


def drafted(drafter: Drafter, target: Target, tokens: Tensor, anchor: int) -> Drafted:
    hidden_states = (
        target_hidden_states(target, drafter.target_layers, [tokens])[0][None, :anchor]
        if drafter.target_layers
        else None
    )
    state = drafter.new_state(1, 64)
    drafter.observe(state, tokens[None, :anchor], hidden_states, [anchor])
    plan = ChainPlan(drafter.block_size, (SamplingParams(),))
    proposal = drafter.propose(state, tokens[anchor : anchor + 1], plan)
    return Drafted(int(tokens[anchor]), proposal.tokens[0, 1:].tolist(), state)


@torch.no_grad()
def check_parity(
    variant: Variant[Any, Any, Any], network: Any, drafter: Drafter, target: Target
) -> tuple[Tensor, list[Drafted]]:
    """The training forward at an anchor drafts what the drafter drafts at that anchor.

    The tokens behind each anchor count as the drafter's own draft tokens, because `Variant.draft_tokens` looks at a
    position as if all draft tokens before it had been accepted.

    Returns:
        The logits of training, `[A, K, V]`, and what was drafted at each of the A anchors.
    """
    random = torch.Generator().manual_seed(1)
    documents = [torch.randint(5, 200, (length,), generator=random) for length in LENGTHS]
    # Three documents in one row, with room behind them.
    starts = [sum(LENGTHS[:i]) for i in range(3)]
    length = sum(LENGTHS) + 4
    tokens, places, owners = (torch.zeros(1, length, dtype=torch.long) for _ in range(3))
    owners[:] = -1
    hidden_states = torch.zeros(1, length, len(drafter.target_layers) * target.hidden_size)
    for number, (start, document) in enumerate(zip(starts, documents, strict=True)):
        part = slice(start, start + len(document))
        tokens[0, part], places[0, part], owners[0, part] = document, torch.arange(len(document)), number
        hidden_states[0, part] = target_hidden_states(target, drafter.target_layers, [document])[0]
    where = [(number, anchor) for number in range(3) for anchor in ANCHORS[number]]
    expected = [drafted(drafter, target, documents[number], anchor) for number, anchor in where]
    anchors = torch.tensor([[starts[number] + anchor for number, anchor in where]])
    draft_tokens = torch.tensor([one.draft_tokens for one in expected])
    assert draft_tokens.size(1) == variant.taught_slots
    assert len(set(draft_tokens.flatten().tolist())) > 10  # else nothing is compared

    blocks = torch.cat([tokens[0][anchors].T, draft_tokens], dim=1)
    taught = torch.ones_like(draft_tokens, dtype=torch.bool)
    rows = PackedSequences(tokens, places, owners, anchors, blocks[None], taught[None])
    hidden = variant.hidden(network, target, hidden_states, rows)[0]
    logits = variant.logits(network, target, hidden)
    assert torch.equal(variant.draft_tokens(network, Slots(hidden, logits, blocks, taught)), draft_tokens)
    return logits, expected


class Answered(NamedTuple):
    """Prompts, how they are answered, and plain decoding's answers, which are also data to learn from in `folder`."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    answers: list[list[int]]
    folder: Path


@pytest.fixture(scope="session")
def answered(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Answered:
    target = load_target(tiny_target_dir)
    assert target.tokenizer is not None
    prompts = [[5 + i, 9, 90 - i] for i in range(16)]
    params = [SamplingParams(16 + i % 5, 0.0 if i % 3 else 0.3, seed=i) for i in range(16)]
    plain = Engine(target, load_drafter("none", target=target), max_batch_size=3).generate(prompts, params)
    folder = tmp_path_factory.mktemp("answered") / "data"
    writer = DataWriter(folder, {"tokenizer": tokenizer_fingerprint(target.tokenizer)})
    writer.begin()
    for row, (prompt, one) in enumerate(zip(prompts, plain, strict=True)):
        ids = torch.tensor(prompt + one.token_ids)
        writer.add(row, [Document(ids, torch.arange(len(ids)) >= len(prompt))])
    writer.finish()
    return Answered(prompts, params, [one.token_ids for one in plain], folder)


@pytest.fixture
def parity() -> Callable[..., tuple[Tensor, list[Drafted]]]:
    return check_parity
