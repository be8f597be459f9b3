"""Comparison of decoding methods: speed, acceptance, and whether the output is the target's own."""
