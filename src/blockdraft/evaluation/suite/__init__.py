"""Prompt sets of papers on drafting, measured as the papers do, with their figures beside ours."""
