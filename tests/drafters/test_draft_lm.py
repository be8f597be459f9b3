import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from copies import copy_with
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from blockdraft.decode.distributions import probabilities
from blockdraft.decode.proposal import SPARSE_SIZE, ChainPlan, Plan, SampledPlan
from blockdraft.decode.sampling import draw
from blockdraft.drafters import check_place, load_drafter
from blockdraft.drafters.draft_lm import BLOCK_SIZE, DraftLMDrafter, DraftState
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.targets import (
    Target,
    TargetOutput,
    load_target,
    load_target_text,
)
from blockdraft.types import Drafting, SamplingParams
from blockdraft_tools.checkpoint import open_checkpoint
from blockdraft_tools.gguf.targets import gguf_architecture, write_gguf_target
from blockdraft_tools.gguf.tokenizers import tokenizer_metadata

GREEDY = SamplingParams(33, ignore_eos=True)
PROMPTS = [[(5 * i * i + 7 * row) % 60 + 4 for i in range(1 + 3 * row)] for row in range(7)]


@pytest.fixture(scope="module")
def drafter(tiny_lm_dir: Path, target: Target) -> DraftLMDrafter:
    loaded = load_drafter(tiny_lm_dir, target=target)
    assert isinstance(loaded, DraftLMDrafter)
    return loaded


