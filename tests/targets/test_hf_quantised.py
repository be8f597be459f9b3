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
from blockdraft_tools.quantize.run import quantize
from blockdraft_tools.quantize.settings import QuantizeSettings

PROMPTS = [[5, 9, 3, 5, 9], [4, 60, 33, 12, 9, 4, 60]]
GREEDY = SamplingParams(10, ignore_eos=True)


def by_torchao(family: str, folder: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    plain, how = write_model(family, folder / "plain"), TorchAoConfig(torchao.Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=how, dtype="float32").save_pretrained(
        folder / "few"
    )


def by_compressed_tensors(family: str, folder: Path) -> None:
    pytest.importorskip("compressed_tensors")
    quantize(write_model(family, folder / "plain"), folder / "few", QuantizeSettings(bits=8, tables="keep"))


@pytest.fixture(
    params=[
        pytest.param((by_torchao, "llama"), marks=pytest.mark.slow, id="torchao-llama"),
        pytest.param((by_torchao, "qwen3_moe"), marks=pytest.mark.slow, id="torchao-qwen3_moe"),
        pytest.param((by_torchao, "bamba"), marks=pytest.mark.slow, id="torchao-bamba"),
        pytest.param((by_compressed_tensors, "llama"), id="compressed-tensors-llama"),
    ]
)
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> HFTarget:
    """Return a quantized target with attention only, with experts, or with recurrent states."""
    write, family = request.param
    write(family, tmp_path)
    target = load_target(tmp_path / "few", dtype="float32", device="cpu", backend="hf")
    assert isinstance(target, HFTarget)
    assert target.architecture["quantization_config"]
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
