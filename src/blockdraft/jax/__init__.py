"""What only JAX runs: the decoder as pure functions over a pytree of its checkpoint, and its key/value memory."""
