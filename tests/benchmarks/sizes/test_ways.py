import pytest
from benchmarks.sizes.ways import LLAMA, OURS, Way, drafting, memory, ways


def test_draft_tokens_do_not_count_the_anchor() -> None:
    assert drafting("plain") == {"drafter": "none"}
    assert drafting("chain:3") == {"drafting": {"block_size": 4}}
    assert drafting("chain:auto") == {"drafting": {"block_size": "auto"}}
    assert drafting("tree:16")["drafting"]["tree_budget"] == 16
    assert drafting("tree:auto") == {"drafting": {"tree_budget": "auto"}}


@pytest.mark.parametrize("method", ["chain", "chain:", "chain:-1", "bush:3"])
def test_unknown_methods_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match=method):
        drafting(method)


def test_ways_stand_by_bits_and_drafters_are_tried_both_ways() -> None:
    found = ways(["int4", "bfloat16"], ["chain:3"], ["Q4_0", "bf16"])
    assert [way.bits for way in found] == sorted((way.bits for way in found), reverse=True)
    assert [way.method for way in found if way.kind == "int4"] == ["plain", "chain:3"]
    assert {way.drafter for way in found if way.kind == "Q4_0"} == {"", "bf16", "Q4_0"}
    assert {way.drafter for way in found if way.kind == "bf16"} == {"", "bf16"}


def test_one_process_serves_all_of_our_ways_and_each_of_theirs_has_its_own() -> None:
    found = ways(["bfloat16"], ["chain:3", "tree:16"], ["bf16"])
    assert len({way.process for way in found if way.side == OURS}) == 1
    assert len({way.process for way in found if way.side == LLAMA}) == 3
    assert Way(LLAMA, "Q4_0", "chain:3", "Q4_0").name == "chain:3, drafter Q4_0"


def test_draft_tokens_of_llama_are_chosen() -> None:
    found = ways([], [], ["Q4_0"], [4])
    assert {way.method for way in found} == {"plain", "chain:4"}
    assert [way.method for way in ways([], [], ["Q4_0"], [])] == ["plain"]


def test_memory_counts_each_process_with_its_drafter() -> None:
    plain, drafting_exact = Way(LLAMA, "Q4_0", "plain"), Way(LLAMA, "Q4_0", "chain:3", "bf16")
    assert memory([plain], 1600, 160) == 500
    assert memory([plain, drafting_exact], 1600, 160) == 500 + 700
    assert memory([Way(OURS, "int8", "")], 1600, 160) == 1100
