"""Decoding speed of the working tree against another commit."""
