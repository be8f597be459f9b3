"""Other MLX programs as outside judges: on the bundled pair they say the same tokens in the same cycles as we do."""

from collections.abc import Callable
from typing import TypeAlias

import pytest
from pair_chats import PAIR, chats
from transformers import AutoTokenizer

pytest.importorskip("mlx_lm")

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.mlx.tensor import mx
from blockdraft.targets import load_target
from blockdraft.types import Drafting, SamplingParams

pytestmark = pytest.mark.mlx

TARGET, DRAFTER, TOKENS = str(PAIR / "target"), str(PAIR / "drafter"), 40
Answers: TypeAlias = list[tuple[list[int], list[int]]]  # of each prompt: tokens, and how many each cycle has committed


def zlab(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Answers:
    peer = pytest.importorskip("dflash.model_mlx", reason="needs the peers of make test-mlx")
    monkeypatch.setattr(peer, "snapshot_download", lambda path, **_: path)  # it asks the hub for folders, too
    [model, tokenizer], draft = peer.load(TARGET), peer.load_draft(DRAFTER)
    for each in (model, draft):
        each.set_dtype(mx.float32)
    found: Answers = []
    for prompt in prompts:  # `stream_generate` would ask for Apple's memory limit
        parts = list(peer._stream_generate(model, draft, tokenizer, mx.array(prompt), max_tokens=TOKENS))
        found.append(
            ([token for part in parts for token in part.tokens], [n for part in parts if (n := part.accepted)])
        )
    return found


def mlx_dspark(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Answers:
    pytest.importorskip("mlx_dspark", reason="needs the peers of make test-mlx")
    from mlx_dspark.generate import dflash_generate
    from mlx_dspark.load import load_dflash, load_target

    [target, tokenizer], [draft, _] = load_target(TARGET, require_tap=True), load_dflash(DRAFTER, quantize=False)
    for each in (target.model, draft):
        each.set_dtype(mx.float32)
    every = [dflash_generate(target, tokenizer, draft, prompt_ids=each, max_new_tokens=TOKENS) for each in prompts]
    return [(each.token_ids, each.accept_lengths) for each in every]


def dflash_mlx(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Answers:
    pytest.importorskip("dflash_mlx", reason="needs the peers of make test-mlx")
    from dflash_mlx.engine.copyspec import CopySpecIndex
    from dflash_mlx.engine.events import SummaryEvent
    from dflash_mlx.runtime import get_stop_token_ids, stream_dflash_generate
    from dflash_mlx.runtime.bundle import load_runtime_bundle
    from dflash_mlx.runtime.context import build_offline_runtime_context

    monkeypatch.setattr(CopySpecIndex, "draft_after", lambda *_, **__: None)  # its guesses by n-grams
    context = build_offline_runtime_context(verify_mode="dflash")
    loaded = load_runtime_bundle(
        model_ref=TARGET, draft_ref=DRAFTER, draft_quant="none", verify_config=context.verify, lazy=False
    )
    for each in (loaded.target_model, loaded.draft_model):
        each.set_dtype(mx.float32)
    found: Answers = []
    for prompt in prompts:
        events = stream_dflash_generate(
            target_model=loaded.target_model,
            target_ops=loaded.target_ops,
            tokenizer=loaded.tokenizer,
            draft_model=loaded.draft_model,
            draft_backend=loaded.draft_backend,
            prompt_tokens_override=prompt,
            max_new_tokens=TOKENS,
            stop_token_ids=get_stop_token_ids(loaded.tokenizer),
            runtime_context=context,
        )
        [told] = [event for event in events if isinstance(event, SummaryEvent)]
        assert not told.fallback_ar and not told.copyspec_hits
        found.append((list(told.generated_token_ids), [1 + accepted for accepted in told.acceptance_history]))
    return found


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    every = [[{"role": "user", "content": text}] for text in chats(10)]
    return [tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"] for each in every]


@pytest.fixture(scope="module")
def ours(prompts: list[list[int]]) -> dict[str, Answers]:
    """By backend."""
    found: dict[str, Answers] = {}
    for backend in ("mlx", "native"):
        target = load_target(
            TARGET, "float32", "cpu", backend=backend, compile="off" if backend == "native" else "auto"
        )
        with Engine(target, load_drafter(DRAFTER, target=target), 1, Drafting(None)) as engine:
            every = [engine.generate([each], SamplingParams(TOKENS))[0] for each in prompts]
        found[backend] = [(each.token_ids, each.stats.committed) for each in every]
    return found


@pytest.mark.parametrize("peer", [zlab, mlx_dspark, dflash_mlx], ids=lambda peer: peer.__name__)
def test_the_bundled_pair_takes_the_same_cycles(
    peer: Callable[..., Answers], prompts: list[list[int]], ours: dict[str, Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ours["mlx"] == ours["native"]
    theirs = peer(prompts, monkeypatch)
    for [tokens, cycles], [their_tokens, their_cycles] in zip(ours["mlx"], theirs, strict=True):
        assert their_tokens[:TOKENS] == tokens  # a last block may go on behind the end
        assert their_cycles[:-1] == cycles[:-1] and len(their_cycles) == len(cycles)
        assert their_cycles[-1] >= cycles[-1]
    assert sum(len(cycles) for _, cycles in theirs) < 0.5 * sum(len(tokens) for tokens, _ in theirs)
