"""Answers of an engine with sampled draft tokens have the target's distribution, not just a plausible one."""

from pathlib import Path

import pytest
import torch
from exact_distribution import LENGTH, NOISE, PROMPT, ROWS, V, surprise, write_model
from thinned import LONG
from transformers import LlamaForCausalLM

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.formats.zlab import write_checkpoint
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.targets import load_target
from blockdraft.types import Drafting, SamplingParams
from blockdraft_diffusion.flow.network import FlowConfig, FlowNetwork


def write_flow(folder: Path, steps: int) -> Path:
    """A random flow map for such a model."""
    layers = (LayerAttention(False, None),)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8, "layers": layers}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": V, "block_size": LENGTH}
    shape |= {"mask_token_id": 2, "target_layers": (0,), "num_target_layers": 1, "rope_theta": 10000.0}
    config = FlowConfig(**shape, noise_std=1.0, diffusion_steps=steps)  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(4)
        network = FlowNetwork(config)
        torch.nn.init.normal_(network.state_proj.weight)
        torch.nn.init.normal_(network.time_proj.weight, std=0.3)
    write_checkpoint(folder, config, network.state_dict())
    return folder


# Of a few pairs of seeds this one gives reused numbers away with the fewest rows.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "budget", "flow"),
    [("", 0, False), pytest.param("lookup+", 0, False, marks=LONG), ("lookup+", 12, False), ("", 0, True)],
    ids=["alone", "chain", "tree", "flow map"],
)
def test_answers_with_sampled_draft_tokens_have_the_distribution_of_the_target(
    tmp_path: Path, others: str, budget: int, flow: bool
) -> None:
    """The drafter is another model, so that many draft tokens are rejected; which ones must not depend on how they were
    sampled, so the numbers that test them are others than those that drew them. Combined with another drafter, whose
    chain is proposed must not depend on it either."""
    target = load_target(write_model(tmp_path / "target", 2))
    folder = write_flow(tmp_path / "drafter", 2) if flow else write_model(tmp_path / "drafter", 3)
    drafter = load_drafter(f"{others}{folder}", target=target)
    engine = Engine(target, drafter, max_batch_size=500, drafting=Drafting(None, budget, sampled=True))
    params = [SamplingParams(LENGTH, 1.0, seed=seed, ignore_eos=True) for seed in range(ROWS)]
    completions = engine.generate([PROMPT] * ROWS, params)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "target").eval()
    assert abs(surprise([tuple(completion.token_ids) for completion in completions], model)) < NOISE
    draft_tokens = [from_draft for completion in completions for from_draft in completion.drafted[1:]]
    assert 0.2 < sum(draft_tokens) / len(draft_tokens) < 0.9  # both happen
