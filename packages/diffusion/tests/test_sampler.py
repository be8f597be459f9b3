"""Block-by-block sampling."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from copies import copy_with

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import NumbersError, UsageError
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams
from blockdraft_diffusion.model import DiffusionModel
from blockdraft_diffusion.sampler import BlockChunk, Sampler
from blockdraft_diffusion.settings import SampleSettings
from blockdraft_diffusion.strategies import STRATEGIES

PROMPTS = [[40, 41, 42], [50, 51, 52, 53, 54, 55, 56, 57], [60], [70, 71, 72, 73, 74, 75]]


def completions(
    model: DiffusionModel, prompts: list[Any], stop: tuple[str, ...] = (), **settings: Any
) -> list[tuple[list[int], str, BlockChunk]]:
    """Return the tokens, text and last chunk of each completion."""
    results: list[Any] = [([], "", None) for _ in prompts]
    for chunk in Sampler(model, SampleSettings(**settings), stop=stop).stream(prompts):
        tokens, text, _ = results[chunk.index]
        results[chunk.index] = tokens + list(chunk.token_ids), text + chunk.text, chunk
    return results


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_blocks_of_one_token_match_the_causal_model(model_of: Any, tiny_target_dir: Path, temperature: float) -> None:
    target = load_target(tiny_target_dir, device="cpu", compile="off")
    engine = Engine(target, load_drafter("none", target=target))
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, logit_bias={3: -100})
    [ours] = completions(model_of(1), [PROMPTS[1]], max_new_tokens=24, ignore_eos=True)
    [theirs] = engine.generate([PROMPTS[1]], params)
    engine.close()
    if temperature == 0:
        assert ours[0] == list(theirs.token_ids) and ours[1] == theirs.text
        assert ours[2].forwards == 23  # one pass per token, except the last
    else:
        [first], [same], [other] = (
            completions(model_of(1), [PROMPTS[1]], max_new_tokens=24, ignore_eos=True, temperature=1.0, seed=seed)
            for seed in (1, 1, 2)
        )
        assert first[0] == same[0] != other[0] != ours[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "shift"),
    [
        pytest.param(strategy, shift, marks=() if shift == (place % 2 == 0) else pytest.mark.slow)
        for place, strategy in enumerate(STRATEGIES)
        for shift in (True, False)
    ],
)
def test_tokens_do_not_depend_on_the_batch(model_of: Any, strategy: str, shift: bool) -> None:
    """A batch of prompts of any length gives each prompt the tokens that it gets alone; prompt i has the seed + i."""
    settings = {"max_new_tokens": 13, "temperature": 0.7, "strategy": strategy, "ignore_eos": True}
    model = model_of(4, shift)
    batch = completions(model, PROMPTS, seed=5, **settings)
    for index, prompt in enumerate(PROMPTS):
        [alone] = completions(model, [prompt], seed=5 + index, **settings)
        assert alone[:2] == batch[index][:2] and len(alone[0]) == 13
        assert alone[2].finish_reason == "length" and 3 not in alone[0]


@pytest.mark.parametrize("shift", [True, False])
def test_number_of_passes(model_of: Any, shift: bool) -> None:
    """If each pass unmasks one token, there is one pass per token and one per block to commit."""
    model = model_of(4, shift)
    calls, hidden = [], model.network.hidden
    model = replace(
        model, network=copy_with(model.network, hidden=lambda *args: calls.append(args[0].shape) or hidden(*args))
    )
    seen: list[tuple[int, ...]] = []
    settings = SampleSettings(max_new_tokens=8, strategy="left_to_right", ignore_eos=True)
    *_, last = Sampler(model, settings).stream([PROMPTS[1]], lambda index, block: seen.append(tuple(block)))
    assert last.forwards == 8 + 1 == len(calls) - 1  # and one over the prompt
    assert [block.count(None) for block in seen] == [3, 2, 1, 0] * 2
    calls.clear()
    [fast] = completions(model, [PROMPTS[1]], max_new_tokens=8, strategy="threshold=0", ignore_eos=True)
    assert fast[2].forwards == 3 == len(calls) - 1 and len(fast[0]) == 8


def test_prompt_fills_part_of_the_first_block(model_of: Any) -> None:
    seen: list[tuple[int | None, ...]] = []
    sampler = Sampler(model_of(4), SampleSettings(max_new_tokens=2, strategy="left_to_right", ignore_eos=True))
    [chunk] = sampler.stream([[40, 41, 42, 43, 44]], lambda index, block: seen.append(tuple(block)))
    assert [block[0] for block in seen] == [44, 44] and seen[-1][3] is None
    assert chunk.token_ids == seen[-1][1:3]  # cut within a block


def ending(model: DiffusionModel, token: int) -> DiffusionModel:
    """Return the model as one that predicts this token from position 10 on."""
    hidden, logits = model.network.hidden, model.network.logits

    def marked(tokens: Any, positions: Any, *rest: Any) -> Any:
        states = hidden(tokens, positions, *rest)
        return torch.cat([states, (positions >= 10).float().expand(len(states), -1)[..., None]], dim=-1)

    def biased(states: Any) -> Any:
        values = logits(states[..., :-1])
        values[..., token] = torch.where(states[..., -1] > 0, 1e4, -1e4)
        return values

    return replace(model, network=copy_with(model.network, hidden=marked, logits=biased))


@pytest.mark.parametrize("strategy", ["left_to_right", "threshold=0"])
def test_each_sequence_ends_at_its_end_token(model_of: Any, strategy: str) -> None:
    """The end token is in the tokens but not in the text; other sequences continue."""
    model = ending(model_of(4, False), 2)
    results = completions(model, PROMPTS, max_new_tokens=16, strategy=strategy)
    for prompt, (tokens, text, chunk) in zip(PROMPTS, results, strict=True):
        assert len(prompt) + len(tokens) == 11 and tokens[-1] == 2 and chunk.finish_reason == "stop"
        assert text == model.text.tokenizer.decode(tokens[:-1])
    longer = completions(model, PROMPTS, max_new_tokens=16, strategy=strategy, ignore_eos=True)
    assert all(len(tokens) == 16 and chunk.finish_reason == "length" for tokens, _, chunk in longer)


def test_end_token_as_padding_token(model_of: Any) -> None:
    """Prompts may contain the end token, even if it is the padding token too."""
    model = model_of(4, False)
    model.text.tokenizer.pad_token = "<|im_end|>"
    prompts = [[2, 40, 2], [40, 2, 41, 42, 2, 43]]
    batch = completions(model, prompts, max_new_tokens=9, seed=0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        [alone] = completions(model, [prompt], max_new_tokens=9, seed=index, ignore_eos=True)
        assert alone[0] == batch[index][0]


def test_stop_strings(model_of: Any) -> None:
    [plain] = completions(model_of(4), [PROMPTS[1]], max_new_tokens=24, ignore_eos=True)
    part = plain[1][5:7]
    [cut] = completions(model_of(4), [PROMPTS[1]], (part,), max_new_tokens=24, ignore_eos=True)
    assert cut[1] == plain[1][: plain[1].index(part)] and cut[2].finish_reason == "stop"
    assert plain[0][: len(cut[0])] == cut[0]


def test_text_prompts_use_the_chat_template(model_of: Any) -> None:
    model = model_of(4)
    chat = model.text.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    [from_text], [from_chat] = (completions(model, [prompt], max_new_tokens=6) for prompt in ("hi", chat))
    assert from_text[0] == from_chat[0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "The prompt is empty"),
        ([40, 3], r"The prompt contains the mask token \(id 3\)"),
        ([40, 9999], "The prompt contains the token id 9999"),
        ([40] * 250, "The prompt's 250 tokens and max_new_tokens 8, in blocks of 4, exceed .* 256; ask for at most 6"),
        ([40] * 256, "exceed the model's context of 256; shorten the prompt"),
    ],
)
def test_bad_prompts(model_of: Any, prompt: list[int], message: str) -> None:
    """Invalid prompts raise before anything is sampled."""
    with pytest.raises(UsageError, match=message):
        Sampler(model_of(4), SampleSettings(max_new_tokens=8)).stream([[40], prompt])


def test_non_finite_numbers(model_of: Any) -> None:
    model = model_of(4)
    model = replace(
        model, network=copy_with(model.network, logits=lambda states: states.new_full((len(states), 265), torch.nan))
    )
    with pytest.raises(NumbersError, match="computes numbers that are not finite; its weights are too large"):
        list(Sampler(model, SampleSettings()).stream([[40]]))
    model.network.to(torch.bfloat16)
    with pytest.raises(NumbersError, match="computes numbers that are not finite; load it as float32"):
        list(Sampler(model, SampleSettings()).stream([[40]]))
    model.network.model.norm.weight.data[0] = torch.inf
    with pytest.raises(NumbersError, match="weight model.norm.weight is not finite; copy or create the model again"):
        list(Sampler(model, SampleSettings()).stream([[40]]))
    with pytest.raises(UsageError, match="strategy is 'x'"):
        Sampler(model, SampleSettings(strategy="x"))


def test_waiting_prompts_get_the_same_tokens(model_of: Any) -> None:
    """A waiting prompt takes the place of a sequence as soon as that ends."""
    model = model_of(4)
    hidden, sizes = model.network.hidden, []
    model = replace(
        model, network=copy_with(model.network, hidden=lambda *args: sizes.append(len(args[0])) or hidden(*args))
    )
    settings = {"max_new_tokens": 9, "seed": 5, "temperature": 0.7, "ignore_eos": True}
    batch = completions(model, PROMPTS, **settings)
    assert max(sizes) == 4
    sizes.clear()
    queued = completions(model, PROMPTS, batch_size=2, **settings)
    assert max(sizes) == 2
    assert [result[:2] for result in queued] == [result[:2] for result in batch]
    sampler = Sampler(model, SampleSettings(batch_size=1, **settings))
    ended = [chunk.index for chunk in sampler.stream(PROMPTS) if chunk.finish_reason]
    assert ended == [0, 1, 2, 3] and all(sampler.history)


def test_streams_of_one_sampler_are_independent(model_of: Any) -> None:
    """Streams may be interleaved."""
    sampler = Sampler(model_of(4), SampleSettings(max_new_tokens=12, seed=1, ignore_eos=True))
    alone = [[chunk.token_ids for chunk in sampler.stream([prompt])] for prompt in PROMPTS[:2]]
    streams = sampler.stream(PROMPTS[:1]), sampler.stream(PROMPTS[1:2])
    interleaved: list[Any] = [[next(stream).token_ids] for stream in streams]
    for tokens, stream in zip(interleaved, streams, strict=True):
        tokens += [chunk.token_ids for chunk in stream]
    assert interleaved == alone


# Gaps


def filled(model: DiffusionModel, texts: list[list[int | None]], **settings: Any) -> tuple[list[list[int]], Sampler]:
    sampler = Sampler(model, SampleSettings(seed=3, **settings))
    results: list[list[int]] = [[] for _ in texts]
    for chunk in sampler.fill(texts):
        results[chunk.index] += chunk.token_ids
    return results, sampler


GAPPED = [
    [40, 41, 42, None, None, None, 50, 51, 52, 53, None, 60],
    [70, *[None] * 6],
    [40, 41, 42, 43, 44, None, 45, 46, 47],
]


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("strategy", ["left_to_right", "threshold=0", "first_hitting"])
def test_only_gaps_are_filled(model_of: Any, shift: bool, strategy: str) -> None:
    """Texts of any length are filled in one batch, and keep their lengths."""
    model = model_of(4, shift)
    results, sampler = filled(model, GAPPED, strategy=strategy)  # type: ignore[arg-type]
    for index, (inputs, tokens) in enumerate(zip(GAPPED, results, strict=True)):
        assert len(tokens) == len(inputs) and not {2, 3} & {*tokens}  # no end token, no mask token
        assert all(before in (None, after) for before, after in zip(inputs, tokens, strict=True))
        alone = Sampler(model, SampleSettings(seed=3 + index, strategy=strategy))
        assert [token for chunk in alone.fill([inputs]) for token in chunk.token_ids] == tokens  # type: ignore[list-item]
        assert sampler.inputs[index] == inputs and all(step.unmasked for step in sampler.history[index])
        assert all(step.begin + i < len(inputs) for step in sampler.history[index] for i in step.unmasked)


def test_gaps_get_no_end_token(model_of: Any) -> None:
    """No end token is sampled, even if it is the most probable token of each gap."""
    model = model_of(4)
    [[_, *likeliest]] = filled(model, [[40, None, None]])[0]
    ending = replace(model, text=replace(model.text, eos_token_ids=frozenset(likeliest)))
    [[_, *others]] = filled(ending, [[40, None, None]])[0]
    assert len(others) == 2 and not {*likeliest} & {*others}


def test_end_tokens_outside_the_vocabulary_are_ignored(model_of: Any) -> None:
    """Generation configurations of models with a cut vocabulary have such tokens."""
    model = model_of(4)
    whole = filled(model, [[40, None, None]])[0]
    more = replace(model, text=replace(model.text, eos_token_ids=frozenset({2, 100_000})))
    assert filled(more, [[40, None, None]])[0] == whole


@pytest.mark.parametrize("shift", [True, False])
def test_gap_depends_on_its_block_and_the_blocks_before(model_of: Any, shift: bool) -> None:
    model = model_of(4, shift)

    def logits_of(text: list[int | None]) -> Any:
        calls, logits = [], model.network.logits
        network = copy_with(model.network, logits=lambda states: calls.append(logits(states)) or calls[-1])
        filled(replace(model, network=network), [text], strategy="left_to_right")
        [values] = calls
        return values

    original = logits_of([40, 41, 42, 43, 44, None, 45, 46, 47, 48])
    after_block = logits_of([40, 41, 42, 43, 44, None, 45, 46, 90, 91])
    within_block = logits_of([40, 41, 42, 43, 44, None, 45, 90, 47, 48])
    before_block = logits_of([90, 41, 42, 43, 44, None, 45, 46, 47, 48])
    assert torch.equal(original, after_block)
    assert not torch.allclose(original, within_block) and not torch.allclose(original, before_block)


def test_history_of_a_completion(model_of: Any) -> None:
    """The history has each pass; the last passes of the blocks have the completion."""
    sampler = Sampler(model_of(4), SampleSettings(max_new_tokens=8, strategy="left_to_right", ignore_eos=True))
    seen: list[tuple[int | None, ...]] = []
    chunks = list(sampler.stream([PROMPTS[1]], lambda index, block: seen.append(tuple(block))))
    [steps] = sampler.history
    assert [step.block for step in steps] == seen and [step.begin for step in steps] == [8] * 4 + [12] * 4
    assert [step.unmasked for step in steps] == [(0,), (1,), (2,), (3,)] * 2
    assert steps[3].block + steps[7].block == tuple(token for chunk in chunks for token in chunk.token_ids)
    list(sampler.stream([PROMPTS[0]]))
    assert len(sampler.history) == 1 and sampler.inputs == [PROMPTS[0]]  # of the last call


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([40, 41], "The text has no gap, or begins with one"),
        ([None, 41], "The text has no gap, or begins with one"),
        ([3, None], r"The text contains the mask token \(id 3\)"),
        (
            [40, *[None] * 260],
            "The text's 261 tokens, gaps included, in blocks of 4, exceed the model's context of 256; shorten it",
        ),
    ],
)
def test_invalid_texts_with_gaps(model_of: Any, text: list[int | None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        filled(model_of(4), [text])
