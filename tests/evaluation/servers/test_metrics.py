"""Counters of four engines."""

import pytest

from blockdraft.errors import UsageError
from blockdraft.evaluation.servers.metrics import Acceptance, acceptance, cached_tokens, drafted, parse

OURS = """# TYPE blockdraft:num_cycles counter
blockdraft:num_cycles_total {cycles}
# TYPE blockdraft:num_cycle_tokens counter
blockdraft:num_cycle_tokens_total {tokens}
# TYPE blockdraft:spec_decode_num_drafts counter
blockdraft:spec_decode_num_drafts_total {drafts}
# TYPE blockdraft:spec_decode_num_accepted_tokens counter
blockdraft:spec_decode_num_accepted_tokens_total {accepted}
# TYPE blockdraft:spec_decode_num_accepted_tokens_per_pos counter
blockdraft:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {accepted}
"""


def test_our_cycles_count_whether_they_drafted_or_not() -> None:
    before = parse(OURS.format(cycles=10, tokens=12, drafts=2, accepted=2))
    after = parse(OURS.format(cycles=30, tokens=52, drafts=22, accepted=22))
    assert (after.engine, after.caches) == ("blockdraft", None)
    assert acceptance(before, after) == Acceptance(2.0, (1.0,))
    assert drafted(before, after) and not drafted(after, after)


def test_others_count_cycles_that_drafted() -> None:
    text = '# TYPE vllm:{0} counter\nvllm:{0}_total{{engine="0"}} {1}\nvllm:{0}_total{{engine="1"}} {1}\n'
    name = "spec_decode_num_accepted_tokens_per_pos"
    places = f'# TYPE vllm:{name} counter\nvllm:{name}_total{{position="0"}} 6\nvllm:{name}_total{{position="1"}} 2\n'
    drafts, accepted = (f"spec_decode_num_{each}" for each in ("drafts", "accepted_tokens"))
    before, after = parse(text.format(drafts, 0) + text.format(accepted, 0)), None
    after = parse(text.format(drafts, 5) + text.format(accepted, 4) + places)
    assert acceptance(before, after) == Acceptance(1.8, (0.6, 0.2))
    assert acceptance(after, after) == Acceptance(1.0)


def test_sglang_tells_a_mean_of_what_is_not_zero() -> None:
    gauges = 'sglang:spec_accept_length{tp_rank="0"} 3.5\nsglang:spec_accept_length{tp_rank="1"} 0.0\n'
    found = parse(f"# TYPE sglang:spec_accept_length gauge\n{gauges}")
    assert (found.engine, acceptance(found, found)) == ("SGLang", Acceptance(3.5))


def test_nothing_to_tell() -> None:
    found = parse("# TYPE process_cpu_seconds counter\nprocess_cpu_seconds_total 3\n")
    assert found.engine is None and acceptance(found, found) == acceptance(None, found) == Acceptance()
    assert cached_tokens(found, found) is None and not drafted(found, found)
    with pytest.raises(UsageError, match="not in Prometheus' format"):
        parse("<html>{ not found</html>")


def test_cached_tokens() -> None:
    text = '# TYPE sglang:cached_tokens counter\nsglang:cached_tokens_total{{cache_source="device"}} {}\n'
    assert cached_tokens(parse(text.format(3)), parse(text.format(20))) == ("sglang:cached_tokens_total", 17)
