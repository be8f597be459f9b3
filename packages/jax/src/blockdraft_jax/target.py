"""Checkpoints as targets in JAX: Google's TPUs, and CPUs for tests.

The decoder is `blockdraft_jax.model`, pure functions over the checkpoint's own tensors, sharded over all devices of
this process. Shapes are rounded up to powers of two, and each is compiled once. Keys and values stay on the devices;
logits and hidden states too, until a function of torch reads them.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from blockdraft.decode.proposal import depths, tree_mask
from blockdraft.formats.gguf import is_gguf
from blockdraft.nn.draft_network import DraftNetwork, LayeredNetwork
from blockdraft.nn.torch_runner import TorchDraftRunner
from blockdraft.targets.base import NotCovered, TargetOutput
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
from blockdraft.types import LoadOptions
from blockdraft_jax.cache import JaxCache
from blockdraft_jax.draft_runner import KNOWN, JaxDraftRunner, JaxHost
from blockdraft_jax.model import (
    Array,
    JaxDecoder,
    ShardedLayout,
    as_numpy,
    bucket,
    embed,
    jax,
    jnp,
    load_params,
    local_layout,
)
from blockdraft_jax.tensor import JaxTensor

RANK = None  # never chosen automatically


def load(path: str | Path, options: LoadOptions, layout: ShardedLayout | None = None) -> JaxTarget:
    """Load a safetensors checkpoint of a family in `targets.families`.

    Args:
        layout: Mesh and sharding rules; None uses all devices of this process.

    Raises:
        NotCovered: JAX is not installed, or does not support the family, one of its parts, or an option.
        UsageError: The path is neither a folder nor a hub name, or its files cannot be read.
    """
    if importlib.util.find_spec("jax") is None:
        raise NotCovered("JAX is not installed; pip install jax, and on a TPU 'jax[tpu]'")
    if is_gguf(path):
        raise NotCovered("it reads no GGUF files")
    refused = {
        "quantize": options.quantize is not None,
        "kv_dtype": options.kv_dtype is not None,
        "exact": options.exact,
        "compile": options.compile == "on",
    }
    for name, is_set in refused.items():
        if is_set:
            raise NotCovered(f"it has no {name}")
    if options.torch_dtype == torch.float16:
        raise NotCovered("TPUs have no float16; choose the dtype bfloat16 or float32")
    if options.torch_device.type == "cuda":
        raise NotCovered("it selects JAX's own devices, and the device is cuda; choose the device cpu")
    checked_folder(path, options.revision)
    with loading(path):
        config = text_part(load_config(path, options.revision))
    shape = decoder_config(config)
    if shape.unusual:
        raise NotCovered(f"it has {shape.unusual}")
    if not shape.pre_norms:
        raise NotCovered("its layers norm no inputs")
    if shape.fused_names:
        raise NotCovered("its checkpoint has fused projections")
    if getattr(config, "quantization_config", None):
        raise NotCovered("its weights are quantized; load the model that it was quantized from")
    opened, source = open_weights(path, shape, config, options)
    decoder = JaxDecoder(shape, layout or local_layout())
    with loading(path):
        params = load_params(
            shape.tensor_shapes(),
            lambda name: opened.tensors[name].tensor(),
            jnp.dtype(str(options.torch_dtype).removeprefix("torch.")),
            decoder.layout,
            shape.num_heads,
            shape.num_kv_heads,
        )
        tokenizer = load_tokenizer(path, options.revision)
    return JaxTarget(
        decoder,
        params,
        config,
        dtype=options.torch_dtype,
        tokenizer=tokenizer,
        path=Path(path) if Path(path).exists() else None,
        generation_config=load_generation_config(path, options.revision),
        source_fingerprint=source,
    )


class JaxTarget(CheckpointTarget):
    """A decoder in JAX as a `Target`.

    Args:
        decoder: Shape and layout of the decoder.
        params: Weights by their checkpoint names.
        config: Configuration of the checkpoint.
        dtype: Dtype of the weights and of the arithmetic.
        tokenizer, path, generation_config, source_fingerprint: As in `CheckpointTarget`.
    """

    backend = "jax"

    def __init__(
        self,
        decoder: JaxDecoder,
        params: dict[str, Array],
        config: AnyConfig,
        *,
        dtype: torch.dtype,
        **text: Any,
    ) -> None:
        super().__init__(config, **text)
        self.decoder, self.params, self.layout = decoder, params, decoder.layout
        self.dtype, self.device = dtype, torch.device("cpu")  # of the tensors that the engine sees
        self.hidden_size, self.num_layers = decoder.config.hidden_size, len(decoder.config.layers)
        self.vocab_size = decoder.config.vocab_size
        self.jax_forward = jax.jit(decoder.forward, static_argnums=0)
        self._head = jax.jit(decoder.head)

    @property
    def running(self) -> str:
        devices = self.layout.mesh.size
        kind = self.layout.mesh.devices.flat[0].device_kind
        return f"jax, {devices} x {kind}" if devices > 1 else f"jax, {kind}"

    def new_cache(self, batch: int, capacity: int) -> JaxCache:
        dtype = self.params["model.norm.weight"].dtype
        return JaxCache(batch, capacity, self.decoder.config, dtype, self.layout)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        config = self.decoder.config
        token = 2 * self.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        return batch * capacity * token

    def weight_bytes(self) -> int:
        return sum(int(weight.nbytes) for weight in self.params.values())

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        config, scored = self.decoder.config, bucket(batch) * bucket(nodes)
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
        nodes = np.zeros((2, *wide), np.int32)  # tokens and depths
        nodes[0, :batch, :count], nodes[1, :batch, :count] = as_numpy(tokens), depths(parents)
        within = np.zeros((*wide, wide[1]), bool)
        within[:, range(wide[1]), range(wide[1])] = True  # padding attends to itself
        within[:batch, :count, :count] = tree_mask(parents)
        scored = None
        if logits_at is not None:
            scored = np.zeros(wide[0], np.int32)
            scored[:batch] = as_numpy(logits_at)
        with self.lock:
            arguments = self.layout.put((*nodes, within, scored))
            logits, best, hidden, cache.pending = self.jax_forward(
                tuple(target_layers), self.params, cache.arrays, cache.view_of_batch(), *arguments
            )
        shape = (batch, count if logits_at is None else 1)
        return TargetOutput(
            JaxTensor(logits, (*shape, self.vocab_size)),
            None if hidden is None else JaxTensor(hidden, (batch, count, hidden.shape[-1])),
            JaxTensor(best, shape),
        )

    def embed(self, tokens: Tensor) -> Tensor:
        embedded = embed(self.params, self.layout.put(as_numpy(tokens).astype(np.int32)))
        return JaxTensor(embedded, embedded.shape).real

    def head(self, hidden: Tensor) -> Tensor:
        logits = self._head(self.params, self.layout.put(as_numpy(hidden)))
        return JaxTensor(logits, logits.shape).real.to(self.dtype)

    def runner(self, network: DraftNetwork, head: Callable[[Tensor], Tensor] | None = None, owned: bool = False) -> Any:
        network.to(device=self.device, dtype=self.dtype)
        host, why_not = self.draft_host(head), network.description.why_not(KNOWN)
        if why_not is None:
            network_in_jax = cast(LayeredNetwork, network)
            return JaxDraftRunner(network_in_jax, JaxHost(**vars(host), decoder=self.decoder, params=self.params))
        reason = f"{why_not}, and torch runs it on the CPU"
        logging.getLogger(__name__).warning("The drafter is not run by JAX: %s.", reason)
        return TorchDraftRunner(network, replace(host, compile_reason=reason))

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        for name, weight in self.params.items():
            yield name, JaxTensor(weight, weight.shape).real
