"""MLX backend: torch tensors whose values are MLX arrays, the key/value cache, and draft networks."""
