"""Sampling, block by block."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.diffusion.model import DiffusionModel
from blockdraft.diffusion.sampler import Chunk, Sampler
from blockdraft.diffusion.settings import SampleSettings
from blockdraft.diffusion.strategies import STRATEGIES
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import NumbersError, UsageError
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams

PROMPTS = [[40, 41, 42], [50, 51, 52, 53, 54, 55, 56, 57], [60], [70, 71, 72, 73, 74, 75]]


def answers(
    model: DiffusionModel, prompts: list[Any], stop: tuple[str, ...] = (), **settings: Any
) -> list[tuple[list[int], str, Chunk]]:
    """Tokens, text and last chunk of each answer."""
    found: list[Any] = [([], "", None) for _ in prompts]
    for chunk in Sampler(model, SampleSettings(**settings), stop=stop).stream(prompts):
        tokens, text, _ = found[chunk.row]
        found[chunk.row] = tokens + list(chunk.token_ids), text + chunk.text, chunk
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_blocks_of_one_token_answer_as_the_causal_model(
    model_of: Any, tiny_target_dir: Path, temperature: float
) -> None:
    target = load_target(tiny_target_dir, device="cpu", compile="off")
    engine = Engine(target, load_drafter("none", target=target))
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, logit_bias={3: -100})
    [ours] = answers(model_of(1), [PROMPTS[1]], max_new_tokens=24, ignore_eos=True)
    [theirs] = engine.generate([PROMPTS[1]], params)
    engine.close()
    if temperature == 0:
        assert ours[0] == list(theirs.token_ids) and ours[1] == theirs.text
        assert ours[2].forwards == 23  # a pass for each token but the last one
    else:
        [one], [two], [other] = (
            answers(model_of(1), [PROMPTS[1]], max_new_tokens=24, ignore_eos=True, temperature=1.0, seed=seed)
            for seed in (1, 1, 2)
        )
        assert one[0] == two[0] != other[0] != ours[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "shift"),
    [
        pytest.param(strategy, shift, marks=() if shift == (place % 2 == 0) else pytest.mark.slow)
        for place, strategy in enumerate(STRATEGIES)
        for shift in (True, False)
    ],
)
def test_rows_are_what_they_are_alone(model_of: Any, strategy: str, shift: bool) -> None:
    """Batches of prompts of any length give each row the tokens it gets alone; row i has the seed + i."""
    how = {"max_new_tokens": 13, "temperature": 0.7, "strategy": strategy, "ignore_eos": True}
    model = model_of(4, shift)
    together = answers(model, PROMPTS, seed=5, **how)
    for row, prompt in enumerate(PROMPTS):
        [alone] = answers(model, [prompt], seed=5 + row, **how)
        assert alone[:2] == together[row][:2] and len(alone[0]) == 13
        assert alone[2].finish_reason == "length" and 3 not in alone[0]


@pytest.mark.parametrize("shift", [True, False])
def test_passes(model_of: Any, shift: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are one for each token and one for each block to commit, if each settles one token."""
    model = model_of(4, shift)
    calls, hidden = [], model.network.hidden
    monkeypatch.setattr(model.network, "hidden", lambda *given: calls.append(given[0].shape) or hidden(*given))
    seen: list[tuple[int, ...]] = []
    how = SampleSettings(max_new_tokens=8, strategy="left_to_right", ignore_eos=True)
    *_, last = Sampler(model, how).stream([PROMPTS[1]], lambda row, block: seen.append(tuple(block)))
    known_at_once = 0  # with a shift the first token is known without a pass, but only if it is the only one that lacks
    assert last.forwards == 8 + 1 - known_at_once == len(calls) - 1  # and one over the prompt
    lacking = [block.count(None) for block in seen]
    assert lacking == [3, 2, 1, 0] * 2
    calls.clear()
    [fast] = answers(model, [PROMPTS[1]], max_new_tokens=8, strategy="threshold=0", ignore_eos=True)
    assert fast[2].forwards == 3 == len(calls) - 1 and len(fast[0]) == 8


