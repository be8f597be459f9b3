"""Block-diffusion language models as their folders hold them: network, configuration, tokenizer."""
