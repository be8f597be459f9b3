"""Distributions after each node, and probabilities, against transformers and by brute force."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from blockdraft.decode.distributions import HEAD, Distributions, best_tokens, probabilities
from blockdraft.decode.sampling import draw
from blockdraft.types import MAX, MIN, SamplingParams

# A tree whose node 0 is the last token of prompt and output.
TOKENS = torch.tensor([[4, 1, 4, 2, 1, 0], [3, 3, 3, 0, 9, 3]])


PARENTS = torch.tensor([[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 2, 0, 4]])


PROMPTS, OUTPUTS = [[7, 7, 5, 1], [2, 6, 3]], [[6, 4], []]


EVERY_NODE = [0] * 6 + [1] * 6, [*range(6)] * 2


NODE_LOGITS = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(1))


def distributions(*params: SamplingParams, logits: Tensor = NODE_LOGITS) -> Distributions:
    return Distributions(logits, params, TOKENS, PARENTS, PROMPTS, OUTPUTS)


def generated_after(row: int, node: int) -> list[int]:
    """Return the output and the path to a node, by brute force."""
    path: list[int] = []
    while node != 0:
        path.insert(0, int(TOKENS[row, node]))
        node = int(PARENTS[row, node])
    return OUTPUTS[row] + path


def adjusted(params: SamplingParams, row: int, node: int) -> Tensor:
    """Return the logits after a node with bias and penalties, by transformers and by OpenAI's formula."""
    generated = generated_after(row, node)
    ids = torch.tensor([PROMPTS[row] + generated])
    scores = NODE_LOGITS[row, node][None]
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor({(i,): b for i, b in dict(params.logit_bias).items()})(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)[0].clone()
    for token, count in Counter(generated).items():
        scores[token] -= count * params.frequency_penalty + float(count > 0) * params.presence_penalty
    return scores


PENALISED = [
    SamplingParams(temperature=0.8, repetition_penalty=1.7),
    SamplingParams(temperature=0.8, repetition_penalty=0.4),
    SamplingParams(temperature=0.8, presence_penalty=1.3),
    SamplingParams(temperature=0.8, frequency_penalty=-0.9),
    SamplingParams(temperature=0.8, logit_bias={2: 1.5, 7: -100.0}),
    SamplingParams(
        temperature=0.8,
        top_k=6,
        top_p=0.9,
        min_p=0.05,
        logit_bias={2: 1.5, 7: -9.0},
        repetition_penalty=1.7,
        presence_penalty=0.3,
        frequency_penalty=0.9,
    ),
]


@pytest.mark.parametrize("params", PENALISED)
def test_penalties_see_prompt_output_and_path(params: SamplingParams) -> None:
    scores = torch.stack([adjusted(params, row, node) for row, node in zip(*EVERY_NODE, strict=True)])
    exact = probabilities(scores[None], [params])[0]
    both = distributions(params, params)
    torch.testing.assert_close(both.probs(*EVERY_NODE), exact)
    few = torch.tensor([[3, 1]]).repeat(12, 1)
    torch.testing.assert_close(both.probs_of(*EVERY_NODE, few), exact[:, [3, 1]])
    greedy = distributions(*[replace(params, temperature=0.0)] * 2)
    assert greedy.draw(*EVERY_NODE, torch.zeros(2, 6)) == scores.argmax(-1).tolist()


@pytest.mark.parametrize("times", range(6))
def test_a_frequency_penalty_counts_every_time(times: int) -> None:
    params, node = [SamplingParams(temperature=1.0, frequency_penalty=0.3)], torch.tensor([[2]])
    actual = Distributions(torch.zeros(1, 1, 4), params, node, torch.tensor([[-1]]), [[2]], [[2] * times]).probs(
        [0], [0]
    )
    torch.testing.assert_close(actual[0], torch.tensor([0.0, 0.0, -0.3 * times, 0.0]).softmax(-1))


def test_the_prompt_has_no_presence_and_rows_keep_their_own_penalties() -> None:
    plain, penalised = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, presence_penalty=2.0)
    given = NODE_LOGITS.clone()
    torch.testing.assert_close(distributions(plain, penalised).probs([0, 1], [0, 0]), NODE_LOGITS[:, 0].softmax(-1))
    torch.testing.assert_close(
        distributions(penalised, plain).probs([1, 1], [2, 5]), NODE_LOGITS[1, [2, 5]].softmax(-1)
    )
    assert torch.equal(NODE_LOGITS, given), "logits are adjusted in place"