def test_prompts_fill_the_first_block(model_of: Any) -> None:
    seen: list[tuple[int | None, ...]] = []
    sampler = Sampler(model_of(4), SampleSettings(max_new_tokens=2, strategy="left_to_right", ignore_eos=True))
    [chunk] = sampler.stream([[40, 41, 42, 43, 44]], lambda row, block: seen.append(tuple(block)))
    assert [block[0] for block in seen] == [44, 44] and seen[-1][3] is None
    assert chunk.token_ids == seen[-1][1:3]  # cut in the middle of a block, which need not be whole


def ending(model: DiffusionModel, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the model predict this token from position 10 on."""
    hidden, logits = model.network.hidden, model.network.logits

    def marked(tokens: Any, positions: Any, *rest: Any) -> Any:
        states = hidden(tokens, positions, *rest)
        return torch.cat([states, (positions >= 10).float().expand(len(states), -1)[..., None]], dim=-1)

    def said(states: Any) -> Any:
        found = logits(states[..., :-1])
        found[..., token] = torch.where(states[..., -1] > 0, 1e4, -1e4)
        return found

    monkeypatch.setattr(model.network, "hidden", marked)
    monkeypatch.setattr(model.network, "logits", said)


@pytest.mark.parametrize("strategy", ["left_to_right", "threshold=0"])
def test_each_row_ends_where_it_ends(model_of: Any, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row ends at the end token, which is in the tokens and not in the text; other rows go on."""
    model = model_of(4, False)
    ending(model, 2, monkeypatch)
    found = answers(model, PROMPTS, max_new_tokens=16, strategy=strategy)
    for prompt, (tokens, text, chunk) in zip(PROMPTS, found, strict=True):
        assert len(prompt) + len(tokens) == 11 and tokens[-1] == 2 and chunk.finish_reason == "stop"
        assert text == model.text.tokenizer.decode(tokens[:-1])
    on = answers(model, PROMPTS, max_new_tokens=16, strategy=strategy, ignore_eos=True)
    assert all(len(tokens) == 16 and chunk.finish_reason == "length" for tokens, _, chunk in on)


def test_padding_means_nothing(model_of: Any) -> None:
    """Prompts that hold the end token are read whole where it is the padding token too."""
    model = model_of(4, False)
    model.text.tokenizer.pad_token = "<|im_end|>"
    prompts = [[2, 40, 2], [40, 2, 41, 42, 2, 43]]
    together = answers(model, prompts, max_new_tokens=9, seed=0, ignore_eos=True)
    for row, prompt in enumerate(prompts):
        [alone] = answers(model, [prompt], max_new_tokens=9, seed=row, ignore_eos=True)
        assert alone[0] == together[row][0]


def test_stop_texts(model_of: Any) -> None:
    [plain] = answers(model_of(4), [PROMPTS[1]], max_new_tokens=24, ignore_eos=True)
    part = plain[1][5:7]
    [cut] = answers(model_of(4), [PROMPTS[1]], (part,), max_new_tokens=24, ignore_eos=True)
    assert cut[1] == plain[1][: plain[1].index(part)] and cut[2].finish_reason == "stop"
    assert plain[0][: len(cut[0])] == cut[0]


def test_texts_become_chats(model_of: Any) -> None:
    model = model_of(4)
    chat = model.text.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    [one], [two] = (answers(model, [prompt], max_new_tokens=6) for prompt in ("hi", chat))
    assert one[0] == two[0]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "The prompt is empty"),
        ([40, 3], r"The prompt holds the mask token \(id 3\)"),
        ([40, 9999], "The prompt holds the token id 9999"),
        ([40] * 250, "The prompt's 250 tokens and max_new_tokens 8, in blocks of 4, exceed .* 256; ask for at most 6"),
        ([40] * 256, "exceed the model's context of 256; shorten the prompt"),
    ],
)
def test_bad_prompts(model_of: Any, prompt: list[int], told: str) -> None:
    """Wrong prompts are refused before anything is sampled."""
    with pytest.raises(UsageError, match=told):
        Sampler(model_of(4), SampleSettings(max_new_tokens=8)).stream([[40], prompt])


