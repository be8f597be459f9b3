"""CUDA graphs and weights of 8 bits for NVIDIA GPUs."""