def test_an_extreme_penalty_does_not_overflow() -> None:
    probs = distributions(*[SamplingParams(temperature=1.0, repetition_penalty=MIN)] * 2).probs(*EVERY_NODE)
    torch.testing.assert_close(probs.sum(-1), torch.ones(12))


def test_each_node_is_sampled_with_its_own_number() -> None:
    params = SamplingParams(), SamplingParams(temperature=1.0)
    uniforms = torch.rand(2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sampled = draw(NODE_LOGITS[1:].softmax(-1), uniforms[1:])[0]
    expected = NODE_LOGITS[0].argmax(-1).tolist() + sampled.tolist()
    assert distributions(*params).draw(*EVERY_NODE, uniforms) == expected
    assert distributions(*params).draw([1, 0, 1], [5, 2, 3], uniforms) == [expected[11], expected[2], expected[9]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_distribution_are_reported(bad: float, dtype: torch.dtype) -> None:
    logits = NODE_LOGITS.to(dtype, copy=True)
    logits[0, :, 3] = -torch.inf  # forbidden, which is legal
    params = [SamplingParams(), SamplingParams(temperature=1.0)]
    assert distributions(*params, logits=logits).invalid_rows == []
    logits[1, 4, 7] = bad
    assert distributions(*params, logits=logits).invalid_rows == [1]
    logits[0, 2] = -torch.inf
    assert distributions(*params, logits=logits).invalid_rows == [0, 1]


def test_tokens_sampled_ahead_are_those_sampled_when_asked_for(constants: Callable[..., None]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 3, 5, generator=generator)
    uniforms = torch.rand(3, 3, generator=generator, dtype=torch.float64)
    params = [SamplingParams(), SamplingParams(temperature=0.8), SamplingParams(temperature=1.0, presence_penalty=1.5)]
    tree = torch.tensor([[-1, 0, 0]] * 3)

    def made() -> Distributions:
        return Distributions(logits, params, torch.tensor([[1, 2, 3]] * 3), tree, [[0]] * 3, [[1]] * 3)

    asked, ahead = made(), made()
    assert not asked.draws_ahead  # on a CPU, where it would cost
    ahead.draws_ahead = True
    constants("blockdraft.decode.distributions", PART=10)  # two distributions at a time
    everywhere = [(row, node) for row in range(3) for node in range(3)]
    expected = [asked.draw([row], [node], uniforms)[0] for row, node in everywhere]
    assert [ahead.draw([row], [node], uniforms)[0] for row, node in everywhere] == expected


def test_looking_at_one_node_leaves_the_logits_alone() -> None:
    logits = torch.zeros(1, 1, 5)
    distributions = Distributions(
        logits, [SamplingParams(presence_penalty=2.0)], torch.tensor([[1]]), torch.tensor([[-1]]), [[0]], [[1]]
    )
    assert distributions.draw([0], [0], None) == [0]
    assert not logits.any()


class Mask:
    """Grammar rules that are a mask."""

    def after(self, tokens: Sequence[int]) -> Tensor | None:
        raise NotImplementedError

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        allowed = self.after(tokens)
        return allowed is not None and bool(allowed[token])


class OnlyLarger(Mask):
    """Allows tokens larger than all before them, the anchor aside."""

    def after(self, tokens: Sequence[int]) -> Tensor | None:
        allowed = torch.arange(10) > max(tokens, default=-1)
        return allowed if allowed.any() else None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=3),
        SamplingParams(temperature=1.7, top_p=0.6, min_p=0.1),
        SamplingParams(temperature=0.8, presence_penalty=1.0, repetition_penalty=1.4, logit_bias={1: -100, 9: 2.0}),
        SamplingParams(),
        SamplingParams(logit_bias={7: 50.0}, repetition_penalty=MAX),
    ],
)
def test_under_rules_p_is_masked_before_anything_is_cut(params: SamplingParams) -> None:
    """Row 0 has rules and row 1 has none. The reference masks the adjusted logits by hand, node by node."""
    free = Distributions(NODE_LOGITS, [params] * 2, TOKENS, PARENTS, PROMPTS, OUTPUTS)
    ruled = Distributions(NODE_LOGITS, [params] * 2, TOKENS, PARENTS, PROMPTS, OUTPUTS, rules=[OnlyLarger(), None])
    assert ruled.argmax is None
    scores = free.scores(*EVERY_NODE).clone()
    for m, (row, node) in enumerate(zip(*EVERY_NODE, strict=True)):
        if row == 0:
            path = generated_after(row, node)[len(OUTPUTS[row]) :]
            scores[m, : max(path, default=-1) + 1] = -torch.inf
    expected = probabilities(scores[:, None], [params] * 12)[:, 0]
    torch.testing.assert_close(ruled.probs(*EVERY_NODE), expected)
    if params.temperature == 0:
        assert ruled.draw(*EVERY_NODE, None) == scores.argmax(-1).tolist()
    else:
        uniforms = torch.rand(2, 6, dtype=torch.float64)
        assert ruled.draw(*EVERY_NODE, uniforms) == draw(expected[:, None], uniforms.view(12, 1))[:, 0].tolist()


