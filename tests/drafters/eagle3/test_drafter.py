"""Draft tokens of EAGLE-3, compared with a twin without a cache, which computes every entry of a text anew."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from copies import copy_with
from thinned import thinned
from torch import Tensor

from blockdraft.decode.distributions import probabilities
from blockdraft.decode.proposal import SPARSE_SIZE, ChainPlan, SampledPlan, TreePlan
from blockdraft.decode.sampling import draw
from blockdraft.drafters import load_drafter
from blockdraft.drafters.eagle3 import drafter as eagle3
from blockdraft.drafters.eagle3 import layout as eagle3_layout
from blockdraft.drafters.eagle3.drafter import Eagle3Drafter
from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network
from blockdraft.errors import UsageError
from blockdraft.formats import DrafterTarget, read_drafter
from blockdraft.formats.base import Borrowed, Checkpoint
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams

FLAGS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    {"norm_before_fc": True, "qk_norm": True, "attention_bias": True},
]


@pytest.fixture(scope="module", params=["compiled", "uncompiled"])
def target(tiny_target_dir: Path, request: pytest.FixtureRequest) -> Target:
    return load_target(tiny_target_dir, backend="native", compile="on" if request.param == "compiled" else "off")


@pytest.fixture(scope="module")
def drafter(tiny_eagle3_dir: Path, target: Target) -> Eagle3Drafter:
    loaded = load_drafter(tiny_eagle3_dir, target=target)
    assert isinstance(loaded, Eagle3Drafter) and (loaded.compile_reason is None) == (target.compiled is not None)
    return loaded


def with_flags(drafter: Eagle3Drafter, target: Target, **flags: Any) -> Eagle3Drafter:
    """Random drafter with these fields of the configuration changed."""
    config = Eagle3Config(**{**vars(drafter.config), **flags})
    with torch.random.fork_rng():
        torch.manual_seed(8)
        network = Eagle3Network(config)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    network.keep(drafter.network.kept)
    return Eagle3Drafter(network, target)


class Twin:
    """Readable twin of the network: one entry at a time, with a loop over heads."""

    def __init__(self, drafter: Eagle3Drafter, target: Target) -> None:
        self.config, self.target, self.weights = drafter.config, target, drafter.network.state_dict()
        if drafter.path is not None:  # a packed network keeps no weights
            self.weights = read_drafter(drafter.path, None, target.num_layers).tensors

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weights[name]

    def fused(self, target_layers: Tensor) -> Tensor:
        if self.config.fc_norm:
            parts = target_layers.chunk(len(self.config.target_layers))
            target_layers = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)])
        if self.config.norm_before_fc:
            target_layers = self.norm(target_layers, "input_norm.weight")
        return self.weights["fc.weight"] @ target_layers

    def heads(self, kind: str, x: Tensor, position: int) -> Tensor:
        name = f"midlayer.self_attn.{kind}_"
        actual = self.weights[f"{name}proj.weight"] @ x + self.weights.get(f"{name}proj.bias", torch.zeros(()))
        actual = actual.view(-1, self.config.head_dim)
        if kind == "v":
            return actual
        if self.config.qk_norm:
            actual = self.norm(actual, f"{name}norm.weight")
        half = self.config.head_dim // 2
        angles = position * self.config.rope_theta ** (-torch.arange(half) / half)
        left, right = actual[:, :half], actual[:, half:]
        turned = left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()
        return torch.cat(turned, dim=1)

    def row(self, token: int, hidden_state: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden state of an entry, which is added to those that later entries see."""
        weights, config = self.weights, self.config
        normed = self.norm(hidden_state, "midlayer.hidden_norm.weight")
        embedded = self.target.embed(torch.tensor([token]))[0]
        x = torch.cat([self.norm(embedded, "midlayer.input_layernorm.weight"), normed])
        seen.append((self.heads("k", x, position), self.heads("v", x, position)))
        out = []
        for head, query in enumerate(self.heads("q", x, position)):
            group = head * config.num_key_value_heads // config.num_attention_heads
            scores = torch.stack([keys[group] @ query for keys, _ in seen]) / config.head_dim**0.5
            out.append(scores.softmax(dim=0) @ torch.stack([values[group] for _, values in seen]))
        o = weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)
        x = (normed if config.norm_before_residual else hidden_state) + o
        x = x + weights.get("midlayer.self_attn.o_proj.bias", torch.zeros(()))
        y = self.norm(x, "midlayer.post_attention_layernorm.weight")
        gate, up = (weights[f"midlayer.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        return x + weights["midlayer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)

    def logits(
        self, text: Sequence[int], target_layers: Tensor, path: Sequence[int], window: int | None = None
    ) -> list[Tensor]:
        """Draft-vocabulary logits after the anchor and each draft token of `path`, given these hidden states."""
        hidden_states, seen = [self.fused(one) for one in target_layers], list[tuple[Tensor, Tensor]]()
        for place in range(1, len(text)):
            self.row(text[place], hidden_states[place - 1], place - 1, seen)
        seen = seen[-window:] if window is not None else seen
        hidden_state, actual = hidden_states[-1], []
        for step, token in enumerate(path):
            state = self.row(token, hidden_state, len(text) - 1 + step, seen)
            normed = self.norm(state, "norm.weight")
            hidden_state = normed if self.config.norm_output else state
            actual.append(self.weights["lm_head.weight"] @ normed)
        return actual


def target_layers_of(count: int, seed: int) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))


