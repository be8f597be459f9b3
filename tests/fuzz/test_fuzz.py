"""Random models, ways of running, drafters, settings and requests: every completion is that of plain decoding.

`make test` and `make test-long` always run the same cases; `make fuzz` runs others.
"""

from dataclasses import replace
from typing import Any

import pytest
from fuzz_cases import CASES_PER_MODEL, case_of
from fuzz_check import Different, Outcome, run
from fuzz_models import DRAFTERS, LATER, NEWEST, WAYS, Models, is_hybrid, is_latent, is_mixture, target_fields

from blockdraft import Completion, Engine
from blockdraft.engine import Request

MODELS, MORE_MODELS = 4, 24
QUICK_CASES = 10  # of each of the first models in `make test`, which has every kind of case; the others are long


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cases"),
    [
        *((model, range(QUICK_CASES)) for model in range(MODELS)),
        *(pytest.param(model, range(QUICK_CASES, CASES_PER_MODEL), marks=pytest.mark.long) for model in range(MODELS)),
        *(pytest.param(model, range(CASES_PER_MODEL), marks=pytest.mark.long) for model in range(MODELS, MORE_MODELS)),
    ],
)
def test_answers_are_those_of_plain_decoding(model: int, cases: range, models: Models) -> None:
    outcome = Outcome()
    for seed in (model * CASES_PER_MODEL + case for case in cases):
        print(f"seed {seed}: make fuzz SEED={seed}")
        outcome += run(case_of(seed), models)
    assert outcome.near_ties <= 1
    assert outcome.tokens > 200 and outcome.committed > outcome.steps  # and some draft tokens stood


def test_cases_are_of_every_kind() -> None:
    cases = [case_of(model * CASES_PER_MODEL + case) for model in range(MODELS) for case in range(QUICK_CASES)]
    assert {case.way for case in cases} == set(WAYS)
    assert {case.drafter for case in cases} == {*DRAFTERS, *LATER, NEWEST}
    assert {"auto"} < {case.drafting.block_size for case in cases} and {case.drafting.sampled for case in cases} == {
        False,
        True,
    }
    asks = [ask for case in cases for ask in case.asks]
    assert any(ask.cancel for ask in asks) and any(ask.stream for ask in asks) and any(ask.params.stop for ask in asks)
    assert {ask.urgent for ask in asks} == {False, True}
    assert any(case.stored for case in cases) and any(ask.instructions for ask in asks)
    assert {is_mixture(model) for model in range(MORE_MODELS)} == {False, True}
    assert {is_hybrid(model) for model in range(MORE_MODELS)} == {False, True}
    assert {is_latent(model) for model in range(MORE_MODELS)} == {False, True}
    assert any(ask.bounds for ask in asks) and any(ask.params.grammar for ask in asks)
    assert {ask.predicted for ask in asks} == {None, 0.0, 0.5, 0.9, 1.0}
    assert {ask.params.lookup_scope for ask in asks} == {None, "a", "b"}
    assert {ask.turn_of is None for ask in asks} == {ask.after is None for ask in asks} == {False, True}
    windows = {target_fields(number)[1].get("sliding_window") for number in range(MODELS)}
    assert len(windows) > 3 and None in windows
    assert case_of(77) == case_of(77) != case_of(78)


def test_an_engine_that_answers_wrongly_is_found(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of each drafted completion is changed."""
    case = case_of(3)
    case = replace(case, drafter="lookup", drafting=replace(case.drafting, sampled=False))
    for ask in case.asks:
        ask.cancel = ask.stream = False
    run(case, models)
    submit = Engine.submit

    def wrong(self: Engine, *args: Any, **more: Any) -> Request:
        request = submit(self, *args, **more)
        if request.max_depth == 0:  # the plain answer
            return request
        result = request.result

        def changed(timeout: float | None = None) -> Completion:
            completion = result(timeout)
            *tokens, last = completion.token_ids
            return replace(completion, token_ids=[*tokens, (last + 1) % self.target.vocab_size])

        request.result = changed  # type: ignore[method-assign]
        return request

    monkeypatch.setattr(Engine, "submit", wrong)
    with pytest.raises(Different, match="but alone and plainly"):
        run(case, models)
