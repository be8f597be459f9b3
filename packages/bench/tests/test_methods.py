import pytest

from blockdraft.types import Drafting
from blockdraft_bench.methods import Method, parse_methods


def test_settings_of_each_method() -> None:
    found = parse_methods("chain, chain:4,none,tree,tree:64,look,look:3,/a:b/c,/a:b/c:5", "D", 8, 16)
    assert found == [
        Method("chain", "D", Drafting(8)),
        Method("chain:4", "D", Drafting(4)),
        Method("none", "none", Drafting(None)),
        Method("tree", "D", Drafting(8, 16)),
        Method("tree:64", "D", Drafting(8, 64)),
        Method("look", "look", Drafting(8)),
        Method("look:3", "look", Drafting(3)),
        Method("/a:b/c", "/a:b/c", Drafting(8)),
        Method("/a:b/c:5", "/a:b/c", Drafting(5)),
    ]


def test_plain_decoding_is_always_there_and_the_bundled_drafter_is_the_default() -> None:
    assert parse_methods("tree", None, None, 32) == [
        Method("none", "none", Drafting(None)),
        Method("tree", None, Drafting(None, 32)),
    ]


def test_auto_reaches_drafting() -> None:
    chosen = parse_methods("none,chain,chain:auto,chain:2,tree,tree:auto,tree:0", None, "auto", "auto")
    assert [(method.drafting.block_size, method.drafting.tree_budget) for method in chosen] == [
        (None, 0),
        ("auto", 0),
        ("auto", 0),
        (2, 0),
        ("auto", "auto"),
        ("auto", "auto"),
        ("auto", 0),
    ]


def test_other_drafters_join_the_one_at_hand() -> None:
    names = "lookup+chain,lookup+chain:4,lookup+chain-sampled,lookup+tree:64,look+/a+b:5"
    [_, *found] = parse_methods(names, "D", None, 16)
    assert [(method.drafter, method.drafting) for method in found] == [
        ("lookup+D", Drafting(None)),
        ("lookup+D", Drafting(4)),
        ("lookup+D", Drafting(None, sampled=True)),
        ("lookup+D", Drafting(None, tree_budget=64)),
        ("look+/a+b", Drafting(5)),
    ]
    assert parse_methods("lookup+tree", None, None, 16)[1].drafter == "lookup+bundled"


def test_sampled_draft_tokens_come_in_chains() -> None:
    [_, sampled] = parse_methods("none,chain-sampled:4", "folder", None, 32)
    assert (sampled.drafter, sampled.drafting) == ("folder", Drafting(4, sampled=True))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("chain,,tree", "empty name"),
        ("", "empty name"),
        ("chain,tree,chain", "names 'chain' twice"),
        ("none:8", "'none:8' has a setting"),
        ("chain:0", "block_size must be .*, got 0"),
    ],
)
def test_bad_methods(names: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_methods(names, None, None, 32)
