"""Losslessness on small distributions that are known exactly, and proof that the same test catches broken rules."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
from thinned import thinned
from torch import Tensor
from twins import draw_token, verify_chosen

from blockdraft.decode import block_verification
from blockdraft.decode.distributions import Distributions, probabilities
from blockdraft.decode.proposal import Proposal, SparseDistribution, chain, depths
from blockdraft.decode.sampling import draw
from blockdraft.decode.verification import Verdict, verify
from blockdraft.types import SamplingParams

V, ROWS, LENGTH = 3, 2000, 3
# Two small languages: the logits of the next token given the last two, for the target and for a drafter. With this seed
# the subtlest of the broken rules below is caught with the fewest rows.
TARGET, DRAFTER = 1.5 * torch.randn(2, V, V, V, generator=torch.Generator().manual_seed(39))
CHAIN = [-1, 0, 1, 2]
TREE = [-1, 0, 0, 0, 1, 1, 2]
WARM = SamplingParams(temperature=1.0)
Judge = Callable[[Proposal, Distributions, Tensor, Tensor], Verdict]
# From the tokens before the anchors, the anchors, and random numbers to a proposal.
Drafter = Callable[[Tensor, Tensor, Tensor], Proposal]


def before(earlier: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
    """Return the token before each node; `earlier` is the one before the anchor."""
    return torch.where(parents >= 0, tokens.gather(1, parents.clamp(min=0)), earlier[:, None])


def drafting(
    shape: list[int], is_sampled: bool, keep: int = V, ragged: bool = False, mixed: bool = False, claims: bool = False
) -> Drafter:
    """A drafter of trees of this shape, whose distributions keep so many tokens.

    Ragged proposals have fewer nodes in every second row, mixed ones have chosen draft tokens there. A drafter that
    `claims` chooses its draft tokens and says that it drew them.
    """

    def propose(earlier: Tensor, anchor: Tensor, numbers: Tensor) -> Proposal:
        tokens, parents = anchor[:, None], torch.tensor(shape).repeat(len(anchor), 1)
        for node in range(1, len(shape)):
            dist = dist_at(earlier, tokens, parents[:, :node])[:, shape[node]]
            best = dist.argsort(-1, descending=True)[:, shape[:node].count(shape[node])]
            taken = draw(dist[:, None], numbers[:, node : node + 1])[:, 0] if is_sampled else best
            tokens = torch.cat([tokens, torch.where(choosers(len(anchor)), best, taken)[:, None]], 1)
        if ragged:
            parents[::2, -2:] = -1
        if not is_sampled and not claims:
            return Proposal(tokens, parents)
        dist, ids = dist_at(earlier, tokens, parents).topk(keep, -1)
        q = [SparseDistribution(i, p) for i, p in zip(ids, dist, strict=True)]
        chosen = choosers(len(anchor)).tolist()
        return Proposal(tokens, parents, tuple(None if c else dist for c, dist in zip(chosen, q, strict=True)))

    def choosers(rows: int) -> Tensor:
        return (torch.arange(rows) % 2 == 1) & mixed

    def dist_at(earlier: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        return probabilities(
            DRAFTER[before(earlier, tokens, parents), tokens], [replace(WARM, top_k=keep)] * len(tokens)
        )

    return propose


def beside(earlier: Tensor, anchor: Tensor, numbers: Tensor) -> Proposal:
    """Sampled chains with chosen draft tokens around them, which depend on what was sampled: some hold another token
    than a sampled draft token, some follow the end of the chain, and some each other."""
    chain = drafting(CHAIN, is_sampled=True)(earlier, anchor, numbers)
    own = chain.tokens
    others = [(own[:, 1] + 1) % V, (own[:, 2] + 2) % V, (own[:, 3] + own[:, 1]) % V, own[:, 1], (own[:, 1] + 1) % V]
    parents = torch.tensor([*CHAIN, 0, 1, 3, 4, 7]).repeat(len(own), 1)
    return Proposal(torch.cat([own, torch.stack(others, dim=1)], 1), parents, chain.q)


def only_the_likeliest(earlier: Tensor, anchor: Tensor, numbers: Tensor) -> Proposal:
    """Sampled chains, but none where the first draft token is not the likeliest: what was sampled decides whether it
    stays."""
    chain = drafting(CHAIN, is_sampled=True)(earlier, anchor, numbers)
    likeliest = drafting(CHAIN, is_sampled=False)(earlier, anchor, numbers).tokens[:, 1]
    parents = chain.parents.clone()
    parents[chain.tokens[:, 1] != likeliest, 1:] = -1
    return replace(chain, parents=parents)


def decode(drafter: Drafter, params: SamplingParams, judge: Judge = verify) -> list[list[int]]:
    """Decode the first tokens of many sequences after the prompt [0, 0]."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(ROWS, 3 * LENGTH, generator=generator, dtype=torch.float64)  # number i decides token i
    outputs: list[list[int]] = [[] for _ in range(ROWS)]
    while going := [row for row in range(ROWS) if len(outputs[row]) < LENGTH]:
        generated = [outputs[row] for row in going]
        earlier, anchor = torch.tensor([[0, 0, *output][-2:] for output in generated]).unbind(1)
        draws, tests = torch.rand(2, len(going), 8, generator=generator, dtype=torch.float64)
        proposal = drafter(earlier, anchor, draws)
        tokens, parents = proposal.tokens, proposal.parents
        logits = TARGET[before(earlier, tokens, parents), tokens]
        distributions = Distributions(logits, [params] * len(going), tokens, parents, [[0, 0]] * len(going), generated)
        done = torch.tensor([[len(output)] for output in generated])
        uniforms = numbers[going].gather(1, done + depths(parents))
        verdict = judge(proposal, distributions, uniforms, draws if judge is reused_numbers else tests)
        for output, ids, path, bonus in zip(generated, tokens.tolist(), verdict.path, verdict.bonus, strict=True):
            output += [ids[node] for node in path[1:]] + [bonus]
    return [output[:LENGTH] for output in outputs]