def observe(drafter: Eagle3Drafter, state: Any, texts: list[list[int]], target_layers: list[Tensor]) -> None:
    """Let the drafter observe; rows are padded with tokens and hidden states that must leave no trace."""
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [77] * (longest - len(text)) for text in texts])
    hidden_states = torch.stack([torch.cat([one, target_layers_of(longest - len(one), 9)]) for one in target_layers])
    drafter.observe(state, tokens, hidden_states, [len(text) for text in texts])


@pytest.mark.parametrize(("flags", "sampled"), thinned(FLAGS, [False, True], keep=2))
def test_chains_equal_those_of_the_twin(
    flags: dict[str, Any], sampled: bool, drafter: Eagle3Drafter, target: Target, scatter: Callable[..., Any]
) -> None:
    """With any number of accepted draft tokens, and rows of different lengths at any slots."""
    drafter = with_flags(drafter, target, **flags) if flags else drafter
    twin, kept = Twin(drafter, target), drafter.network.kept
    params = [SamplingParams(), SamplingParams(temperature=0.8), SamplingParams(temperature=1.2, top_k=6)]
    generator = torch.Generator().manual_seed(1)
    texts, target_layers = (
        [[9], [4, 30, 7, 8, 50, 51], [30, 12]],
        [target_layers_of(1, 0), target_layers_of(6, 1), target_layers_of(2, 2)],
    )
    state = scatter(drafter.new_state(1, 150), (90, 40), (5, 45), (50, 40))
    observe(drafter, state, texts, target_layers)
    for step in range(4):
        anchors = torch.randint(4, 60, (3,), generator=generator)
        draws = torch.rand(3, 5, dtype=torch.float64, generator=generator) if sampled else None
        plan = ChainPlan(6, params) if draws is None else SampledPlan(6, params, draws)
        proposal = drafter.propose(state, anchors, plan)
        assert proposal.tokens.shape == (3, 6)
        new, more = [], []
        for row, ids in enumerate(proposal.tokens.tolist()):
            dist = proposal.q[row] if proposal.q else None
            assert (dist is None) == (not sampled or row == 0)
            for depth, logits in enumerate(twin.logits(texts[row], target_layers[row], ids[:-1])):
                if dist is None or draws is None:
                    assert ids[depth + 1] == kept[logits.argmax()]
                    continue
                probs = probabilities(logits[None, None], [params[row]])[0, 0]
                probs[probs.argsort(descending=True)[SPARSE_SIZE:]] = 0
                dense = torch.zeros(target.vocab_size).index_add(0, dist.ids[depth], dist.probs[depth])
                torch.testing.assert_close(dense[kept], probs / probs.sum(), atol=1e-5, rtol=1e-3)
                [[rank]] = draw(dist.probs[None, depth : depth + 1], draws[row : row + 1, depth : depth + 1]).tolist()
                assert ids[depth + 1] == dist.ids[depth, rank]
            accepted = (step + 2 * row) % 6  # tokens of the path, from none to the anchor and four draft tokens
            new.append(ids[:accepted])
            more.append(target_layers_of(accepted, 10 * step + row))
        observe(drafter, state, new, more)
        texts = [text + ids for text, ids in zip(texts, new, strict=True)]
        target_layers = [torch.cat(both) for both in zip(target_layers, more, strict=True)]


