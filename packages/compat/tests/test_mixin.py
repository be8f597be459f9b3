"""`DFlashGenerationMixin.generate` gives the tokens of transformers' greedy `generate`, with any drafting."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from copies import copy_with
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.targets.hf import HFTarget
from blockdraft_compat import DFlashConfig, DFlashGenerationMixin

PROMPTS = [[5, 17, 3, 80, 44, 9], [61, 2], [30, 31, 32, 33]]
PAD = 95


def padded(prompts: list[list[int]], side: str) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    fill = [([PAD] * (width - len(p)), [0] * (width - len(p)), p, [1] * len(p)) for p in prompts]
    ids = [pad + p if side == "left" else p + pad for pad, _, p, _ in fill]
    mask = [no + yes if side == "left" else yes + no for _, no, _, yes in fill]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.fixture
def config(drafter_dir: Path) -> DFlashConfig:
    return DFlashConfig(drafter=drafter_dir)


@pytest.fixture
def mixin(model: PreTrainedModel, config: DFlashConfig) -> DFlashGenerationMixin:
    return DFlashGenerationMixin(model, config=config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "use_dflash"),
    [("left", True), pytest.param("right", True, marks=pytest.mark.slow), ("right", False)],
)
def test_equals_greedy_generate_for_padded_batches(mixin, good_draft_tokens, greedy, side, use_dflash):
    inputs = padded(PROMPTS, side)
    output = mixin.generate(**inputs, max_new_tokens=30, use_dflash=use_dflash)
    assert output.dtype == torch.int64
    assert output[:, :6].tolist() == inputs["input_ids"].tolist()
    assert output[:, 6:].tolist() == [greedy(prompt, 30) for prompt in PROMPTS]
    assert len(mixin.last_stats) == 3
    assert all((stats.tau > 1.5) == use_dflash for stats in mixin.last_stats)


def test_equals_the_tensor_that_generate_returns(model, mixin):
    """End tokens, padding and layout are the same too."""
    inputs = padded(PROMPTS, "left")
    answers = mixin.generate(**inputs, max_new_tokens=30)[:, 6:].tolist()
    ends = [answers[0][4], answers[2][14]]
    options = {"max_new_tokens": 30, "eos_token_id": ends, "pad_token_id": PAD}
    theirs = model.generate(**inputs, **options, do_sample=False)
    assert PAD in theirs[:, 6:]
    assert torch.equal(mixin.generate(**inputs, **options), theirs)


def test_without_a_pad_token_an_end_token_fills_up(mixin, greedy):
    answer = greedy(PROMPTS[0], 20)
    other = greedy(PROMPTS[1], 20)
    end = next(token for token in answer if token not in other)
    output = mixin.generate(**padded(PROMPTS[:2], "left"), max_new_tokens=20, eos_token_id=end)
    count = answer.index(end) + 1
    assert output[0, 6:].tolist() == answer[:count] + [end] * (20 - count)
    assert output[1, 6:].tolist() == other


def test_the_models_own_end_token_counts_unless_another_is_given(model, config, greedy):
    answer = greedy(PROMPTS[0], 20)
    target = HFTarget(model)
    target.eos_token_ids = frozenset({answer[3]})
    mixin = DFlashGenerationMixin(target, config)
    prompt = torch.tensor(PROMPTS[:1])
    assert mixin.generate(prompt, max_new_tokens=20)[0, 6:].tolist() == answer[: answer.index(answer[3]) + 1]
    for none in ([], 93):
        assert mixin.generate(prompt, max_new_tokens=20, eos_token_id=none)[0, 6:].tolist() == answer


@pytest.mark.parametrize(
    ("block_size", "steps", "schedule"),
    [
        (4, 2, "cosine"),
        pytest.param(None, 3, "linear", marks=pytest.mark.slow),
    ],
)
def test_refinement_does_not_change_the_output(model, config, good_draft_tokens, greedy, steps, schedule, block_size):
    config = replace(config, block_size=block_size, diffusion_steps=steps, noise_schedule=schedule)
    mixin = DFlashGenerationMixin(model, config)
    output = mixin.generate(**padded(PROMPTS, "left"), max_new_tokens=20)
    assert output[:, 6:].tolist() == [greedy(prompt, 20) for prompt in PROMPTS]
    assert max(max(stats.drafted) for stats in mixin.last_stats) == (block_size or 8) - 1


def test_sampling_only_where_asked(mixin, good_draft_tokens):
    inputs = padded(PROMPTS, "left")
    once = mixin.generate(**inputs, max_new_tokens=15, do_sample=True, temperature=2.0, top_k=50, top_p=0.9, seed=3)
    plain = mixin.generate(
        **inputs, max_new_tokens=15, do_sample=True, temperature=2.0, top_k=50, top_p=0.9, seed=3, use_dflash=False
    )
    greedy = mixin.generate(**inputs, max_new_tokens=15)
    assert torch.equal(once, plain)
    assert not torch.equal(once, greedy)
    assert torch.equal(mixin.generate(**inputs, max_new_tokens=15, do_sample=True, top_k=1), greedy)


def test_sampling_values_without_sampling_are_reported(mixin, greedy):
    prompt = torch.tensor(PROMPTS[:1])
    with pytest.warns(UserWarning, match="temperature=0.7, top_p=0.9 has no effect"):
        output = mixin.generate(prompt, max_new_tokens=5, temperature=0.7, top_p=0.9, top_k=0)
    assert output[0, 6:].tolist() == greedy(PROMPTS[0], 5)
    mixin.generate(prompt, max_new_tokens=5, temperature=0.0, top_p=1.0, top_k=0)  # these change nothing


def test_unknown_arguments_are_refused_by_name(mixin):
    with pytest.raises(TypeError, match="num_beams"):
        mixin.generate(torch.tensor(PROMPTS[:1]), num_beams=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.tensor([5, 6])}, "shape"),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, "no prompt"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "empty"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask must be of input_ids' shape"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "attention_mask hides tokens inside row 0"),
        ({"attention_mask": torch.zeros(1, 4)}, "attention_mask hides all of row 0"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=False"),
        ({"do_sample": True, "temperature": -1.0}, "temperature must be .*, got -1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 1000}, "exceed the target's context of 128"),
    ],
)
def test_bad_arguments_are_refused(mixin, arguments, message):
    with pytest.raises(ValueError, match=message):
        mixin.generate(**{"input_ids": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 5, **arguments})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size must be .*got 0"),
        ({"diffusion_steps": 0}, "diffusion_steps must be .*got 0"),
        ({"noise_schedule": "square"}, r"must be one of \['cosine', 'linear'\], got 'square'"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DFlashConfig(**changes)


def test_configs_that_do_not_fit_the_drafter_are_refused(model, config, wide_drafter_dir):
    with pytest.raises(ValueError, match="trained for at most 8"):
        DFlashGenerationMixin(model, replace(config, block_size=9))
    with pytest.raises(ValueError, match="vocab_size must be .*got 100"):
        DFlashGenerationMixin(model, replace(config, drafter=wide_drafter_dir))


def test_the_base_model_shows_through(model, mixin):
    assert mixin.base_model is model
    assert mixin.config is model.config
    assert mixin.generation_config is model.generation_config
    assert (mixin.device, mixin.dtype) == (model.device, model.dtype)


@pytest.mark.parametrize("end", [-1, 97, 5000])
def test_an_end_token_that_the_model_cannot_yield_ends_nothing(mixin, greedy, end):
    output = mixin.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=9, eos_token_id=end)
    assert output[0, 6:].tolist() == greedy(PROMPTS[0], 9)


@pytest.mark.parametrize("use_dflash", [True, False])
def test_a_call_takes_no_more_memory_than_its_prompts_need(mixin, use_dflash):
    asked, target, drafter = [], mixin.target, mixin.drafter
    mixin.target = copy_with(target, new_cache=lambda *given: [asked.append(given[1]), target.new_cache(*given)][1])
    mixin.drafter = copy_with(drafter, new_state=lambda *given: [asked.append(given[1]), drafter.new_state(*given)][1])
    mixin.generate(**padded(PROMPTS, "left"), max_new_tokens=30, use_dflash=use_dflash)
    most = 3 * mixin.target.row_slots(6 + 30 + 1 + mixin.drafter.block_size)
    assert asked and all(3 * 37 <= slots <= most for slots in asked)
