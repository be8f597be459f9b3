"""Drafters that score part of the vocabulary with the target's output projection."""

import json
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from thinned import LONG, thinned
from torch import Tensor

from blockdraft import Drafting, Engine, SamplingParams, load_drafter
from blockdraft.decode.proposal import ChainPlan, Plan, Proposal, SampledPlan, TreePlan
from blockdraft.drafters import Drafter
from blockdraft.drafters.draft_vocab import check_draft_vocab, read_draft_vocab
from blockdraft.engine.adaptive.costs import path
from blockdraft.errors import UsageError
from blockdraft.formats import read_drafter
from blockdraft.targets import Target, load_target, with_draft_vocab
from blockdraft_medusa.drafter import MedusaDrafter
from blockdraft_medusa.network import MedusaNetwork

KINDS = ["drafter", "dflash2", "dspark", "flow", "mtp", "medusa"]
KEPT = sorted({(7 * i * i + 3) % 265 for i in range(60)})
SAMPLED = torch.tensor([[0.1, 0.5, 0.8]], dtype=torch.float64)
PLANS = {
    "chain": ChainPlan(4, [SamplingParams()]),
    "tree": TreePlan(4, [SamplingParams()], 12),
    "as far as pays": ChainPlan(4, [SamplingParams()], step_seconds=[1.0, 1.01, 1.02, 1.03]),
    "sampled": SampledPlan(4, [SamplingParams(temperature=1.0)], SAMPLED),
}


@pytest.fixture
def load(request: pytest.FixtureRequest) -> Callable[[str, Target], Drafter]:
    """Loads a kind for a target that may have a draft head already."""

    def of_kind(kind: str, target: Target) -> Drafter:
        folder: Path = request.getfixturevalue(f"tiny_{kind}_dir")
        if kind != "medusa":
            return load_drafter(folder, target=target)
        actual = read_drafter(folder, None, target.num_layers)
        config: Any = replace(actual.config, shared_head=True)  # type: ignore[type-var]
        network = MedusaNetwork(config)
        network.load_state_dict({name: actual.tensors[name] for name in network.state_dict()})
        return MedusaDrafter(network, target, owned=True)

    return of_kind


def proposal(drafter: Drafter, target: Target, plan: Plan) -> Proposal:
    generator, state = torch.Generator().manual_seed(1), drafter.new_state(1, 60)
    hidden_states = torch.randn(1, 7, len(drafter.target_layers) * target.hidden_size, generator=generator)
    drafter.observe(state, torch.tensor([[4, 9, 33, 12, 7, 8, 60]]), hidden_states, [7])
    return drafter.propose(state, torch.tensor([21]), plan)


def masked(target: Target) -> Target:
    """The target for drafters that score all tokens, and then forget those that they may not draft."""
    actual, others = copy(target), torch.ones(target.vocab_size, dtype=torch.bool)
    others[KEPT] = False
    head: Any = lambda hidden: target.head(hidden).masked_fill(others, -torch.inf)  # noqa: E731
    actual.draft_head = head
    return actual


