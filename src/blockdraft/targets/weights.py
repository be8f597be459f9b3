"""Weights of Hugging Face checkpoints: their tensors, read one at a time, with adapters merged into them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdraft.errors import UsageError, counted
from blockdraft.formats.folder import INDEX, WHOLE, open_folder
from blockdraft.formats.quantized import NotRead, read_quantized
from blockdraft.formats.stored import MadeTensor, StoredTensor, TensorFiles, stored
from blockdraft.nn.decoder_config import DecoderConfig
from blockdraft.targets.base import NotCovered
from blockdraft.targets.checkpoint import check_hub, find_file, is_hub_name, loading
from blockdraft.targets.families import own_tensors
from blockdraft.targets.fingerprint import weights_fingerprint
from blockdraft.targets.model_config import AnyConfig, load_config
from blockdraft.text_files import without_marks
from blockdraft.types import LoadOptions

if TYPE_CHECKING:  # takes as long to import as torch
    from transformers import PreTrainedModel

SOURCE = "source_fingerprint"  # our key in quantization_config, which other programs ignore
TEXT_PART = "model.language_model."  # prefix of the text part's tensors in models with other parts
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def open_weights(
    path: str | Path, wanted: DecoderConfig, config: AnyConfig, options: LoadOptions
) -> tuple[TensorFiles, str | None]:
    """Open the tensors of a checkpoint with the adapter merged, and return their `source_fingerprint` too.

    Raises:
        NotCovered: The tensors are not those of this decoder.
    """
    source, quantization = None, getattr(config, "quantization_config", None)
    if options.adapter is not None:
        model, source = load_model(path, options)
        files: Sequence[Path] = ()
        tensors = {name: stored(tensor) for name, tensor in model.state_dict().items()}
    else:
        opened = open_files(path, options.revision)
        files, tensors = opened.files, {name.replace(TEXT_PART, "model.", 1): t for name, t in opened.tensors.items()}
    if quantization:
        try:
            tensors, source = read_quantized(quantization, tensors), str(quantization.get(SOURCE) or "")
        except NotRead as refused:
            raise NotCovered(str(refused)) from refused
    tensors = experts_apart(own_tensors(config, tensors))
    if wanted.tied_head and TABLE not in tensors and HEAD in tensors:
        tensors[TABLE] = tensors[HEAD]
    _check_tensors(wanted, tensors)
    return TensorFiles(files, tensors), source


def open_files(path: str | Path, revision: str | None = None) -> TensorFiles:
    """Open the tensors of a model folder or hub name, which are downloaded; there are none if it has no safetensors."""
    with loading(path):
        folder = Path(path)
        if not folder.exists():
            file = find_file(path, WHOLE, revision)
            if file is None and (file := find_file(path, INDEX, revision)) is not None:
                from transformers.utils.hub import get_checkpoint_shard_files

                get_checkpoint_shard_files(path, file, revision=revision)
            folder = Path(file).parent if file else folder
        return open_folder(folder)


def experts_apart(
    tensors: Mapping[str, StoredTensor], spelled: Mapping[str, str] = MappingProxyType({})
) -> dict[str, StoredTensor]:
    """Split tensors of all experts of a layer, as newer checkpoints have them, into matrices of one expert each.

    Args:
        spelled: Names of matrices that are not the usual ones, by the usual.
    """
    apart = dict[str, StoredTensor]()
    for name, whole in tensors.items():
        place, _, kind = name.rpartition(".")
        if not place.endswith(".experts") or len(whole.shape) != 3:
            apart[name] = whole
            continue
        # Experts beside an MLP, as in Gemma 4, have gates and the values that they multiply in one matrix.
        beside = place.rsplit(".", 2)[-2].isdigit()
        parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" and not beside else [kind]
        experts, size, inputs = whole.shape[0], whole.shape[1] // len(parts), whole.shape[2]
        for expert in range(experts):
            for number, part in enumerate(parts):
                read = partial(_read_expert, whole, expert, slice(number * size, (number + 1) * size))
                apart[f"{place}.{expert}.{spelled.get(part, part)}.weight"] = MadeTensor(
                    (size, inputs), whole.kind, read
                )
    return apart


def _read_expert(whole: StoredTensor, expert: int, rows: slice) -> Tensor:
    return whole.tensor()[expert, rows]


def _check_tensors(wanted: DecoderConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise `NotCovered` unless these are the tensors of this decoder."""
    if not tensors:
        raise NotCovered("it has no weights in safetensors")
    for name, shape in wanted.tensor_shapes().items():
        if name not in tensors:
            raise NotCovered(f"its checkpoint lacks {name}")
        actual = tensors[name].shape
        if actual != shape:
            raise NotCovered(f"{name} has the shape {list(actual)} instead of {list(shape)}")
    both = wanted.tied_head and HEAD in tensors and tensors[HEAD] is not tensors[TABLE]
    if both and not torch.equal(tensors[TABLE].tensor(), tensors[HEAD].tensor()):
        raise NotCovered("its configuration ties the head to the embeddings, and its checkpoint does not")


