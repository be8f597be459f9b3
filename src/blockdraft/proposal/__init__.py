"""What a drafter hands to the target: a tree of guesses."""

from blockdraft.proposal.budget import best_count
from blockdraft.proposal.plan import Plan
from blockdraft.proposal.proposal import Proposal, SparseLaw, chain, depths, tree_mask
from blockdraft.proposal.tree import best_first, paying_tree

__all__ = [
    "Plan",
    "Proposal",
    "SparseLaw",
    "best_count",
    "best_first",
    "chain",
    "depths",
    "paying_tree",
    "tree_mask",
]