@pytest.mark.parametrize("budget", [2, 7, 30])
def test_trees_are_those_of_the_twin(
    budget: int, drafter: Eagle3Drafter, target: Target, constants: Callable[..., None]
) -> None:
    """The likeliest draft tokens of each level are continued, and the likeliest of all are proposed."""
    constants(eagle3, WIDTH=3)
    twin, kept, anchors = Twin(drafter, target), drafter.network.kept, [40, 41]
    texts, target_layers = [[9, 8, 7, 20], [31, 5]], [target_layers_of(4, 3), target_layers_of(2, 4)]
    state = drafter.new_state(2, 20)
    observe(drafter, state, texts, target_layers)
    params = [SamplingParams(), SamplingParams(temperature=0.5)]
    proposal = drafter.propose(state, torch.tensor(anchors), ChainPlan(5, params).as_tree(budget))
    for row in range(2):
        tokens, parents = proposal.tokens[row].tolist(), proposal.parents[row].tolist()
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            paths.append((*paths[parent], token))
        expected = dict[tuple[int, ...], float]()
        level = {(): 0.0}
        for _ in range(4):
            children = {}
            for path, likely in level.items():
                logits = twin.logits(texts[row], target_layers[row], [anchors[row], *path])[-1]
                log_probs = (logits / (params[row].temperature or 1)).log_softmax(dim=-1)
                best = log_probs.topk(min(3, budget))
                for value, rank in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    children[(*path, int(kept[rank]))] = likely + value
            expected |= children
            level = dict(sorted(children.items(), key=lambda one: -one[1])[: min(3, budget)])
        best_paths = sorted(expected, key=lambda path: -expected[path])[:budget]
        assert set(paths[1:]) == set(best_paths) and len(paths) == 1 + min(budget, len(expected))


