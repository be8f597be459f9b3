"""Rounding of checkpoints to few bits, in the layout of compressed-tensors, which other engines read too."""