def test_where_rules_leave_nothing_there_is_no_distribution() -> None:
    logits = NODE_LOGITS.clone()
    logits[0, 0, :] = -torch.inf
    logits[0, 0, 2] = 1.0  # allowed by the rules
    logits[0, 1, 2:] = -torch.inf  # all allowed tokens
    tokens = TOKENS.clone()
    tokens[0, 2] = 9  # no token is larger
    actual = Distributions(
        logits, [SamplingParams()] * 2, tokens, PARENTS, PROMPTS, OUTPUTS, rules=[OnlyLarger(), None]
    )
    assert [actual.exists(0, node) for node in range(6)] == [True, False, False, True, False, False]
    assert all(actual.exists(1, node) for node in range(6)) and actual.invalid_rows == []


class NotTwice(Mask):
    def after(self, tokens: Sequence[int]) -> Tensor | None:
        return torch.arange(10) != tokens[-1]


def test_rules_see_the_path_in_order() -> None:
    logits = torch.zeros(1, 3, 10)
    logits[0, 2, [4, 3]] = torch.tensor([2.0, 1.0])
    chain, parents = torch.tensor([[0, 3, 4]]), torch.tensor([[-1, 0, 1]])
    actual = Distributions(logits, [SamplingParams()], chain, parents, [[9]], [[0]], rules=[NotTwice()])
    assert actual.draw([0], [2], None) == [3]


class NoMask(Mask):
    """Rules without a mask, as at a limit of the grammar library."""

    def after(self, tokens: Sequence[int]) -> Tensor | None:
        return None

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        return True


def test_only_a_plain_greedy_sequence_needs_no_mask() -> None:
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(logit_bias={3: 1.0})]
    logits, nodes = torch.eye(10)[[4, 4, 4]].unsqueeze(1), torch.zeros(3, 1, dtype=torch.int64)
    actual = Distributions(logits, params, nodes, nodes - 1, [[9]] * 3, [[0]] * 3, rules=[NoMask()] * 3)
    assert [actual.exists(row, 0) for row in range(3)] == [True, False, False]
    assert actual.draw([0], [0], None) == [4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_penalty_makes_the_only_allowed_token_impossible(temperature: float) -> None:
    params, node = [SamplingParams(temperature=temperature, repetition_penalty=MAX)], torch.tensor([[9]])
    logits = torch.full((1, 1, 10), -1e10)
    actual = Distributions(logits, params, node, torch.tensor([[-1]]), [[9]], [[]], rules=[OnlyNine()])
    assert actual.draw([0], [0], torch.zeros(1, 1, dtype=torch.float64)) == [9]


class OnlyNine(Mask):
    def after(self, tokens: Sequence[int]) -> Tensor | None:
        return torch.arange(10) == 9


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0]).log_softmax(-1)


def dist(**fields: float) -> torch.Tensor:
    return probabilities(LOGITS.expand(1, 1, -1), [SamplingParams(**fields)])[0, 0]  # type: ignore[arg-type]


def test_temperature_divides_the_logits() -> None:
    torch.testing.assert_close(dist(temperature=1.0), LOGITS.exp())
    torch.testing.assert_close(dist(temperature=0.5), (LOGITS / 0.5).softmax(-1))


def test_a_very_low_temperature_is_greedy_and_finite() -> None:
    for fields in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_p": MIN}):
        assert dist(temperature=MIN, **fields).tolist() == [1, 0, 0, 0, 0]
    assert dist(temperature=1.0, top_p=MIN).tolist() == [1, 0, 0, 0, 0]


