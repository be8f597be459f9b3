"""What only MLX runs: torch tensors whose numbers are MLX arrays, and key/value memory."""
