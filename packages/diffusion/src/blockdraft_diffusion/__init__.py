"""Block-diffusion language models (BD3-LM, arXiv 2503.09573): autoregressive over blocks, masked diffusion inside."""
