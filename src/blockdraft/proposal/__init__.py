"""What a drafter hands to the target: a tree of guesses."""

from blockdraft.proposal.bounds import cut
from blockdraft.proposal.budget import best_count, next_pays
from blockdraft.proposal.drawn import LAW_SIZE, chain_laws, cut_laws
from blockdraft.proposal.plan import Plan
from blockdraft.proposal.proposal import Proposal, SparseLaw, chain, chain_parents, depths, is_chain, tree_mask
from blockdraft.proposal.tree import best_first, best_of, lattice_tree, paying_tree

__all__ = [
    "LAW_SIZE",
    "Plan",
    "Proposal",
    "SparseLaw",
    "best_count",
    "best_first",
    "best_of",
    "chain",
    "chain_laws",
    "chain_parents",
    "cut",
    "cut_laws",
    "depths",
    "is_chain",
    "lattice_tree",
    "next_pays",
    "paying_tree",
    "tree_mask",
]
