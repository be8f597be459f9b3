"""Our own decoder as a target: how it is loaded, and which executor runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.decode.proposal import chain_parents
from blockdraft.errors import UsageError
from blockdraft.formats.gguf import is_gguf
from blockdraft.kernels.cpu.build import Build
from blockdraft.kernels.cpu.compiled_decoder import CompiledDecoder
from blockdraft.kernels.cpu.compiled_network import CompiledHost, NotCompiled
from blockdraft.kernels.cpu.compiled_runner import CompiledDraftRunner
from blockdraft.kernels.cpu.threads import use_best_threads
from blockdraft.kernels.cuda.captured_decoder import CapturedDecoder
from blockdraft.kernels.cuda.captured_runner import CapturedDraftRunner
from blockdraft.kernels.cuda.compiler import Compiler
from blockdraft.kernels.cuda.graphs import CapturedHost, CudaRecorder, GraphRecorder, room
from blockdraft.machine import multiplies_bfloat16
from blockdraft.nn.cache import KVCache
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.draft_network import DraftHost, DraftNetwork
from blockdraft.nn.executor import Executor
from blockdraft.nn.torch_decoder import TorchDecoder
from blockdraft.nn.torch_runner import TorchDraftRunner
from blockdraft.targets.base import TargetOutput, set_max_context
from blockdraft.targets.checkpoint import CheckpointTarget
from blockdraft.targets.exact import ExactDecoder
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
BESIDE_BFLOAT16 = 8  # bits of drafters next to targets that compute in bfloat16


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
    if options.kv_dtype is not None and not target.is_compiled:
        raise UsageError(
            f"kv_dtype is {options.kv_dtype!r}, which only a forward compiled for a CPU can do, and {path} has none: "
            f"{target.compile_reason}. Leave kv_dtype out."
        )
    if options.compile == "on" and not target.is_compiled:
        raise UsageError(f"{path} has no compiled forward: {target.compile_reason}. Use compile auto or off.")
    if options.exact and not target.is_compiled:  # a compiled forward pass is always exact
        target.executor = ExactDecoder(target.decoder, target.max_context)
    if options.threads == "auto" and target.is_compiled:
        _use_best_threads(target)
    return target


def _compile(target: NativeTarget, library: Build, compile: Compile) -> str | None:
    """Let the target use a library. Return the reason if it does not."""
    loaded = library.library()
    if loaded is None:
        if compile == "auto":
            log.warning("The target runs uncompiled, which is slower: %s.", library.reason)
        return library.reason
    target.executor = CompiledDecoder(target.decoder, loaded, target.max_context)
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
        executor: Runs the decoder's forward passes.
        compile_reason: Reason why they are neither compiled nor captured, where they might have been.
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
        self.executor: Executor = TorchDecoder(decoder)
        self.compile_reason: str | None = None
        self.round_drafters = True
        self.can_truncate = decoder.config.recurrent_net is None  # a recurrent state cannot be truncated
        self.kernels = decoder.embedding.kernels

    @property
    def compiled(self) -> CompiledDecoder | None:
        """The executor, if it is the one in C."""
        return self.executor if isinstance(self.executor, CompiledDecoder) else None

    @property
    def is_compiled(self) -> bool:  # type: ignore[override]
        return isinstance(self.executor, CompiledDecoder | CapturedDecoder)

    @property
    def keeps_checkpoints(self) -> bool:  # type: ignore[override]
        return not self.can_truncate and self.compiled is not None

    @property
    def running(self) -> str:
        kind = f"int{self.bits}" if self.bits else self.decoder.rounded
        return ", ".join([self.backend, *self.executor.traits, *([f"{kind} weights"] if kind else [])])

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
        return self.executor.new_cache(batch, capacity)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        return self.executor.cache_bytes(batch, capacity)

    def weight_bytes(self) -> int:
        return self.decoder.nbytes

    def row_slots(self, tokens: int) -> int:
        return self.executor.slots_for(tokens)

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        return self.executor.working_bytes(batch, nodes, slots)

    def runner(self, network: DraftNetwork, head: Callable[[Tensor], Tensor] | None = None, owned: bool = False) -> Any:
        network.to(device=self.device)
        executor, shared, reason = self.executor, vars(self.draft_host(head)), "its target is not compiled"
        if isinstance(executor, CapturedDecoder) and CapturedDraftRunner.knows(network):
            network.to(dtype=self.dtype)
            recorder, compiler = executor.recorder, executor.compiler
            return CapturedDraftRunner(network, CapturedHost(**shared, recorder=recorder, compiler=compiler))
        if isinstance(executor, CompiledDecoder):
            host = CompiledHost(
                **shared,
                decoder=executor,
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
        self.executor = CapturedDecoder(self.decoder, recorder, compiler)
        node = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self.forward(node, chain_parents(1, 1), self.new_cache(1, room(1)))  # raises errors now

    def compile_at_once(self) -> None:
        self.executor.compile_at_once()

    def step_context(self) -> AbstractContextManager[Any]:
        return self.executor.step_context()

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: KVCache,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        with self.lock, torch.no_grad():
            return self.executor.forward(tokens, parents, cache, target_layers, logits_at)

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
