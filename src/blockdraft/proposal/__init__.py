"""What a drafter hands to the target: a tree of guesses."""

from blockdraft.proposal.plan import Plan
from blockdraft.proposal.proposal import Proposal, SparseLaw, chain, depths, tree_mask

__all__ = ["Plan", "Proposal", "SparseLaw", "chain", "depths", "tree_mask"]
