"""Draft networks run by the library compiled from `decoder.c`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.kernels.cpu.compiled_decoder import (
    EVERYWHERE,
    CompiledLayers,
    address,
    chain_parents,
    numbers,
    shape_fields,
    tables_of,
)
from blockdraft.kernels.cpu.compiled_network import CompiledHost, NotCompiled, pack_together
from blockdraft.kernels.cpu.growing_head import GrowingHead
from blockdraft.kernels.cpu.library import (
    CallFields,
    ChainFields,
    ConvolutionFields,
    LayerFields,
    LinearFields,
    ModelFields,
)
from blockdraft.machine import return_freed
from blockdraft.nn.cache import KVCache, StoreShape
from blockdraft.nn.draft_network import DraftDescription, DraftNetwork
from blockdraft.nn.draft_runner import DraftRunner
from blockdraft.nn.packed import PackedLinear, check_tokens
from blockdraft.nn.torch_runner import picked
from blockdraft.timing import HEAD, PASS, mark

KNOWN = frozenset(
    (
        "heads",
        "packed layers of a decoder",
        "pairs",
        "whole blocks",
        "sliding windows",
        "convolutions",
        "several layers of pairs",
    )
)  # of `DraftDescription.kinds`


class CompiledDraftRunner(CompiledLayers, DraftRunner):
    """A `DraftRunner` with one library call per method, except for heads. Sums are in float32, whatever the dtype.

    Where the target's library runs the network too, embedding, layers and head are a single call. The nodes of a draft
    lie in the KV slots behind their sequence's committed tokens.

    Args:
        network: Network whose weights are copied into the library's layout and must not change afterwards.
        host: The compiled target. An own head that is a `ReducedHead` is packed.
        owned: As in `Target.runner`.

    Attributes:
        bits: Bits to which weights are quantized; None where they are not.
        quantized_layers: Names of the linear layers whose weights are quantized.

    Raises:
        NotCompiled: The network has layers that the library does not know, or as in `CompiledHost.choose_library` and
            `CompiledHost.packing_library`.
    """

    compile_reason: str | None = None

    @torch.no_grad()
    def __init__(self, network: DraftNetwork, host: CompiledHost, owned: bool = False) -> None:
        described, self.config = network.description, network.config
        reason = described.why_not(KNOWN)
        if reason is not None:
            raise NotCompiled(reason)
        if described.head is not None:
            host = replace(host, own_head=None)  # the network has a head itself
        if described.heads:
            host = replace(host, bits=None)
        head_dim = self.config.head_dim if described.layers else host.head_dim
        is_packed = described.packed_decoder
        library, self.bits = host.packing_library(network) if is_packed else host.choose_library(network, head_dim)
        super().__init__(library, len(described.layers), EVERYWHERE)
        self.network: Any = network
        self.embed, self.head, self.described = host.embed, host.head, described
        self._dtype, self._owned, self._has_pairs = host.dtype, owned, described.has_pairs
        self.packed: list[PackedLinear] = []
        self._names = {module: name for name, module in network.named_modules()}
        self.quantized_layers: set[str] = set()
        self._growing: GrowingHead | None = None
        # A target that uses the same library lends its embedding, and its head unless there is one of another kind.
        # The reference keeps alive the memory that the model's fields point to.
        lends = host.decoder.library is library and host.own_head is host.reduced_head and host.decoder.lends_head
        self.lender = host.decoder if lends else None
        self._reduced = host.reduced_head if lends else None
        if described.layers:
            self._pack_network(described, host)
        else:
            self._reduced = host.reduced_head
            self._pack_heads(described)
        hidden_state = StoreShape(1, 1, self.config.hidden_size, torch.float32 if described.layers else self._dtype)
        if described.layers:
            heads, size = self.config.num_key_value_heads, library.slot_size(self.config.head_dim)
            per_head = self.config.decoder.stored_per_head if is_packed else 2
            keys_values = StoreShape(len(described.layers), per_head * heads, size, library.store_dtype)
            self.shapes = (keys_values, hidden_state) if described.has_pairs else (keys_values,)
        else:
            self.shapes = (hidden_state,)
        return_freed()

    @property
    def grown_vocabulary(self) -> Tensor | None:
        return None if self._growing is None else self._kept[: self._growing.outputs]

    def weight_bytes(self) -> int:
        grown = 0 if self._growing is None else self._growing.nbytes
        return sum(layer.nbytes for layer in self.packed) + sum(owner.nbytes for owner in self._owners) + grown

    def workspace_bytes(self, batch: int, nodes: int, slots: int) -> int:
        if not self.described.layers:
            return 0
        needed = super().workspace_bytes(batch, nodes, slots)
        if self._has_pairs:
            return needed
        return max(needed, 4 * self.library.draft_context_workspace(self._model, batch, nodes, self._fc.inputs))

    def slots_beside(self, block_size: int, width: int) -> int:
        return 1 + width * max(block_size - 2, 0) if self._has_pairs else 0

    def observe(self, state: KVCache, tokens: Tensor, hidden_states: Tensor) -> None:
        if not self.described.layers:
            state.extend(state.stores[0][0], hidden_states.to(self._dtype).unsqueeze(1))
        elif self._has_pairs:
            if self._growing is not None and self._growing.add(tokens):
                self._model.head = self._growing.fields
            fused = self._fuse(hidden_states)
            before = torch.cat([state.last(state.stores[-1][0]), fused[:, :-1]], dim=1)
            self._run_nodes(state, tokens, before, chain_parents(*tokens.shape))
            state.extend(state.stores[1][0], fused.unsqueeze(1))
        else:
            normed = self._normed(hidden_states)
            call, end = self._call(state, normed.size(0), normed.size(1))
            call.embedded = normed.data_ptr()
            self._in_workspace(self._write_context, call, end)

    def draft_tokens(
        self, state: KVCache, tokens: Tensor, first: int, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self.described.layers:
            return self._run_heads(state.last(state.stores[0][0]), tokens.size(1) - first)
        if self.lender is None:
            hidden = self.block_pass(state, self.embed(tokens), window)[:, first:]
            mark(PASS)
            return hidden, self.head(hidden)
        tokens = tokens.contiguous()
        call, end = self._call(state, tokens.size(0), tokens.size(1))
        call.tokens = tokens.data_ptr()
        wanted = _nodes_from(first, *tokens.shape)
        logits = torch.empty(len(tokens), tokens.size(1) - first, self._model.head.outputs)
        call.logits, call.logits_at, call.num_logits = logits.data_ptr(), address(wanted), len(wanted)
        hidden = self._run_block(call, end, tokens, window)[:, first:].to(self._dtype)
        mark(PASS)
        return hidden, logits if self._reduced is None else self._reduced.everywhere(logits)

    def block_pass(self, state: KVCache, block: Tensor, window: int | None = None) -> Tensor:
        """As `TorchDraftRunner.block_pass`."""
        embedded = block.float().contiguous()
        call, end = self._call(state, embedded.size(0), embedded.size(1))
        call.embedded = embedded.data_ptr()
        return self._run_block(call, end, None, window).to(block.dtype)

    def chain(
        self,
        state: KVCache,
        anchor: Tensor,
        draft_tokens: int,
        window: int | None = None,
        seconds: Sequence[float] | None = None,
        calibration: float = 1.0,
    ) -> tuple[Tensor, Tensor | None] | None:
        if self.lender is None or not self._scores:
            return None  # the target's own functions embed or score
        batch = len(anchor)
        tokens = torch.empty(batch, draft_tokens + 1, dtype=torch.int64)
        tokens[:, 0] = anchor
        current, best = torch.empty(2, batch, dtype=torch.int64)
        parents = torch.empty(batch * draft_tokens, dtype=torch.int64)
        known = state.last(state.stores[-1][0]).contiguous()
        hidden_state = torch.empty(batch, self.config.hidden_size)
        logits = torch.empty(batch, self._model.head.outputs)
        expected, survival, following = torch.empty(3, batch)
        costs = None if seconds is None else array("d", seconds[: draft_tokens + 1])
        call, end = self._call(state, batch, draft_tokens)
        call.nodes, call.num_logits, call.hidden_slots = 1, batch, 1
        call.reach = EVERYWHERE if window is None else window
        call.beside, call.hidden_states, call.logits = known.data_ptr(), hidden_state.data_ptr(), logits.data_ptr()
        call.target_layers, call.num_target_layer_ids = address(self._target_layers), len(self._target_layers)
        call.best = best.data_ptr()
        wanted = ChainFields(
            kept=self._kept.data_ptr(),
            tokens=tokens.data_ptr(),
            current=current.data_ptr(),
            parents=parents.data_ptr(),
            draft_tokens=draft_tokens,
            seconds=None if costs is None else costs.buffer_info()[0],
            calibration=calibration,
            expected=expected.data_ptr(),
            survival=survival.data_ptr(),
            following=following.data_ptr(),
        )
        try:
            self._in_workspace(lambda model, call: self.library.draft_chain(model, call, wanted), call, end)
        except AssertionError:
            check_tokens(tokens[:, :1], self._model.embedding.outputs)
            raise
        mark(PASS)
        return tokens[:, : wanted.made + 1], None if costs is None else expected

    def nodes(self, state: KVCache, block_size: int, width: int, window: int | None = None) -> CompiledNodes:
        return CompiledNodes(self, state, window)

    def pass_of(
        self, state: KVCache, tokens: Tensor, beside: Tensor, parents: array[int], done: int, window: int
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states that follow nodes, `[B, N, H]` float32, and their logits `[B, N, V]`.

        Args:
            tokens: `[B, N]` int64, behind `done` earlier nodes of each sequence.
            beside: `[B, N, H]` float32, the hidden states before the nodes.
            parents: Parents of all `B * (done + N)` nodes.
            window: Number of last committed tokens that are visible.
        """
        size = self.config.hidden_size
        hidden_states = torch.empty(*tokens.shape, len(self._target_layers) * size)
        logits = torch.empty(*tokens.shape, self._model.head.outputs) if self._scores else None
        self._run_nodes(
            state, tokens, beside, parents, done=done, window=window, hidden_states=hidden_states, logits=logits
        )
        fed, normed = hidden_states[..., :size], hidden_states[..., -size:]
        mark(PASS)
        if logits is None:
            return fed, self.head(normed.to(self._dtype))
        return fed, logits if self._reduced is None else self._reduced.everywhere(logits)

    def _run_nodes(
        self,
        state: KVCache,
        tokens: Tensor,
        beside: Tensor,
        parents: array[int],
        *,
        done: int = 0,
        window: int = EVERYWHERE,
        hidden_states: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> None:
        """Run nodes as in `pass_of`, and write to `hidden_states` and `logits`.

        Without these, compute only keys and values.
        """
        tokens, beside = tokens.contiguous(), beside.contiguous()
        call, end = self._call(state, tokens.size(0), tokens.size(1), done)
        call.parents, call.beside, call.reach, call.hidden_slots = address(parents), beside.data_ptr(), window, 1
        if self.lender is None:
            embedded = self.embed(tokens).float().contiguous()
            call.embedded = embedded.data_ptr()
        else:
            call.tokens = tokens.data_ptr()
        if hidden_states is not None:
            call.target_layers, call.num_target_layer_ids = address(self._target_layers), len(self._target_layers)
            call.hidden_states = hidden_states.data_ptr()
        if logits is not None:
            call.logits, call.num_logits = logits.data_ptr(), tokens.numel()
        self._run(call, end, None if self.lender is None else tokens)

    def _run_block(self, call: CallFields, end: int, tokens: Tensor | None, window: int | None) -> Tensor:
        """Run a pass over blocks, and return hidden states `[B, N, H]` after the final norm."""
        parents = chain_parents(call.batch, call.nodes)
        hidden = torch.empty(call.batch, call.nodes, self.config.hidden_size)
        call.parents, call.target_layers, call.num_target_layer_ids = address(parents), address(self._target_layers), 1
        call.hidden_states, call.reach = hidden.data_ptr(), EVERYWHERE if window is None else window
        self._run(call, end, tokens)
        return hidden

    def _run_heads(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return states `[B, count, H]` and logits `[B, count, V]` of the first `count` heads.

        Args:
            hidden: `[B, 1, H]`, the target's last hidden states.
        """
        hidden = hidden.float().contiguous()
        fields = self.library.linear(self._first)
        fields = type(fields).from_buffer_copy(fields)
        fields.outputs = count * hidden.size(2)  # of the first `count` heads
        raised = torch.empty(len(hidden), count, hidden.size(2))
        self.library.multiply(fields, hidden[:, 0], raised)
        states = hidden + F.silu(raised)
        for state, others in zip(states.unbind(1), self._others, strict=False):
            for linear in others:
                state += F.silu(self._product(linear, state.contiguous()))
        mark(PASS)
        if self._projections:
            by_head = zip(self._projections, states.unbind(1), strict=False)
            logits = torch.stack([self._product(head, state.contiguous()) for head, state in by_head], dim=1)
        elif self._reduced is not None and self._shared is not None:
            scores = self._product(self._shared, states.flatten(0, 1))
            logits = self._reduced.everywhere(scores.view(*states.shape[:2], -1))
        else:
            logits = self.head(states.to(self._dtype))
        mark(HEAD)
        return states, logits

    def _product(self, linear: PackedLinear, x: Tensor) -> Tensor:
        out = torch.empty(len(x), linear.out_features)
        self.library.multiply(self.library.linear(linear), x, out)
        return out

    def _write_context(self, model: ModelFields, call: CallFields) -> int:
        return self.library.draft_context(model, call, self._fc, self._fused_norm)

    def _normed(self, hidden_states: Tensor) -> Tensor:
        """Return the input of the `fc` that fuses hidden states, `[B, N, m * H]` float32."""
        if self.described.fusing_norms:
            hidden_states = self.network.normed_hidden_states(hidden_states.to(self._dtype))
        return hidden_states.float().contiguous()

    def _fuse(self, hidden_states: Tensor) -> Tensor:
        """Fuse the hidden states of the target layers, `[B, N, m * H]`, to `[B, N, H]` float32."""
        normed = self._normed(hidden_states)
        if self.described.entry == "joined pair":
            return normed
        fused = torch.empty(*hidden_states.shape[:2], self.config.hidden_size)
        self.library.multiply(self._fc, normed.flatten(0, 1), fused)
        norm = self.described.fused_norm
        return fused if norm is None else self.network.part(norm)(fused.to(self._dtype)).float()

    # Weights in the form of the library.

    def _pack_network(self, described: DraftDescription, host: CompiledHost) -> None:
        config, network = self.config, self.network
        pointer = self._exact_pointer if described.packed_decoder else self._pointer
        for own, kind, layer in zip(self._layers, described.layers, network.draft_layers, strict=True):
            if described.packed_decoder:
                self._set_layer(own, layer, config.decoder)
            else:
                self._pack_layer(own, layer, kind.convolved)
                own.window, own.whole_block = kind.window or 0, not kind.causal
        self._fc = self.library.linear(network.fc) if described.packed_decoder else self._pack(network.fc)
        if described.has_pairs:
            self._kept = (network.kept if self._reduced is None else self._reduced.kept).contiguous()
        own_head = None if described.head is None else self._pack_head(network.part(described.head), host)
        own_head = own_head if self._reduced is None else self._pack(self._reduced.projection)
        pairs: dict[str, Any] = {}
        if described.has_pairs:
            joins = described.entry == "joined pair"
            pairs = {"pairs": True, "normed_stream": described.normed_stream}
            pairs["joined"] = self._fc if joins else LinearFields()
            for name in ("token_norm", "hidden_state_norm"):
                pairs[name] = pointer(network.part(getattr(described, name)).weight)
        else:
            self._fused_norm = pointer(network.part(described.fused_norm).weight)
        lent_embedding, lent_head = LinearFields(), LinearFields()
        if self.lender is not None:
            lent_embedding, lent_head = self.lender.embedding, self.lender.head
        self._model = ModelFields(
            layers=self._layers,
            embedding=lent_embedding,
            head=lent_head if own_head is None else own_head,
            norm=pointer(network.norm.weight),
            eps=config.rms_norm_eps,
            embedding_scale=described.embedding_scale,
            **self._shape_fields(),
            **pairs,
        )
        self._scores = own_head is not None or self.lender is not None
        # Outputs of a pass: that of the last layer, or the same behind the last norm. The first output is that which a
        # block returns, or a node feeds to its children. The target's head reads the last, unless the library runs it.
        last, normed = len(described.layers) - 1, len(described.layers)
        outputs = [normed if described.normed_feedback or not described.has_pairs else last]
        self._target_layers = numbers(outputs if self._scores or outputs == [normed] else [*outputs, normed])

    def _shape_fields(self) -> Mapping[str, Any]:
        """Return the fields of `Model` of calls.h that describe the shapes of the layers."""
        config = self.config
        if self.described.packed_decoder:
            return shape_fields(config.decoder, [layer.number for layer in self.network.draft_layers])
        return {
            "num_layers": len(self._layers),
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "inner": config.intermediate_size,
            "attention_scale": config.head_dim**-0.5,
        }

    def _pack_head(self, head: nn.Linear, host: CompiledHost) -> LinearFields:
        """Pack the network's own head, to which rows for tokens of sequences are added if its rows are the target's."""
        fits = (
            self._has_pairs and len(self._kept) % self.library.lanes == 0 and len(self._kept) < self.config.vocab_size
        )
        if not self.described.tied_head or host.head_rows is None or not fits:
            return self._pack(head)
        self._growing = GrowingHead(head, self._kept, host.head_rows, self._packed_together, self.library)
        self._kept = self._growing.kept
        return self._growing.fields

    def _pack_layer(self, own: LayerFields, layer: Any, convolved: bool) -> None:
        """Pack projections and norms of a `DraftLayer`."""
        attention, mlp = layer.self_attn, layer.mlp
        own.qkv = self._pack(attention.q_proj, attention.k_proj, attention.v_proj)
        own.output = self._pack(attention.o_proj)
        own.gate_up = self._pack(mlp.gate_proj, mlp.up_proj)
        own.down = self._pack(mlp.down_proj)
        own.before_attention = self._pointer(layer.input_layernorm.weight)
        own.before_mlp = self._pointer(layer.post_attention_layernorm.weight)
        if not isinstance(attention.q_norm, nn.Identity):
            own.query_norm = self._pointer(attention.q_norm.weight)
            own.key_norm = self._pointer(attention.k_norm.weight)
        if convolved:
            own.attention_conv, own.mlp_conv = map(self._convolution, (layer.attention_conv, layer.mlp_conv))

    def _convolution(self, module: Any) -> ConvolutionFields:
        _, taps, groups = module.corrections
        projection = self._pack(module.kernel_projection, quantize=False)  # small, so 4 bits would save little
        base = self._pointer(module.base_kernel)
        return ConvolutionFields(projection=projection, base=base, taps=taps, groups=groups)

    def _pack_heads(self, described: DraftDescription) -> None:
        """Pack heads. Their first blocks read the same input, so they are one product."""
        heads, count = [list(head) for head in self.network], described.head_blocks

        def packed(*projections: nn.Linear) -> PackedLinear:
            self._pack(*projections)
            return self.packed[-1]

        self._first = packed(*(head[0].linear for head in heads))
        self._others = [[packed(block.linear) for block in head[1:count]] for head in heads]
        self._projections = [packed(projection) for head in heads for projection in head[count:]]
        self._shared = None if self._reduced is None or self._projections else packed(self._reduced.projection)

    def _pointer(self, weight: Tensor) -> int:
        """Return a pointer to the weight in float32, rounded to the network's dtype, which this object owns."""
        return self._exact_pointer(weight.to(self._dtype))

    def _pack(self, *projections: nn.Linear, quantize: bool = True) -> LinearFields:
        """Pack projections for as long as the network, quantized to `bits` unless `quantize` is False."""
        packed = self._packed_together(*projections, quantize=quantize)
        self.packed.append(packed)  # it owns the memory
        return self.library.linear(packed)

    def _packed_together(self, *projections: nn.Linear, quantize: bool = True) -> PackedLinear:
        bits = self.bits if quantize else None
        if bits is not None:
            self.quantized_layers |= {self._names[layer] for layer in projections if layer in self._names}
        return pack_together(projections, self.library, self._dtype, bits, self._owned)

    # Calls.

    def _call(self, state: KVCache, batch: int, count: int, done: int = 0) -> tuple[CallFields, int]:
        """Return a call on `count` nodes per sequence, and how many KV slots its sequences reach.

        The nodes follow the committed tokens of each sequence and `done` earlier nodes.
        """
        end, memory = state.check_room(done + count), state.stores[0]
        assert state.shapes == self.shapes, state.shapes
        lengths, starts = numbers(state.lengths), numbers(state.starts)
        assert len(lengths) == batch, (state.lengths, batch)
        call = CallFields(
            lengths=address(lengths),
            starts=address(starts),
            batch=batch,
            nodes=count,
            done=done,
            slots=memory.size(2),
            store=memory.data_ptr(),
            layer_stride=memory.stride(0),
            head_stride=memory.stride(1),
        )
        call.owners = lengths, starts
        return call, end

    def _angles(self, count: int) -> list[tuple[Tensor, Tensor]]:
        # The entry of slot s, if it is a pair, has position s - 1, but only differences between positions matter.
        if self.described.packed_decoder:
            kinds = self.config.decoder.layers
            return [tables_of(kinds[layer.number].rope, count) for layer in self.network.draft_layers]
        tables = self.network.angles(torch.arange(count)[None], torch.float32)
        cos, sin = (table[0, :, : self.config.head_dim // 2].contiguous() for table in tables)
        return [(cos, sin)] * len(self._layers)


class CompiledNodes:
    """`DraftNodes` in the KV slots behind each sequence's committed tokens."""

    def __init__(self, run: CompiledDraftRunner, state: KVCache, window: int | None) -> None:
        self._run, self._state, self._window = run, state, EVERYWHERE if window is None else window
        self._hidden_state = state.last(state.stores[-1][0])
        self._parents: list[list[int]] = [[] for _ in state.starts]
        self._last = 0  # nodes per sequence of the last call

    @property
    def room(self) -> int:
        """Nodes that still fit behind every sequence's committed tokens."""
        return self._state.spare - len(self._parents[0])

    def __call__(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        count, done = tokens.size(1), len(self._parents[0])
        first, hidden_state = done - self._last, self._hidden_state
        if parents is None:
            for own in self._parents:
                own += [done - 1] * count
        else:
            hidden_state = picked(hidden_state, parents)
            for own, new in zip(self._parents, parents.tolist(), strict=True):
                own += [first + parent for parent in new]
        everyone = numbers(parent for own in self._parents for parent in own)
        self._hidden_state, logits = self._run.pass_of(self._state, tokens, hidden_state, everyone, done, self._window)
        self._last = count
        mark(HEAD)
        return logits


@lru_cache(maxsize=256)
def _nodes_from(first: int, batch: int, count: int) -> array[int]:
    """Return the indices, over all sequences, of the nodes from node `first` of each sequence on."""
    return numbers(node for node in range(batch * count) if node % count >= first)
