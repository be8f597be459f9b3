"""`model.generate(..., custom_generate=FOLDER, drafter=...)` gives the same tokens as without them."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, MinLengthLogitsProcessor, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from blockdraft.errors import UsageError
from blockdraft_compat import generate as custom

PAD, EOS = 95, 94
PROMPTS = torch.tensor([[PAD, PAD, 5, 17, 3, 80], [9, 8, 61, 2, 30, 31]])
MASK = (PROMPTS != PAD).long()


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]) -> None:
    """Keep transformers' copies of the folder's code in a folder of the test's own."""
    constants("transformers.dynamic_module_utils", HF_MODULES_CACHE=str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


@pytest.fixture
def decode(model: PreTrainedModel, drafter_dir: Path, tmp_path: Path) -> Callable[..., Tensor]:
    """Return a function that calls `model.generate` with a new folder."""
    custom.write_custom_generate(tmp_path / "folder")

    def generate(inputs: Tensor = PROMPTS, of: PreTrainedModel = model, **given: Any) -> Tensor:
        given = {"drafter": str(drafter_dir), **given}
        return of.generate(inputs, custom_generate=str(tmp_path / "folder"), trust_remote_code=True, **given)

    return generate


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_greedy_tokens_are_those_of_generate(
    model: PreTrainedModel, decode: Callable[..., Tensor], good_draft_tokens: None
) -> None:
    answer = model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=24)
    ends = [int(answer[0, 12]), int(answer[1, 18])]
    for given in (
        {"max_new_tokens": 24},
        {"max_new_tokens": 24, "eos_token_id": ends, "pad_token_id": PAD},
        {"max_length": 20},
        {},  # 20 new tokens
        {"max_new_tokens": 9, "repetition_penalty": 1.7, "do_sample": False},
        {"generation_config": GenerationConfig(max_new_tokens=7, eos_token_id=ends[0], pad_token_id=PAD)},
    ):
        theirs = model.generate(PROMPTS, attention_mask=MASK, **given)
        assert torch.equal(decode(attention_mask=MASK, **given), theirs), given
    assert PAD in decode(attention_mask=MASK, max_new_tokens=24, eos_token_id=ends, pad_token_id=PAD)[:, 6:]


def test_padding_is_found_as_transformers_finds_it(model: PreTrainedModel, decode: Callable[..., Tensor]) -> None:
    given = {"max_new_tokens": 8, "pad_token_id": PAD, "eos_token_id": EOS}
    assert torch.equal(decode(**given), model.generate(PROMPTS, **given))
    assert not torch.equal(decode(**given), decode(max_new_tokens=8))


def test_a_loaded_drafter_is_reused_for_its_model_only(
    model: PreTrainedModel, drafter_dir: Path, decode: Callable[..., Tensor], tmp_path: Path
) -> None:
    copied, twin = shutil.copytree(drafter_dir, tmp_path / "copy"), copy.deepcopy(model)
    first = decode(of=twin, max_new_tokens=4, drafter=str(copied))
    shutil.rmtree(copied)
    assert torch.equal(first, decode(of=twin, max_new_tokens=4, drafter=str(copied)))
    with pytest.raises(UsageError, match="copy"):
        decode(of=copy.deepcopy(twin), max_new_tokens=4, drafter=str(copied))


def test_sampling(decode: Callable[..., Tensor]) -> None:
    given = {"max_new_tokens": 12, "do_sample": True, "temperature": 2.0, "top_k": 30, "attention_mask": MASK}
    entry, same, other = (decode(**given, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(entry, same) and not torch.equal(entry, other)
    twice = decode(**given, seed=1, num_return_sequences=2)
    assert twice.shape[0] == 4 and torch.equal(twice[0, 6:], entry[0, 6:]) and not torch.equal(twice[0], twice[1])
    torch.manual_seed(4)
    first = decode(**given)
    assert not torch.equal(first, decode(**given))
    torch.manual_seed(4)
    assert torch.equal(first, decode(**given))


@pytest.mark.filterwarnings("error")
def test_a_model_that_was_cast_meanwhile_is_drafted_for_again(
    model: PreTrainedModel, decode: Callable[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    twin = copy.deepcopy(model)
    decode(of=twin, max_new_tokens=4)
    answer = decode(of=twin.to(torch.bfloat16), max_new_tokens=12)
    assert torch.equal(answer, twin.generate(PROMPTS, max_new_tokens=12)) and not caplog.records


def test_a_model_in_training_stays_so_and_answers_without_dropout(
    model: PreTrainedModel, decode: Callable[..., Tensor]
) -> None:
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        layer.self_attn.attention_dropout = 0.9
    for _ in range(2):
        assert torch.equal(decode(of=twin.train(), max_new_tokens=8), decode(max_new_tokens=8)) and twin.training


def test_folders_with_a_plus_in_their_name_are_joined(
    drafter_dir: Path, decode: Callable[..., Tensor], tmp_path: Path
) -> None:
    (tmp_path / "a+b").symlink_to(drafter_dir)
    joined = decode(max_new_tokens=8, drafter=f"lookup+{tmp_path / 'a+b'}")
    assert torch.equal(joined, decode(max_new_tokens=8))


class RecordingStreamer(BaseStreamer):
    def __init__(self) -> None:
        self.put_tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.put_tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streamer(decode: Callable[..., Tensor]) -> None:
    streamer = RecordingStreamer()
    answer = decode(PROMPTS[1:], max_new_tokens=10, streamer=streamer)
    assert streamer.ended and streamer.put_tokens == answer[0].tolist()
    with pytest.raises(UsageError, match="2 prompts; a streamer takes one"):
        decode(max_new_tokens=4, streamer=RecordingStreamer())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drafter": None}, "drafter is not given"),
        ({"num_beams": 3}, "num_beams is 3, which is not supported"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate is True"),
        ({"stop_strings": ["a"]}, "stop_strings is"),
        ({"stop_strings": ["a"], "tokenizer": object()}, "stop_strings is"),
        ({"input_ids": PROMPTS}, "inputs and input_ids are both given"),
        ({"do_sample": True, "temperature": 0.0}, "temperature is 0 with do_sample=True"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be .*, got 0.0"),
        ({"min_new_tokens": 3}, "min_new_tokens is 3"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size is 2"),
        ({"logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(3, 1)])}, "logits_processor is not supp"),
        ({"prefix_allowed_tokens_fn": lambda *_: [1]}, "prefix_allowed_tokens_fn is not supported"),
        ({"max_length": 6}, "max_length is 6 and the prompt has 6 tokens"),
        ({"drafter": "no/such"}, "no/such is no folder here"),
    ],
)
def test_unsupported_arguments_are_refused(decode: Callable[..., Tensor], given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decode(**given)


def test_the_folders_own_drafter(model: PreTrainedModel, drafter_dir: Path, tmp_path: Path) -> None:
    custom.write_custom_generate(tmp_path / "own", str(drafter_dir))
    answer = model.generate(PROMPTS, custom_generate=str(tmp_path / "own"), trust_remote_code=True, max_new_tokens=5)
    assert answer.shape == (2, 11)
    assert (tmp_path / "own/custom_generate/requirements.txt").read_text().startswith("blockdraft-compat>=")
