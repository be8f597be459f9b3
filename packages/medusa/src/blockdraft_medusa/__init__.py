"""Medusa's heads (arXiv 2401.10774): drafter, layout, training and checks."""
