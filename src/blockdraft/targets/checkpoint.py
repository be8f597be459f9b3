"""Hugging Face checkpoints without their weights: location, configuration, limits and tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import huggingface_hub
import torch
from safetensors import SafetensorError

from blockdraft.errors import UsageError
from blockdraft.formats.gguf import is_gguf
from blockdraft.models import located, suggestion
from blockdraft.targets.base import Target, TargetText
from blockdraft.targets.fingerprint import weights_fingerprint
from blockdraft.targets.model_config import AnyConfig, ModelConfig, architecture_of, load_config
from blockdraft.text_files import read_json, refuse_pointer, without_marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Prefixes of the `model_type` of models that `blockdraft_diffusion` reads.
BLOCK_DIFFUSION = ("a2d-", "bd3lm", "sdar")
log = logging.getLogger(__name__)
SCALED = ("linear", "yarn", "llama3")  # kinds of rotary embeddings that extend the context by a factor
HUB_SECONDS = 10.0  # timeout of the hub, as in its own client


class CheckpointTarget(Target):
    """A target from a Hugging Face checkpoint, without its forward pass.

    Args:
        config: The checkpoint's configuration.
        tokenizer: Its tokenizer, if there is one.
        path: Folder that it was loaded from.
        generation_config: The checkpoint's generation configuration, which may name end tokens.
        source_fingerprint: As in `Target`; None if the weights are the checkpoint's own, so that it can be computed;
            "" if it is unknown.
    """

    def __init__(
        self,
        config: AnyConfig,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        path: Path | None,
        generation_config: Any,
        source_fingerprint: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.path = path
        self.max_context = max_context(config)
        self.eos_token_ids = end_tokens(generation_config, config, tokenizer)
        self.architecture = architecture_of(config)
        self._config = config.get_text_config()
        self._source = source_fingerprint

    @property
    def shape(self) -> dict[str, Any]:
        return drafter_shape(self._config)

    @property
    def source_fingerprint(self) -> str | None:
        if self._source is None:
            # Numbers outside the range of float16 differ from those of the other dtypes.
            unknown = self.dtype == torch.float16 or self.architecture.get("quantization_config")
            self._source = "" if unknown else weights_fingerprint(self.named_weights())
        return self._source or None


def checked_folder(path: str | Path, revision: str | None = None) -> Path:
    """Return the path of a model folder, or a hub name.

    Raises:
        UsageError: The path is neither, the hub cannot be reached, or a folder is given with a revision.
    """
    folder = Path(located(path))
    if is_gguf(folder):
        raise UsageError(f"{path} is a GGUF file, where a Hugging Face model folder or a hub name is wanted.")
    if folder.exists() and not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} has no config.json; a target is a Hugging Face model folder, a hub name, or a GGUF file (.gguf)."
        )
    if not folder.exists() and not is_hub_name(path):
        hint = suggestion(str(path)) or "`blockdraft models` lists models with names; names of the hub are OWNER/NAME."
        raise UsageError(f"There is no folder {path}, and no model has that name; {hint}")
    if folder.exists() and revision is not None:
        raise UsageError(f"revision is {revision!r}, and {folder} is a folder, which has none; leave it out.")
    if not folder.exists():
        check_hub(str(path), "config.json", revision)
    elif _model_type(folder).startswith(BLOCK_DIFFUSION):
        raise UsageError(
            f"{folder} holds a block-diffusion model, which is no target: `blockdraft diffusion generate --model "
            f"{folder}` writes with it, and --drafter {folder} drafts with it."
        )
    return folder


def _model_type(folder: Path) -> str:
    """Return the `model_type` of config.json, or nothing if it cannot be read, which loading reports."""
    try:
        return str(read_json(folder / "config.json")["model_type"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def is_hub_name(name: str | Path) -> bool:
    """Return whether a name has the form owner/name, unlike ./folder and ../folder."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name)) is not None


def check_hub(name: str, file: str, revision: str | None = None) -> None:
    """Raise a UsageError if a repository's file is not on this machine, and cannot or will not come from the hub.

    A name whose first part is a folder here is a path with a mistake. The hub's client would only notice after a long
    time that the hub does not respond.
    """
    if isinstance(huggingface_hub.try_to_load_from_cache(name, file, revision=revision), str):
        return
    if (folder := Path(name).parent).is_dir():
        raise UsageError(
            f"There is no {Path(name).name} in the folder {folder}; correct the path. To load {name} from the hub, run "
            f"the command in a folder without {folder}."
        )
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:
        ask_hub(huggingface_hub.constants.ENDPOINT)
    except Exception as error:  # from whichever package the hub's client uses
        raise UsageError(
            f"{name} is no folder here, and the hub cannot be reached to look for it there ({error}); give the path of "
            "a local folder, or try again with a connection."
        ) from error


@cache
def ask_hub(address: str) -> None:
    """Send a request to the hub, once per process."""
    huggingface_hub.get_session().head(address, timeout=HUB_SECONDS)


@contextmanager
def loading(path: str | Path, device: torch.device | str = "cpu") -> Iterator[None]:
    """Turn all errors in reading a model's files into a UsageError that names the model."""
    try:
        try:
            yield
        except Exception:
            refuse_pointer(path)
            raise
    except UsageError as error:
        raise UsageError(f"{path} cannot be loaded: {error}") from error
    except SafetensorError as error:
        raise UsageError(f"The weights in {path} are corrupt or cut short ({error}); copy them again.") from error
    except torch.OutOfMemoryError as error:
        raise UsageError(f"{path} does not fit into the free memory of {device}: {error}") from error
    except Exception as error:  # transformers, tokenizers and the hub raise many kinds, and bare Exception too
        detail = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} cannot be loaded as a causal language model ({detail})") from error


