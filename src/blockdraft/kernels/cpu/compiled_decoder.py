"""The decoder's forward pass as one call of the library compiled from `decoder.c`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from blockdraft.kernels.cpu.library import (
    ACTIVATIONS,
    DELTA_GATES,
    HEADS,
    KINDS,
    LAYER_INPUTS,
    NORMS,
    NORMS_BESIDE,
    PROJECTIONS,
    ROUTED,
    CallFields,
    LayerFields,
    Library,
    ModelFields,
    num_threads,
    return_pool,
)
from blockdraft.kernels.cpu.recurrent_cache import CompiledRecurrentCache, StateShape
from blockdraft.nn.cache import KVCache
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig, Mamba2, Rope
from blockdraft.nn.decoder_layer import Norm
from blockdraft.nn.executor import Executor, TargetOutput, store_shapes
from blockdraft.nn.packed import check_tokens

MAX_LANES = 16  # numbers of the widest vector; experts are whole vectors of outputs
MAX_CHOSEN = 1024  # experts that a token uses
MAX_SHAPES = 2  # of heads
MAX_KEY = 256  # numbers of the longest key of a delta net
FIRST_POSITIONS = 1024  # size of the first tables of angles, which grow with the sequences
EVERYWHERE = 1 << 40  # window size, or number of positions, without a limit


def why_not(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a decoder has no compiled forward pass, or None if it has one."""
    if config.activation not in ACTIVATIONS or config.gated_mlp == (config.activation == "relu2"):
        return f"it does not know the activation {config.activation}"
    if config.recurrent_net is not None and config.recurrent_net.key_dim > MAX_KEY:
        return f"keys of its recurrent layers have more than {MAX_KEY} numbers"
    if len(config.memories) > MAX_SHAPES:
        return f"it does not know heads of more than {MAX_SHAPES} shapes"
    if config.layer_input_size and config.layer_input_vocab < config.vocab_size:
        return "some tokens have no embeddings of its layers"
    if config.experts is not None and config.experts.chosen > MAX_CHOSEN:
        return f"each token uses more than {MAX_CHOSEN} experts"
    return why_not_packed(config, dtype, device)


