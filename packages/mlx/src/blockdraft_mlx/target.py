"""Models of mlx-lm as targets: Apple's GPUs, and CPUs for tests.

The model is mlx-lm's own, with its own quantized layers. Three kinds of calls are wrapped: layers, whose outputs
drafters read; the last norm, so that the head scores the requested nodes only; and rotary embeddings, which give the
nodes of a tree the positions of their depths. Keys and values are ours, so that an accepted path can be committed.

Nothing is computed before the engine asks for the best tokens: the draft pass, the forward and the last commit are one
graph, and the host waits once. See `blockdraft_mlx.tensor`.
"""

from __future__ import annotations

import importlib.util
import logging
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from blockdraft.decode.proposal import chain_parents, depths, is_chain, tree_mask
from blockdraft.errors import describe
from blockdraft.formats.folder import open_folder
from blockdraft.formats.gguf import is_gguf
from blockdraft.nn.attention import visible_slots
from blockdraft.nn.draft_network import DraftNetwork
from blockdraft.nn.foreign_tensor import in_torch
from blockdraft.nn.torch_runner import TorchDraftRunner
from blockdraft.targets.base import NotCovered, TargetOutput
from blockdraft.targets.checkpoint import (
    CheckpointTarget,
    checked_folder,
    load_generation_config,
    load_tokenizer,
    loading,
)
from blockdraft.targets.families import logit_factor
from blockdraft.targets.model_config import AnyConfig, load_config
from blockdraft.types import LoadOptions
from blockdraft_mlx.cache import MLXCache
from blockdraft_mlx.draft_runner import KNOWN, MLXDraftRunner
from blockdraft_mlx.tensor import Array, MLXTensor, computing, dtypes, in_mlx, mx, quantize_weight

log = logging.getLogger(__name__)

INSTALL = "pip install mlx-lm"
IS_APPLE = platform.system() == "Darwin" and platform.machine() == "arm64"
# On Apple silicon it is the first choice; elsewhere it is never chosen automatically.
RANK = -1 if IS_APPLE and importlib.util.find_spec("mlx_lm") else None
TREE_CHECK = ([3, 5, 7, 9], [-1, 0, 0, 2])  # tokens and parents of the tree that checks a model
TOLERANCE = {torch.float32: 1e-3}  # difference of a node's logits relative to the largest; 0.05 in half precision


def load(path: str | Path, options: LoadOptions) -> MLXTarget:
    """Load a model folder or hub name with mlx-lm.

    Raises:
        NotCovered: mlx-lm is not installed or does not support the model, a layer keeps a state that cannot be cut, or
            an option is not supported.
        UsageError: The path is neither a folder nor a hub name, or its files cannot be read.
    """
    if importlib.util.find_spec("mlx_lm") is None or mx is None:
        extra = INSTALL if IS_APPLE else f"{INSTALL} 'mlx[cpu]'"
        raise NotCovered(f"mlx-lm is not installed; {extra}")
    if is_gguf(path):
        raise NotCovered("it reads no GGUF files")
    refused = {
        "quantize": options.quantize is not None,
        "kv_dtype": options.kv_dtype is not None,
        "adapter": options.adapter is not None,
        "exact": options.exact,
        "compile": options.compile == "on",
    }
    for name, is_set in refused.items():
        if is_set:
            remedy = "; mlx_lm.convert --quantize writes a quantized model" if name == "quantize" else ""
            raise NotCovered(f"it has no {name}{remedy}")
    if options.torch_device.type == "cuda":
        raise NotCovered("it runs on Apple's GPUs and on CPUs, and the device is cuda")
    from mlx_lm import utils

    checked_folder(path, options.revision)
    with loading(path):
        folder = Path(path) if Path(path).exists() else Path(utils._download(str(path), revision=options.revision))
        raw = utils.load_config(folder)
        config = load_config(folder)
    try:
        utils._get_classes(raw)
    except ValueError as error:
        raise NotCovered(f"mlx-lm {_version()} does not know the model ({describe(error)})") from error
    if options.torch_device.type == "cpu":
        mx.set_default_device(mx.cpu)
    with loading(path):
        text = {"tokenizer": load_tokenizer(folder, None), "generation_config": load_generation_config(folder)}
    here = Path(path) if Path(path).exists() else None
    try:
        with computing():
            model, _ = utils.load_model(folder, lazy=True, model_config=_with_flat_rope(raw))
            _cast(model, dtypes()[options.torch_dtype])
            mx.eval(model.parameters())
        rounds = options.round_drafters
        target = MLXTarget(model, raw, config, folder=folder, path=here, round_drafters=rounds, **text)
    except NotCovered:
        raise
    except Exception as error:  # mlx-lm raises many kinds for unexpected keys or tensors
        raise NotCovered(f"mlx-lm {_version()} cannot run its files ({describe(error)})") from error
    if target.dtype != options.torch_dtype:
        log.warning(
            "%s has scales in %s and computes in that dtype, not in %s.", path, target.dtype, options.torch_dtype
        )
    return target


