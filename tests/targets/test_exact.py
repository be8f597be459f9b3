"""Exact targets: no bit of a node depends on the other nodes, so greedy outputs equal plain decoding."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_hf import FAMILIES as HF_MODELS
from test_native import MODELS, folders  # noqa: F401 (a fixture)
from thinned import LONG, thinned
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from blockdraft.decode.proposal import Plan, Proposal, chain
from blockdraft.drafters import Drafter
from blockdraft.drafters.lookup import LookupDrafter, LookupState
from blockdraft.engine import Costs, Engine
from blockdraft.nn.cache import KVCache
from blockdraft.targets import Target, TargetOutput, exact, load_target, native
from blockdraft.targets.hf import HFTarget
from blockdraft.types import Drafting, LoadOptions, SamplingParams

WIDE = ("llama", "gemma2", "qwen3-window", "mistral-window")  # in float32 too
# Each has layers that the wide ones lack: sinks and experts, recurrent states, norms behind, shared experts and biases.
# The others repeat layers of these with other numbers.
QUICK_FAMILIES = ("gpt_oss", "granitemoehybrid", "olmo2", "qwen2_moe")
QUICK = ("gemma2", "bfloat16")  # windows, a soft-cap, and many near ties
EVERY_MODEL = [  # `make test` covers every name, dtype and backend of the wide ones
    *thinned(WIDE, ("bfloat16", "float32"), ("native", "hf"), keep=3, marks=LONG),
    *(
        pytest.param(name, "bfloat16", backend, marks=() if name in QUICK_FAMILIES and backend == "native" else LONG)
        for name in MODELS
        if name not in WIDE
        for backend in ("native", "hf")
    ),
]
BACKENDS = pytest.mark.parametrize("backend", ["native", pytest.param("hf", marks=pytest.mark.slow)])
# Transformers computes experts on the rows that chose them, so kernels may see other shapes; its states are not exact.
HF_INEXACT = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "gemma4_text-experts"), "the numbers of a token depend on"),
    "gpt_oss": "attends with s_aux, which exact does not know",
    **dict.fromkeys(
        (
            *("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "nemotron_h"),
            *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        ),
        "keeps more than keys and values",
    ),
}


def hf_inexact(name: str) -> str | None:
    """Return why transformers cannot run a model exactly, or None."""
    return HF_INEXACT.get(name, HF_INEXACT.get(name.partition("-")[0]))


# Batch sizes, and settings of drafting.
DRAFTINGS = [
    (5, Drafting(None)),
    (3, Drafting(tree_budget=8)),
    (1, Drafting(tree_budget=40)),
    (3, Drafting("auto", "auto")),
]
COSTS = Costs(  # drafting costs little, so that "auto" drafts
    batch_sizes=(1, 100),
    plain=(1.0, 1.1),
    chain=(((1, 1.1), (100, 1.3)),) * 2,
    tree=(((1, 1.2), (100, 1.4)),) * 2,
    date=time.time(),
)
PROMPTS = [[(7 * i * i + 5 * row) % 55 + 4 for i in range(1 + (5 * row) % 19)] for row in range(6)]
GREEDY = SamplingParams(10, ignore_eos=True)


class Oracle(LookupDrafter):
    """Drafts the right next token four times of five, among wrong draft tokens at random nodes of the tree."""

    block_size = 6

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=False)]
        self.random = torch.Generator().manual_seed(0)

    def _draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.random))

    def propose(self, state: LookupState, anchor: Tensor, plan: Plan) -> Proposal:
        anchors = anchor.flatten().tolist()
        rows = [self._row([*text.tokens, token], plan) for text, token in zip(state.sequences, anchors, strict=True)]
        tokens, parents = zip(*rows, strict=True)
        return Proposal(torch.tensor(tokens), torch.tensor(parents))

    def _row(self, text: list[int], plan: Plan) -> tuple[list[int], list[int]]:
        known = next((each for each in self.texts if each[: len(text)] == text), text)
        tokens, parents, right, depths = [text[-1]], [-1], 0, [0]
        for node in range(1, 1 + (plan.tree_budget or plan.block_size - 1)):
            parent = node - 1 if plan.tree_budget == 0 else right if self._draw(3) else self._draw(node)
            parent = parent if depths[parent] < plan.block_size - 1 else 0
            token = known[len(text) + depths[parent]] if len(text) + depths[parent] < len(known) else 3
            if parent != right or not self._draw(5):
                token = 3 + self._draw(58)
            else:
                right = node
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return tokens, parents


def answers(target: Target, drafter: Drafter, rows: int = 1, drafting: Drafting | None = None) -> list[list[int]]:
    """Return the outputs for the prompts, and for prompts that continue with the first tokens of these outputs."""
    with Engine(target, drafter, rows, drafting, prefix_tokens=200, prefill_tokens=24) as engine:
        engine.controller.costs = lambda: COSTS  # type: ignore[method-assign]
        first = [completion.checked().token_ids for completion in engine.generate(PROMPTS, GREEDY)]
        turns = [prompt + answer[:6] for prompt, answer in zip(PROMPTS, first, strict=True)]
        completions = engine.generate(turns, GREEDY)
        most = max(max(completion.stats.committed) for completion in completions)
        assert (most > 1) == (drafting is None or drafting.block_size != 1)  # draft tokens are accepted
        return first + [completion.token_ids for completion in completions]


def plain(target: Target) -> list[list[int]]:
    return answers(target, LookupDrafter(), 1, Drafting(block_size=1))


@pytest.fixture
def row_dependent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make products depend on their number of rows, as in some kernels, only much more."""
    linear = F.linear

    def by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias) * (1 + (x.numel() // x.size(-1)) % 7 / 32)

    monkeypatch.setattr(F, "linear", by_rows)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "backend"), EVERY_MODEL)
