"""Servers with OpenAI's API under load: speed, acceptance, and whether drafting changes their responses."""
