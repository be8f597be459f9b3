"""Prompt sets of papers on drafting, measured as in the papers and compared with their figures."""