def test_answers_are_those_of_plain_decoding(
    folders: dict[str, Path],  # noqa: F811
    name: str,
    dtype: str,
    backend: str,
    row_dependent: None,
) -> None:
    if backend == "hf" and hf_inexact(name):
        pytest.skip("refused, as another test says")
    target = load_target(folders[name], dtype=dtype, device="cpu", backend=backend, compile="off", exact=True)
    assert target.running == f"{backend}, exact"
    expected = plain(target)
    for rows, drafting in DRAFTINGS if name in WIDE else DRAFTINGS[:2]:
        assert answers(target, Oracle(expected), rows, drafting) == expected
    if name in WIDE:
        assert answers(target, LookupDrafter(), 5, Drafting(block_size=1)) == expected


@pytest.mark.slow
@BACKENDS
def test_without_exact_the_same_products_change_answers(
    folders: dict[str, Path],  # noqa: F811
    backend: str,
    row_dependent: None,
) -> None:
    target = load_target(folders[QUICK[0]], dtype=QUICK[1], device="cpu", backend=backend, compile="off")
    expected = plain(target)
    assert all(answers(target, Oracle(expected), *how) != expected for how in DRAFTINGS[:2])


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("name", ["gemma2-uncapped", "llama-odd", "qwen2-window"])
def test_exact_is_refused_without_filled_pieces_or_with_attention_in_the_dtype(
    folders: dict[str, Path],  # noqa: F811
    name: str,
    backend: str,
    row_dependent: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how = LoadOptions(dtype="float32", device="cpu", backend=backend, compile="off")
    load_target(folders[name], how, exact=True)
    unfilled = lambda values, first, end: values.flatten()[None, first:end]  # noqa: E731
    for owner, function, other in ((exact, "filled", unfilled), (Tensor, "double", lambda x: x)):
        with monkeypatch.context() as changed:
            changed.setattr(owner, function, other)
            with pytest.raises(ValueError, match="depend on how many keys there are and where they lie.*Use other"):
                load_target(folders[name], how, exact=True)


def trees(target: Target) -> list[Tensor]:
    """Return logits and hidden states of prompts, trees and chains of sequences of unequal lengths."""
    random = torch.Generator().manual_seed(1)
    cache, lengths, target_layers = target.new_cache(3, 40), [9, 6, 9], (2, 0, target.num_layers)
    prompts = torch.randint(3, 61, (3, 9), generator=random)
    actual = [target.forward(prompts, chain(prompts).parents, cache, target_layers, torch.tensor(lengths) - 1)]
    cache.commit([range(length) for length in lengths])
    tree = torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 1, -1, -1], [-1, 0, 1, 2, 3, 4]])
    for path in ([[0, 2, 5], [0], [0, 1, 2, 3, 4]], [[0, 1], [0, 1, 2], []]):
        tokens = torch.randint(3, 61, (3, 6), generator=random)
        actual.append(target.forward(tokens, tree, cache, target_layers))
        cache.commit(path)
    assert all(output.hidden_states is not None for output in actual)
    return [each for output in actual for each in (output.logits, output.hidden_states) if each is not None]


