"""One step of speculative decoding without its models: proposal, target distributions, verification."""
