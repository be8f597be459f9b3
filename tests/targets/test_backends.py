"""A backend is one file, found by its name; the engine uses nothing of it but its protocol."""

import json
import shutil
from pathlib import Path

import pytest

from blockdraft import targets
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import Target, backends, load_target
from blockdraft.types import Drafting, RequestDrafting, SamplingParams

PROMPTS = [[7, 60, 33, 12, 9], [5], [40, 41, 42, 40, 41], [(7 * i + 3) % 100 for i in range(90)]]
GREEDY = SamplingParams(40)


@pytest.fixture
def toy_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a model for the toy backend, whose file is put among those of the package."""
    package, model = tmp_path / "package", tmp_path / "model"
    package.mkdir()
    model.mkdir()
    shutil.copy(Path(__file__).with_name("toy_backend.py"), package)
    monkeypatch.setattr(targets, "__path__", [*targets.__path__, str(package)])
    config = {"model_type": "toy-recurrent", "seed": 3, "vocab_size": 265, "hidden_size": 32}
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture
def toy(toy_dir: Path) -> Target:
    return load_target(toy_dir, backend="toy_backend")


def test_backends_are_found_by_file(toy_dir: Path) -> None:
    assert set(backends()) == {"native", "hf", "jax", "mlx", "toy_backend"}
    with pytest.raises(
        ValueError, match=r"backend is 'jvm'; use one of \['auto', 'hf', 'jax', 'mlx', 'native', 'toy_backend'\]"
    ):
        load_target("bundled", backend="jvm")


def test_a_backend_that_does_not_know_a_model_says_so(toy_dir: Path, tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match="The toy_backend backend cannot run .*: it runs toy-recurrent only"):
        load_target(tiny_target_dir, backend="toy_backend")
    assert load_target(tiny_target_dir).backend == "native"


@pytest.mark.parametrize(
    ("name", "drafting"),
    [
        pytest.param(name, drafting, marks=pytest.mark.slow if (kind + way) % 2 else ())
        for kind, name in enumerate(["lookup", "dflash"])
        for way, drafting in enumerate(
            [Drafting(None), Drafting(tree_budget=9), Drafting("auto"), Drafting(None, sampled=True)],
        )
    ],
)
def test_drafting_changes_no_answer(toy: Target, tiny_drafter_dir: Path, name: str, drafting: Drafting) -> None:
    drafter = load_drafter(tiny_drafter_dir if name == "dflash" else name, target=toy)
    none = load_drafter("none", target=toy)
    alone = [Engine(toy, none).generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    assert len({tuple(answer) for answer in alone}) == len(PROMPTS) and all(len(set(answer)) > 5 for answer in alone)
    engine = Engine(toy, drafter, 3, drafting, prefix_tokens=500, prefill_tokens=32)
    assert [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)] == alone
    turn = PROMPTS[0] + alone[0] + [8, 9]  # states cannot be cut, so nothing is taken from the turn before
    [again] = Engine(toy, none).generate([turn], GREEDY)
    assert engine.generate([turn], GREEDY)[0].token_ids == again.token_ids


def test_a_backend_without_trees_is_not_asked_for_any(toy: Target) -> None:
    toy.has_trees = False
    with pytest.raises(
        ValueError, match="tree_budget must be 0 with the backend toy_backend, which scores chains only; got 4"
    ):
        Engine(toy, load_drafter("lookup", target=toy), drafting=Drafting(tree_budget=4))


def test_logprobs_and_bounds_need_nothing_more(toy: Target) -> None:
    """Its sequences cannot be truncated. The prompt is read in parts, next to other requests."""
    drafter = load_drafter("lookup", target=toy)
    params = SamplingParams(40, logprobs=2, prompt_logprobs=1)
    [alone] = Engine(toy).generate([PROMPTS[3]], params)
    with Engine(toy, drafter, 4, Drafting(tree_budget=9), prefill_tokens=32) as engine:
        bounds = (None, RequestDrafting(enabled=False), RequestDrafting(block_size=3), RequestDrafting(tree_budget=0))
        requests = [engine.submit(PROMPTS[3], params, drafting=bound) for bound in bounds]
        for actual in (request.result().checked() for request in requests):
            assert actual.token_ids == alone.token_ids
            for ours, theirs in ((actual.logprobs, alone.logprobs), (actual.prompt_logprobs, alone.prompt_logprobs)):
                assert ours and theirs and len(ours) == len(theirs)
                for one, other in zip(ours, theirs, strict=True):
                    assert (one is None) == (other is None)
                    if one and other:
                        assert one.token_id == other.token_id and one.logprob == pytest.approx(other.logprob, abs=1e-4)
