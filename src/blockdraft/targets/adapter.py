"""Models of transformers as their checkpoints have them, and with an adapter of PEFT merged into the weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from blockdraft.errors import UsageError, counted
from blockdraft.targets.base import LoadOptions
from blockdraft.targets.checkpoint import check_hub, is_hub_name, loading
from blockdraft.targets.fingerprint import weights_fingerprint


def load_model(path: str | Path, options: LoadOptions) -> tuple[PreTrainedModel, str | None]:
    """Load a causal LM of transformers, on the CPU, and merge the adapter, if any, into it.

    Returns:
        The model, and its `source_fingerprint` as `CheckpointTarget` takes it.

    Raises:
        UsageError: Files that cannot be read, weights that do not fill the model, or an adapter that is absent, of
            another model, or of a kind that cannot be merged.
    """
    with loading(path):
        few = getattr(AutoConfig.from_pretrained(path, revision=options.revision), "quantization_config", None)
    if few and options.adapter is not None:
        raise UsageError(
            f"{path} is quantised ({few.get('quant_method')}), and no adapter can be merged with weights of few bits; "
            "give the model that it was made of, and quantize to round it then."
        )
    with loading(path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=options.dtype, revision=options.revision, output_loading_info=True
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
    source = "" if options.dtype == torch.float16 else weights_fingerprint(model.named_parameters())
    whole, weights = merged(model, path, options.adapter)
    return whole, source and weights_fingerprint(weights.items(), source)


def merged(
    model: PreTrainedModel, path: str | Path, adapter: str | Path
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A model with an adapter in its weights, and the weights of the adapter; the model that was given is changed.
    Errors as in `load_model`."""
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
            # Peft asks transformers for what a newer name has been given to; no one here can mend that.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            wrapped: Any = PeftModel.from_pretrained(model, str(adapter))
            weights: dict[str, torch.Tensor] = get_peft_model_state_dict(wrapped)
            whole: PreTrainedModel = wrapped.merge_and_unload()
    except Exception as error:  # peft raises many kinds
        said = " ".join(map(str.strip, str(error).splitlines()[:2]))  # torch's errors name every single weight
        raise UsageError(
            f"The adapter {adapter} cannot be merged into {path} ({said}); give one that was made for this model, of "
            "a kind that can be merged, such as a LoRA."
        ) from error
    return whole, weights
