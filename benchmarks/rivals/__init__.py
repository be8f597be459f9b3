"""Kinds of drafters against each other: the same target, tokens and about the same size."""
