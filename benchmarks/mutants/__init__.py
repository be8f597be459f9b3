"""Mutation testing: breaks the code on purpose, one place at a time, and runs the tests that should notice."""