def why_not_packed(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a decoder has no compiled matrix products, or None if it has them."""
    experts = config.experts
    inner = 0 if experts is None else experts.intermediate_size * (2 if config.gated_mlp else 1)
    if inner % MAX_LANES or (inner and config.hidden_size % MAX_LANES):
        return f"sizes of its experts are no multiples of {MAX_LANES}"
    return why_not_compiled(dtype, device, config.head_divisor)


def why_not_compiled(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Return why nothing is compiled for a device, dtype and head size, or None if it is."""
    if device.type != "cpu":
        return f"it is for CPUs, and the device is {device}"
    if dtype not in KINDS:
        return f"it knows float32 and bfloat16, and the dtype is {str(dtype).removeprefix('torch.')}"
    return f"heads of {head_dim} are no multiple of 4" if head_dim % 4 else None


def numbers(values: Iterable[int]) -> array[int]:
    """Return values as an int64 array, in a tenth of the time of a tensor."""
    return array("q", values)


def address(values: array[int]) -> int:
    """Return the pointer to the first value."""
    return values.buffer_info()[0]


@lru_cache(maxsize=256)
def chain_parents(batch: int, count: int) -> array[int]:
    """Return the parents of `batch` chains of `count` nodes."""
    return numbers(list(range(-1, count - 1)) * batch)


def tables_of(rope: Rope, count: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the first `count` positions, `[count, D / 2]` float32."""
    angles = torch.arange(count)[:, None] * torch.tensor(rope.inverse_frequencies)
    return angles.cos() * rope.scale, angles.sin() * rope.scale


def shape_fields(config: DecoderConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return the fields of `Model` of calls.h that describe the shapes of some layers of a decoder."""
    fields: dict[str, Any] = {
        "num_layers": len(layers),
        "hidden": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": max(map(config.kv_heads_of, layers)),
        "head_dim": max(map(config.head_dim_of, layers)),
        "inner": max(config.dense_inner_size(layer) for layer in layers),
        "activation": ACTIVATIONS[config.activation],
        "rotated": config.rotated,
        "attention_scale": config.query_scale,
        "attention_cap": config.attention_softcap or 0.0,
        "kernel": config.conv_kernel,
        "gated": config.gated,
        "joint_norm": config.joint_qk_norm,
    }
    if config.clamped is not None:
        fields |= {"clamp_alpha": config.clamped.alpha, "clamp_limit": config.clamped.limit}
    if config.experts is not None:
        experts = config.experts
        fields |= {"experts": experts.count, "chosen": experts.chosen, "normed": experts.normed}
        fields |= {"expert_inner": experts.intermediate_size, "shared_inner": experts.shared_size}
        fields |= {"sigmoid": experts.sigmoid, "share_scale": experts.scale, "groups": experts.groups}
        fields |= {"chosen_groups": experts.chosen_groups, "pair_of_group": experts.group_best == 2}
    if config.latent is not None:
        latent = config.latent
        fields |= {"latent": latent.rank, "unrotated": latent.unrotated, "latent_value": latent.value_dim}
        fields |= {"query_rank": latent.query_rank, "latent_eps": latent.norm_eps}
    recurrent = sum(config.layers[layer].recurrent for layer in layers)
    if config.recurrent_net is not None and recurrent:
        net = config.recurrent_net
        names = ("key_heads", "value_heads", "key_dim", "value_dim", "tiled")
        fields |= {name: getattr(net, name) for name in names}
        fields |= {"delta_kernel": net.kernel, "recurrent_layers": recurrent, "delta_eps": config.norm_eps}
        fields["mamba"] = isinstance(net, Mamba2)
    return fields


class CompiledLayers(ABC):
    """Layers in the form of `decoder.c`, with their tables of angles and the workspace of calls.

    Concurrent calls wait for each other, so one workspace suffices, whose size can be planned.

    Args:
        library: Library built for the dtypes and head size of the layers.
        count: Number of layers.
        max_positions: Positions from this one on are clamped to the last before it.
    """

    def __init__(self, library: Library, count: int, max_positions: int) -> None:
        self.library, self._max_positions = library, max_positions
        self._layers = (LayerFields * count)()
        self._model = ModelFields()
        self._owners: list[Tensor] = []
        # `_reach` changes `_model` and `_layers`, so the lock guards them too.
        self._lock = threading.Lock()
        self.workspace = torch.empty(0)
        self._tables: list[tuple[Tensor, Tensor]] = []

    @abstractmethod
    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return cosines and sines of the first `count` positions for each layer, `[count, D / 2]` float32."""

    def _reach(self, end: int) -> None:
        """Extend the tables of angles to positions below `end`."""
        if end <= self._model.max_positions or self._model.max_positions == self._max_positions:
            return
        count = min(max(FIRST_POSITIONS, 1 << (end - 1).bit_length()), self._max_positions)
        self._tables = self._angles(count)
        for own, (cos, sin) in zip(self._layers, self._tables, strict=True):
            own.cos, own.sin = cos.data_ptr(), sin.data_ptr()
        self._model.max_positions = count

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        """Return the bytes of a call's workspace. That of the largest call so far stays allocated.

        Args:
            batch: Sequences.
            nodes: Nodes per sequence.
            slots: KV slots that a sequence reaches, which need no workspace.
        """
        return 4 * self.library.decoder_workspace(self._model, batch, nodes, num_threads())

    def _in_workspace(self, function: Callable[[ModelFields, CallFields], int], call: CallFields, end: int) -> None:
        """Make a call of a library function whose sequences reach at most `end` KV slots."""
        with self._lock:
            self._reach(end)
            call.workspace, call.room = self.workspace.data_ptr(), self.workspace.numel()
            pool = self.library.borrow_pool(num_threads())
            call.pool = pool.address
            try:
                while needed := function(self._model, call):  # a chain's later nodes may need more than its first
                    self.workspace = torch.empty(0)  # frees the previous one first
                    self.workspace = torch.empty(needed)
                    call.workspace, call.room = self.workspace.data_ptr(), needed
            finally:
                return_pool(pool)

    def _run(self, call: CallFields, end: int, tokens: Tensor | None) -> None:
        """Run the layers on sequences that reach at most `end` KV slots."""
        try:
            self._in_workspace(self.library.decoder_forward, call, end)
        except AssertionError:
            if tokens is not None:  # the only argument that users control
                check_tokens(tokens, self._model.embedding.outputs)
            raise

    def _set_layer(self, own: LayerFields, layer: Any, config: DecoderConfig) -> None:
        """Set the fields of a layer of a decoder, whose weights are packed for the library."""
        for name in (*PROJECTIONS, *ROUTED, *LAYER_INPUTS, *HEADS, DELTA_GATES):
            if hasattr(layer, name):
                setattr(own, name, self.library.linear(getattr(layer, name)))
        for name in (*NORMS, *NORMS_BESIDE, "after_input"):
            norm = getattr(layer, name, None)
            setattr(own, name, self._exact_pointer(norm.weight) if isinstance(norm, Norm) else None)
        if layer.recurrent_mixer is not None:
            net = layer.recurrent_mixer
            own.delta_filter, own.delta_norm = self._exact_pointer(net.kernel), self._exact_pointer(net.weight)
            own.fading, own.fading_bias = self._exact_pointer(net.fading), self._exact_pointer(net.fading_bias)
            if net.bias is not None:
                own.delta_bias, own.skip = self._exact_pointer(net.bias), self._exact_pointer(net.skip)
        elif layer.convolution is not None:
            own.filter = self._exact_pointer(layer.convolution.kernel)
        elif config.mixed:
            self._set_shape(own, layer, config)
        elif config.joint_qk_norm or config.latent is not None:
            for name in ("query_norm", "key_norm"):
                if hasattr(layer, name):  # queries may be projected from a layer's input, without a norm
                    setattr(own, name, self._exact_pointer(getattr(layer, name).weight))
        elif config.qk_norm:  # one weight per head, equal for all queries and for all keys
            own.query_norm = self._exact_pointer(layer.qk_norm.weight[0])
            own.key_norm = self._exact_pointer(layer.qk_norm.weight[-1])
        if layer.expert_bias is not None:
            own.expert_bias = self._exact_pointer(layer.expert_bias)
        own.sinks = None if layer.sinks is None else self._exact_pointer(layer.sinks)
        own.window = config.layers[layer.number].window or 0

    def _set_shape(self, own: LayerFields, layer: Any, config: DecoderConfig) -> None:
        """Set the fields of a layer whose shape differs from others'."""
        number = layer.number
        kind = config.layers[number]
        keys_of = number if kind.keys_of is None else kind.keys_of
        stores = list(config.memories.values())
        second = keys_of not in stores[0]
        own.head_dim, own.kv_heads = config.head_dim_of(number), config.kv_heads_of(number)
        own.inner, own.place, own.second = config.dense_inner_size(number), stores[second].index(keys_of), second
        own.shared, own.values_are_keys, own.scale = keys_of != number, kind.values_are_keys, float(layer.scalar)
        own.query_norm = self._exact_pointer(layer.query_norm.weight)
        own.key_norm = None if own.shared else self._exact_pointer(layer.key_norm.weight)
        if layer.expert_scale is not None:
            own.expert_scale = self._exact_pointer(layer.expert_scale)

    def _exact_pointer(self, weight: Tensor) -> int:
        """Return a pointer to the weight in float32, which this object owns."""
        owned = weight.detach().float().contiguous()
        self._owners.append(owned)
        return owned.data_ptr()


class CompiledDecoder(CompiledLayers, Executor):
    """Runs a decoder's forward pass in one call, from the tree of nodes to logits and hidden states in float32.

    A token gets the same bits alone, in a block, in a tree and in a batch.

    Args:
        decoder: A decoder for which `why_not` returns None. Its weights are packed for the library, and its own
            `forward` uses the packed ones from then on.
        library: Library built for the decoder's dtypes and head size.
        max_context: Positions from this one on are clamped; nodes there are never committed.

    Attributes:
        embedding, head: Embedding table and output head in the form of the library.
        lends_head: Whether the head alone gives the target's logits.
        states: Shape of the states of recurrent layers, or None without any.
    """

    def __init__(self, decoder: Decoder, library: Library, max_context: int) -> None:
        config = decoder.config
        CompiledLayers.__init__(self, library, len(config.layers), max_context)
        shapes = store_shapes(config, library.store_dtype, torch.float32, library.slot_size)
        Executor.__init__(self, decoder, shapes)
        for own, layer in zip(self._layers, decoder.layers, strict=True):
            self._set_layer(own, layer, config)
        self.embedding, self.head = library.linear(decoder.embedding), library.linear(decoder.head)
        self.lends_head = config.logit_scale == 1
        # The library computes with hidden states over `residual_scale`, so that what layers add needs no factor, and
        # with the head's input times `logit_scale`.
        residual = config.residual_scale
        self._unscale = residual, 1 / config.logit_scale
        inputs: dict[str, Any] = {}
        if config.layer_input_size:
            inputs = {name: library.linear(getattr(decoder, name)) for name in ("input_table", "input_projection")}
            inputs |= {
                "input_norm": self._exact_pointer(decoder.input_norm.weight),
                "input_size": config.layer_input_size,
            }
        self.states: StateShape | None = None
        if config.recurrent_net is not None:
            self.states = StateShape(config.recurrent_net, config.recurrent_layers, library.lanes)
        self._model = ModelFields(
            layers=self._layers,
            embedding=self.embedding,
            head=self.head,
            norm=self._exact_pointer(decoder.norm.weight.float() * config.logit_scale),
            eps=config.norm_eps / residual**2,
            embedding_scale=decoder.embedding_scale / residual,
            logit_cap=config.final_softcap or 0.0,
            **shape_fields(config, range(len(config.layers))),
            **inputs,
        )

    @property
    def traits(self) -> list[str]:
        library, traits = self.library, ["compiled"]
        if not self.decoder.bits and self.decoder.dtype == torch.float32 and library.weights_dtype == torch.bfloat16:
            traits.append("weights kept in bfloat16")
        if library.store_dtype != self.decoder.dtype:
            traits.append(f"{str(library.store_dtype).removeprefix('torch.')} keys and values")
        return traits

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        if self.states is None:
            return KVCache(batch, capacity, self.shapes)
        return CompiledRecurrentCache(batch, capacity, self.shapes, self.states)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        states = self.states
        recurrent = 0 if states is None else batch * states.nbytes + states.checkpoint_bytes(batch * capacity)
        return super().cache_bytes(batch, capacity) + recurrent

    def working_bytes(self, batch: int, nodes: int, slots: int) -> int:
        recurrent = 0 if self.states is None else batch * self.states.working_bytes(nodes)
        return self.workspace_bytes(batch, nodes, slots) + recurrent

    def step_context(self) -> AbstractContextManager[None]:
        return self.library.torch_threads

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: KVCache,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        (batch, count), config, lengths = tokens.shape, self.decoder.config, cache.lengths
        end, stores = cache.check_room(count), cache.stores
        assert tokens.dtype == parents.dtype == torch.int64 and parents.shape == tokens.shape and len(lengths) == batch
        assert cache.shapes == self.shapes, cache.shapes
        inputs = stores.pop() if config.convolved_layers else None
        memory, second = stores[0], stores[-1]
        wanted = None if logits_at is None else logits_at + torch.arange(batch) * count
        assert logits_at is None or bool(((logits_at >= 0) & (logits_at < count)).all()), (logits_at, count)
        scored = count if wanted is None else 1
        logits = torch.empty(batch, scored, config.vocab_size)
        hidden_states = torch.empty(batch, count, len(target_layers) * config.hidden_size) if target_layers else None
        best = torch.empty(batch, scored, dtype=torch.int64)
        tokens, parents = tokens.contiguous(), parents.contiguous()
        committed, starts, target_layer_numbers = numbers(lengths), numbers(cache.starts), numbers(target_layers)
        call = CallFields(
            tokens=tokens.data_ptr(),
            parents=parents.data_ptr(),
            lengths=address(committed),
            target_layers=address(target_layer_numbers),
            logits_at=None if wanted is None else wanted.data_ptr(),
            batch=batch,
            nodes=count,
            num_target_layer_ids=len(target_layers),
            num_logits=batch * scored,
            reach=EVERYWHERE,
            slots=memory.size(2),
            store=memory.data_ptr(),
            layer_stride=memory.stride(0),
            head_stride=memory.stride(1),
            starts=address(starts),
            hidden_states=None if hidden_states is None else hidden_states.data_ptr(),
            logits=logits.data_ptr(),
            best=best.data_ptr(),
            inputs=None if inputs is None else inputs.data_ptr(),
            second_store=second.data_ptr(),
            second_layer_stride=second.stride(0),
            second_head_stride=second.stride(1),
        )
        if isinstance(cache, CompiledRecurrentCache):
            again = partial(self._read_again, tokens, cache)
            counts = [count] * batch if logits_at is None else (logits_at + 1).tolist()
            with cache.recurring(parents, counts, logits_at is not None, again) as call.recurrent:
                self._run(call, end, tokens)
        else:
            self._run(call, end, tokens)
        if hidden_states is not None and self._unscale != (1, 1):
            factors = [self._unscale[layer == len(config.layers)] for layer in target_layers]
            hidden_states.unflatten(2, (len(factors), config.hidden_size)).mul_(torch.tensor(factors).unsqueeze(-1))
        return TargetOutput(logits, hidden_states, best)

    def _read_again(self, tokens: Tensor, cache: CompiledRecurrentCache, row: int, count: int) -> None:
        """Read the first tokens of one sequence of an earlier call again, which were a chain."""
        own, last = tokens[row : row + 1, :count], torch.tensor([count - 1])
        parents = torch.arange(-1, count - 1)[None]
        self.forward(own, parents, cache.of([cache.starts[row]]), logits_at=last)

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        config = self.decoder.config
        tables = {rope: tables_of(rope, count) for rope in config.ropes}
        return [tables[kind.rope] for kind in config.layers]
