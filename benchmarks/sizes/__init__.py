"""Decoding speed by the size of the model."""
