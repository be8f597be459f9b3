"""Runs a pair in another program for MLX, greedily and in float32, as `python mlx_peers.py NAME TARGET DRAFTER TOKENS`.

A process for each of them, since they change classes of mlx-lm. It reads the tokens of prompts from standard input, and
prints as JSON the tokens of each answer, and how many each cycle has committed.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

Answers: TypeAlias = list[tuple[list[int], list[int]]]


def zlab(target: str, drafter: str, tokens: int, prompts: Sequence[Sequence[int]]) -> Answers:
    from dflash import model_mlx

    model_mlx.snapshot_download = lambda path, **_: path  # it asks the hub for folders, too
    [model, tokenizer], draft = model_mlx.load(target), model_mlx.load_draft(drafter)
    in_float32(model, draft)
    found: Answers = []
    for prompt in prompts:  # `stream_generate` would ask for Apple's memory limit
        parts = list(model_mlx._stream_generate(model, draft, tokenizer, mx.array(prompt), max_tokens=tokens))
        said = [token for part in parts for token in part.tokens]
        found.append((said, [part.accepted for part in parts if part.accepted]))
    return found


def mlx_dspark(target: str, drafter: str, tokens: int, prompts: Sequence[Sequence[int]]) -> Answers:
    from mlx_dspark.generate import dflash_generate
    from mlx_dspark.load import load_dflash, load_target

    [model, tokenizer], [draft, _] = (
        load_target(target, require_target_layer=True),
        load_dflash(drafter, quantize=False),
    )
    in_float32(model.model, draft)
    every = [dflash_generate(model, tokenizer, draft, prompt_ids=each, max_new_tokens=tokens) for each in prompts]
    return [(each.token_ids, each.accept_lengths) for each in every]


def dflash_mlx(target: str, drafter: str, tokens: int, prompts: Sequence[Sequence[int]]) -> Answers:
    from dflash_mlx.engine.copyspec import CopySpecIndex
    from dflash_mlx.engine.events import SummaryEvent
    from dflash_mlx.runtime import get_stop_token_ids, stream_dflash_generate
    from dflash_mlx.runtime.bundle import load_runtime_bundle
    from dflash_mlx.runtime.context import build_offline_runtime_context

    CopySpecIndex.draft_after = lambda *_, **__: None  # its drafts by n-grams
    context = build_offline_runtime_context(verify_mode="dflash")
    loaded = load_runtime_bundle(
        model_ref=target, draft_ref=drafter, draft_quant="none", verify_config=context.verify, lazy=False
    )
    in_float32(loaded.target_model, loaded.draft_model)
    found: Answers = []
    for prompt in prompts:
        events = stream_dflash_generate(
            target_model=loaded.target_model,
            target_ops=loaded.target_ops,
            tokenizer=loaded.tokenizer,
            draft_model=loaded.draft_model,
            draft_backend=loaded.draft_backend,
            prompt_tokens_override=prompt,
            max_new_tokens=tokens,
            stop_token_ids=get_stop_token_ids(loaded.tokenizer),
            runtime_context=context,
        )
        [told] = [event for event in events if isinstance(event, SummaryEvent)]
        assert not told.fallback_ar and not told.copyspec_hits
        found.append((list(told.generated_token_ids), [1 + accepted for accepted in told.acceptance_history]))
    return found


def in_float32(*models: Any) -> None:
    for model in models:
        model.set_dtype(mx.float32)


PEERS: dict[str, Callable[..., Answers]] = {"dflash": zlab, "mlx_dspark": mlx_dspark, "dflash_mlx": dflash_mlx}

if __name__ == "__main__":
    name, target, drafter, tokens = sys.argv[1:]
    print(json.dumps(PEERS[name](target, drafter, int(tokens), json.load(sys.stdin))))
