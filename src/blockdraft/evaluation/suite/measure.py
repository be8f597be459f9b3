"""Measurement of a suite's tasks with all methods, with figures as the paper counts them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from blockdraft.data.chats import ChatEncoder
from blockdraft.data.records import Message
from blockdraft.engine import Engine, loops
from blockdraft.engine.text import check_request
from blockdraft.errors import UsageError
from blockdraft.evaluation.methods import PLAIN
from blockdraft.evaluation.speed import WARM_UP_TOKENS, Progress, Trial
from blockdraft.evaluation.suite.paper import Task, Turns
from blockdraft.targets import Target, without_tokenizer
from blockdraft.types import SamplingParams

THINKING = '{"enable_thinking": false}'  # as in the paper; templates without thinking ignore it


@dataclass(frozen=True)
class Row:
    """Figures of one method on one task at one temperature.

    Speed and tau are None if no response has more than its first token.

    Attributes:
        task: Name of the task.
        temperature: Sampling temperature.
        method: Name of the method.
        prompts: Number of prompts; a prompt with several turns has as many responses.
        answers: Number of responses.
        tokens: Tokens of all responses but the first of each, which comes from the prefill.
        tokens_per_second: Tokens over the time from each response's first token to its last.
        speedup: Mean time per token of plain decoding over that of this method; every response counts equally.
        tau: Tokens per target forward pass, bonus included: mean over responses of the response's own mean.
        identical: Share of responses equal to those of plain decoding with the same seed, token by token. None for
            sampled draft tokens if decoding is not greedy.
        repetitive: Share of responses in which a run of 8 tokens occurs at least 4 times. They are included everywhere.
    """

    task: str
    temperature: float
    method: str
    prompts: int
    answers: int
    tokens: int
    tokens_per_second: float | None
    speedup: float | None
    tau: float | None
    identical: float | None
    repetitive: float


def chat_encoder(target: Target) -> ChatEncoder:
    """Return the encoder of the suite's chats.

    Raises:
        UsageError: The target has no tokenizer or no chat template.
    """
    if target.tokenizer is None:
        raise UsageError(f"{without_tokenizer(target)}; the suite's prompts are texts.")
    if target.tokenizer.chat_template is None:
        raise UsageError("The target's tokenizer has no chat template, and the suite asks chats; use a chat model.")
    return ChatEncoder(target.tokenizer, target.eos_token_ids, THINKING)


def check_prompts(target: Target, prompts: Mapping[str, Sequence[Turns]], params: SamplingParams) -> None:
    """Raise a UsageError if the first turn of a prompt is too long for the target."""
    encoder = chat_encoder(target)
    for task, asked in prompts.items():
        for number, turns in enumerate(asked, 1):
            _check(encoder.prompt(_user(turns[0])), params, target, f"Prompt {number} of {task}")


def decode_task(
    engines: Mapping[str, Engine],
    task: Task,
    prompts: Sequence[Turns],
    params: SamplingParams,
    progress: Progress = lambda stage, done, total: None,
) -> list[Trial]:
    """Decode each prompt with all methods, interleaved, after a warm-up.

    Later turns follow the response of plain decoding, which all methods give when decoding is greedy.

    Args:
        engines: Engines by method, `none` among them.
        params: Sampling parameters, with a seed unless decoding is greedy; prompt i uses the seed + i.

    Raises:
        UsageError: A later turn is too long for the target.
    """
    target = engines[PLAIN].target
    encoder = chat_encoder(target)
    warm_up = replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens))
    for engine in engines.values():
        engine.generate([encoder.prompt(_user(prompts[0][0]))], warm_up)
    names, trials = [PLAIN, *(name for name in engines if name != PLAIN)], list[Trial]()
    stage = f"{task.title}, temperature {params.temperature:g}"
    for i, turns in enumerate(prompts):
        progress(stage, i, len(prompts))
        chat, own = list[Message](), params if params.seed is None else replace(params, seed=params.seed + i)
        for turn, text in enumerate(turns, 1):
            chat += _user(text)
            ids = encoder.prompt(chat)
            _check(ids, own, target, f"Prompt {i + 1} of {task.name}, turn {turn}")
            latest = [_trial(engines[name], name, task.name, i, ids, own) for name in names]
            trials += latest
            chat.append({"role": "assistant", "content": latest[0].completions[0].text})
    progress(stage, len(prompts), len(prompts))
    return trials


def _trial(engine: Engine, method: str, task: str, i: int, ids: list[int], params: SamplingParams) -> Trial:
    began = time.perf_counter()
    completion = engine.generate([ids], params)[0].checked()
    return Trial(method, task, (i,), 0, (completion,), time.perf_counter() - began)


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _check(ids: list[int], params: SamplingParams, target: Target, place: str) -> None:
    try:
        check_request(ids, params, target)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def rows_of(task: str, temperature: float, trials: Sequence[Trial], sampled: Collection[str] = ()) -> list[Row]:
    """Compute the figures of each method from the trials of `decode_task`.

    Args:
        sampled: Methods whose draft tokens are sampled.
    """
    by_method: dict[str, list[Trial]] = {}
    for trial in trials:
        by_method.setdefault(trial.method, []).append(trial)
    plain = by_method[PLAIN]
    # Only responses with timed tokens of every method are compared, since a faulty method may end at once.
    timed = [i for i in range(len(plain)) if all(own[i].tokens for own in by_method.values())]
    rows = []
    for method, own in by_method.items():
        tokens = [trial.completions[0].token_ids for trial in own]
        same = [ids == reference.completions[0].token_ids for ids, reference in zip(tokens, plain, strict=True)]
        row = Row(
            task=task,
            temperature=temperature,
            method=method,
            prompts=len({trial.prompts for trial in own}),
            answers=len(own),
            tokens=sum(trial.tokens for trial in own),
            tokens_per_second=None,
            speedup=None,
            tau=None,
            identical=None if temperature and method in sampled else fmean(same),
            repetitive=fmean(map(loops, tokens)),
        )
        if timed:
            row = replace(
                row,
                tokens_per_second=sum(own[i].tokens for i in timed) / sum(own[i].decode_seconds for i in timed),
                speedup=_token_seconds([plain[i] for i in timed]) / _token_seconds([own[i] for i in timed]),
                tau=fmean(own[i].completions[0].tau for i in timed),
            )
        rows.append(row)
    return rows


def _token_seconds(trials: Sequence[Trial]) -> float:
    return fmean(trial.decode_seconds / trial.tokens for trial in trials)
