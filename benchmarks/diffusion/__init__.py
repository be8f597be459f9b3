"""Block-diffusion models: what block sizes, strategies of sampling and conversion cost and bring."""
