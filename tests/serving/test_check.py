"""Tests of the check that drafting changes nothing."""

import pytest
from torch import Tensor

from blockdraft import Drafting, Engine
from blockdraft.decode.verification import Verdict, verify
from blockdraft.serving import check
from blockdraft.serving.check import answers_differ


def test_drafting_is_tried_even_where_the_engine_pauses(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    automatic = list[bool]()

    class Told(Engine):
        def close(self) -> None:
            automatic.append(self.controller.automatic)
            super().close()

    monkeypatch.setattr(check, "Engine", Told)
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