@pytest.mark.parametrize(
    ("kind", "way", "plan"), thinned(KINDS, ["compiled", "uncompiled", "hf"], PLANS, keep=3, marks=LONG)
)
def test_drafts_equal_those_of_the_whole_head_among_these_tokens(
    kind: str, way: str, plan: str, tiny_target_dir: Path, load: Callable[[str, Target], Drafter]
) -> None:
    plain = load_target(tiny_target_dir, dtype="float32", device="cpu", backend="native", compile="off")
    backend = {"hf": "hf"}.get(way, "native")
    compile: Any = {"compiled": "on", "uncompiled": "off"}.get(way, "auto")
    target = load_target(tiny_target_dir, dtype="float32", device="cpu", backend=backend, compile=compile)
    drafter = load(kind, with_draft_vocab(target, torch.tensor(KEPT)))
    assert drafter.has_target_head
    own = PLANS[plan]
    actual, expected = proposal(drafter, target, own), proposal(load(kind, masked(plain)), plain, own)
    assert torch.equal(actual.tokens, expected.tokens) and torch.equal(actual.parents, expected.parents)
    assert set(actual.tokens[0, 1:].tolist()) <= set(KEPT) and actual.tokens.size(1) > 1
    if isinstance(own, SampledPlan) and actual.q is not None:
        assert expected.q is not None and (ours := actual.q[0]) is not None and (theirs := expected.q[0]) is not None
        dense = [torch.zeros(len(q.ids), 265).double().scatter_add_(1, q.ids, q.probs.double()) for q in (ours, theirs)]
        torch.testing.assert_close(*dense, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"),
    thinned(
        [kind for kind in KINDS if kind != "medusa"],
        [{}, {"dtype": "bfloat16"}, {"quantize": "int8"}, {"quantize": "int4"}],
        keep=2,
        marks=LONG,
    ),
)
def test_answers_are_the_targets_and_the_head_takes_less_memory(
    kind: str, options: dict[str, Any], tiny_target_dir: Path, request: pytest.FixtureRequest
) -> None:
    target = load_target(tiny_target_dir, **{"dtype": "float32", "device": "cpu", **options})
    folder = request.getfixturevalue(f"tiny_{kind}_dir")
    drafter, whole = load_drafter(folder, target=target, draft_vocab=KEPT), load_drafter(folder, target=target)
    params = SamplingParams(24, ignore_eos=True)
    prompts = [[5, 9, 12], [7, 8, 30, 31]]
    plain = [
        answer.token_ids for answer in Engine(target, load_drafter("none", target=target)).generate(prompts, params)
    ]
    for drafting in (Drafting(4), Drafting(4, 12), Drafting("auto", 0)):
        answers = Engine(target, drafter, drafting=drafting).generate(prompts, params)
        assert [answer.token_ids for answer in answers] == plain
    assert drafter.draft_vocab == len(KEPT) and whole.draft_vocab is None
    more = drafter.weight_bytes() - whole.weight_bytes()
    assert 0 < more <= 4 * len(KEPT) * target.hidden_size + 4096  # padding of the last block
    assert path(target, drafter) != path(target, whole)  # what steps cost is another thing


def test_the_target_keeps_its_head(tiny_target_dir: Path, tiny_mtp_dir: Path) -> None:
    target = load_target(tiny_target_dir, dtype="float32", device="cpu")
    lent = with_draft_vocab(target, torch.tensor(KEPT))
    hidden = torch.randn(2, target.hidden_size)
    assert target.draft_head is None and lent.draft_head is not None and lent.lock is target.lock
    logits = lent.draft_head(hidden)
    torch.testing.assert_close(logits[:, KEPT], target.head(hidden)[:, KEPT])
    assert torch.equal(lent.head(hidden), target.head(hidden))


def test_of_a_combination_the_drafters_with_a_head_use_it(tiny_target_dir: Path, tiny_mtp_dir: Path) -> None:
    target = load_target(tiny_target_dir, dtype="float32", device="cpu")
    drafter = load_drafter(f"lookup+{tiny_mtp_dir}", target=target, draft_vocab=40)
    assert [part.draft_vocab for part in drafter.parts] == [None, 40]
    [answer] = Engine(target, drafter, drafting=Drafting(4)).generate([[5, 9]], SamplingParams(8, ignore_eos=True))
    assert len(answer.token_ids) == 8


@pytest.mark.parametrize("name", ["none", "lookup", "tiny_eagle3_dir", "tiny_medusa_dir"])
def test_drafters_without_it_refuse(name: str, tiny_target_dir: Path, request: pytest.FixtureRequest) -> None:
    target = load_target(tiny_target_dir, dtype="float32", device="cpu")
    drafter = request.getfixturevalue(name) if name.startswith("tiny") else name
    with pytest.raises(UsageError, match="does not use the target's output projection, so draft_vocab would change"):
        load_drafter(drafter, target=target, draft_vocab=40)


def test_a_number_takes_the_first_tokens_and_the_end_tokens(target: Target) -> None:
    target = copy(target)
    target.eos_token_ids = frozenset({2, 200, 260})
    assert read_draft_vocab(10, target).tolist() == [*range(8), 200, 260]
    assert read_draft_vocab("265", target).tolist() == list(range(265))
    assert read_draft_vocab(201, target).tolist() == [*range(199), 200, 260]
    assert read_draft_vocab(1, target).tolist() == [2]


def test_files(target: Target, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([9, 4, 4, 264]))
    torch.save(torch.tensor([4, 9, 264]), tmp_path / "map.pt")
    torch.save([4, 9, 264], tmp_path / "list.pt")
    for name in ("list.json", "map.pt", "list.pt"):
        assert read_draft_vocab(tmp_path / name, target).tolist() == [4, 9, 264]
        assert read_draft_vocab(str(tmp_path / name), target).tolist() == [4, 9, 264]


