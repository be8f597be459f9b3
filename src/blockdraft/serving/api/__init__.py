"""The HTTP side: one file for each API, what they share, and the checks on callers."""
