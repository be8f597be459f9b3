"""Small decoders, all kinds of their forward passes, and a stand-in for CUDA graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from blockdraft.decode.proposal import chain_parents
from blockdraft.kernels.cuda.graphs import room
from blockdraft.nn.decoder import Decoder
from blockdraft.targets.families import decoder_config
from blockdraft.targets.native import NativeTarget

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": WINDOWS | {"use_sliding_window": True},
    "gemma2": WINDOWS | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
}
TARGET_LAYERS = (2, 0, 4)


class Recorder:
    """Recorder of graphs that counts, and replays by calling again."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, call: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        self.captures += 1
        results = call()

        def replay() -> None:
            self.replays += 1
            for own, new in zip(results, call(), strict=True):
                own.copy_(new)

        return results, replay


def target_of(name: str, device: torch.device) -> NativeTarget:
    config = AutoConfig.for_model(name, **SMALL | MODELS[name])
    wanted, generator = decoder_config(config), torch.Generator().manual_seed(0)
    shapes = wanted.tensor_shapes()

    def read(tensor: str) -> Tensor:
        shape = shapes[tensor]
        return (torch.randn(shape, generator=generator) * 0.25 + 0.2 * (len(shape) == 1)).to(device)

    return NativeTarget(Decoder(wanted, read), config)


def scores(target: NativeTarget, rows: int) -> Iterator[Tensor]:
    """Yield logits and hidden states of all kinds of forward passes, in two rounds with new caches."""
    generator = torch.Generator().manual_seed(1)

    def random(rows: int, count: int) -> Tensor:
        return torch.randint(3, 61, (rows, count), generator=generator).to(target.device)

    def score(parents: Tensor, target_layers: tuple[int, ...] = TARGET_LAYERS) -> Iterator[Tensor]:
        for _ in range(2):
            output = target.forward(random(*parents.shape), parents, cache, target_layers)
            yield from (output.logits,) if output.hidden_states is None else (output.logits, output.hidden_states)

    def chains(count: int) -> Tensor:
        return chain_parents(len(cache.lengths), count)

    #     0
    #   1   2
    #  3 4    5, in another row a smaller tree that is filled up, and a line
    trees = torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 1, -1, -1], [-1, 0, 1, 2, 3, 4]][:rows])
    for _ in range(2):
        size = room(70)
        whole = target.new_cache(rows + 2, size)
        cache = whole.of([row * size for row in range(rows)])
        lengths = [9, 4, 7][:rows]
        prompt_at = torch.tensor(lengths, device=target.device) - 1
        yield target.forward(random(rows, 9), chains(9), cache, TARGET_LAYERS, prompt_at).logits
        cache.commit([range(length) for length in lengths])
        for count in (1, 5, 9, 11, 1, 17, 9):  # of which some are filled up, to 10, 12, 20
            yield from score(chains(count))
            cache.commit([range(min(count, 1 + row)) for row in range(rows)])
        yield from score(trees)
        cache.commit([[0, 2, 5], [0], [0, 1, 2, 3]][:rows])
        nine = torch.cat([trees, torch.full((rows, 3), 1)], dim=1)
        yield from score(nine)
        yield from score(nine, target_layers=())
        yield from score(nine, target_layers=(1,))
        cache.commit([[0, 8], [0, 1, 3], [0]][:rows])
        whole.copy(0, rows * size, 5)
        cache = whole.of([row * size for row in range(rows + 1)])  # one more
        yield from score(chains(5))
        cache.commit([[0]] * (rows + 1))
        cache = whole.of([(row + 1) * size for row in range(rows)])  # without the first
        yield from score(chains(5))
        cache.commit([range(5)] * rows)
        cache = whole.of([*range(0, rows * size, size), (rows + 1) * size][::-1])  # not at equal distances
        yield from score(chains(5))
        cache.commit([range(5)] * (rows + 1))
        cache = whole.of([row * size for row in range(rows + 2)])
        while max(cache.lengths) + 20 <= 70:
            yield from score(chains(17))
            cache.commit([range(17)] * (rows + 2))


def assert_same(actual: Iterator[Tensor], expected: Iterator[Tensor]) -> None:
    for mine, theirs in zip(list(actual), expected, strict=True):  # the whole of the one before the other
        tolerance = 1e-4 if mine.device.type == "cpu" else 1e-3  # kernels differ there with and without a mask
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)
