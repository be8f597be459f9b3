"""Decoding speed against other implementations: `make bench-peers`. The README of this folder says more."""
