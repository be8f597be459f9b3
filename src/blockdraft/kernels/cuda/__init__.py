"""CUDA graphs and 8-bit weights for NVIDIA GPUs."""