@BACKENDS
@pytest.mark.parametrize("name", thinned(MODELS, keep=3, marks=LONG))
def test_numbers_are_those_of_the_ordinary_forward(
    folders: dict[str, Path],  # noqa: F811
    name: str,
    backend: str,
) -> None:
    how = LoadOptions(dtype="float32", device="cpu", backend=backend, compile="off")
    if backend == "hf" and (reason := hf_inexact(name)):
        with pytest.raises(ValueError, match=reason):
            load_target(folders[name], how, exact=True)
        return
    for mine, ordinary in zip(
        trees(load_target(folders[name], how, exact=True)), trees(load_target(folders[name], how)), strict=True
    ):
        torch.testing.assert_close(mine, ordinary, atol=1e-4, rtol=1e-4)


def random_model(name: str, **changes: Any) -> Any:
    fields = dict(HF_MODELS[name]) | changes
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type", name), **fields))


@pytest.mark.parametrize("name", thinned(sorted(set(HF_MODELS) - set(MODELS)), keep=3))
def test_models_that_only_transformers_knows_are_exact_too(name: str) -> None:
    ordinary = trees(HFTarget(random_model(name)))
    target = HFTarget(random_model(name), exact=True)
    exact.check_exact(target)
    for mine, expected in zip(trees(target), ordinary, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


def test_a_forward_writes_its_own_slots_only(folders: dict[str, Path]) -> None:  # noqa: F811
    for backend in ("native", "hf"):
        target = load_target(
            folders["llama"], dtype="float32", device="cpu", backend=backend, compile="off", exact=True
        )
        cache = target.new_cache(3, 5)
        tokens = torch.full((3, 5), 7)
        target.forward(tokens, chain(tokens).parents, cache)
        cache.commit([range(5), range(2), range(5)])
        stores = [store.clone() for store in cache.stores]  # type: ignore[attr-defined]
        target.forward(tokens[:1, :3], chain(tokens[:1, :3]).parents, cache.of([5]))
        changed = [
            (old != new).any(dim=-1).flatten(0, -2).any(dim=0).nonzero().flatten().tolist()
            for old, new in zip(stores, cache.stores, strict=True)  # type: ignore[attr-defined]
        ]
        assert changed and all(set(slots) <= {7, 8, 9} for slots in changed)


def test_a_target_compiled_for_a_cpu_is_exact_already(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir, device="cpu", compile="on", exact=True)
    assert target.running == load_target(tiny_target_dir, device="cpu", compile="on").running
    assert "exact" not in target.running


def test_captured_forwards_are_refused(tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match="exact and compile 'on' do not go together on a GPU"):
        native.load(
            tiny_target_dir, LoadOptions(dtype=torch.bfloat16, device=torch.device("cuda"), compile="on", exact=True)
        )


class Fake:
    """A target whose logits at a node depend on its path, plus a small error that should not be there."""

    backend, running, path, has_trees, can_truncate = "fake", "fake", None, True, True
    dtype, device, num_layers, vocab_size, max_context = torch.float32, torch.device("cpu"), 1, 50, 100

    def __init__(self, added: Callable[[int, list[int], int], int], rare: bool = False) -> None:
        self.added, self.rare, self.texts = added, rare, {}
        self.calls = 0

    def new_cache(self, batch: int, capacity: int) -> "FakeCache":
        return FakeCache(batch, capacity)

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: "FakeCache",
        target_layers: Sequence[int] = (),
        logits_at: Any = None,
    ) -> TargetOutput:
        numbers = torch.zeros(*tokens.shape, 1)
        for place, (start, own, above) in enumerate(zip(cache.starts, tokens.tolist(), parents.tolist(), strict=True)):
            text = cache.texts[start]
            cache.nodes[start] = own
            for node, parent in enumerate(above):
                path = [own[node]]
                while parent >= 0:
                    path.append(own[parent])
                    parent = above[parent]
                beside = [token for each, token in enumerate(tokens.flatten().tolist()) if token != own[node]]
                extra = self.added(node, beside, len(text) + len(own))
                extra = extra if not self.rare or len(text) == exact.CONTEXTS[0] else 0
                numbers[place, node] = 64 * (sum(text) + sum(path)) + extra
        return TargetOutput(numbers, numbers)


