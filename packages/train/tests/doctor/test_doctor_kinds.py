"""EAGLE-3, Medusa and MTP drafters that learned a tiny target's answers by heart. Where the file names another
convention than the one in training, the doctor finds it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.engine.text import encode
from blockdraft.errors import UsageError
from blockdraft.formats import Checkpoint, find_layout
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams
from blockdraft_train.batches import PackedSequences
from blockdraft_train.data.target_layers import target_hidden_states
from blockdraft_train.doctor.checks import checker_of
from blockdraft_train.doctor.examine import Diagnosis, examine
from blockdraft_train.variant import find_variant

PROMPTS = ["What is this?", "Tell me of the sea.", "Why?", "Count to nine!"]
RESPONSE_TOKENS = 32
DRAFT_CHOICE, STEPS = 3, 80
OWN = {"eagle3": {"draft_vocab": 200, "target_layers": (0, 1)}, "mtp": {}, "medusa": {}}

Learn = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target whose last norm does more than scale."""
    folder = shutil.copytree(tiny_target_dir, tmp_path_factory.mktemp("normed") / "target")
    torch.manual_seed(0)

    def uneven(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.empty_like(tensors["model.norm.weight"]).uniform_(-2, 2)

    return load_target(rewrite(folder, uneven), device="cpu", compile="off")


@pytest.fixture(scope="module")
def texts(target: Target) -> list[tuple[torch.Tensor, int]]:
    """Prompts with their answers, and the indices where the answers begin."""
    prompts = [encode(prompt, target) for prompt in PROMPTS]
    with Engine(target, load_drafter("none", target=target)) as engine:
        answers = engine.generate(prompts, SamplingParams(max_new_tokens=RESPONSE_TOKENS))
    return [(torch.tensor([*p, *a.token_ids]), len(p)) for p, a in zip(prompts, answers, strict=True)]


@pytest.fixture(scope="module")
def learned(target: Target, texts: list[tuple[torch.Tensor, int]]) -> Callable[..., Checkpoint]:
    """Drafters trained in a given convention.

    Args (of what it returns):
        lag: Of the hidden states, as in `Check`.
        early: By how many tokens each draft token comes too early.
        target_layers: That are read.
        changes: Fields of its configuration.
    """

    @cache
    def learn(
        kind: str, lag: int = 0, early: int = 0, target_layers: tuple[int, ...] | None = None, **changes: Any
    ) -> Checkpoint:
        variant: Any = find_variant(kind)
        variant = variant(variant.recipe_class(block_size=1 + DRAFT_CHOICE, **OWN[kind]))
        config = replace(variant.config(target), **changes)
        torch.manual_seed(0)
        network = variant.network(config)
        if kind == "eagle3":
            used = torch.cat([tokens for tokens, _ in texts]).unique()
            others = torch.tensor([i for i in range(1, target.vocab_size - 1, 1) if i not in used.tolist()])
            network.keep(torch.cat([used, others[: config.draft_vocab_size - len(used)]]).sort().values)
            places = {int(token): place for place, token in enumerate(network.kept)}
        else:
            torch.nn.init.uniform_(network.norm.weight, -2, 2) if kind == "mtp" else None
            places = {i: i for i in range(target.vocab_size)}
        optimizer = torch.optim.Adam(network.parameters(), 5e-3)
        parts, blocks, labels, hidden_states, begin = list[PackedSequences](), list[torch.Tensor](), [], [], 0
        for number, (tokens, first) in enumerate(texts):
            anchors = torch.arange(first, len(tokens) - DRAFT_CHOICE - 1)
            read = target_hidden_states(
                target, config.target_layers if target_layers is None else target_layers, [tokens]
            )[0]
            hidden_states.append(read.roll(lag, dims=0))
            blocks.append(torch.stack([tokens[anchors + k] for k in range(DRAFT_CHOICE + 1)], dim=1))
            labels.append(torch.stack([tokens[anchors + k - early] for k in range(1, DRAFT_CHOICE + 1)], dim=1))
            numbers = torch.full_like(tokens, number)
            parts.append(
                PackedSequences(
                    tokens, torch.arange(len(tokens)), numbers, begin + anchors, blocks[-1], blocks[-1][:, 1:] >= 0
                )
            )
            begin += len(tokens)
        rows = PackedSequences(*(torch.cat(column)[None] for column in zip(*parts, strict=True)))
        wanted = torch.cat(labels).apply_(lambda token: places[token]).flatten()
        for _ in range(STEPS):
            optimizer.zero_grad()
            hidden = variant.hidden(network, target, torch.cat(hidden_states)[None], rows)[0]
            F.cross_entropy(variant.logits(network, target, hidden).flatten(0, 1), wanted).backward()
            optimizer.step()
        return Checkpoint(config, {name: one.detach().clone() for name, one in network.state_dict().items()})

    return learn


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A drafter's folder, with fields in its configuration that differ from training."""

    def written(kind: str, found: Checkpoint, **changes: Any) -> Path:
        find_layout(kind).write(tmp_path / kind, replace(found, config=replace(found.config, **changes)))
        return tmp_path / kind

    return written


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def diagnosis(target: Target, folder: Path) -> Diagnosis:
    return examine(target, folder, PROMPTS, RESPONSE_TOKENS)


def swap(*names: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)

    return change


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa"])
def test_good_pairs(target: Target, learned: Callable[..., Checkpoint], write: Learn, kind: str) -> None:
    found = diagnosis(target, write(kind, learned(kind)))
    assert (found.fault, found.remedy) == (None, "") and found.alike > 0.9
    assert found.decoded[0] > 0.6 and len(found.decoded) == DRAFT_CHOICE


LEARNED = [
    ("eagle3", {"lag": 1}, "shift", "hidden state of two tokens before its own"),
    pytest.param("eagle3", {"lag": -1}, "shift", "hidden state of its own token", marks=pytest.mark.long),
    pytest.param("mtp", {"lag": 1}, "shift", "hidden state of two tokens before its own", marks=pytest.mark.long),
    ("mtp", {"lag": -1}, "shift", "hidden state of its own token"),
    ("mtp", {"target_layers": (2,)}, "target_layers", "before its norm"),
    ("medusa", {"target_layers": (2,)}, "target_layers", "before its norm"),
    pytest.param("medusa", {"lag": 1}, "shift", "hidden state of two tokens before", marks=pytest.mark.long),
    ("medusa", {"early": 1}, "shift", "head 1 drafts the token after the anchor"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how", "fault", "assumption"), LEARNED)
def test_learned_otherwise(
    target: Target,
    learned: Callable[..., Checkpoint],
    write: Learn,
    kind: str,
    how: dict[str, Any],
    fault: str,
    assumption: str,
) -> None:
    found = diagnosis(target, write(kind, learned(kind, **how)))
    assert found.fault == fault and assumption in found.finding and found.remedy, found


WRITTEN = [
    ("eagle3", {}, {"target_layers": (1, 2)}, "target_layers", "target layers [0, 1] in place of [1, 2]"),
    ("eagle3", {"norm_output": True}, {"norm_output": False}, "feedback", "taken behind the last norm"),
    ("eagle3", {}, {"norm_before_residual": True}, "norm", "begun before the norm"),
    ("eagle3", {}, {"rope_theta": 3.0}, "rope", "rope_theta 10000 in place of 3"),
    ("mtp", {}, {"normed_feedback": False}, "feedback", "taken behind the last norm"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how", "changes", "fault", "assumption"), WRITTEN)
def test_a_wrong_configuration(
    target: Target,
    learned: Callable[..., Checkpoint],
    write: Learn,
    kind: str,
    how: dict[str, Any],
    changes: dict[str, Any],
    fault: str,
    assumption: str,
) -> None:
    found = diagnosis(target, write(kind, learned(kind, **how), **changes))
    assert found.fault == fault and assumption in found.finding and found.remedy, found


@pytest.mark.slow
def test_halves_in_the_other_order(target: Target, learned: Callable[..., Checkpoint], write: Learn) -> None:
    names = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]
    for folder, those in (
        (write("eagle3", learned("eagle3")), names),
        (write("mtp", learned("mtp")), ["mtp.fc.weight"]),
    ):
        found = diagnosis(target, rewrite(folder, swap(*those)))
        assert found.fault == "order" and "inputs of hidden state and embedding" in found.finding, found


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "assumption"), [(1, "d2t one less"), (-1, "d2t one more")])
def test_a_wrong_vocabulary(
    target: Target, learned: Callable[..., Checkpoint], write: Learn, wrong: int, assumption: str
) -> None:
    def off(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["t2d"]  # which would tell
        tensors["d2t"] += wrong

    found = diagnosis(target, rewrite(write("eagle3", learned("eagle3")), off))
    assert found.fault == "vocabulary" and assumption in found.finding and "Write d2t anew" in found.remedy, found


@pytest.mark.slow
def test_norms_kept_otherwise(target: Target, learned: Callable[..., Checkpoint], write: Learn) -> None:
    def whole(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 1 and "norm" in name:
                tensor += 1

    found = diagnosis(target, rewrite(write("mtp", learned("mtp")), whole))
    assert found.fault == "norm" and "norms that the file keeps whole" in found.finding, found


def test_drafters_without_files_cannot_be_examined(target: Target) -> None:
    with pytest.raises(UsageError, match="There is no lookup; give the folder or GGUF file"):
        checker_of("lookup", target)


def test_checks_are_different_and_possible(
    target: Target, tiny_eagle3_dir: Path, tiny_mtp_dir: Path, tiny_medusa_dir: Path, tiny_drafter_dir: Path
) -> None:
    faults = {}
    for folder in (tiny_eagle3_dir, tiny_mtp_dir, tiny_medusa_dir, tiny_drafter_dir):
        checker, _ = checker_of(folder, target)
        known = list(checker.checks(100))
        assert known[0].fault == "" and len({one.assumption for one in known}) == len(known)
        faults[folder.name] = {one.fault for one in known} - {""}
        text = [(torch.arange(5, 25), [8, 15])]
        shapes = {tuple(checker.right(one, text).shape) for one in known}
        assert shapes == {(2, {"medusa": 2, "mtp": 3, "eagle3": 5, "drafter": 6}[folder.name])}
    assert faults["eagle3"] == {"target_layers", "shift", "vocabulary", "order", "feedback", "norm", "rope"}
    assert faults["mtp"] == {"target_layers", "shift", "order", "feedback", "norm", "rope"}
    assert faults["medusa"] == {"target_layers", "shift"}
