"""Decoding against the limits of a device, at the shapes of real models with random weights."""
