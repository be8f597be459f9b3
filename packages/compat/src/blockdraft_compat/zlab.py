"""The interface of z-lab's `dflash` package: `DFlashDraftModel.from_pretrained(...).spec_generate(target=..., ...)`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.drafters import drafter_of
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dflash2.network import DFlash2Network
from blockdraft.errors import UsageError
from blockdraft.formats import Trained, check_fits, read_config
from blockdraft.formats.zlab import read_checkpoint
from blockdraft.targets import Target, as_target
from blockdraft.types import SamplingParams
from blockdraft_compat.adapt import check_token_ids, decode_batch, stop_ids


def spec_generate(
    network_or_drafter: Any,
    target: PreTrainedModel | Target,
    input_ids: Tensor | Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Sequence[int] | None = None,
    temperature: float = SamplingParams.temperature,
    top_p: float = SamplingParams.top_p,
    top_k: int = SamplingParams.top_k,
) -> Tensor:
    """Decode one prompt.

    Args:
        network_or_drafter: A `DFlashNetwork`, which is moved to the target's device and dtype, or a drafter from
            `load_drafter`.
        target: A causal language model of transformers, or a target from `load_target`.
        input_ids: `[1, L]` integers, or a list of token ids.
        max_new_tokens: Maximum number of new tokens.
        stop_token_ids: The only tokens that end the response early.
        temperature, top_p, top_k: As in `SamplingParams`. Seed with `torch.manual_seed`.

    Returns:
        `[1, L + new]` int64, prompt and stop token included, on the device of `input_ids`, or of the target for a list.

    Raises:
        UsageError: `input_ids` holds several prompts, the drafter does not fit the target, or `Engine.generate` refuses
            an argument.
    """
    bound = as_target(target)
    ids = input_ids
    if not isinstance(ids, Tensor):
        ids = torch.tensor([list(ids)], dtype=None if len(ids) else torch.int64, device=bound.device)
    check_token_ids(ids)
    if len(ids) != 1:
        raise UsageError(
            f"input_ids holds {len(ids)} prompts; give one, [1, length], or use Engine.generate for several."
        )
    check_fits(
        network_or_drafter.config,
        hidden_size=bound.hidden_size,
        num_layers=bound.num_layers,
        vocab_size=bound.vocab_size,
        max_context=ids.size(1) + max_new_tokens,
    )
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_token_ids=stop_ids(stop_token_ids, bound),
        ignore_eos=True,
    )
    given = network_or_drafter
    drafter = drafter_of(given, bound) if isinstance(given, torch.nn.Module) else given
    return decode_batch(bound, drafter, ids, ids.tolist(), params, pad_token=0)[0]


class DFlashDraftModel(DFlashNetwork):
    """A DFlash network that receives its target with each call."""

    spec_generate = partialmethod(spec_generate)

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: torch.dtype | str | None = None) -> DFlashDraftModel:
        """Load a checkpoint folder.

        Args:
            dtype: Dtype of the weights, such as `torch.bfloat16` or "bfloat16"; None or "auto" is the checkpoint's own.
                `spec_generate` converts them to the target's.

        Raises:
            UsageError: The folder holds no checkpoint of this architecture, or the dtype is unknown.
        """
        config, tensors = read_checkpoint(path)
        if type(config) is not cls.config_class:
            raise UsageError(f"{path} does not hold a {cls.__name__}; use the class that its config.json names.")
        wanted: Any = tensors["fc.weight"].dtype if dtype in (None, "auto") else dtype
        wanted = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
        if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
            raise UsageError(f'dtype must be float32, bfloat16, float16 or "auto", got {dtype!r}.')
        model = cls(config)
        model.load_state_dict(tensors)
        model.qat_bits = Trained.read(read_config(path)).qat_bits
        return model.to(wanted).eval()

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def mask_token_id(self) -> int:
        return self.config.mask_token_id

    @property
    def target_layer_ids(self) -> list[int]:
        return list(self.config.target_layers)


class DFlash2DraftModel(DFlashDraftModel, DFlash2Network):
    """A DFlash2 network that receives its target with each call."""