def altered(folder: Path, copy: Path, vocab_size: int | None = None, **config: object) -> Path:
    """Copy of a model's folder with another configuration and, if asked, another size of embedding and head."""
    shutil.copytree(folder, copy)
    raw = json.loads((copy / "config.json").read_text())
    if vocab_size is not None:
        tensors = load_file(copy / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = tensors[name][torch.arange(vocab_size) % len(tensors[name])].clone()
            rows[len(tensors[name]) :] *= 9  # so that many of the largest logits are those of padding
            tensors[name] = rows
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        config["vocab_size"] = vocab_size
    (copy / "config.json").write_text(json.dumps(raw | config))
    return copy


def observe(drafter: DraftLMDrafter, state: DraftState, rows: list[list[int]]) -> None:
    longest = max(map(len, rows))
    padded = torch.tensor([row + [77] * (longest - len(row)) for row in rows], dtype=torch.long)
    drafter.observe(state, padded, None, [len(row) for row in rows])


def logits_after(drafter: DraftLMDrafter, ids: list[int]) -> Tensor:
    """Logits of the draft model after a text, without a cache."""
    assert drafter.model.path is not None
    with torch.no_grad():
        logits: Tensor = reference(drafter.model.path)(torch.tensor([ids])).logits
    return logits[0, -1]


@cache
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def as_gguf(folder: Path, path: Path, vocab_size: int) -> Path:
    with open_checkpoint(folder) as source:
        text = load_target_text(folder)
        values, _ = tokenizer_metadata(text, vocab_size, gguf_architecture(source))
        write_gguf_target(path, source, values, "f32")
    return path


def test_a_published_drafter_of_another_model_is_reported(
    tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Published drafters do not say what they were trained for, so names are compared."""
    own, other = "Qwen3-Coder-30B-A3B-Instruct-Q4_K_M", "Qwen3-4B-Q4_K_M"
    files = [as_gguf(tiny_target_dir, tmp_path / f"{name}.gguf", target.vocab_size) for name in (own, other)]
    drafter = Path(shutil.copytree(tiny_drafter_dir, tmp_path / "Qwen3-Coder-30B-A3B-DFlash"))
    load_drafter(drafter, target=load_target(files[0], device="cpu"))
    assert caplog.messages == []
    load_drafter(drafter, target=load_target(files[1], device="cpu"))
    [message] = caplog.messages
    assert "made for Qwen3-Coder-30B-A3B-Instruct, and Qwen3-4B-Q4_K_M.gguf is Qwen3-4B" in message
    assert "z-lab/Qwen3-4B-DFlash-b16" in message and "tau may be low" in message
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "num_target_layers": target.num_layers + 1}))
    with pytest.raises(UsageError, match=r"num_target_layers must be .* made for Qwen3-Coder-30B-A3B-Instruct"):
        load_drafter(drafter, target=load_target(files[1], device="cpu"))


def test_a_gguf_file_drafts_for_another(
    tiny_target_dir: Path, tiny_lm_dir: Path, tmp_path: Path, target: Target
) -> None:
    """vllm-project/vllm#13849, ggml-org/llama.cpp#3812: the sizes of embeddings may differ, the tokens may not."""
    model = as_gguf(tiny_target_dir, tmp_path / "target.gguf", target.vocab_size)
    padded = altered(tiny_lm_dir, tmp_path / "padded", target.vocab_size + 8)
    draft = as_gguf(padded, tmp_path / "draft.gguf", target.vocab_size + 8)
    check_place(draft)
    loaded = load_target(model, device="cpu")
    drafter = load_drafter(draft, target=loaded)
    assert isinstance(drafter, DraftLMDrafter)
    plain = Engine(loaded, load_drafter("none", target=loaded)).generate(PROMPTS[:2], GREEDY)
    drafted = Engine(loaded, drafter).generate(PROMPTS[:2], GREEDY)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert any(any(one.drafted) for one in drafted)
    assert loaded.tokenizer is not None
    loaded.tokenizer.add_tokens(["<|new|>"])
    with pytest.raises(ValueError, match="use a draft model with the target's tokenizer"):
        load_drafter(draft, target=loaded)


# The cache of the draft model.


@pytest.mark.parametrize("block_size", [2, 5, BLOCK_SIZE])
def test_the_target_as_its_own_drafter_is_always_right(target: Target, block_size: int) -> None:
    """A mistake in rollback would make draft tokens wrong. Rows of different lengths come and go meanwhile."""
    engine = Engine(target, DraftLMDrafter(target, target), max_batch_size=4, drafting=Drafting(block_size))
    scheduler, requests = engine.scheduler, [engine.request(prompt, GREEDY) for prompt in PROMPTS]
    for request in requests:
        scheduler.add([request])
        scheduler.step()
    while not scheduler.idle:
        scheduler.step()
    for request in requests:
        assert request.stats.committed[:-1] == [block_size] * ((GREEDY.max_new_tokens - 2) // block_size)
        assert sum(request.stats.committed) == GREEDY.max_new_tokens - 1


def test_a_similar_model_is_sometimes_right(target: Target, drafter: DraftLMDrafter) -> None:
    completions = Engine(target, drafter, drafting=Drafting(None)).generate(PROMPTS[4:], GREEDY)
    taken = {count for completion in completions for count in completion.stats.committed[:-1]}
    assert len(taken) >= 3, "the tests below need drafts that are right and drafts that are wrong"


@pytest.mark.parametrize("sampled", [False, True])
def test_draft_tokens_equal_those_of_a_model_without_a_cache(
    drafter: DraftLMDrafter, sampled: bool, scatter: Callable[..., Any]
) -> None:
    """With any number of committed draft tokens, and rows that leave, come, or commit nothing."""
    generator = torch.Generator().manual_seed(4)
    params = [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=1.0, top_k=5, top_p=0.9)]
    texts = [[9, 8, 7], [4] * 12, [30]]
    state = scatter(drafter.new_state(1, 250), (90, 60), (5, 60), (170, 70))
    observe(drafter, state, texts)
    for step in range(8):
        if step == 3:  # the first row leaves, and one comes whose prompt is longer than a block
            state.close(90)
            state.open(70, 80)
            observe(drafter, state.of([70]), [list(range(20, 40))])
            state = state.of([170, 5, 70])
            texts = [texts[2], texts[1], list(range(20, 40))]
            params = [params[2], params[1], params[0]]
        if step == 5:  # not drafted for a while, and observed in one piece
            new = [[50, 51, 52], [53] * 11, [54]]
            observe(drafter, state, new)
            texts = [text + more for text, more in zip(texts, new, strict=True)]
        if step == 6:  # drafted in vain: no token was committed
            drafter.propose(state, torch.tensor([11, 12, 13]), ChainPlan(4, params))
            observe(drafter, state, [[], [], []])
        anchor = torch.randint(4, 60, (3,), generator=generator)
        draws = torch.rand(3, 4, dtype=torch.float64, generator=generator) if sampled else None
        proposal = drafter.propose(state, anchor, SampledPlan(5, params, draws))
        assert proposal.tokens.shape == (3, 5)
        new = []
        for row, (text, ids) in enumerate(zip(texts, proposal.tokens.tolist(), strict=True)):
            dist = proposal.q[row] if proposal.q else None
            assert (dist is None) == (not sampled or params[row].temperature == 0)
            for depth in range(4):
                logits = logits_after(drafter, text + ids[: depth + 1])
                if dist is None or draws is None:
                    assert ids[depth + 1] == int(logits.argmax())
                    continue
                probs = probabilities(logits[None, None], [params[row]])[0, 0]
                probs[probs.argsort(descending=True)[SPARSE_SIZE:]] = 0
                probs /= probs.sum()
                dense = torch.zeros_like(probs).index_add(0, dist.ids[depth], dist.probs[depth])
                torch.testing.assert_close(dense, probs, atol=1e-5, rtol=1e-3)
                [[index]] = draw(dist.probs[None, depth : depth + 1], draws[row : row + 1, depth : depth + 1]).tolist()
                assert ids[depth + 1] == dist.ids[depth, index]
            if dist is not None:
                assert dist.ids.shape == dist.probs.shape == (5, SPARSE_SIZE)
                torch.testing.assert_close(dist.probs.sum(-1), torch.ones(5))
                assert all(len(set(node)) == SPARSE_SIZE for node in dist.ids.tolist())
            new.append(ids[: (step + 2 * row) % 6])  # from nothing to all draft tokens
        observe(drafter, state, new)
        texts = [text + more for text, more in zip(texts, new, strict=True)]


def test_no_token_is_read_twice_for_nothing(drafter: DraftLMDrafter) -> None:
    calls: list[tuple[int, int]] = []  # nodes, and nodes with logits, of each forward
    forward = drafter.model.forward

    def spy(tokens: Tensor, *args: Any, **kwargs: Any) -> TargetOutput:
        output = forward(tokens, *args, **kwargs)
        calls.append((tokens.size(1), output.logits.size(1)))
        return output

    def nodes(anchor: list[int]) -> list[tuple[int, int]]:
        calls.clear()
        drafter.propose(state, torch.tensor(anchor), ChainPlan(4, [SamplingParams()] * len(anchor)))
        return calls

    drafter = copy_with(drafter, model=copy_with(drafter.model, forward=spy))
    state = drafter.new_state(2, 60).of([0])
    observe(drafter, state, [[5] * 20])
    assert calls == [(20, 1)]  # a prompt, here and not in `propose`
    assert nodes([6]) == [(1, 1)] * 3
    observe(drafter, state, [state.cached[0][20:22]])
    assert nodes([7]) == [(1, 1)] * 3  # one draft token was right
    observe(drafter, state.of([60]), [[8] * 11])
    state = state.of([0, 60])
    observe(drafter, state, [state.cached[0][22:25], []])
    assert nodes([9, 9]) == [(1, 1)] * 3  # nor is anything read again when a row joins
    observe(drafter, state, [[*state.cached[0][25:28], 9], []])
    assert nodes([9, 9]) == [
        (2, 2),
        (1, 1),
        (1, 1),
    ]  # all draft tokens were right, and the last of them was not read yet


def test_a_copy_is_the_state_of_a_shorter_text(drafter: DraftLMDrafter, scatter: Callable[..., Any]) -> None:
    """Also if the source row has given up the slots behind its text."""
    state = scatter(drafter.new_state(1, 160), (100, 60), (3, 60))
    observe(drafter, state, [[9, 8, 7, 6], list(range(20, 40))])
    drafter.propose(state, torch.tensor([5, 6]), ChainPlan(5, [SamplingParams()] * 2))
    observe(drafter, state, [[5], [6, 44]])
    texts = dict(zip(state.starts, state.committed, strict=True))
    for size in (60, 22, 5):
        state.shrink(3, size)
        for row, length in ((100, 5), (100, 2), (3, min(size, 22)), (3, 4)):
            state.open(70, 30)
            state.copy(row, 70, length)
            copy = state.of([70])
            assert copy.committed == [texts[row][:length]]
            ids = drafter.propose(copy, torch.tensor([17]), ChainPlan(4, [SamplingParams()])).tokens[0].tolist()
            for depth in range(1, 4):
                assert ids[depth] == int(logits_after(drafter, texts[row][:length] + ids[:depth]).argmax())
            state.close(70)
    assert state.committed == [texts[100], texts[3][:5]]


def test_a_long_sequence_is_not_padded_into_the_slots_of_another(
    drafter: DraftLMDrafter, scatter: Callable[..., Any]
) -> None:
    state = scatter(drafter.new_state(1, 60), (30, 30), (10, 8), (18, 12))  # the last one follows the shortest
    texts = [list(range(20, 42)), [9, 8], [30, 31, 32]]
    observe(drafter, state.of([18]), texts[2:])
    drafter.propose(state.of([18]), torch.tensor([6]), ChainPlan(2, [SamplingParams()]))  # read what was observed
    observe(drafter, state.of([18]), [[6]])
    observe(drafter, state.of([30, 10]), texts[:2])
    texts[2].append(6)
    proposal = drafter.propose(state, torch.tensor([5, 6, 7]), ChainPlan(4, [SamplingParams()] * 3))
    for text, ids in zip(texts, proposal.tokens.tolist(), strict=True):
        for depth in range(1, 4):
            assert ids[depth] == int(logits_after(drafter, text + ids[:depth]).argmax())


def test_the_state_takes_the_memory_of_the_models_cache(drafter: DraftLMDrafter) -> None:
    state = drafter.new_state(2, 50)
    observe(drafter, state, [[5] * 20, [6]])
    taken = sum(store.nbytes for store in state.cache.stores)  # type: ignore[attr-defined]
    assert drafter.state_bytes(2, 50) == taken


# How far it drafts.


def test_nothing_is_drafted_past_the_context(target: Target, tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = altered(tiny_target_dir, tmp_path / "short", max_position_embeddings=20)
    drafter = load_drafter(folder, target=target)
    assert isinstance(drafter, DraftLMDrafter)
    state = drafter.new_state(4, 60)
    observe(drafter, state, [[7] * length for length in (3, 17, 20, 30)])
    assert state.cache.lengths == [3, 17, 20, 0]
    proposal = drafter.propose(state, torch.tensor([6] * 4), ChainPlan(6, [GREEDY] * 4))
    assert [sum(parent >= 0 for parent in parents) for parents in proposal.parents.tolist()] == [5, 3, 0, 0]
    assert state.cache.lengths == [len(cached) for cached in state.cached] == [8, 20, 0, 0]
    completions = Engine(target, drafter, drafting=Drafting(None)).generate([PROMPTS[1], PROMPTS[3], [7] * 30], GREEDY)
    for prompt, completion in zip([PROMPTS[1], PROMPTS[3], [7] * 30], completions, strict=True):
        [plain] = Engine(target, load_drafter("none", target=target)).generate([prompt], GREEDY)
        assert completion.token_ids == plain.token_ids
        length, from_draft = len(prompt), []
        for committed in completion.stats.committed:
            from_draft.append(max(0, min(BLOCK_SIZE - 1, 20 - length, 32 - (length - len(prompt)))))
            length += committed
        assert completion.stats.drafted == from_draft
        assert completion.stats.committed[:-1] == [1 + count for count in from_draft[:-1]]  # it is the target itself


def test_a_prompt_longer_than_the_context_is_not_read(target: Target, tiny_target_dir: Path, tmp_path: Path) -> None:
    drafter = load_drafter(altered(tiny_target_dir, tmp_path / "short", max_position_embeddings=20), target=target)
    [completion] = Engine(target, drafter, drafting=Drafting(None)).generate(
        [[7] * 30], SamplingParams(4, ignore_eos=True)
    )
    assert completion.checked().stats.drafted == [0] * 3


def test_no_more_is_drafted_than_pays(drafter: DraftLMDrafter) -> None:
    def count(seconds: list[float], uniforms: Tensor | None = None) -> int:
        state = drafter.new_state(2, 60)
        observe(drafter, state, PROMPTS[1:3])
        plan: Plan = ChainPlan(6, [SamplingParams(), SamplingParams(temperature=1.0)], step_seconds=seconds)
        plan = plan if uniforms is None else plan.as_sampled(uniforms)
        return drafter.propose(state, torch.tensor([5, 6]), plan).tokens.size(1) - 1

    assert count([1.0] * 6) == count([1.0] * 9) == 5
    assert count([1.0] * 3) == 2  # no more than there are times for
    assert count([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == 0
    assert count([1.0, 9.0], torch.rand(2, 5, dtype=torch.float64)) == 5  # not what was sampled decides
    following, expected = 0.0, 2.0
    for text in ([*PROMPTS[1], 5], [*PROMPTS[2], 6]):
        survival = 1.0
        for _ in range(2):
            prob, token = logits_after(drafter, text).softmax(-1).max(-1)
            survival *= float(prob)
            expected += survival
            text.append(int(token))
        following += survival * float(prob)
    # If the third draft token is as likely as the second, it costs just too much, or just little enough.
    dear = 1 + following / expected
    assert count([1.0, 1.0, 1.0, dear + 1e-3, 9.0, 9.0]) == 2
    assert count([1.0, 1.0, 1.0, dear - 1e-3, 9.0, 9.0]) == 3


# Vocabularies.


def test_embeddings_padded_to_different_sizes(
    target: Target, tiny_target_dir: Path, tiny_lm_dir: Path, tmp_path: Path
) -> None:
    wide = altered(tiny_lm_dir, tmp_path / "wide", vocab_size=300)
    drafter = load_drafter(wide, target=target)
    params = SamplingParams(20, ignore_eos=True)
    [completion] = Engine(target, drafter, drafting=Drafting(None)).generate([PROMPTS[2]], params)
    [plain] = Engine(target, load_drafter("none", target=target)).generate([PROMPTS[2]], params)
    assert completion.token_ids == plain.token_ids  # a draft token past 265 would have no embedding in the target
    wide_target = load_target(altered(tiny_target_dir, tmp_path / "target", vocab_size=300))
    narrow = load_drafter(tiny_lm_dir, target=wide_target)
    [completion] = Engine(wide_target, narrow, drafting=Drafting(None)).generate([[299, 5]], params)
    assert max(completion.token_ids) > 264, "the test needs an answer that the draft model has no embedding for"


def test_a_model_with_other_tokens_is_refused(
    target: Target, tiny_target_dir: Path, tiny_lm_dir: Path, tmp_path: Path
) -> None:
    folder = altered(tiny_lm_dir, tmp_path / "other")
    raw = json.loads((folder / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    vocab["in"], vocab["the"] = vocab["the"], vocab["in"]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"token 'in' has the id 261 .* and 262 in the target .265"):
        load_drafter(folder, target=target)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert load_drafter(folder, target=target).block_size == BLOCK_SIZE  # as many tokens, and no one knows which
    bare = altered(folder, tmp_path / "bare", vocab_size=300)
    with pytest.raises(ValueError, match="has 300 tokens and the target's 265"):
        load_drafter(bare, target=target)
