"""What only NVIDIA GPUs run: CUDA graphs, and weights of 8 bits."""
