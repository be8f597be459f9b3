"""Quantization of checkpoints in the layout of compressed-tensors, which other engines read too."""