def exact_distribution(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of each output, by enumeration."""
    dist = {}
    for output in product(range(V), repeat=LENGTH):
        text, dist[output] = (0, 0, *output), 1.0
        for i, token in enumerate(output):
            logits = TARGET[text[i], text[i + 1]].clone()
            for generated in set(output[:i]):
                logits[generated] -= params.presence_penalty
            dist[output] *= float(probabilities(logits.view(1, 1, -1), [params])[0, 0, token])
    return dist


def surprise(outputs: list[list[int]], params: SamplingParams) -> float:
    """Chi-square of the outputs against the exact distribution, in standard deviations from what noise alone would
    give."""
    actual, dist = Counter(map(tuple, outputs)), exact_distribution(params)
    if any(dist[output] == 0 for output in actual):
        return math.inf
    possible = [output for output in dist if dist[output] > 0]
    expected = {output: dist[output] * len(outputs) for output in possible}
    chi_square = sum((actual[output] - expected[output]) ** 2 / expected[output] for output in possible)
    freedom = len(possible) - 1
    return (chi_square - freedom) / math.sqrt(2 * freedom)


NOISE = 4.0
DRAFTERS = {
    "none": drafting([-1], is_sampled=False),
    "chosen chain": drafting(CHAIN, is_sampled=False),
    "chosen tree": drafting(TREE, is_sampled=False, ragged=True),
    "sampled chain": drafting(CHAIN, is_sampled=True, keep=2),
    "sampled chain, ragged and mixed": drafting(CHAIN, is_sampled=True, ragged=True, mixed=True),
}
SETTINGS = {
    "temperature 1": WARM,
    "temperature 0.6": SamplingParams(temperature=0.6),
    "nucleus": SamplingParams(temperature=1.0, top_p=0.8),
    "penalty": SamplingParams(temperature=1.0, presence_penalty=1.5),
}


@pytest.mark.parametrize(("name", "setting"), thinned(DRAFTERS, SETTINGS, keep=2))
def test_output_has_the_target_distribution(name: str, setting: str) -> None:
    params = SETTINGS[setting]
    assert abs(surprise(decode(DRAFTERS[name], params), params)) < NOISE


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["temperature 1", "penalty"])
def test_chosen_draft_tokens_beside_sampled_ones_leave_the_distribution(setting: str) -> None:
    assert abs(surprise(decode(beside, SETTINGS[setting]), SETTINGS[setting])) < NOISE


def test_greedy_output_is_the_argmax_whatever_was_drafted() -> None:
    outputs = {tuple(output) for drafter in DRAFTERS.values() for output in decode(drafter, SamplingParams())}
    assert outputs == {output for output, share in exact_distribution(SamplingParams()).items() if share == 1}


# Rules that are broken on purpose.


def accept_everything(proposal: Proposal, distributions: Distributions, uniforms: Tensor, tests: Tensor) -> Verdict:
    count = proposal.tokens.size(1)
    rows = range(len(proposal.tokens))
    return Verdict([list(range(count)) for _ in rows], distributions.draw(rows, [count - 1] * len(rows), uniforms))


def bonus_of_the_anchor(proposal: Proposal, distributions: Distributions, uniforms: Tensor, tests: Tensor) -> Verdict:
    rows = range(len(proposal.tokens))
    return Verdict(
        verify(proposal, distributions, uniforms, tests).path, distributions.draw(rows, [0] * len(rows), uniforms)
    )


def skewed_numbers(proposal: Proposal, distributions: Distributions, uniforms: Tensor, tests: Tensor) -> Verdict:
    return verify(proposal, distributions, uniforms * 0.9, tests)


def no_residual(proposal: Proposal, distributions: Distributions, uniforms: Tensor, tests: Tensor) -> Verdict:
    path = verify(proposal, distributions, uniforms, tests).path
    return Verdict(path, distributions.draw(range(len(path)), [nodes[-1] for nodes in path], uniforms))


def q_of_the_wrong_node(proposal: Proposal, distributions: Distributions, uniforms: Tensor, tests: Tensor) -> Verdict:
    assert proposal.q is not None
    q = [SparseDistribution(dist.ids.roll(1, 0), dist.probs.roll(1, 0)) for dist in proposal.q if dist is not None]
    return verify(replace(proposal, q=tuple(q)), distributions, uniforms, tests)


def reused_numbers(proposal: Proposal, distributions: Distributions, uniforms: Tensor, tests: Tensor) -> Verdict:
    return verify(proposal, distributions, uniforms, tests)  # `decode` passes the numbers that drew the draft tokens


def broken(name: str, rule: Callable[..., tuple[Tensor, Tensor]]) -> Judge:
    def judge(proposal: Proposal, distributions: Distributions, uniforms: Tensor, tests: Tensor) -> Verdict:
        with patch.object(block_verification, name, rule):
            return verify(proposal, distributions, uniforms, tests)

    return judge


def block_with_ratios(
    p: Tensor, q: Tensor, draft_token_p: Tensor, draft_token_q: Tensor, tests: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept up to the last draft token whose test is below the ratio r, instead of the probability h."""
    _, c = block_verification.block_acceptance_probs(p, q, draft_token_p, draft_token_q)
    last = torch.where(tests < 1 / c, torch.arange(tests.size(1)), 0).amax(1)
    return last, c.gather(1, last[:, None])[:, 0]


def block_up_to_first_rejection(
    p: Tensor, q: Tensor, draft_token_p: Tensor, draft_token_q: Tensor, tests: Tensor
) -> tuple[Tensor, Tensor]:
    """Test draft tokens one by one as in plain rejection sampling, then draw from the block's residual."""
    _, c = block_verification.block_acceptance_probs(p, q, draft_token_p, draft_token_q)
    accepted = tests * draft_token_q < draft_token_p
    accepted[:, 0] = True
    last = accepted.long().cumprod(1).sum(1) - 1
    return last, c.gather(1, last[:, None])[:, 0]


@pytest.mark.parametrize(
    ("drafter", "judge"),
    [
        (drafting(TREE, is_sampled=False), skewed_numbers),
        (drafting(CHAIN, is_sampled=True), no_residual),
        pytest.param(drafting(CHAIN, is_sampled=False), accept_everything, marks=pytest.mark.slow),
        pytest.param(drafting(CHAIN, is_sampled=False), bonus_of_the_anchor, marks=pytest.mark.slow),
        pytest.param(drafting(CHAIN, is_sampled=True), q_of_the_wrong_node, marks=pytest.mark.slow),
        pytest.param(drafting(CHAIN, is_sampled=True), reused_numbers, marks=pytest.mark.slow),
        pytest.param(drafting(CHAIN, is_sampled=False, claims=True), verify, marks=pytest.mark.slow),
        pytest.param(only_the_likeliest, verify, marks=pytest.mark.slow),
        pytest.param(
            drafting(CHAIN, is_sampled=True), broken("accept_block", block_with_ratios), marks=pytest.mark.slow
        ),
        pytest.param(
            drafting(CHAIN, is_sampled=True),
            broken("accept_block", block_up_to_first_rejection),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_broken_rules_are_caught(drafter: Drafter, judge: Judge) -> None:
    assert surprise(decode(drafter, WARM, judge), WARM) > 2 * NOISE


def distributions_of(probs: Tensor, proposal: Proposal) -> Distributions:
    """Return distributions with these probabilities `[B, N, V]`."""
    nothing: list[list[int]] = [[]] * len(probs)
    return Distributions(probs.log(), [WARM] * len(probs), proposal.tokens, proposal.parents, nothing, nothing)


@pytest.mark.parametrize("seed", range(10))
def test_agrees_with_the_readable_twin(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = 12
    tokens = torch.randint(V, (2, count), generator=generator)
    parents = torch.tensor(
        [[-1] + [int(torch.randint(-1, i, (), generator=generator)) for i in range(1, count)] for _ in range(2)]
    )
    probs = torch.rand(2, count, V, generator=generator).softmax(-1)
    uniforms = torch.rand(2, count, dtype=torch.float64, generator=generator)
    proposal = Proposal(tokens, parents)
    verdict = verify(proposal, distributions_of(probs, proposal), uniforms)
    for row in range(2):

        def draw_at(node: int, row: int = row) -> int:
            return draw_token(probs[row, node].tolist(), float(uniforms[row, node]))

        expected = verify_chosen(tokens[row].tolist(), parents[row].tolist(), draw_at)
        assert (verdict.path[row], verdict.bonus[row]) == expected


def test_greedy_accepts_the_longest_matching_prefix() -> None:
    proposal = chain(torch.tensor([[0, 1, 2, 2]]))
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0, 1]]), V).float()
    distributions = Distributions(logits, [SamplingParams()], proposal.tokens, proposal.parents, [[0]], [[]])
    verdict = verify(proposal, distributions, torch.rand(1, 4, dtype=torch.float64))
    assert (verdict.path, verdict.bonus) == ([[0, 1, 2]], [0])


@pytest.mark.parametrize("seed", range(10))
def test_greedy_rows_are_judged_alike_with_and_without_sampled_ones_beside_them(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, count = 40, 12
    tokens = torch.randint(V, (rows, count), generator=generator)  # so that siblings often hold the same token
    above = [[-1, *(int(torch.randint(-1, i, (), generator=generator)) for i in range(1, count))] for _ in range(rows)]
    logits = torch.randn(rows, count, V, generator=generator)
    logits[3, 0, 1], logits[5, -1, 2], logits[7, 4, 0], logits[8, 2] = math.nan, math.inf, -math.inf, -math.inf
    proposal = Proposal(tokens, torch.tensor(above))
    uniforms = torch.rand(rows, count, dtype=torch.float64, generator=generator)

    def judged(last: SamplingParams) -> Verdict:
        params = [*[SamplingParams()] * (rows - 1), last]
        distributions = Distributions(logits, params, tokens, proposal.parents, [[0]] * rows, [[]] * rows)
        return verify(proposal, distributions, uniforms)

    alone, beside = judged(SamplingParams()), judged(WARM)
    assert (alone.path[:-1], alone.bonus[:-1]) == (beside.path[:-1], beside.bonus[:-1])
    # Row 3 has no distribution after the anchor, rows 5 and 8 none after a later node, which matters if it is reached.
    lost = {row for row, path in enumerate(alone.path) if not path}
    assert 3 in lost and lost <= {3, 5, 8} and 7 not in lost
    assert max(map(len, alone.path)) > 2


@pytest.mark.parametrize(
    ("shape", "is_sampled"), [(CHAIN, False), (TREE, False), (CHAIN, True)], ids=["chain", "tree", "sampled chain"]
)
def test_a_row_without_a_distribution_leaves_the_others_alone(shape: list[int], is_sampled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    earlier, draws = torch.zeros(3).long(), torch.rand(3, 8, generator=generator, dtype=torch.float64)
    proposal = drafting(shape, is_sampled)(earlier, earlier, draws)
    logits = TARGET[before(earlier, proposal.tokens, proposal.parents), proposal.tokens]
    uniforms, tests = torch.rand(2, 3, len(shape), generator=generator, dtype=torch.float64)

    def judged(logits: Tensor) -> Verdict:
        params = [SamplingParams(), WARM, WARM]
        distributions = Distributions(logits, params, proposal.tokens, proposal.parents, [[0, 0]] * 3, [[]] * 3)
        return verify(proposal, distributions, uniforms, tests)

    sound = judged(logits)
    logits[1, 0, 2] = torch.nan
    verdict = judged(logits)
    assert verdict == Verdict([sound.path[0], [], sound.path[2]], [sound.bonus[0], -1, sound.bonus[2]])


def test_the_walk_goes_on_beside_a_sampled_chain() -> None:
    """The sampled draft token 1 is impossible, the chosen draft token 2 is certain, and so is what follows it."""
    dist = SparseDistribution(torch.tensor([[1], [1]]), torch.ones(2, 1))
    proposal = Proposal(torch.tensor([[0, 1, 2, 0]]), torch.tensor([[-1, 0, 0, 2]]), (dist,))
    following = torch.tensor([2, 1, 0, 1])  # after each node
    numbers = torch.full((1, 4), 0.5, dtype=torch.float64)

    def judged(broken: int | None = None) -> Verdict:
        probs = torch.nn.functional.one_hot(following, V).float()[None]
        if broken is not None:
            probs[0, broken] = torch.nan
        return verify(proposal, distributions_of(probs, proposal), numbers, numbers)

    assert judged() == judged(1) == Verdict([[0, 2, 3]], [1])
    assert judged(3) == Verdict([[0, 2]], [0])  # ends before what has no distribution
    assert judged(2) == Verdict([[0]], [2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_node_without_a_distribution_counts_where_the_walk_comes_by_only(temperature: float) -> None:
    """Two draft tokens follow the anchor, one of which has no distribution."""
    proposal = Proposal(torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 0]]))
    logits = torch.full((1, 3, V), -20.0)
    logits[0, 0, 1] = logits[0, 1, 0] = logits[0, 2, 0] = 20.0  # the target goes to token 1, which node 1 holds
    params = SamplingParams(temperature=temperature)

    def judged(broken: int) -> Verdict:
        scores = logits.clone()
        scores[0, broken, 2] = torch.nan
        distributions = Distributions(scores, [params], proposal.tokens, proposal.parents, [[0]], [[]])
        return verify(proposal, distributions, torch.full((1, 3), 0.5, dtype=torch.float64))

    assert judged(2) == Verdict([[0, 1]], [0])
    assert judged(1) == judged(0) == Verdict([[]], [-1])


def test_sampled_draft_tokens_form_chains() -> None:
    start, draws = torch.zeros(1).long(), torch.full((1, 8), 0.5, dtype=torch.float64)
    proposal = drafting(TREE, is_sampled=True)(start, start, draws)
    probs = torch.full((1, len(TREE), V), 1 / V)
    with pytest.raises(AssertionError, match="sampled draft tokens form a chain"):
        verify(proposal, distributions_of(probs, proposal), draws, draws)


def test_a_draft_token_that_its_distribution_cannot_offer_is_refused() -> None:
    proposal = chain(torch.tensor([[0, 2]]))
    dist = SparseDistribution(torch.tensor([[0, 1]] * 2), torch.tensor([[0.5, 0.5]] * 2))
    numbers = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not sampled from its parent's q"):
        verify(replace(proposal, q=(dist,)), distributions_of(torch.full((1, 2, V), 1 / V), proposal), numbers, numbers)
