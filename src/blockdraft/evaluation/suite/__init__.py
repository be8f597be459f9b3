"""Prompt sets of papers on drafting, measured as in the papers."""
