"""Runs a pair greedily in float32 in another program for MLX: `python mlx_peers.py NAME TARGET DRAFTER TOKENS`.

Each program needs a process of its own, because it changes classes of mlx-lm. The script reads the tokens of prompts
from standard input, and prints as JSON the tokens of each output and how many of them each step committed.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

Outputs: TypeAlias = list[tuple[list[int], list[int]]]


def zlab(target: str, drafter: str, tokens: int, prompts: Sequence[Sequence[int]]) -> Outputs:
    from dflash import model_mlx

    model_mlx.snapshot_download = lambda path, **_: path  # it also asks the hub for folders
    [model, tokenizer], draft = model_mlx.load(target), model_mlx.load_draft(drafter)
    in_float32(model, draft)
    outputs: Outputs = []
    for prompt in prompts:  # `stream_generate` would ask for Apple's memory limit
        parts = list(model_mlx._stream_generate(model, draft, tokenizer, mx.array(prompt), max_tokens=tokens))
        generated = [token for part in parts for token in part.tokens]
        outputs.append((generated, [part.accepted for part in parts if part.accepted]))
    return outputs


def mlx_dspark(target: str, drafter: str, tokens: int, prompts: Sequence[Sequence[int]]) -> Outputs:
    from mlx_dspark.generate import dflash_generate
    from mlx_dspark.load import load_dflash, load_target

    [model, tokenizer], [draft, _] = load_target(target, require_tap=True), load_dflash(drafter, quantize=False)
    in_float32(model.model, draft)
    results = [dflash_generate(model, tokenizer, draft, prompt_ids=ids, max_new_tokens=tokens) for ids in prompts]
    return [(result.token_ids, result.accept_lengths) for result in results]


def dflash_mlx(target: str, drafter: str, tokens: int, prompts: Sequence[Sequence[int]]) -> Outputs:
    from dflash_mlx.engine.copyspec import CopySpecIndex
    from dflash_mlx.engine.events import SummaryEvent
    from dflash_mlx.runtime import get_stop_token_ids, stream_dflash_generate
    from dflash_mlx.runtime.bundle import load_runtime_bundle
    from dflash_mlx.runtime.context import build_offline_runtime_context

    CopySpecIndex.draft_after = lambda *_, **__: None  # its n-gram drafts
    context = build_offline_runtime_context(verify_mode="dflash")
    loaded = load_runtime_bundle(
        model_ref=target, draft_ref=drafter, draft_quant="none", verify_config=context.verify, lazy=False
    )
    in_float32(loaded.target_model, loaded.draft_model)
    outputs: Outputs = []
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
        [summary] = [event for event in events if isinstance(event, SummaryEvent)]
        assert not summary.fallback_ar and not summary.copyspec_hits
        outputs.append((list(summary.generated_token_ids), [1 + accepted for accepted in summary.acceptance_history]))
    return outputs


def in_float32(*models: Any) -> None:
    for model in models:
        model.set_dtype(mx.float32)


PEERS: dict[str, Callable[..., Outputs]] = {"dflash": zlab, "mlx_dspark": mlx_dspark, "dflash_mlx": dflash_mlx}

if __name__ == "__main__":
    name, target, drafter, tokens = sys.argv[1:]
    print(json.dumps(PEERS[name](target, drafter, int(tokens), json.load(sys.stdin))))