class FakeCache(KVCache):
    """Holds the tokens of each sequence, and of the nodes of the last forward pass."""

    def __init__(self, batch: int, capacity: int) -> None:
        super().__init__(batch, capacity)
        self.texts: dict[int, list[int]] = {start: [] for start in self.starts}
        self.nodes: dict[int, list[int]] = {}

    def copy(self, source: int, start: int, length: int) -> None:
        self.texts[start] = self.texts[source][:length]

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        for start, nodes in zip(self.starts, path, strict=True):
            self.texts[start] = self.texts[start] + [self.nodes[start][node] for node in nodes]


PLACE, NEIGHBOURS, LENGTH = "its place among the nodes", "the nodes beside it", "how many keys there are"


@pytest.mark.parametrize(
    ("added", "cause"),
    [
        (lambda node, beside, keys: node % 3 == 2, PLACE),
        (lambda node, beside, keys: len(beside) % 2, NEIGHBOURS),
        (lambda node, beside, keys: keys % 2, LENGTH),
    ],
)
def test_a_model_that_is_not_exact_is_refused(added: Callable[[int, list[int], int], int], cause: str) -> None:
    with pytest.raises(ValueError, match=f"the numbers of a token depend on .*{cause}"):
        exact.check_exact(Fake(added))  # type: ignore[arg-type]


def test_what_shows_in_one_context_is_chance_in_float32_only() -> None:
    fake = Fake(lambda node, beside, keys: keys % 2, rare=True)
    exact.check_exact(fake)  # type: ignore[arg-type]
    fake.dtype = torch.bfloat16
    with pytest.raises(ValueError, match=LENGTH):
        exact.check_exact(fake)  # type: ignore[arg-type]


def test_a_backend_without_trees_is_refused() -> None:
    fake = Fake(lambda node, beside, keys: 0)
    exact.check_exact(fake)  # type: ignore[arg-type]
    fake.has_trees = False
    with pytest.raises(ValueError, match="the backend fake scores chains only"):
        exact.check_exact(fake)  # type: ignore[arg-type]


def test_models_with_other_attention_are_refused() -> None:
    small = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="FalconForCausalLM has attention of its own"):
        HFTarget(AutoModelForCausalLM.from_config(AutoConfig.for_model("falcon", **small)), exact=True)
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 500.0}
    HFTarget(random_model("llama", rope_parameters=long | {"original_max_position_embeddings": 128}), exact=True)
    with pytest.raises(ValueError, match=r"\(longrope\) change with the length"):
        HFTarget(random_model("llama", rope_parameters=long | {"original_max_position_embeddings": 64}), exact=True)
    sinks = {"num_local_experts": 2, "num_experts_per_tok": 1, "model_type": "gpt_oss", "sliding_window": 8}
    target = HFTarget(random_model("llama", **sinks), exact=True)
    with pytest.raises(ValueError, match="attends with s_aux, which exact does not know"):
        exact.check_exact(target)
