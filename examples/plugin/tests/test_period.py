from blockdraft_period import BLOCK_SIZE, PeriodDrafter, follower

from blockdraft import Drafting, Engine, SamplingParams, load_drafter, load_target


def test_it_drafts_what_followed_last_time() -> None:
    assert follower([1, 2, 3, 4, 1, 2], 4) == [3, 4, 1, 2]
    assert follower([1, 2, 3], 2) == [3, 3]


def test_it_is_found_by_name_and_changes_no_output() -> None:
    target = load_target("bundled")
    drafter = load_drafter("period", target=target)
    assert isinstance(drafter, PeriodDrafter) and drafter.kind == "period"
    params = SamplingParams(max_new_tokens=32)
    prompt = "Tom has 3 boxes of 12 pens. Tom has 3 boxes of 12 pens."
    plain, drafted = (
        Engine(target, found, drafting=Drafting(block_size)).generate([prompt], params)[0]
        for found, block_size in ((None, None), (drafter, BLOCK_SIZE))
    )
    assert drafted.token_ids == plain.token_ids and len(drafted.stats.committed) <= len(plain.stats.committed)
