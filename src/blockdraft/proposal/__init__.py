"""What a drafter hands to the target: a tree of guesses."""

from blockdraft.proposal.proposal import Proposal, chain, depths, tree_mask

__all__ = ["Proposal", "chain", "depths", "tree_mask"]
