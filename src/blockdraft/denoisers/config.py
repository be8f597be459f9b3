"""What a block-diffusion model is, beside its network."""

from __future__ import annotations

from blockdraft.settings import Count, Natural, settings


@settings
class DiffusionConfig:
    """What the network itself does not show.

    Attributes:
        block_size: Tokens of a block. At 1 the model is autoregressive.
        mask_token_id: Stands for a token that is not known yet.
        token_shift: Whether what the network says at a token is about the next one, as in causal language models. What
            is said about the first token of a block is then said at the last one of the block before.
    """

    block_size: Count
    mask_token_id: Natural
    token_shift: bool