def test_bad_numbers(model_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(4)
    monkeypatch.setattr(model.network, "logits", lambda states: states.new_full((len(states), 265), torch.nan))
    with pytest.raises(NumbersError, match="computes numbers that are not finite; its weights are too large"):
        list(Sampler(model, SampleSettings()).stream([[40]]))
    model.network.to(torch.bfloat16)
    with pytest.raises(NumbersError, match="computes numbers that are not finite; load it as float32"):
        list(Sampler(model, SampleSettings()).stream([[40]]))
    model.network.model.norm.weight.data[0] = torch.inf
    with pytest.raises(NumbersError, match="weight model.norm.weight is not finite; copy its files again"):
        list(Sampler(model, SampleSettings()).stream([[40]]))
    with pytest.raises(UsageError, match="strategy is 'x'"):
        Sampler(model, SampleSettings(strategy="x"))


def test_texts_that_wait_are_what_they_are_alone(model_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting text takes the place of one that ends at once."""
    model = model_of(4)
    hidden, rows = model.network.hidden, []
    monkeypatch.setattr(model.network, "hidden", lambda *given: rows.append(len(given[0])) or hidden(*given))
    how = {"max_new_tokens": 9, "seed": 5, "temperature": 0.7, "ignore_eos": True}
    together = answers(model, PROMPTS, **how)
    assert max(rows) == 4
    rows.clear()
    waiting = answers(model, PROMPTS, batch_size=2, **how)
    assert max(rows) == 2
    assert [each[:2] for each in waiting] == [each[:2] for each in together]
    sampler = Sampler(model, SampleSettings(batch_size=1, **how))
    ended = [chunk.row for chunk in sampler.stream(PROMPTS) if chunk.finish_reason]
    assert ended == [0, 1, 2, 3] and all(sampler.history)


def test_streams_of_one_sampler_know_nothing_of_each_other(model_of: Any) -> None:
    """Streams may be read in turns, or by threads of their own."""
    sampler = Sampler(model_of(4), SampleSettings(max_new_tokens=12, seed=1, ignore_eos=True))
    alone = [[chunk.token_ids for chunk in sampler.stream([prompt])] for prompt in PROMPTS[:2]]
    one, two = sampler.stream(PROMPTS[:1]), sampler.stream(PROMPTS[1:2])
    found: list[Any] = [[next(one).token_ids], [next(two).token_ids]]
    found[0] += [chunk.token_ids for chunk in one]
    found[1] += [chunk.token_ids for chunk in two]
    assert found == alone


# Gaps


def filled(model: DiffusionModel, texts: list[list[int | None]], **settings: Any) -> tuple[list[list[int]], Sampler]:
    sampler = Sampler(model, SampleSettings(seed=3, **settings))
    found: list[list[int]] = [[] for _ in texts]
    for chunk in sampler.fill(texts):
        found[chunk.row] += chunk.token_ids
    return found, sampler


GAPPED = [
    [40, 41, 42, None, None, None, 50, 51, 52, 53, None, 60],
    [70, *[None] * 6],
    [40, 41, 42, 43, 44, None, 45, 46, 47],
]


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("strategy", ["left_to_right", "threshold=0", "first_hitting"])
def test_gaps_are_filled_and_nothing_else(model_of: Any, shift: bool, strategy: str) -> None:
    """Texts of any lengths are filled together, exactly to their ends."""
    model = model_of(4, shift)
    together, sampler = filled(model, GAPPED, strategy=strategy)  # type: ignore[arg-type]
    for row, (given, found) in enumerate(zip(GAPPED, together, strict=True)):
        assert len(found) == len(given) and not {2, 3} & {*found}  # no gap ends the text
        assert all(before in (None, after) for before, after in zip(given, found, strict=True))
        alone = Sampler(model, SampleSettings(seed=3 + row, strategy=strategy))
        assert [token for chunk in alone.fill([given]) for token in chunk.token_ids] == found  # type: ignore[list-item]
        assert sampler.given[row] == given and all(step.settled for step in sampler.history[row])
        assert all(step.begin + place < len(given) for step in sampler.history[row] for place in step.settled)


def test_no_gap_ends_the_text(model_of: Any) -> None:
    """Also where the likeliest token of each gap would."""
    model = model_of(4)
    [[_, *likeliest]] = filled(model, [[40, None, None]])[0]
    ending = replace(model, text=replace(model.text, eos_token_ids=frozenset(likeliest)))
    [[_, *others]] = filled(ending, [[40, None, None]])[0]
    assert len(others) == 2 and not {*likeliest} & {*others}


def test_end_tokens_that_the_model_lacks_are_no_matter(model_of: Any) -> None:
    """Generation configurations of cut models name end tokens outside of the vocabulary."""
    model = model_of(4)
    whole = filled(model, [[40, None, None]])[0]
    more = replace(model, text=replace(model.text, eos_token_ids=frozenset({2, 100_000})))
    assert filled(more, [[40, None, None]])[0] == whole


@pytest.mark.parametrize("shift", [True, False])
def test_a_gap_sees_its_block_and_what_is_before(model_of: Any, shift: bool) -> None:
    """A gap does not depend on what follows its block."""
    model = model_of(4, shift)

    def said(text: list[int | None]) -> list[Any]:
        seen = []
        logits = model.network.logits
        model.network.logits = lambda states: seen.append(logits(states)) or seen[-1]  # type: ignore[func-returns-value]
        try:
            filled(model, [text], strategy="left_to_right")
        finally:
            del model.network.logits
        return seen

    [one] = said([40, 41, 42, 43, 44, None, 45, 46, 47, 48])
    [behind] = said([40, 41, 42, 43, 44, None, 45, 46, 90, 91])
    [within] = said([40, 41, 42, 43, 44, None, 45, 90, 47, 48])
    [before] = said([90, 41, 42, 43, 44, None, 45, 46, 47, 48])
    assert torch.equal(one, behind)
    assert not torch.allclose(one, within) and not torch.allclose(one, before)


def test_the_history_of_an_answer(model_of: Any) -> None:
    """History keeps each pass, and the last ones hold the answer."""
    sampler = Sampler(model_of(4), SampleSettings(max_new_tokens=8, strategy="left_to_right", ignore_eos=True))
    seen: list[tuple[int | None, ...]] = []
    chunks = list(sampler.stream([PROMPTS[1]], lambda row, block: seen.append(tuple(block))))
    [steps] = sampler.history
    assert [step.block for step in steps] == seen and [step.begin for step in steps] == [8] * 4 + [12] * 4
    assert [step.settled for step in steps] == [(0,), (1,), (2,), (3,)] * 2
    assert steps[3].block + steps[7].block == tuple(token for chunk in chunks for token in chunk.token_ids)
    list(sampler.stream([PROMPTS[0]]))
    assert len(sampler.history) == 1 and sampler.given == [PROMPTS[0]]  # of the last call alone


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ([40, 41], "The text has no gap, or begins with one"),
        ([None, 41], "The text has no gap, or begins with one"),
        ([3, None], r"The text holds the mask token \(id 3\)"),
        (
            [40, *[None] * 260],
            "The text's 261 tokens, gaps included, in blocks of 4, exceed the model's context of 256; shorten it",
        ),
    ],
)
def test_texts_that_cannot_be_filled(model_of: Any, text: list[int | None], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        filled(model_of(4), [text])