def _version() -> str:
    try:
        return version("mlx-lm")
    except PackageNotFoundError:
        return "of unknown version"


def _with_flat_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with its rotary embeddings where mlx-lm looks for them.

    transformers 5 nests them, and most models of mlx-lm then silently use the family's defaults."""
    nested = raw.get("rope_parameters") or {}
    rope, local = nested.get("full_attention", nested), nested.get("sliding_attention", {})
    flat = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    flat |= {"rope_local_base_freq": local["rope_theta"]} if local else {}
    flat |= {} if rope.get("rope_type", "default") == "default" else {"rope_scaling": dict(rope)}
    text = {"text_config": _with_flat_rope(raw["text_config"])} if "text_config" in raw else {}
    return {**raw, **{name: value for name, value in flat.items() if raw.get(name) is None}, **text}


def _cast(model: Any, dtype: Any) -> None:
    """Cast the weights. A quantized model keeps the dtype of its scales where the other is narrower, to stay exact."""
    for scales in {module["scales"].dtype for module in model.modules() if "scales" in module}:
        if mx.issubdtype(scales, mx.floating) and scales.size >= dtype.size:
            dtype = scales
    for module in model.modules():
        for name, value in list(module.items()):
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
                module[name] = value.astype(dtype)


class LayerCache:
    """The cache interface of mlx-lm, for one layer and one forward.

    Attributes:
        offset: Tokens before the nodes: a number, or an array `[B]` if sequences differ.
    """

    def __init__(self, nodes: NodeMasks, layer: int) -> None:
        self._nodes, self._layer, self.offset = nodes, layer, nodes.offset

    def update_and_fetch(self, keys: Array, values: Array) -> list[Array]:
        views = self._nodes.cache.write(self._layer, MLXTensor(keys), MLXTensor(values))
        return [in_mlx(view) for view in views]

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self._nodes.mask(window_size, return_array)


class NodeMasks:
    """Positions and masks of the nodes of one forward.

    Attributes:
        positions: `[B * N]`, or None for chains.
        offset: As in `LayerCache`.
    """

    def __init__(self, cache: MLXCache, parents: Tensor) -> None:
        self.cache, self._parents, self._lengths = cache, parents, cache.lengths
        self._is_chain, self._is_even = is_chain(parents), len(set(self._lengths)) == 1
        self._masks: dict[int | None, Array] = {}
        self.offset: Any = self._lengths[0] if self._is_even else mx.array(self._lengths)
        self.positions: Array | None = None
        self._depths = torch.tensor(self._lengths)[:, None] + depths(parents)
        if not self._is_chain:
            self.positions = mx.array(self._depths.flatten().numpy())

    def mask(self, window: int | None, wants_array: bool) -> Any:
        end = max(self._lengths) + self._parents.size(1)
        window = window if window is not None and window < end else None
        if self._is_chain and self._is_even and window is None and not wants_array:
            return None if self._parents.size(1) == 1 else "causal"
        if window not in self._masks:
            visible = visible_slots(self._lengths, tree_mask(self._parents), self._depths, window)
            self._masks[window] = mx.array(visible[:, None].numpy())
        return self._masks[window]


