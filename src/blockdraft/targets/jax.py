"""Checkpoints as targets in JAX: Google's TPUs, and CPUs for tests.

The decoder is `blockdraft.jax.model`, pure functions over a pytree of the checkpoint's own tensors, sharded over all
devices of this process. Shapes are rounded up to buckets, and each bucket is compiled once. Keys and values stay on the
devices; logits and features too, until somebody asks for their numbers. Where a drafter has a cycle as one program, as
DFlash has, the engine gets the tokens of a cycle and nothing else; see `blockdraft.jax.drafting`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockdraft.decode.proposal import depths, tree_mask
from blockdraft.formats.gguf import is_gguf
from blockdraft.jax import model
from blockdraft.jax.cache import JaxCache, JaxTensor
from blockdraft.jax.model import Array, Layout, Memory, Params, Rows, as_numpy, bucket, jax, jnp
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.draft_network import DraftNetwork
from blockdraft.plugins import runner_class
from blockdraft.targets.base import LoadOptions, NotCovered, TargetOutput
from blockdraft.targets.checkpoint import (
    CheckpointTarget,
    checked_folder,
    load_generation_config,
    load_tokenizer,
    loading,
)
from blockdraft.targets.families import decoder_config, text_part
from blockdraft.targets.model_config import AnyConfig, load_config
from blockdraft.targets.weights import open_weights

RANK = None  # asked by its name only


def load(path: str | Path, options: LoadOptions, layout: Layout | None = None) -> JaxTarget:
    """Load a checkpoint in safetensors of a family that `targets.families` knows.

    Args:
        layout: Mesh and sharding rules; None is all devices of this process.

    Raises:
        NotCovered: JAX is not installed, the family or one of its parts is not known, or an option is another
            backend's.
        UsageError: There is no such folder or hub name, or the files cannot be read.
    """
    if importlib.util.find_spec("jax") is None:
        raise NotCovered("JAX is not installed; pip install 'blockdraft[jax]', and on a TPU 'jax[tpu]' beside it")
    if is_gguf(path):
        raise NotCovered("it reads no GGUF files")
    asked: dict[str, Any] = {"quantize": options.quantize, "kv_dtype": options.kv_dtype, "exact": options.exact or None}
    asked |= {"compile": "on" if options.compile == "on" else None}  # it compiles anyway, but not into C
    for name, value in asked.items():
        if value is not None:
            raise NotCovered(f"it has no {name}")
    if options.dtype == torch.float16:
        raise NotCovered("TPUs have no float16; choose the dtype bfloat16 or float32")
    if options.device.type == "cuda":
        raise NotCovered("it chooses among JAX's own devices, and the device is cuda; choose the device cpu")
    checked_folder(path, options.revision)
    with loading(path):
        config = text_part(load_config(path, options.revision))
    wanted = decoder_config(config)
    if wanted.torch_only:
        raise NotCovered(f"it has {wanted.torch_only}")
    if getattr(config, "quantization_config", None):
        raise NotCovered("its weights are in few bits; give the model that it was made of")
    tensors, source = open_weights(path, wanted, config, options)
    layout = layout or model.local_layout()
    abstract = model.abstract_params(
        wanted.tensor_shapes(),
        jnp.dtype(str(options.dtype).removeprefix("torch.")),
        layout,
        heads=wanted.num_heads,
        kv_heads=wanted.num_kv_heads,
    )
    with loading(path):
        params = model.load_params(abstract, lambda name: tensors[name].tensor())
        tokenizer = load_tokenizer(path, options.revision)
    return JaxTarget(
        wanted,
        params,
        layout,
        config,
        dtype=options.dtype,
        tokenizer=tokenizer,
        path=Path(path) if Path(path).exists() else None,
        generation_config=load_generation_config(path, options.revision),
        source_fingerprint=source,
    )


class JaxTarget(CheckpointTarget):
    """A decoder in JAX behind the `Target` protocol.

    Args:
        decoder: Shape of the decoder.
        params: Weights by their names in the checkpoint.
        layout: Mesh and sharding rules.
        config: The checkpoint's configuration.
        dtype: Of the arithmetic.
        tokenizer, path, generation_config, source_fingerprint: As in `CheckpointTarget`.
    """

    backend = "jax"

    def __init__(
        self,
        decoder: DecoderConfig,
        params: dict[str, Array],
        layout: Layout,
        config: AnyConfig,
        *,
        dtype: torch.dtype,
        **text: Any,
    ) -> None:
        super().__init__(config, **text)
        self.decoder, self.params, self.layout = decoder, params, layout
        self.dtype, self.device = dtype, torch.device("cpu")  # of the tensors that the engine sees
        self.hidden_size, self.num_layers = decoder.hidden_size, len(decoder.layers)
        self.vocab_size = decoder.vocab_size
        self.jax_forward = jax.jit(partial(_forward, decoder, layout), static_argnums=0)
        self._head = jax.jit(partial(model.head, decoder, layout))

    @property
    def running(self) -> str:
        devices = self.layout.mesh.size
        kind = self.layout.mesh.devices.flat[0].device_kind
        return f"jax, {devices} x {kind}" if devices > 1 else f"jax, {kind}"

    def new_cache(self, batch: int, capacity: int) -> JaxCache:
        return JaxCache(
            batch,
            capacity,
            layers=self.num_layers,
            kv_heads=self.decoder.num_kv_heads,
            head_dim=self.decoder.head_dim,
            dtype=self.params["model.norm.weight"].dtype,
            layout=self.layout,
        )

    def cache_bytes(self, batch: int, capacity: int) -> int:
        config = self.decoder
        token = 2 * self.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        return batch * capacity * token

    def weight_bytes(self) -> int:
        return sum(int(weight.nbytes) for weight in self.params.values())

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        config, scored = self.decoder, bucket(batch) * bucket(nodes)
        widths = 4 * config.hidden_size + 3 * config.intermediate_size + 3 * config.num_heads * config.head_dim
        scores = scored * config.num_heads * bucket(slots) * 4  # float32
        one_layer = self.cache_bytes(bucket(batch), bucket(slots)) // max(self.num_layers, 1)
        return scored * widths * self.dtype.itemsize + scores + one_layer

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: Any,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        assert isinstance(cache, JaxCache)
        (batch, count), wide = tokens.shape, (bucket(tokens.size(0)), bucket(tokens.size(1)))
        cache.check_room(count)
        given = np.zeros((2, *wide), np.int32)  # tokens and depths
        given[0, :batch, :count], given[1, :batch, :count] = as_numpy(tokens), depths(parents)
        within = np.zeros((*wide, wide[1]), bool)
        within[:, range(wide[1]), range(wide[1])] = True  # padding sees itself
        within[:batch, :count, :count] = tree_mask(parents)
        at = None
        if logits_at is not None:
            at = np.zeros(wide[0], np.int32)
            at[:batch] = as_numpy(logits_at)
        with self.lock:
            placed = self.layout.put((given, within, at))
            logits, best, hidden_states, nodes = self.jax_forward(
                tuple(target_layers), self.params, cache.arrays, cache.where(), *placed
            )
        cache.leave(nodes)
        shape = (batch, count if logits_at is None else 1)
        return TargetOutput(
            JaxTensor(logits, (*shape, self.vocab_size)),
            None if hidden_states is None else JaxTensor(hidden_states, (batch, count, hidden_states.shape[-1])),
            JaxTensor(best, shape),
        )

    def embed(self, tokens: Tensor) -> Tensor:
        found = self.params["model.embed_tokens.weight"][self.layout.put(as_numpy(tokens).astype(np.int32))]
        return JaxTensor(found, found.shape).real

    def head(self, hidden: Tensor) -> Tensor:
        found = self._head(self.params, self.layout.put(as_numpy(hidden)))
        return JaxTensor(found, found.shape).real.to(self.dtype)

    def runner(self, network: DraftNetwork, head: Callable[[Tensor], Tensor] | None = None, owned: bool = False) -> Any:
        network.to(device=self.device, dtype=self.dtype)
        make = runner_class(network, "jax")
        if make is not None:
            return make(network, self, head or self.draft_head)
        reason = f"JAX knows no networks of the kind {type(network).__name__}, and torch runs it on the CPU"
        logging.getLogger(__name__).warning("The drafter is not run by JAX: %s.", reason)
        return network.runner(replace(self.draft_host(head), compile_reason=reason))

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        for name, weight in self.params.items():
            yield name, JaxTensor(weight, weight.shape).real


def _forward(
    config: DecoderConfig,
    layout: Layout,
    target_layers: tuple[int, ...],
    params: Params,
    memory: Memory,
    rows: Rows,
    given: Array,
    within: Array,
    scored: Array | None,
) -> tuple[Array, Array, Array | None, Memory]:
    """`forward` and the best tokens. `given` are tokens and depths."""
    logits, hidden_states, nodes = model.forward(
        config, layout, target_layers, params, memory, rows, given[0], given[1], within, scored
    )
    return logits, model.best_tokens(logits), hidden_states, nodes
