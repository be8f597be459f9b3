"""Our own decoder as a target: how it is loaded, its cache, and how it runs a forward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.decode.proposal import chain_parents, depths, is_chain, tree_mask
from blockdraft.errors import UsageError
from blockdraft.formats.gguf import is_gguf
from blockdraft.kernels.cpu.build import Build
from blockdraft.kernels.cpu.compiled_decoder import CompiledDecoder
from blockdraft.kernels.cpu.compiled_network import CompiledHost, NotCompiled
from blockdraft.kernels.cpu.compiled_runner import CompiledDraftRunner
from blockdraft.kernels.cpu.library import Library, one_torch_thread
from blockdraft.kernels.cpu.recurrent_cache import CompiledRecurrentCache
from blockdraft.kernels.cpu.threads import use_best_threads
from blockdraft.kernels.cuda.captured_runner import CapturedDraftRunner
from blockdraft.kernels.cuda.compiler import Compiler
from blockdraft.kernels.cuda.graphs import MAX_NODES, CapturedDecoder, CapturedHost, CudaRecorder, GraphRecorder, room
from blockdraft.machine import multiplies_bfloat16, send
from blockdraft.nn.attention import EXACT_NODES, ExactAttention, attention_bytes, grouped_mask, visible_slots
from blockdraft.nn.cache import KVCache, RecurrentCache, bucket, join_states, slot_bucket
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.nn.decoder_layer import DecoderLayer, Memory
from blockdraft.nn.delta_net import CHUNK, Ancestry, DeltaRecurrence, ExactRecurrence, TreeRecurrence
from blockdraft.nn.draft_network import DraftHost, DraftNetwork
from blockdraft.nn.short_convolution import ConvolutionMemory, ConvolutionWindow
from blockdraft.nn.torch_runner import TorchDraftRunner
from blockdraft.targets.base import TargetOutput, set_max_context
from blockdraft.targets.checkpoint import CheckpointTarget
from blockdraft.targets.exact import forward_in_pieces
from blockdraft.targets.families import context_limit
from blockdraft.targets.gguf import read_gguf
from blockdraft.targets.model_config import AnyConfig
from blockdraft.targets.native_files import read_checkpoint
from blockdraft.types import CPU_BLOCK_SIZE, Compile, LoadOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

RANK = 0
PROBED_CONTEXT = 256  # KV slots of the sequence on which numbers of threads are tried
PROBED_NODES = (1, 16)
FEW_NODES = 64  # nodes for which operations of torch between compiled products run in one thread
BESIDE_BFLOAT16 = 8  # bits of drafters next to targets that compute in bfloat16
MAX_TREE = 256  # nodes of the largest tree to plan memory for; more nodes are chunks of a prompt


def load(path: str | Path, options: LoadOptions) -> NativeTarget:
    """Load a checkpoint like `read_checkpoint` and `read_gguf`.

    On a CPU this waits for the compiler, so that a loaded target always runs its forward pass in the same way. On a
    GPU, compile "auto" begins uncompiled.

    Raises:
        NotCovered, UsageError: As in `read_checkpoint` and `read_gguf`.
        UsageError: The options ask for a compiled or captured forward pass, and there is none.
    """
    on_gpu = options.torch_device.type == "cuda"
    if options.kv_dtype is not None and options.torch_device.type != "cpu":
        raise UsageError(
            f"kv_dtype is {options.kv_dtype!r}, which is for CPUs, and the device is {options.torch_device}."
        )
    if on_gpu and options.compile == "on" and options.exact:
        raise UsageError("exact and compile 'on' do not go together on a GPU; use compile auto or off.")
    read = read_gguf(path, options) if is_gguf(path) else read_checkpoint(path, options)
    target = NativeTarget(
        read.decoder,
        read.config,
        tokenizer=read.tokenizer,
        path=read.folder,
        generation_config=read.generation_config,
        source_fingerprint=read.source_fingerprint,
    )
    limit = context_limit(read.config)
    if limit is not None and limit < min(target.max_context, options.max_context or target.max_context):
        log.warning("The context of %s ends at %d tokens: beyond, its attention is scaled by position.", path, limit)
    longest = [length for length in (limit, options.max_context) if length is not None]
    if longest:
        set_max_context(target, min(longest))
    target.round_drafters = options.round_drafters
    target.tokenizer_reason = read.tokenizer_reason
    special = read.decoder.config.unusual
    if on_gpu and options.compile != "off" and not options.exact and not special:
        compiler = Compiler(options.torch_device, in_background=options.compile == "auto")
        target.capture(CudaRecorder(options.torch_device), compiler)
        return target
    if on_gpu and options.compile == "on":
        raise UsageError(f"compile is 'on', but CUDA graphs know no {special}; use compile auto or off.")
    target.compile_reason = read.reason if read.build is None else _compile(target, read.build, options.compile)
    if options.kv_dtype is not None and target.compiled is None:
        raise UsageError(
            f"kv_dtype is {options.kv_dtype!r}, which only a forward compiled for a CPU can do, and {path} has none: "
            f"{target.compile_reason}. Leave kv_dtype out."
        )
    if options.compile == "on" and target.compiled is None:
        raise UsageError(f"{path} has no compiled forward: {target.compile_reason}. Use compile auto or off.")
    target.exact = options.exact and target.compiled is None  # a compiled forward pass is always exact
    if options.threads == "auto" and target.compiled is not None:
        _use_best_threads(target)
    return target


def _compile(target: NativeTarget, library: Build, compile: Compile) -> str | None:
    """Let the target use a library. Return the reason if it does not."""
    loaded = library.library()
    if loaded is None:
        if compile == "auto":
            log.warning("The target runs uncompiled, which is slower: %s.", library.reason)
        return library.reason
    target.compiled = CompiledDecoder(target.decoder, loaded, target.max_context)
    return None


def _use_best_threads(target: NativeTarget) -> None:
    """Use the fastest number of threads for forward passes of one node and of a block."""
    cache = target.new_cache(1, min(PROBED_CONTEXT, target.max_context))
    cache.commit([range(cache.capacity - max(PROBED_NODES))])  # as if these tokens had been read

    def score() -> None:
        for count in PROBED_NODES:
            tokens = torch.zeros(1, count, dtype=torch.long)
            target.forward(tokens, chain_parents(1, count), cache)

    facts = (target.decoder.config, target.dtype, target.bits)
    use_best_threads(score, facts)


class NativeTarget(CheckpointTarget):
    """Our decoder behind the `Target` protocol.

    Args:
        decoder: Decoder on the device and in the dtype of the target.
        config, tokenizer, path, generation_config, source_fingerprint: As in `CheckpointTarget`.

    Attributes:
        compiled: The decoder's forward pass compiled for this machine, or None.
        captured: The decoder's forward passes of few nodes captured as CUDA graphs, or None.
        compile_reason: Reason why it is neither, where it might have been; torch's operations then run one by one.
        exact: Whether torch's operations run in pieces of one size, so that a node's numbers do not depend on what else
            is computed.
        round_drafters: Whether drafters are quantized like the layers, or to 8 bits next to layers that compute in
            bfloat16, or to fewer bits that they were trained with.
    """

    backend = "native"

    def __init__(
        self,
        decoder: Decoder,
        config: AnyConfig,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        path: Path | None = None,
        generation_config: Any = None,
        source_fingerprint: str | None = None,
    ) -> None:
        super().__init__(
            config,
            tokenizer=tokenizer,
            path=path,
            generation_config=generation_config,
            source_fingerprint=source_fingerprint,
        )
        self.decoder = decoder.eval()
        self.dtype: torch.dtype = decoder.dtype
        self.device: torch.device = decoder.device
        self.hidden_size = decoder.config.hidden_size
        self.num_layers = len(decoder.config.layers)
        self.vocab_size = decoder.config.vocab_size
        self.compiled: CompiledDecoder | None = None
        self.captured: CapturedDecoder | None = None
        self.compile_reason: str | None = None
        self.exact = False
        self.round_drafters = True
        self.can_truncate = decoder.config.delta_net is None  # a recurrent state cannot be truncated
        self.kernels = cast("Library | None", decoder.embedding.kernels)
        kinds = enumerate(decoder.config.layers)
        # Query heads per key/value head, by window.
        self._groups = {kind.window: decoder.config.num_heads // decoder.config.kv_heads_of(n) for n, kind in kinds}

    @property
    def keeps_checkpoints(self) -> bool:  # type: ignore[override]
        return self.compiled is not None and self.compiled.states is not None

    @property
    def running(self) -> str:
        parts = ["native"]
        if self.compiled is not None:
            parts.append("compiled")
            if not self.bits and self.dtype == torch.float32 and self.compiled.library.weights_dtype == torch.bfloat16:
                parts.append("weights kept in bfloat16")
            if self.compiled.library.store_dtype == torch.int8:
                parts.append("int8 keys and values")
        elif self.kernels is not None:
            parts.append("compiled products")
        if self.captured is not None:
            parts.append("captured")
        if self.exact:
            parts.append("exact")
        bits = self.bits
        kind = f"int{bits}" if bits else self.decoder.rounded
        return ", ".join([*parts, *([f"{kind} weights"] if kind else [])])

    def _draft_bits(self, network: DraftNetwork) -> int | None:
        """Return the bits to which a draft network is quantized for this target.

        They are those of the target's layers, or fewer if the network was trained with fewer.
        """
        narrow = self.compiled is not None and self.compiled.library.inputs_dtype == torch.bfloat16
        # Processors without such instructions multiply small integers no faster than bfloat16.
        bits = BESIDE_BFLOAT16 if narrow and not self.bits and multiplies_bfloat16() else self.bits
        return min(bits, network.qat_bits or bits) if bits and self.round_drafters else None

    @property
    def bits(self) -> int | None:
        """Bits of the layers' quantized weights, as a CPU uses them; else None."""
        return self.decoder.bits

    @property
    def best_block_size(self) -> int | None:
        return None if self.compiled is None else CPU_BLOCK_SIZE

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        if self.compiled is not None and self.compiled.states is not None:
            return CompiledRecurrentCache(batch, capacity, self.compiled.states)
        return KVCache(batch, capacity) if self.can_truncate else RecurrentCache(batch, capacity)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        config, size, itemsize = self.decoder.config, self._slot_size, self.dtype.itemsize
        if self.compiled is not None:
            itemsize = self.compiled.library.store_dtype.itemsize
        memories = config.memories.items()
        a_token = sum(2 * len(layers) * heads * size(head_dim) * itemsize for (heads, head_dim), layers in memories)
        a_token += config.convolved_layers * config.hidden_size * self._inputs_dtype.itemsize
        states = None if self.compiled is None else self.compiled.states
        if states is not None:
            return batch * (capacity * a_token + states.nbytes) + states.checkpoint_bytes(batch * capacity)
        return batch * (capacity * a_token + _state_bytes(config, self.dtype))

    def weight_bytes(self) -> int:
        return self.decoder.nbytes

    def row_slots(self, tokens: int) -> int:
        # Sequences of few different sizes are at equal distances, which saves torch's operations a copy.
        return tokens if self.compiled is not None else room(tokens)

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        if self.compiled is not None:
            states = self.compiled.states
            recurrent = 0 if states is None else batch * states.working_bytes(nodes)
            return self.compiled.workspace_bytes(batch, nodes, slots) + recurrent
        config, scored = self.decoder.config, EXACT_NODES if self.exact else batch * nodes
        head_dim = max(head_dim for _, head_dim in config.memories)
        attention_widths = (5 if config.gated else 3) * config.num_heads * head_dim
        attention_widths += len(config.layers) * config.layer_input_size * 3
        widths = 4 * config.hidden_size + 3 * config.intermediate_size + attention_widths
        widths += 16 * config.hidden_size if config.convolved_layers else 0  # sums of convolutions are float32
        recurrent = _recurrent_bytes(config, self.dtype, batch, nodes)
        if self.exact:
            attention = attention_bytes(config.num_heads, config.num_kv_heads, head_dim, slots)
            return scored * widths * self.dtype.itemsize + len(config.windows) * nodes * slots + attention + recurrent
        masks = len(config.windows) * scored * max(self._groups.values()) * slots
        scores = scored * config.num_heads * slots
        # Sequences at unequal distances are copied into a batch, in all layers.
        return (scored * widths + masks + scores) * self.dtype.itemsize + self.cache_bytes(batch, slots) + recurrent

    def runner(self, network: DraftNetwork, head: Callable[[Tensor], Tensor] | None = None, owned: bool = False) -> Any:
        network.to(device=self.device)
        shared, reason = vars(self.draft_host(head)), "its target is not compiled"
        if self.captured is not None and CapturedDraftRunner.knows(network):
            network.to(dtype=self.dtype)
            recorder, compiler = self.captured.recorder, self.captured.compiler
            return CapturedDraftRunner(network, CapturedHost(**shared, recorder=recorder, compiler=compiler))
        if self.compiled is not None:
            host = CompiledHost(
                **shared,
                decoder=self.compiled,
                head_dim=self.decoder.config.head_divisor,
                bits=self._draft_bits(network),
                head_rows=self.decoder.head.lookup,
            )
            try:
                return CompiledDraftRunner(network, host, owned)
            except NotCompiled as error:
                reason = str(error)
        network.to(dtype=self.dtype)
        return TorchDraftRunner(network, DraftHost(**shared | {"compile_reason": reason}))

    def capture(self, recorder: GraphRecorder, compiler: Compiler | None = None) -> None:
        """Run forward passes of few nodes as graphs from now on. Call this before the first cache and drafter are made.

        Args:
            recorder, compiler: As in `CapturedDecoder`.

        Raises:
            UsageError: The recorder cannot capture one, or the compiler, unless in the background, cannot compile it.
        """
        self.captured = CapturedDecoder(self.decoder, recorder, compiler)
        node = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self.forward(node, chain_parents(1, 1), self.new_cache(1, room(1)))  # raises errors now

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: KVCache,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        memories, inputs = self._cache_memories(cache)
        with self.lock, torch.no_grad():
            if self.compiled is not None:
                return TargetOutput(
                    *self.compiled.forward(tokens, parents, cache, memories, target_layers, logits_at, inputs)
                )
            if self.captured is not None and logits_at is None:
                output = self._replay_graph(self.captured, tokens, parents, cache, memories[0], target_layers)
                if output is not None:
                    return output
            window = None if inputs is None else self._convolution_window(parents, cache)
            recurrent: dict[int, DeltaRecurrence] = {}
            if isinstance(cache, RecurrentCache):
                recurrent = _recurrences(self.decoder, cache, parents, self.exact)
                cache.leave(lambda row, nodes: [recurrence.after(row, nodes) for recurrence in recurrent.values()])
            if self.exact:
                windows_of_pieces = None if window is None else _pieces(window, tokens.numel())
                run = partial(self._run_piece, memories, recurrent, inputs, windows_of_pieces, target_layers)
                windows = self.decoder.config.windows
                return forward_in_pieces(run, tokens, parents, cache, windows, self.max_context - 1, logits_at)
            count = tokens.size(1)
            views = [cache.view(memory, count) for memory in memories]
            positions, slots, masks = self._layout(parents, cache.lengths)
            stores = self._memories([store for store, _ in views], recurrent, inputs, window)
            # Threads of torch spin after operations, and would delay compiled products.
            alone = self.kernels is not None and tokens.numel() <= FEW_NODES
            with one_torch_thread if alone else nullcontext():
                output = TargetOutput(*self.decoder(tokens, positions, slots, masks, stores, target_layers, logits_at))
            for memory, (store, is_memory) in zip(memories, views, strict=True):
                if not is_memory:
                    cache.put(memory, store, count)
            return output

    def _cache_memories(self, cache: KVCache) -> tuple[list[Tensor], Tensor | None]:
        """Return the cache's memory of keys and values by head size, and of the inputs of short convolutions."""
        config = self.decoder.config
        like = self.decoder.norm.given[0] if self.compiled is None else self.compiled.no_slots
        memories = [
            cache.memory(len(layers), 2 * heads, self._slot_size(head_dim), like, kind)
            for kind, ((heads, head_dim), layers) in enumerate(config.memories.items())
        ]
        if not config.convolved_layers:
            return memories, None
        inputs_like = like.new_empty(0, dtype=self._inputs_dtype)
        return memories, cache.memory(config.convolved_layers, 1, config.hidden_size, inputs_like, len(memories))

    def _replay_graph(
        self,
        captured: CapturedDecoder,
        tokens: Tensor,
        parents: Tensor,
        cache: KVCache,
        memory: Tensor,
        target_layers: Sequence[int],
    ) -> TargetOutput | None:
        """Run the forward pass as a CUDA graph.

        Return None if graphs are too small for the nodes or KV slots, or while it is compiled in the background.
        """
        count = tokens.size(1)
        nodes = bucket(count)
        end = slot_bucket(max(cache.lengths) + nodes)
        if nodes > MAX_NODES or end > cache.capacity:
            return None
        store, is_memory = cache.view(memory, count, end)
        if not is_memory:
            return None
        padded = F.pad(parents, (0, nodes - count), value=-1)  # nodes without ancestors
        outputs = captured.forward(tokens, depths(padded), tree_mask(padded), cache.lengths, store, target_layers)
        return None if outputs is None else TargetOutput(*outputs)

    def _run_piece(
        self,
        memories: Sequence[Tensor],
        recurrent: Mapping[int, DeltaRecurrence],
        inputs: Tensor | None,
        convolution_windows: Iterator[ConvolutionWindow] | None,
        target_layers: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
        attention: Mapping[int | None, ExactAttention],
        has_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        masks = [attention[window] for window in self.decoder.config.windows]
        none = None if has_logits else tokens.new_empty(0)
        window = None if convolution_windows is None else next(convolution_windows)
        stores = self._memories([memory.unsqueeze(1) for memory in memories], recurrent, inputs, window)
        outputs: tuple[Tensor, Tensor | None] = self.decoder(
            tokens, positions, positions, masks, stores, target_layers, none
        )
        return outputs

    def _memories(
        self,
        stores: Sequence[Tensor],
        recurrent: Mapping[int, DeltaRecurrence],
        inputs: Tensor | None,
        window: ConvolutionWindow | None,
    ) -> Sequence[Memory]:
        """Return the memory of each layer: its part of the store, its recurrence, or the inputs of its convolution."""
        config = self.decoder.config
        memories: dict[int, Memory] = dict(recurrent)
        for layers, store in zip(config.memories.values(), stores, strict=True):
            memories |= zip(layers, store.unbind(0), strict=True)
        if inputs is not None and window is not None:
            convolved = [number for number, kind in enumerate(config.layers) if kind.convolved]
            own_inputs = zip(convolved, inputs[:, 0].unbind(0), strict=True)
            memories |= {number: ConvolutionMemory(own, window) for number, own in own_inputs}
        owners = (number if kind.keys_of is None else kind.keys_of for number, kind in enumerate(config.layers))
        return [memories[owner] for owner in owners]

    def _slot_size(self, head_dim: int) -> int:
        return head_dim if self.compiled is None else self.compiled.library.slot_size(head_dim)

    @property
    def _inputs_dtype(self) -> torch.dtype:
        """Dtype in which the cache keeps inputs of short convolutions."""
        return self.dtype if self.compiled is None else torch.float32

    def _convolution_window(self, parents: Tensor, cache: KVCache) -> ConvolutionWindow:
        starts, lengths = (torch.tensor(values)[:, None] for values in (cache.starts, cache.lengths))
        window = ConvolutionWindow.of(parents, starts, lengths, self.decoder.config.conv_kernel)
        return window.to(self.device)

    def _layout(self, parents: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Return positions, KV slots and masks of the nodes for `Decoder.forward`."""
        config, count, starts = self.decoder.config, parents.size(1), set(lengths)
        end, is_line = max(starts) + count, count == 1 or is_chain(parents)
        slots = torch.arange(end - count, end, device=self.device)
        if len(starts) > 1:
            slots = send(torch.tensor(lengths), self.device)[:, None] + torch.arange(count, device=self.device)
        positions = slots if slots.ndim == 2 else slots[None]
        if not is_line:
            positions = positions[:, :1] + send(depths(parents), self.device)
        # Without a window, a single node on sequences of one length, or a chain on empty sequences, needs no mask.
        is_plain = config.attention_softcap is None and not config.sinks
        unmasked = len(starts) == 1 and (count == 1 or (is_line and end == count and is_plain))
        # By window, of which None is full attention, and query heads per key/value head.
        masks: dict[tuple[int | None, int], Tensor | None] = {}
        keys = [
            (window if window is not None and window < end else None, self._groups[window]) for window in config.windows
        ]
        for reached, group in keys:
            if (reached, group) not in masks:
                alone = reached is None and unmasked
                masks[reached, group] = None if alone else self._mask(parents, positions, lengths, reached, group)
        return positions, slots, [masks[key] for key in keys]

    def _mask(
        self, parents: Tensor, positions: Tensor, lengths: Sequence[int], window: int | None, group: int
    ) -> Tensor:
        within = send(tree_mask(parents), self.device)
        if window is None and len(set(lengths)) == 1:  # all nodes attend to the same committed tokens
            return F.pad(grouped_mask(within, group, self.dtype), (lengths[0], 0))
        visible = visible_slots(lengths, within, positions.expand(parents.shape), window)
        return grouped_mask(visible, group, self.dtype)

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.decoder.named_weights()

    def weights_in(self, part: str) -> dict[str, Tensor]:
        return dict(self.decoder.named_weights(part))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.decoder.embedding.lookup(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled() and hidden.requires_grad:  # a drafter is in training, and our head has no gradients
            logits, scale = F.linear(hidden, self.decoder.head.weight), self.decoder.config.logit_scale
            return logits if scale == 1 else logits * scale
        return self.decoder.logits(hidden)


# Recurrent and convolved layers.


def _pieces(window: ConvolutionWindow, nodes: int) -> Iterator[ConvolutionWindow]:
    """Yield the windows of the pieces of `forward_in_pieces`."""
    for first in range(0, nodes, EXACT_NODES):
        yield window.piece(first, EXACT_NODES)


def _recurrences(decoder: Decoder, cache: RecurrentCache, parents: Tensor, exact: bool) -> dict[int, DeltaRecurrence]:
    """Return the recurrences of a forward pass by layer number.

    Args:
        parents: `[B, N]`, as in `Target.forward`.
        exact: Whether the nodes come in pieces.
    """
    recurrences: dict[int, DeltaRecurrence] = {}
    layers = [cast(DecoderLayer, layer) for layer in decoder.layers]
    family, above = None if exact else _ancestry(parents, decoder), parents.tolist() if exact else []
    for layer in layers:
        net = layer.delta_net
        if net is None:
            continue
        states = cache.states(len(recurrences))
        alone = states[0] if len(states) == 1 else join_states(states)
        state = net.empty(len(states)) if alone is None else alone
        recurrences[layer.number] = ExactRecurrence(state, above) if family is None else TreeRecurrence(state, family)
    return recurrences


def _ancestry(parents: Tensor, decoder: Decoder) -> Ancestry:
    assert decoder.config.delta_net is not None
    (batch, count), kernel = parents.shape, decoder.config.delta_net.kernel
    shown = parents[:1, :CHUNK] if is_chain(parents) else parents
    before = torch.arange(-1, kernel - 2).expand(batch, -1)
    previous = torch.cat([before, parents + kernel - 1], dim=1)
    places = [torch.arange(kernel - 1, kernel - 1 + count).expand(batch, -1)]
    for _ in range(kernel - 1):
        places.append(previous.gather(1, places[-1]))
    within = send(tree_mask(shown).unsqueeze(1), decoder.device)
    return Ancestry(within, send(torch.stack(places), decoder.device))


def _state_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a sequence's recurrent states."""
    net = config.delta_net
    if net is None:
        return 0
    inputs, wide = (net.kernel - 1) * net.channels, torch.promote_types(dtype, torch.float32).itemsize
    return (len(config.layers) - config.attention_layers) * (
        inputs * dtype.itemsize + net.value_heads * net.key_dim * net.value_dim * wide
    )


def _recurrent_bytes(config: DecoderConfig, dtype: torch.dtype, batch: int, nodes: int) -> int:
    """Return the bytes that recurrent layers take for a forward pass, and leave for `commit`."""
    net = config.delta_net
    if net is None:
        return 0
    wide, scored = torch.promote_types(dtype, torch.float32).itemsize, batch * nodes
    entering = net.value_heads * (2 * net.key_dim + net.value_dim)
    left = scored * (sum([*net.inputs.values(), *net.gates.values()]) * dtype.itemsize + (entering + net.values) * wide)
    # One layer at a time has the window of the convolution, and some tensors of pairs of nodes of one sequence.
    pairs = 6 * scored * net.value_heads * min(nodes, MAX_TREE)
    working = (2 * scored * net.channels + 2 * scored * entering + pairs) * wide
    return (len(config.layers) - config.attention_layers) * left + working + 2 * batch * _state_bytes(config, dtype)