def test_a_tree_ends_where_nothing_deeper_would_be_proposed(
    drafter: Eagle3Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, plan = drafter.new_state(1, 20), TreePlan(6, [SamplingParams()], 3)
    observe(drafter, state, [[9, 8, 7]], [target_layers_of(3, 3)])
    passes, actual = list[int](), []

    class Counted:
        room = 100

        def __init__(self, *given: Any) -> None:
            self.inner = nodes(*given)

        def __call__(self, *given: Any) -> Tensor:
            passes.append(1)
            return self.inner(*given)

    nodes = drafter.runner.nodes
    drafter = copy_with(drafter, runner=copy_with(drafter.runner, nodes=Counted))
    for number in (lambda levels, following, plan, width: width, eagle3.num_continued):
        monkeypatch.setattr(eagle3, "num_continued", number)
        passes.clear()
        actual.append((drafter.propose(state, torch.tensor([40]), plan), len(passes)))
    (whole, all_passes), (cut, fewer) = actual
    assert torch.equal(whole.tokens, cut.tokens) and torch.equal(whole.parents, cut.parents)
    assert all_passes == 5 and fewer < 4


@pytest.mark.parametrize(
    ("budget", "seconds", "following", "expected"),
    [
        (9, None, [0.5, 0.5, 0.5], 3),  # there is still room for all children
        (3, None, [0.5, 0.5, 0.5], 2),  # 0.4 and 0.2 are in the tree, beside 0.6
        (2, None, [0.5, 0.5, 0.5], 1),
        (1, None, [0.5, 0.5, 0.5], 0),
        (9, [1 + 0.13 * n for n in range(10)], [0.3, 0.0, 0.0], 1),  # from 0.3 on, a token pays
        (9, [1 + 0.08 * n for n in range(10)], [0.3, 0.0, 0.0], 2),
        (9, [1 + 0.13 * n for n in range(10)], [0.19, 0.19, 0.19], 0),  # no better than 0.2, which does not pay
        (9, [1 + 0.7 * n for n in range(10)], [0.3, 0.3, 0.3], 0),
    ],
)
def test_a_tree_grows_from_nodes_whose_children_may_be_proposed(
    budget: int, seconds: list[float] | None, following: list[float], expected: int
) -> None:
    levels = [torch.tensor([[0.6, 0.1]]).log(), torch.tensor([[0.4, 0.2, 0.05]]).log()]
    plan = TreePlan(6, [SamplingParams()], budget, step_seconds=seconds)
    assert eagle3.num_continued(levels, torch.tensor([following]).log(), plan, 3) == expected
    doubled = [level.expand(2, -1).clone() for level in levels]
    doubled[1][0] = -torch.inf  # another sequence without candidates
    both = TreePlan(6, [SamplingParams()] * 2, budget)
    if seconds is None and budget < 5:
        assert eagle3.num_continued(doubled, torch.zeros(2, 3), both, 3) == expected


def test_costs_that_cut_a_tree_save_passes(drafter: Eagle3Drafter) -> None:
    """The tree is that of the most probable nodes, and grows from few of them."""
    state = drafter.new_state(1, 60)
    observe(drafter, state, [[9, 8, 7]], [target_layers_of(3, 3)])
    widths, nodes = list[int](), drafter.runner.nodes

    class Recorded:
        room = 100

        def __init__(self, *given: Any) -> None:
            self.inner = nodes(*given)

        def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
            widths.append(tokens.size(1))
            return self.inner(tokens, parents)

    drafter = copy_with(drafter, runner=copy_with(drafter.runner, nodes=Recorded))
    sizes, passes = list[int](), list[list[int]]()
    for each in (0.0, 0.05):
        widths.clear()
        plan = TreePlan(6, [SamplingParams()], 12, step_seconds=[1 + each * n for n in range(13)])
        proposal = drafter.propose(state, torch.tensor([40]), plan)
        sizes.append(proposal.tokens.size(1) - 1)
        passes.append(widths[:])
    assert sizes[0] == 12 > sizes[1] and passes[0] > passes[1] == [1]


def test_a_window_hides_what_is_older(drafter: Eagle3Drafter, target: Target) -> None:
    twin, kept = Twin(drafter, target), drafter.network.kept
    texts, target_layers = [list(range(10, 22)), [31, 5, 6]], [target_layers_of(12, 5), target_layers_of(3, 6)]
    state = drafter.new_state(2, 30)
    observe(drafter, state, texts, target_layers)
    actual = []
    for window in (2, 5, 50):
        plan = ChainPlan(4, [SamplingParams()] * 2, draft_window=window)
        proposal = drafter.propose(state, torch.tensor([40, 41]), plan)
        for row, ids in enumerate(proposal.tokens.tolist()):
            for depth, logits in enumerate(twin.logits(texts[row], target_layers[row], ids[:-1], window)):
                assert ids[depth + 1] == kept[logits.argmax()]
        actual.append(proposal.tokens[0].tolist())
    assert actual[0] != actual[2]


def test_costs_decide_how_far_is_drafted(drafter: Eagle3Drafter) -> None:
    state = drafter.new_state(1, 20)
    observe(drafter, state, [[9, 8, 7]], [target_layers_of(3, 3)])
    for budget in (0, 12):
        counts = []
        for each in (0.0, 10.0):
            plan = ChainPlan(6, [SamplingParams()], step_seconds=[1 + each * n for n in range(40)]).as_tree(budget)
            proposal = drafter.propose(state, torch.tensor([40]), plan)
            assert proposal.expected is not None and 0 <= proposal.expected[0] < 6
            counts.append(proposal.tokens.size(1) - 1)
        assert counts == [12 if budget else 5, 0]


def test_an_empty_sequence_gets_draft_tokens(drafter: Eagle3Drafter) -> None:
    """Numbers that an earlier row has left in its slots are not read as hidden states."""
    state, plan = drafter.new_state(1, 20), ChainPlan(6, [SamplingParams()])
    first = drafter.propose(state, torch.tensor([40]), plan).tokens
    observe(drafter, state, [[9, 8, 7]], [target_layers_of(3, 3)])
    state.shrink(0, 0)
    state.close(0)
    state.open(0, 20)
    assert torch.equal(drafter.propose(state, torch.tensor([40]), plan).tokens, first)


def test_memory_is_that_of_the_stores(drafter: Eagle3Drafter) -> None:
    state = drafter.new_state(2, 20)
    observe(drafter, state, [[9], [8]], [target_layers_of(1, 3), target_layers_of(1, 4)])
    assert drafter.state_bytes(2, 20) == sum(store.nbytes for store in state.stores)
    assert drafter.weight_bytes() > 4 * 120 * 32


def test_early_files_that_call_themselves_a_llama_are_known(
    tiny_eagle3_dir: Path, target: Target, tmp_path: Path
) -> None:
    shutil.copytree(tiny_eagle3_dir, tmp_path / "early")
    file = tmp_path / "early" / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "architectures": ["LlamaForCausalLM"]}))
    assert isinstance(load_drafter(tmp_path / "early", target=target), Eagle3Drafter)


def test_a_drafter_of_another_target_is_refused(
    tiny_eagle3_dir: Path, drafter: Eagle3Drafter, target: Target, tmp_path: Path
) -> None:
    actual = read_drafter(tiny_eagle3_dir, None, 3)
    foreign = Borrowed(target.embed(torch.arange(target.vocab_size)) + 1, None, None)
    eagle3_layout.SPECULATORS.write(
        tmp_path / "other", Checkpoint(actual.config, actual.tensors, foreign), DrafterTarget("x", ("y",))
    )
    with pytest.raises(UsageError, match="embed_tokens.weight of .*other differs from the target's"):
        load_drafter(tmp_path / "other", target=target)
