"""Engines by backend, their names, and the check that drafting changes nothing."""

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from blockdraft.decode.verification import Verdict, verify
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.models import TINY
from blockdraft.serving.core import backends
from blockdraft.serving.core.backends import Backends, answers_differ, name_of, weights_of
from blockdraft.types import Drafting


def test_a_combination_is_named_hidden_and_counted_whole(engine: Any, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.symlink_to(engine.target.path)
    both = Engine(engine.target, load_drafter(f"prompt_lookup+{folder}", target=engine.target))
    found = Backends(both)
    assert found.drafter == "PromptLookupDrafter+small"
    assert found.public(f"{folder}/config.json is odd.") == "small/config.json is odd."
    assert weights_of(both) == weights_of(engine)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (None, "nothing"),
        (TINY / "target", "blockdraft-pair"),
        (TINY.parent / "smollm2" / "drafter" / "drafter.gguf", "bundled for smollm2"),
        (Path("/models/some/SmolLM2.Q4_1.gguf"), "SmolLM2.Q4_1"),
        (Path("/hub/models--o--n/snapshots/0a1b"), "o/n"),
    ],
)
def test_models_have_public_names(path: Path | None, name: str) -> None:
    assert name_of(path, "nothing") == name


def test_whoever_counts_weights_leaves_the_cores_to_who_decodes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A team of idle threads makes every forward of a small model take several times as long."""
    let_go = list[int]()
    monkeypatch.setattr(backends, "let_team_go", lambda: let_go.append(threading.get_ident()))
    weights_of(engine)
    assert let_go == [threading.get_ident()]


def test_drafting_is_tried_even_where_the_engine_pauses(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    automatic = list[bool]()

    class Told(Engine):
        def close(self) -> None:
            automatic.append(self.controller.automatic)
            super().close()

    monkeypatch.setattr(backends, "Engine", Told)
    server = Engine(engine.target, engine.drafter, drafting=Drafting("auto"))
    assert answers_differ(server, 3) == 0
    assert automatic == [False]


def test_answers_that_drafting_changes_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def accepting(
        proposal: object, distributions: object, uniforms: Tensor | None, tests: Tensor | None = None
    ) -> Verdict:
        verdict = verify(proposal, distributions, uniforms, tests)  # type: ignore[arg-type]
        count = proposal.tokens.size(1)  # type: ignore[attr-defined]
        if count == 1:
            return verdict
        # The first guess is taken, whatever the target says.
        return Verdict([[0, 1] if len(path) == 1 else path for path in verdict.path], verdict.bonus)

    monkeypatch.setattr("blockdraft.engine.runner.verify", accepting)
    assert answers_differ(engine, 3) > 0
