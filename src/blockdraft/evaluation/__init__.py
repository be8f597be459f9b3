"""Measuring methods of decoding against each other: speed, acceptance, and whether the output is the target's own."""
