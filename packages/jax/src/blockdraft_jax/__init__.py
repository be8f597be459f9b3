"""JAX backend: the decoder as pure functions over its checkpoint, its key/value cache, and draft networks."""
