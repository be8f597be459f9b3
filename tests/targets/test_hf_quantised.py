"""Targets that transformers quantises: drafted answers are those of the same target's plain decoding."""

from pathlib import Path

import pytest
from test_exact import Oracle
from tiny_families import write_model
from transformers import AutoModelForCausalLM, TorchAoConfig

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import load_target
from blockdraft.targets.hf import HFTarget
from blockdraft.types import Drafting, SamplingParams

PROMPTS = [[5, 9, 3, 5, 9], [4, 60, 33, 12, 9, 4, 60]]
GREEDY = SamplingParams(10, ignore_eos=True)


@pytest.fixture(params=["llama", "qwen3_moe", "bamba"])
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> HFTarget:
    """With weights in int8, of families with attention alone, with experts, and with states; loaded from its folder."""
    torchao = pytest.importorskip("torchao.quantization")
    how = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        write_model(request.param, tmp_path / "plain"), quantization_config=how, dtype="float32"
    )
    model.save_pretrained(tmp_path / "int8")
    target = load_target(tmp_path / "int8", "float32", "cpu", "hf")
    assert isinstance(target, HFTarget)
    kinds = {type(weight).__name__ for weight in target.model.parameters()}
    assert any("Int8" in kind or "Affine" in kind for kind in kinds), kinds
    return target


def test_drafting_changes_no_answer(quantised: HFTarget, tiny_drafter_dir: Path) -> None:
    none = load_drafter("none", target=quantised)
    alone = [Engine(quantised, none).generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    oracle = Oracle(alone)
    oracle.texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, alone, strict=True)]
    for drafter in (oracle, load_drafter(tiny_drafter_dir, target=quantised)):
        for budget in (0, 6):
            with Engine(quantised, drafter, 2, Drafting(tree_budget=budget)) as engine:
                completions = engine.generate(PROMPTS, GREEDY)
            assert [completion.checked().token_ids for completion in completions] == alone
            assert drafter is not oracle or max(max(each.stats.committed) for each in completions) > 2