def own_dtype(path: str | Path, revision: str | None = None) -> torch.dtype | None:
    """Return the dtype in a checkpoint's config.json, or None if there is none or the weights are quantized.

    Raises:
        UsageError: As in `load_text`.
    """
    folder = checked_folder(path, revision)
    with loading(path):
        raw = _read_json(folder / "config.json") if folder.exists() else load_config(path, revision).to_dict()
    if raw.get("quantization_config"):
        return None
    parts = [part for part in (raw, raw.get("text_config")) if isinstance(part, dict)]
    named = (part.get("dtype") or part.get("torch_dtype") for part in parts)
    return getattr(torch, str(next(filter(None, named), None)).removeprefix("torch."), None)


def _read_json(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content


def load_text(path: str | Path, revision: str | None = None) -> TargetText:
    """Load tokenizer and configuration of a target.

    Raises:
        UsageError: There is no such folder or hub name, or a file cannot be read.
    """
    checked_folder(path, revision)
    with loading(path):
        config = load_config(path, revision)
    return load_text_with(config, path, revision)


def load_text_with(config: AnyConfig, path: str | Path, revision: str | None = None) -> TargetText:
    """Do as `load_text` with a given configuration, for folders with a `model_type` unknown to transformers."""
    folder = Path(path)
    with loading(path):
        tokenizer = load_tokenizer(path, revision, config)
    ends = end_tokens(load_generation_config(path, revision), config, tokenizer)
    return TargetText(folder if folder.exists() else None, tokenizer, max_context(config), ends)


def load_tokenizer(
    path: str | Path, revision: str | None = None, config: AnyConfig | None = None
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model folder or hub name, or return None if the folder has none."""
    folder = Path(path)
    if folder.exists() and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    from transformers import AutoTokenizer, PretrainedConfig

    config = load_config(path, revision) if config is None else config
    if isinstance(config, ModelConfig):
        family, file = getattr(config, "model_type", ""), folder / "tokenizer_config.json"
        names_class = file.is_file() and bool(_read_json(file).get("tokenizer_class"))
        config = None
        if names_class or not family:  # else the class of the configuration decides
            config = PretrainedConfig()
            setattr(config, "model_type", family)  # noqa: B010 (a class variable to mypy)
    with without_marks(path) as clean:
        return AutoTokenizer.from_pretrained(clean, revision=revision, config=config)


def load_generation_config(path: str | Path, revision: str | None = None) -> SimpleNamespace | None:
    """Return the object whose `eos_token_id` is that of generation_config.json, or None if there is no such file."""
    file = find_file(path, "generation_config.json", revision)
    if file is None:
        return None
    with loading(path):
        return SimpleNamespace(eos_token_id=_read_json(Path(file)).get("eos_token_id"))


def find_file(path: str | Path, name: str, revision: str | None = None) -> str | None:
    """Return the path of a file of a model folder or hub name, or None if it has none of this name."""
    folder = Path(path)
    if folder.exists():
        return str(folder / name) if (folder / name).is_file() else None
    from transformers.utils.hub import cached_file

    cached: str | None = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return cached


def max_context(config: AnyConfig) -> int:
    """Return the maximum number of tokens of a sequence, those that scaled rotary embeddings add included.

    Configurations name the scaled or the original number. Frequencies of the kinds "dynamic" and "longrope" change
    beyond the trained number, which is not supported.
    """
    text = config.get_text_config()
    trained: int = getattr(text, "max_position_embeddings", None) or 2**31
    rope = getattr(text, "rope_parameters", None) or {}
    original, factor = rope.get("original_max_position_embeddings") or trained, rope.get("factor")
    if rope.get("rope_type") not in SCALED or not isinstance(factor, int | float):
        return trained
    return max(trained, int(original * factor))


def end_tokens(generation_config: Any, config: AnyConfig, tokenizer: Any) -> frozenset[int]:
    """Return the end tokens that any of a checkpoint's files names.

    Log a warning for ids that the model cannot generate, such as -1, and leave them out.
    """
    ids: list[Any] = []
    for source in (generation_config, config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids += value if isinstance(value, list) else [value] if value is not None else []
    size: int = getattr(config.get_text_config(), "vocab_size", 2**31)  # not every configuration has one
    known = frozenset(token for token in ids if type(token) is int and 0 <= token < size)
    unknown = sorted({repr(token) for token in ids if type(token) is not int or token not in known})
    if unknown:
        log.warning("The end tokens [%s] are no tokens of the model, 0 to %d; ignored.", ", ".join(unknown), size - 1)
    return known


def head_size(config: AnyConfig) -> int:
    """Return the size of an attention head, or that of most layers if they differ (Gemma 4)."""
    return _usual(config, "head_dim") or int(config.hidden_size // config.num_attention_heads)


def _usual(config: AnyConfig, name: str) -> Any:
    """Return a value of a configuration, or that of most layers if they differ; None if it is missing."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return config.to_dict()[name]


def drafter_shape(config: AnyConfig) -> dict[str, Any]:
    """Return `Target.shape` of a model's text configuration."""
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    shape: dict[str, Any] = {name: value for name in names if isinstance(value := _usual(config, name), int | float)}
    heads = shape.get("num_attention_heads")
    if heads:
        shape.setdefault("num_key_value_heads", heads)
        shape["head_dim"] = head_size(config)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention") or rope)  # nested by the kind of layer in some models
    if rope.get("rope_theta"):
        shape["rope_theta"] = rope.pop("rope_theta")
        shape["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    return shape
