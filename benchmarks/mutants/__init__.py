"""Breaks the code on purpose, one place at a time: tests that let that pass guard nothing."""