def test_greedy_is_one_hot_and_breaks_ties_towards_the_lowest_id() -> None:
    tied = torch.tensor([0.0, 3.0, 3.0]).expand(1, 1, -1)
    assert probabilities(tied, [SamplingParams()])[0, 0].tolist() == [0.0, 1.0, 0.0]


def test_top_k_keeps_the_k_best_renormalised() -> None:
    kept = LOGITS.exp()[:2]
    torch.testing.assert_close(dist(temperature=1.0, top_k=2), torch.cat([kept / kept.sum(), torch.zeros(3)]))
    torch.testing.assert_close(dist(temperature=1.0, top_k=99), LOGITS.exp())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    p = LOGITS.exp()
    just_two = float(p[0]) + 0.5 * float(p[1])
    kept = p[:2]
    torch.testing.assert_close(dist(temperature=1.0, top_p=just_two), torch.cat([kept / kept.sum(), torch.zeros(3)]))
    assert dist(temperature=1.0, top_p=1e-6).tolist() == [1, 0, 0, 0, 0]


def test_min_p_keeps_what_has_its_share_of_the_best() -> None:
    p = LOGITS.exp()
    share = float(p[2] / p[0])
    kept = torch.where(p >= p[2], p, 0.0)
    torch.testing.assert_close(dist(temperature=1.0, min_p=share * 0.99), kept / kept.sum())
    assert dist(temperature=1.0, min_p=1.0).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("vocabulary", [60, 3 * HEAD])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 20, "top_p": 0.8},
        {"top_p": 0.8, "min_p": 0.05},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.3},
        {"min_p": 0.1},
        {"top_k": HEAD + 5},
        {"top_p": 0.97},  # keeps more than the head of the large vocabulary
    ],
)
def test_filters_agree_with_transformers(vocabulary: int, fields: dict[str, float]) -> None:
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[1] *= 5  # here the head suffices
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    processors = [TemperatureLogitsWarper(0.7), *(warpers[name](value) for name, value in fields.items())]
    scores = LogitsProcessorList(processors)(torch.zeros(4, 1, dtype=torch.long), logits)
    params = SamplingParams(temperature=0.7, **fields)  # type: ignore[arg-type]
    torch.testing.assert_close(probabilities(logits.unsqueeze(1), [params] * 4).squeeze(1), scores.softmax(-1))


@pytest.mark.parametrize("fields", [{"top_k": 3}, {"top_p": 2.5 / (4 * HEAD)}, {"top_k": HEAD + 3}])
def test_of_equal_logits_the_lower_ids_are_kept(fields: dict[str, float]) -> None:
    params = SamplingParams(temperature=1.0, **fields)  # type: ignore[arg-type]
    kept = probabilities(torch.zeros(1, 1, 4 * HEAD), [params])[0, 0].nonzero().flatten()
    assert kept.tolist() == list(range(params.top_k or 3))


def test_rows_have_their_own_parameters() -> None:
    both = probabilities(LOGITS.expand(2, 1, -1), [SamplingParams(), SamplingParams(temperature=1.0)])
    assert both[0, 0].tolist() == [1, 0, 0, 0, 0]
    torch.testing.assert_close(both[1, 0], LOGITS.exp())


def test_no_bit_of_a_distribution_depends_on_the_neighbours() -> None:
    logits = torch.randn(5, 2, 2 * HEAD, generator=torch.Generator().manual_seed(0))
    logits[::2] *= 5  # these rows need the head only, the others the whole vocabulary
    cut = SamplingParams(temperature=1.0, top_p=0.9)
    params = [cut, cut, SamplingParams(temperature=1.0), SamplingParams(), cut]
    together = probabilities(logits, params)
    for row in range(5):
        assert torch.equal(together[row], probabilities(logits[row : row + 1], params[row : row + 1])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_best_tokens_are_the_first_of_the_highest(dtype: torch.dtype) -> None:
    logits = torch.randint(-3, 4, (2, 5, 9), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = [[row.tolist().index(max(row.tolist())) for row in rows] for rows in logits]
    actual = best_tokens(logits)
    assert actual.dtype == torch.int64 and actual.tolist() == expected
    logits[1, 2, 4] = torch.nan
    assert best_tokens(logits)[1, 2] == 4
    assert best_tokens(logits[0, 0]).tolist() == expected[0][0]
