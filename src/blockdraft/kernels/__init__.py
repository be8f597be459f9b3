"""Compiled kernels: C for CPUs, CUDA graphs for NVIDIA GPUs."""
