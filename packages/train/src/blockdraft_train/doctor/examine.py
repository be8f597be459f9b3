"""`blockdraft doctor`: find out why the target rejects a drafter's tokens.

Prompts are decoded first. Then the drafter drafts again for each step on the finished text, as in training. If decoding
accepts fewer tokens than the drafter gets right there, decoding is at fault. Finally the drafter drafts under other
assumptions about its checkpoint. If it does clearly better under one of them, the checkpoint was trained that way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.engine.text import encode
from blockdraft.errors import UsageError
from blockdraft.targets import Target, other_target_warning
from blockdraft.types import Drafting, SamplingParams
from blockdraft_train.doctor.checks import Assumption, checker_of

BATCH_SIZE = 4
ANCHORS = 48  # evenly spaced in each response, at which each check drafts
# A check is clearly better if its gain in right draft tokens exceeds all three:
MIN_ERRORS = 4.0  # standard errors of the gain
MIN_GAIN = 0.1  # of the right draft tokens of the first check
MIN_RIGHT = 0.05  # right draft tokens
MIN_FIRST_ACCEPTANCE = 0.1  # S_1 below which a drafter does not know this target
MIN_AGREEMENT = 0.9  # minimum share of steps in which decoding accepts as many tokens as the drafter gets right

# Called with the check in words, the number of checks done, and their total.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        fault, assumption: Those of the check.
        accepted: Mean over anchors of the right draft tokens before the first wrong one.
        by_position: S_1, S_2, ... over the same anchors.
    """

    fault: str
    assumption: str
    accepted: float
    by_position: tuple[float, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Result of an examination.

    Attributes:
        steps: Number of decoding steps that were compared.
        decoded: S_1, S_2, ... over these steps in decoding.
        own: S_1, S_2, ... over the same steps for the drafter alone, on the finished text.
        alike: Share of the steps in which both numbers of accepted tokens are equal.
        tried: Results of all checks; the first follows the configuration.
        fault: "decoding", "target", or the fault of the check that is clearly better, such as "target_layers"; None if
            nothing is wrong.
        finding: The fault in a sentence.
        remedy: What to do.
    """

    steps: int
    decoded: tuple[float, ...]
    own: tuple[float, ...]
    alike: float
    tried: tuple[CheckResult, ...]
    fault: str | None
    finding: str
    remedy: str


@dataclass(frozen=True)
class DecodedPrompt:
    """A prompt with its response.

    Attributes:
        tokens: `[S]` int64, prompt and response.
        first: Index where the response begins.
        steps: For each step the index of its anchor, and the numbers of draft tokens and accepted ones. The last step
            is left out, since the end of the response may have cut it.
    """

    tokens: Tensor
    first: int
    steps: tuple[tuple[int, int, int], ...]

    def anchors(self, count: int) -> list[int]:
        """Return up to `count` evenly spaced indices of the response."""
        indices = range(self.first, len(self.tokens) - 1)
        return [indices[i * len(indices) // count] for i in range(count)] if len(indices) > count else list(indices)


def examine(
    target: Target,
    drafter: str | Path,
    prompts: Sequence[str],
    max_new_tokens: int,
    progress: Progress = lambda stage, done, total: None,
) -> Diagnosis:
    """Examine a pair.

    Args:
        drafter: Folder or GGUF file of a drafter with a network.
        max_new_tokens: Maximum length of a response in tokens.

    Raises:
        UsageError: The drafter has no checks, does not fit the target or cannot be read, or the responses are too
            short.
    """
    checker, trained_for = checker_of(drafter, target)
    answers = decode(target, drafter, prompts, max_new_tokens)
    count = sum(len(answer.steps) for answer in answers)
    if not count:
        raise UsageError("The responses hold no complete step; give other prompts, or raise --max-new-tokens.")
    longest = max(len(answer.tokens) for answer in answers)
    checks = list(checker.checks(longest))
    texts = [(answer.tokens, answer.anchors(ANCHORS)) for answer in answers]
    runs = list[Tensor]()
    for number, check in enumerate(checks):
        progress(check.assumption, number, len(checks))
        runs.append(checker.right(check, texts).cumprod(dim=1))
    progress("compared", len(checks), len(checks))
    tried = tuple(
        CheckResult(
            fault=check.fault,
            assumption=check.assumption,
            accepted=float(run.sum(1).double().mean()),
            by_position=tuple(run.double().mean(0).tolist()),
        )
        for check, run in zip(checks, runs, strict=True)
    )
    pairs = [
        (min(right, drafted), accepted)
        for answer in answers
        for right, (_, drafted, accepted) in zip(
            checker.lengths(answer.tokens, [index for index, _, _ in answer.steps]), answer.steps, strict=True
        )
    ]
    alike = sum(mine == accepted for mine, accepted in pairs) / count
    warning = other_target_warning(Path(drafter), trained_for, target)
    own, decoded = ([pair[i] for pair in pairs] for i in (0, 1))
    fault, finding, remedy = conclude(checks, runs, own=own, decoded=decoded, alike=alike, other_target=warning)
    return Diagnosis(
        steps=count,
        decoded=_survival(decoded, checker.block_size),
        own=_survival(own, checker.block_size),
        alike=alike,
        tried=tried,
        fault=fault,
        finding=finding,
        remedy=remedy,
    )


def conclude(
    checks: Sequence[Assumption],
    runs: Sequence[Tensor],
    own: Sequence[int],
    decoded: Sequence[int],
    alike: float,
    other_target: str | None,
) -> tuple[str | None, str, str]:
    """Return fault, finding and remedy.

    Args:
        runs: For each check, `[A, K]`, 1 where the first k draft tokens were all right.
        own, decoded: Right draft tokens of each step, for the drafter alone and in decoding.
        alike: Share of the steps in which both are equal.
        other_target: Warning that the drafter was trained for another target, if it was.
    """
    usual = runs[0].sum(1).double()
    better = []
    for check, run in zip(checks[1:], runs[1:], strict=True):
        gains = run.sum(1).double() - usual
        gain, error = float(gains.mean()), float(gains.std()) / len(gains) ** 0.5
        if gain > max(MIN_ERRORS * error, MIN_GAIN * float(usual.mean()), MIN_RIGHT):
            better.append((gain, check))
    if better:
        best = max(gain for gain, _ in better)
        gain, check = next(pair for pair in better if pair[0] >= 0.9 * best)  # the first, so the simplest
        now = float(usual.mean())
        finding = f"The drafter gets {now:.2f} tokens right on average, and {now + gain:.2f} with {check.assumption}."
        return check.fault, finding, check.remedy
    if alike < MIN_AGREEMENT and sum(decoded) < (1 - MIN_GAIN) * sum(own):
        finding = (
            f"Decoding accepted {sum(decoded)} draft tokens in {len(own)} steps, and the drafter alone gets {sum(own)} "
            "right in the same steps."
        )
        return "decoding", finding, "This is a bug of blockdraft; please report it with the pair."
    if float(runs[0][:, 0].double().mean()) < MIN_FIRST_ACCEPTANCE:
        finding = "The drafter gets almost nothing right under any check: it is for another target, or not trained."
        remedy = "Use the target that it was trained for, or make a drafter for this target (blockdraft fit)."
        return "target", f"{finding} {other_target}" if other_target else finding, remedy
    finding = "Decoding accepts the drafter's tokens, and no other check does better."
    return None, finding, other_target or ""


def decode(target: Target, drafter: str | Path, prompts: Sequence[str], tokens: int) -> list[DecodedPrompt]:
    """Decode prompts greedily, with chains as long as the drafter's block."""
    encoded = [encode(prompt, target) for prompt in prompts]
    with Engine(target, load_drafter(drafter, target=target), BATCH_SIZE, Drafting(block_size=None)) as engine:
        completions = [
            completion.checked() for completion in engine.generate(encoded, SamplingParams(max_new_tokens=tokens))
        ]
    answers = []
    for prompt, completion in zip(encoded, completions, strict=True):
        anchor, steps = len(prompt), []
        for drafted, committed in zip(completion.stats.drafted, completion.stats.committed, strict=True):
            steps.append((anchor, drafted, committed - 1))
            anchor += committed
        text = torch.tensor([*prompt, *completion.token_ids])
        answers.append(DecodedPrompt(tokens=text, first=len(prompt), steps=tuple(steps[:-1])))
    return answers


def _survival(accepted: Sequence[int], block_size: int) -> tuple[float, ...]:
    """Return S_1, S_2, ... of the numbers of accepted tokens of the steps."""
    return tuple(sum(count >= i for count in accepted) / len(accepted) for i in range(1, block_size))
