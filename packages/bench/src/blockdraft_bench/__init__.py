"""Comparison of decoding methods: speed, acceptance, and equality with the target's own output."""