BROKEN: dict[str, tuple[str | None, str]] = {
    "missing.json": (None, "which is no file; give a number of tokens, or a JSON or .pt file"),
    "broken.json": ("[1, 2", "cannot be read as a list of token ids"),
    "broken.pt": ("no tensor", "cannot be read as a list of token ids"),
    "text.json": ('["a"]', "must be a list of token ids, from 0 to 264.*, got 'a'"),
    "empty.json": ("[]", "holds no token ids"),
    "object.json": ('{"tokens": [1]}', "must be a list.*, got .'tokens': .1.."),
    "number.json": ("5", "must be a list.*, got 5"),
    "nested.json": ("[[1, 2]]", r"must be a list.*, got .1, 2."),
    "truth.json": ("[true]", "must be a list.*, got True"),
    "fraction.json": ("[1.5]", "must be a list.*, got 1.5"),
    "large.json": ("[3, 265]", "holds the token id 265; the target's are from 0 to 264"),
    "negative.json": ("[-1]", "holds the token id -1; the target's are from 0 to 264"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(name: str, target: Target, tmp_path: Path) -> None:
    text, message = BROKEN[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message) as raised:
        read_draft_vocab(tmp_path / name, target)
    assert name in str(raised.value)
    if name == "large.json":  # not known to be too large without a target
        assert check_draft_vocab(str(tmp_path / name)) == [3, 265]
        return
    with pytest.raises(UsageError, match=message.replace("from 0 to 264", "0 or more")):
        check_draft_vocab(str(tmp_path / name))


def test_a_torn_tensor_is_named(target: Target, tmp_path: Path) -> None:
    torch.save(torch.tensor([4, 9, 264]), tmp_path / "map.pt")
    whole = (tmp_path / "map.pt").read_bytes()
    for end in range(0, len(whole), 37):
        (tmp_path / "torn.pt").write_bytes(whole[:end])
        with pytest.raises(UsageError, match=r"torn.pt, which cannot be read"):
            read_draft_vocab(tmp_path / "torn.pt", target)


def test_arrays_are_lists_and_their_numbers_are_numbers(target: Target) -> None:
    given: Any
    for given in (
        np.array([9, 4]),
        torch.tensor([9, 4]),
        [np.int64(4), 9],
        (token for token in (9, 4)),
        range(4, 10, 5),
    ):
        assert read_draft_vocab(given, target).tolist() == [4, 9]
    assert len(read_draft_vocab(np.int64(7), target)) == len(read_draft_vocab(" 7 ", target)) == 7  # type: ignore[arg-type]
    for given in (True, 3.0, torch.tensor(3.5), "", "  ", "9" * 5000, [True], "1.5"):
        with pytest.raises(UsageError, match="draft_vocab "):
            read_draft_vocab(given, target)


def test_numbers(target: Target) -> None:
    assert check_draft_vocab("7") == 7 and check_draft_vocab(10**6) == 10**6
    with pytest.raises(UsageError, match=r"draft_vocab must be at least 1, got 0\."):
        check_draft_vocab("0")
    with pytest.raises(UsageError, match="draft_vocab is 'abc', which is no file; give a number"):
        check_draft_vocab("abc")
    for count in (0, -3, 266, "0"):
        with pytest.raises(UsageError, match=rf"draft_vocab must be from 1 to 265.*, got {count}"):
            read_draft_vocab(count, target)


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        (265, "leaves out none of the target's 265 tokens"),
        (264, ""),
        (1, "has end tokens only"),
        ([2, 200], "end"),
        (3, ""),
    ],
)
def test_vocabularies_that_help_no_one_are_reported(
    given: Any, warning: str, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    target = copy(target)
    target.eos_token_ids = frozenset({2, 200})
    read_draft_vocab(given, target)
    assert warning in caplog.text and bool(warning) == bool(caplog.text)


def test_a_projection_with_a_bias_is_refused(tiny_target_dir: Path, tiny_mtp_dir: Path) -> None:
    target = copy(load_target(tiny_target_dir, dtype="float32", device="cpu"))
    head = target.head

    def biased(hidden: Tensor) -> Tensor:
        return head(hidden) + 1

    target.head = biased  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="has a bias"):
        load_drafter(tiny_mtp_dir, target=target, draft_vocab=40)