def load_model(path: str | Path, options: LoadOptions) -> tuple[PreTrainedModel, str | None]:
    """Load a causal language model of transformers on the CPU, with the adapter, if any, merged into it.

    Returns:
        The model, and its `source_fingerprint` for `CheckpointTarget`.

    Raises:
        UsageError: Files cannot be read, weights do not fill the model, or the adapter is missing, made for another
            model, or of a kind that cannot be merged.
    """
    with loading(path):
        quantization = getattr(load_config(path, options.revision), "quantization_config", None)
    if quantization and options.adapter is not None:
        raise UsageError(
            f"{path} is quantized ({quantization.get('quant_method')}), and no adapter can be merged with quantized "
            "weights; give the model that it was made of, and quantize it then."
        )
    from transformers import AutoModelForCausalLM

    with loading(path), without_marks(path) as clean:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            clean, dtype=options.torch_dtype, revision=options.revision, output_loading_info=True
        )
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise UsageError(
            f"{path} lacks {counted(len(missing), 'tensor')} of {type(model).__name__}, such as {missing[0]}; is it a "
            f"causal language model, and are all its files there?"
        )
    if options.adapter is None:
        return model, None
    source = "" if options.torch_dtype == torch.float16 else weights_fingerprint(model.named_parameters())
    merged, weights = _merged(model, path, options.adapter)
    return merged, source and weights_fingerprint(weights.items(), source)


def _merged(model: PreTrainedModel, path: str | Path, adapter: str | Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Merge an adapter into a model, which is changed, and return both the model and the adapter's weights.

    Errors as in `load_model`.
    """
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ModuleNotFoundError as error:
        raise UsageError(f"An adapter takes {error.name}; run pip install 'blockdraft[adapter]'.") from error
    folder = Path(adapter)
    if folder.exists() and not (folder / "adapter_config.json").is_file():
        raise UsageError(f"{folder} has no adapter_config.json; give the folder or hub name of an adapter of PEFT.")
    if not folder.exists() and not is_hub_name(adapter):
        raise UsageError(f"There is no folder {adapter}, and it is no hub name of the form owner/name.")
    if not folder.exists():
        check_hub(str(adapter), "adapter_config.json")
    try:
        with warnings.catch_warnings():
            # Peft uses an old name of transformers, which its users cannot change.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            wrapped: Any = PeftModel.from_pretrained(model, str(adapter))
            weights: dict[str, Tensor] = get_peft_model_state_dict(wrapped)
            merged: PreTrainedModel = wrapped.merge_and_unload()
    except Exception as error:  # peft raises many kinds
        reason = " ".join(map(str.strip, str(error).splitlines()[:2]))  # torch's errors go on with every single weight
        raise UsageError(
            f"The adapter {adapter} cannot be merged into {path} ({reason}); give one that was made for this model, of "
            "a kind that can be merged, such as a LoRA."
        ) from error
    return merged, weights
