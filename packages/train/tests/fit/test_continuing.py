"""`blockdraft fit --init`: a drafter is continued on recorded conversations, and kept only if it got better."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams
from blockdraft_train.data.documents import Document
from blockdraft_train.data.recording import ConversationRecorder
from blockdraft_train.fit import continuing
from blockdraft_train.fit.continuing import Taus, checked_data, continue_fit, turn_prompts
from blockdraft_train.fit.settings import FitSettings
from blockdraft_train.fit.steps import Where


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, backend="native")


@pytest.fixture(scope="module")
def recorded(tiny_eagle3_dir: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder of conversations, recorded with the hidden states that the drafter reads."""
    folder = tmp_path_factory.mktemp("recorded") / "traffic"
    drafter = load_drafter(tiny_eagle3_dir, target=target)
    recorder = ConversationRecorder(folder, target, (*drafter.target_layers, target.num_layers))
    with Engine(target, drafter, 4, recorder=recorder) as engine:
        prompts = [[number, 5, 9, 17] for number in range(20, 32)]
        engine.generate(prompts, SamplingParams(24, temperature=1.0, seed=0, ignore_eos=True))
    recorder.close()
    return folder


def measured(monkeypatch: pytest.MonkeyPatch, before: Taus, after: Taus) -> list[Path]:
    """Let measurements return these figures, and return the drafters that are measured."""
    drafters = list[Path]()

    def measure(drafter: Path, **_: Any) -> Taus:
        drafters.append(drafter)
        return before if len(drafters) == 1 else after

    monkeypatch.setattr(continuing, "measure_taus", measure)
    return drafters


def where(folder: Path, target_dir: Path) -> Where:
    return Where(folder / "out", str(target_dir), device="cpu")


@pytest.mark.slow
def test_a_better_drafter_is_written(
    recorded: Path, tiny_target_dir: Path, tiny_eagle3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafters = measured(monkeypatch, Taus(1.2, 1.5), Taus(1.3, 1.46))
    notes, settings = list[str](), FitSettings(init=str(tiny_eagle3_dir), minutes=5)
    lines = continue_fit(where(tmp_path, tiny_target_dir), settings, recorded, notes.append)
    assert lines[0] == "tau on held-out prompts: 1.200 before, 1.300 after (+8.3%)"
    assert drafters == [tiny_eagle3_dir, tmp_path / "out.fit/drafter"]
    target = load_target(tiny_target_dir, backend="native")
    weights = [load_drafter(path, target=target).network.fc.weight for path in (tiny_eagle3_dir, tmp_path / "out")]
    assert weights[0] is None or not torch.equal(*weights)
    assert not any("computed anew" in note for note in notes)  # the hidden states were recorded
    log = (tmp_path / "out.fit/drafter.run/log.jsonl").read_text().splitlines()
    assert len(log) > 1
    with pytest.raises(UsageError, match="holds other files"):
        continue_fit(where(tmp_path, tiny_target_dir), settings, recorded, notes.append)


@pytest.mark.slow
def test_a_drafter_that_is_no_better_is_not_written(
    recorded: Path, tiny_target_dir: Path, tiny_eagle3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, Taus(1.2, 1.5), Taus(1.3, 1.4))
    settings = FitSettings(init=str(tiny_eagle3_dir), minutes=0.1)
    with pytest.raises(BlockdraftError, match="out is not written, because it loses 6.7% on general prompts"):
        continue_fit(where(tmp_path, tiny_target_dir), settings, recorded, lambda note: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (Taus(1.21, 1.46), None),
        (Taus(1.2, 1.6), "it drafts held-out prompts no better (1.200 instead of 1.200)"),
        (Taus(2.0, 1.45), "it loses 3.3% on general prompts, and may lose less than 3%"),
    ],
)
def test_what_is_kept(after: Taus, reason: str | None) -> None:
    assert Taus(1.2, 1.5).reason_against(after) == reason


def test_prompts_are_those_of_turns() -> None:
    supervised = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    assert turn_prompts(Document(torch.arange(9), supervised)) == [[0, 1], [0, 1, 2, 3, 4, 5]]
    assert turn_prompts(Document(torch.arange(3), torch.ones(3, dtype=torch.bool))) == [[0]]


def test_few_conversations_are_refused(
    target: Target, tiny_target_dir: Path, tiny_eagle3_dir: Path, tmp_path: Path
) -> None:
    recorder = ConversationRecorder(tmp_path / "traffic", target)
    with Engine(target, recorder=recorder) as engine:
        engine.generate([[5, 9, 17]], SamplingParams(8, ignore_eos=True))
    recorder.close()
    with pytest.raises(UsageError, match="hold 1 usable conversations, and at least 5 are needed; record more"):
        settings = FitSettings(init=str(tiny_eagle3_dir))
        continue_fit(where(tmp_path, tiny_target_dir), settings, tmp_path / "traffic", print)


def test_data_of_single_turns_are_refused(recorded: Path, tmp_path: Path) -> None:
    turns = shutil.copytree(recorded, tmp_path / "turns")
    manifest = json.loads((turns / "data.json").read_text())
    (turns / "data.json").write_text(json.dumps(manifest | {"split_turns": True}))
    with pytest.raises(UsageError, match="a document for each turn"):
        checked_data(turns)
