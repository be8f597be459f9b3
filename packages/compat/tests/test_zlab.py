"""z-lab's interface gives the tokens of greedy decoding in transformers, and keeps z-lab's contract."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from blockdraft import load_drafter
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.dflash2.drafter import DFlash2Drafter
from blockdraft.engine import Engine
from blockdraft.formats import Trained
from blockdraft.formats.zlab import read_checkpoint, write_checkpoint
from blockdraft.targets import load_target
from blockdraft.targets.hf import HFTarget
from blockdraft.types import SamplingParams
from blockdraft_compat import DFlash2DraftModel, DFlashDraftModel
from blockdraft_compat.zlab import spec_generate

PROMPT = [5, 17, 3, 80]


@pytest.fixture
def draft(drafter_dir: Path) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(drafter_dir)


@pytest.fixture
def drafter(model: PreTrainedModel, drafter_dir: Path) -> DFlashDrafter:
    loaded = load_drafter(drafter_dir, target=HFTarget(model))
    assert isinstance(loaded, DFlashDrafter)
    return loaded


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_equals_greedy_generate(model, draft, good_draft_tokens, greedy, count):
    output = draft.spec_generate(target=model, input_ids=torch.tensor([PROMPT]), max_new_tokens=count)
    assert output.dtype == torch.int64
    assert output.tolist() == [PROMPT + greedy(PROMPT, count)]


def test_positional_arguments_stand_in_zlabs_order(model, draft, greedy):
    answer = greedy(PROMPT, 20)
    first_end = answer.index(answer[8]) + 1
    output = draft.spec_generate(model, torch.tensor([PROMPT]), 20, [answer[8]], 0.0, 1.0, 0)
    assert output.tolist() == [PROMPT + answer[:first_end]]


def test_targets_and_lists_of_ids_are_taken_too(model, draft, greedy):
    output = spec_generate(draft, target=HFTarget(model), input_ids=PROMPT, max_new_tokens=9)
    assert output.tolist() == [PROMPT + greedy(PROMPT, 9)]


def test_ends_at_the_first_stop_token_and_keeps_it(model, draft, good_draft_tokens, greedy):
    answer = greedy(PROMPT, 40)
    stops = [answer[12], answer[25]]
    end = min(answer.index(stop) for stop in stops) + 1
    output = draft.spec_generate(model, torch.tensor([PROMPT]), 40, stops)
    assert output.tolist() == [PROMPT + answer[:end]]


@pytest.mark.parametrize("stops", [None, [], [200, -1]])  # none, or some that the model cannot yield
def test_the_models_own_end_tokens_do_not_count(model, draft, greedy, stops):
    answer = greedy(PROMPT, 20)
    target = HFTarget(model)
    target.eos_token_ids = frozenset(answer)
    output = draft.spec_generate(target, torch.tensor([PROMPT]), 20, stops)
    assert output.tolist() == [PROMPT + answer]


@pytest.mark.slow
def test_sampling_follows_torchs_seed_and_not_the_drafter(model, draft, good_draft_tokens):
    def sample(seed: int, **more: float) -> list[int]:
        torch.manual_seed(seed)
        output = draft.spec_generate(model, torch.tensor([PROMPT]), 20, temperature=1.0, **more)
        return output[0].tolist()

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(3)}) == 3
    assert sample(1, top_k=1) == sample(2, top_p=1e-6) == draft.spec_generate(model, PROMPT, 20)[0].tolist()


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        (torch.tensor([PROMPT, PROMPT]), "holds 2 prompts"),
        (torch.tensor(PROMPT), r"input_ids must be of shape .*, got \[4\]"),
        (torch.ones(1, 4), "float32"),
        ([PROMPT], "shape"),
        ([], "empty"),
    ],
)
def test_other_prompts_are_refused(model, draft, input_ids, message):
    with pytest.raises(ValueError, match=message):
        draft.spec_generate(model, input_ids, 5)


def test_a_drafter_of_another_target_is_refused(model, wide_drafter_dir):
    draft = DFlashDraftModel.from_pretrained(wide_drafter_dir)
    with pytest.raises(ValueError, match="vocab_size must be .*97, got 100"):
        draft.spec_generate(model, PROMPT, 5)


def test_target_of_another_type_is_refused(draft):
    with pytest.raises(ValueError, match="target is a str"):
        draft.spec_generate("folder", PROMPT, 5)


def test_from_pretrained_knows_of_rounding_in_training(drafter_dir, tmp_path):
    assert DFlashDraftModel.from_pretrained(drafter_dir).qat_bits is None
    write_checkpoint(tmp_path / "few", *read_checkpoint(drafter_dir), Trained(None, 4))
    assert DFlashDraftModel.from_pretrained(tmp_path / "few").qat_bits == 4


def test_from_pretrained_needs_no_target(drafter_dir):
    draft = DFlashDraftModel.from_pretrained(drafter_dir)
    assert (draft.block_size, draft.mask_token_id, draft.target_layer_ids) == (8, 96, [0, 2])
    assert draft.fc.weight.dtype == torch.float32
    assert not draft.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_from_pretrained_takes_a_dtype(model, drafter_dir, greedy, dtype):
    draft = DFlashDraftModel.from_pretrained(drafter_dir, dtype=dtype)
    assert draft.fc.weight.dtype == torch.bfloat16
    assert draft.spec_generate(model, PROMPT, 9)[0].tolist() == PROMPT + greedy(PROMPT, 9)


@pytest.mark.parametrize("dtype", ["int64", "bfloat17", torch.int64])
def test_from_pretrained_refuses_what_is_no_float_dtype(drafter_dir, dtype):
    with pytest.raises(ValueError, match="dtype must be float32, .*, got"):
        DFlashDraftModel.from_pretrained(drafter_dir, dtype=dtype)


def test_a_drafter_survives_a_call_with_a_target_of_another_dtype(model, drafter, half_model, greedy):
    spec_generate(drafter, target=half_model, input_ids=PROMPT, max_new_tokens=5)
    assert drafter.network.fc.weight.dtype == torch.float32
    output = spec_generate(drafter, target=model, input_ids=PROMPT, max_new_tokens=9)
    assert output[0].tolist() == PROMPT + greedy(PROMPT, 9)


def test_calls_leave_no_hooks_on_the_model(model, draft):
    draft.spec_generate(model, PROMPT, 5)
    assert not any(module._forward_hooks for module in model.modules())


def test_calls_leave_the_model_trainable(model, draft):
    own = copy.deepcopy(model).requires_grad_(True)
    frozen, *others = own.parameters()
    frozen.requires_grad_(False)
    draft.spec_generate(own, PROMPT, 5)
    assert not frozen.requires_grad and all(parameter.requires_grad for parameter in others)


def test_dflash2_has_the_same_call(tiny_target_dir: Path, tiny_dflash2_dir: Path, tiny_drafter_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    drafter = load_drafter(tiny_dflash2_dir, target=target)
    assert isinstance(drafter, DFlash2Drafter)
    draft = DFlash2DraftModel.from_pretrained(tiny_dflash2_dir)
    [expected] = Engine(target, load_drafter("none", target=target)).generate(
        [PROMPT], SamplingParams(15, ignore_eos=True)
    )
    for given in (draft, drafter):
        output = spec_generate(given, target=target, input_ids=PROMPT, max_new_tokens=15)
        assert output.tolist() == [PROMPT + expected.token_ids]
    for kind, folder in ((DFlashDraftModel, tiny_dflash2_dir), (DFlash2DraftModel, tiny_drafter_dir)):
        with pytest.raises(ValueError, match=f"does not hold a {kind.__name__}; use the class"):
            kind.from_pretrained(folder)
