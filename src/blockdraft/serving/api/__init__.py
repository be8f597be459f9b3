"""The HTTP side: one file an API, what they share, and who may call."""