class MLXTarget(CheckpointTarget):
    """A model of mlx-lm as a target.

    Args:
        model: Model of mlx-lm.
        raw: Its configuration as mlx-lm reads it.
        config: Its configuration as transformers reads it.
        folder: Folder of its files, also for a hub name.
        round_drafters: Whether to quantize drafters to the bits of a quantized model.
        tokenizer, path, generation_config: As in `CheckpointTarget`.

    Raises:
        NotCovered: The model has a layer that is not supported, or its embedding or last norm was not found.
    """

    backend = "mlx"
    chosen_for = "this machine has Apple silicon" if IS_APPLE else None

    def __init__(
        self,
        model: Any,
        raw: Mapping[str, Any],
        config: AnyConfig,
        *,
        folder: Path,
        round_drafters: bool = True,
        **text: Any,
    ) -> None:
        super().__init__(config, **text)
        self._model, self._folder = model, folder
        text_model = getattr(model, "language_model", model)
        inner: Any = next((text_model[n] for n in ("model", "backbone", "transformer") if n in text_model), {})
        embedding = next((inner[n] for n in ("embed_tokens", "embeddings", "wte") if n in inner), None)
        norm = next((n for n in ("norm", "final_layernorm", "norm_f", "ln_f") if n in inner), None)
        if embedding is None or norm is None:
            raise NotCovered(f"it does not find embedding and last norm in mlx-lm's {type(model).__module__}")
        self._embedding: Any = embedding
        self._head: Any = text_model.get("lm_head", embedding.as_linear)
        self._caches = _cache_layers(model)
        self.dtype = next(ours for ours, theirs in dtypes().items() if theirs == embedding(mx.array([0])).dtype)
        self.device = torch.device("cpu")  # of the tensors that the engine sees
        self.hidden_size = embedding(mx.array([0])).shape[-1]
        self.num_layers = len(model.layers)
        self.vocab_size = self._head(mx.zeros((1, self.hidden_size))).shape[-1]
        quantization = raw.get("quantization") or {}
        self._bits, self._group_size = quantization.get("bits"), quantization.get("group_size", 64)
        self._round_drafters = round_drafters
        self._nodes: NodeMasks | None = None
        self._outputs: dict[int, Array] = {}
        self._target_layers: Sequence[int] = ()
        self._scored: Array | None = None
        for number, layer in enumerate(model.layers):
            _wrap(layer, partial(self._target_layer, number))
        _wrap(inner[norm], self._pick)
        for name, module in model.named_modules():
            if name.endswith(("rope", "rotary_emb")):
                _wrap(module, self._rotate)
        self._one_by_one, self._slot_bytes = False, 0
        self._check()

    @property
    def running(self) -> str:
        return ", ".join(["mlx", *([f"int{self._bits} weights"] if self._bits else [])])

    def _check(self) -> None:
        """Check that nodes of a tree, and batches of different lengths, get the logits of a chain alone.

        They do not in families whose positions are computed by other calls than the wrapped ones."""
        tolerance = TOLERANCE.get(self.dtype, 0.05)
        tokens, parents = (torch.tensor([values]) for values in TREE_CHECK)
        tokens %= self.vocab_size  # MLX reads beyond a table without an error

        def logits(lengths: Sequence[int], tokens: Tensor, parents: Tensor) -> Tensor:
            """Return the last node's logits behind sequences of these lengths."""
            cache = self.new_cache(len(lengths), 16)
            for start, length in zip(cache.starts, lengths, strict=True):
                sequence = cache.of([start])
                self.forward(torch.full((1, length), 1), chain_parents(1, length), sequence)
                sequence.commit([range(length)])
            last: Tensor = in_torch(self.forward(tokens, parents, cache).logits)[:, -1].float()
            self._slot_bytes = cache.nbytes // (16 * len(lengths))
            return last

        def differ(ours: Tensor, reference: Tensor) -> bool:
            return float((ours - reference).abs().max()) > tolerance * float(reference.abs().max())

        path = tokens[:, [0, 2, 3]]
        reference = logits([1], path, chain_parents(1, 3))
        self.has_trees = not differ(logits([1], tokens, parents), reference)
        self._one_by_one = differ(logits([1, 4], path.expand(2, -1), chain_parents(2, 3))[:1], reference)

    def new_cache(self, batch: int, capacity: int) -> MLXCache:
        return MLXCache(batch, capacity)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        return batch * capacity * self._slot_bytes

    def weight_bytes(self) -> int:
        from mlx.utils import tree_flatten

        weights: Any = tree_flatten(self._model.parameters())  # pairs of name and array
        return sum(value.nbytes for _, value in weights)

    def forward_bytes(self, batch: int, nodes: int, slots: int) -> int:
        scored, shape = batch * nodes, self.shape
        widths = 4 * self.hidden_size + 3 * shape.get("intermediate_size", 4 * self.hidden_size)
        copies = self.cache_bytes(batch, slots) if batch > 1 else 0
        heads = shape.get("num_attention_heads", 1)
        return int(scored * (widths + slots * heads) * self.dtype.itemsize) + copies

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        cache: Any,
        target_layers: Sequence[int] = (),
        logits_at: Tensor | None = None,
    ) -> TargetOutput:
        assert isinstance(cache, MLXCache)
        if not self.has_trees:  # other nodes than a chain's are padding then, which is never accepted
            parents = chain_parents(*tokens.shape)
        if self._one_by_one and len(set(cache.lengths)) > 1:
            outputs = []
            for i, start in enumerate(cache.starts):
                at = None if logits_at is None else logits_at[i : i + 1]
                outputs.append(
                    self.forward(tokens[i : i + 1], parents[i : i + 1], cache.of([start]), target_layers, at)
                )
            logits, best = (torch.cat([getattr(output, name) for output in outputs]) for name in ("logits", "best"))
            hidden_states = (
                torch.cat([cast(Tensor, output.hidden_states) for output in outputs]) if target_layers else None
            )
            return TargetOutput(logits, hidden_states, best)
        with self.lock, computing():
            cache.check_room(tokens.size(1))
            self._nodes, self._target_layers, self._outputs = NodeMasks(cache, parents), target_layers, {}
            self._scored = None if logits_at is None else in_mlx(logits_at)
            caches = [LayerCache(self._nodes, layer) for layer in range(self._caches)]
            try:
                logits = self._model(in_mlx(tokens), cache=caches)
                outputs = [self._outputs[target_layer] for target_layer in target_layers]
            finally:
                self._nodes, self._outputs = None, {}
            highest, best = mx.max(logits, axis=-1), mx.argmax(logits, axis=-1).astype(mx.int64)
            is_valid = mx.isfinite(highest) & ~mx.any(mx.isnan(logits), axis=-1)
            hidden_states = MLXTensor(mx.concatenate(outputs, axis=-1)) if target_layers else None
            return TargetOutput(MLXTensor(logits), hidden_states, MLXTensor(mx.where(is_valid, best, -1)))

    def _target_layer(self, number: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        if number in self._target_layers:
            self._outputs[number] = output[0] if isinstance(output, tuple) else output
        return output

    def _pick(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        self._outputs[self.num_layers] = output
        if self._scored is None:
            return output
        return mx.take_along_axis(output, self._scored[:, None, None], axis=1)

    def _rotate(self, call: Callable[..., Any], x: Array, offset: Any = 0, **kwargs: Any) -> Any:
        if self._nodes is None or self._nodes.positions is None:
            return call(x, offset=offset, **kwargs)
        batch, heads, count, size = x.shape
        nodes = x.swapaxes(1, 2).reshape(batch * count, heads, 1, size)  # each node as a sequence of its own
        rotated = call(nodes, offset=self._nodes.positions, **kwargs)
        return rotated.reshape(batch, count, heads, size).swapaxes(1, 2)

    def embed(self, tokens: Tensor) -> Tensor:
        with computing():
            return MLXTensor(self._embedding(in_mlx(tokens)))

    def head(self, hidden: Tensor) -> Tensor:
        factor = logit_factor(self._config)
        with computing():
            logits = self._head(in_mlx(hidden))
            return MLXTensor(logits if factor == 1 else logits * factor)

    def runner(self, network: DraftNetwork, head: Callable[[Tensor], Tensor] | None = None, owned: bool = False) -> Any:
        network.to(device=self.device, dtype=self.dtype)
        host = self.draft_host(head)
        why_not = network.description.why_not(KNOWN)
        if why_not is not None:
            reason = f"{why_not}, and torch runs it on the CPU"
            log.warning("The drafter is not run by MLX: %s.", reason)
            host = replace(
                host,
                embed=lambda tokens: in_torch(self.embed(tokens)),
                target_head=lambda hidden: in_torch(self.head(hidden)),
                compile_reason=reason,
            )
            return InTorch(TorchDraftRunner(network, host))
        run = MLXDraftRunner(network, host)
        if owned and self._bits and self._round_drafters:
            run.bits = self._bits
            for module in network.modules():
                if isinstance(module, nn.Linear):
                    quantize_weight(module.weight, self._bits, self._group_size)
        return run

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Read every weight from the checkpoint's files."""
        for name, tensor in open_folder(self._folder).tensors.items():
            value = tensor.tensor()
            yield name, value.to(self.dtype) if value.is_floating_point() else value


class InTorch:
    """Converts the arguments of a runner that uses torch's own operations to torch's own tensors."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._run, name)
        return (lambda *args, **options: value(*map(in_torch, args), **options)) if callable(value) else value

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._run(*map(in_torch, args), **options)


def _wrap(module: Any, wrapper: Callable[..., Any]) -> None:
    """Replace a module's call by `wrapper(original call, *arguments)`."""
    kind = type(module)
    original = cast(Any, kind).__call__
    methods = {"__call__": lambda self, *args, **kwargs: wrapper(partial(original, self), *args, **kwargs)}
    module.__class__ = type(kind.__name__, (kind,), methods)


def _cache_layers(model: Any) -> int:
    """Return the number of layers that keep keys and values.

    Raises:
        NotCovered: A layer keeps another state.
    """
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

    caches = make_prompt_cache(model)
    for layer in caches:
        if type(layer) not in (KVCache, RotatingKVCache):
            raise NotCovered(
                f"a layer keeps a {type(layer).__name__} of mlx-lm, which cannot be cut to an accepted path"
            )
    return len(caches)
