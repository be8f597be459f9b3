"""Load against scripted servers."""

import io
import json
from contextlib import ExitStack
from typing import Any

import pytest
from fake_server import FakeServer
from rich.console import Console
from thinned import thinned

from blockdraft.errors import UsageError
from blockdraft.prompt_sets import PromptSet
from blockdraft.types import SamplingParams
from blockdraft_bench.servers import report
from blockdraft_bench.servers.client import Answer, Client
from blockdraft_bench.servers.measure import LoadResults, measure, speeds
from blockdraft_bench.settings import LoadSettings

GREEDY, SAMPLED = SamplingParams(16, seed=5), SamplingParams(16, 1.0, seed=5)
PROMPTS = PromptSet("first", ("a", "b", "c"))


def load(*urls: str, sets: Any = (PROMPTS,), params: Any = (GREEDY,), raw: bool = False, **given: Any) -> LoadResults:
    settings = LoadSettings(**{"concurrency": (1, 3), "requests": 6, **given})
    return measure([Client(url, raw=raw, silence=settings.silence) for url in urls], sets, params, settings)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "name"), [("vllm", "vLLM"), ("llamacpp", "llama.cpp"), ("sglang", "SGLang")])
def test_levels(engine: str, name: str) -> None:
    fake = FakeServer(engine)
    with fake.served() as url:
        found = load(f"{url}/v1/", params=(GREEDY, SAMPLED))
    about = found.servers["url"]
    assert (about.url, about.model, about.engine, about.prefix_caching) == (url, "fake-model", name, False)
    assert found.equality is None and not found.problems
    assert [(each.temperature, each.concurrency) for each in found.levels] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    assert fake.most_at_once <= 3
    for level in found.levels:
        assert (level.requests, level.failed, level.speedup) == (6, 0, None)
        assert level.tau == 2.5  # two steps with three accepted draft tokens, or as the gauge has it
        assert level.acceptance_by_position == (() if engine == "sglang" else (1.0, 0.5))
        assert level.tokens_per_second and level.first_median and level.token_median and level.token_p95
        assert level.first_p95 and 0.001 < level.first_median <= level.first_p95
    asked = fake.bodies[2:]  # after the two that see whether prefixes are cached
    assert [body["messages"][0]["content"] for body in asked[:6]] == ["a", "b", "c"] * 2
    assert [body["seed"] for body in asked[:3]] == [5, 6, 7]
    assert [body["temperature"] for body in asked] == [0.0] * 12 + [1.0] * 12
    assert asked[0]["stream"] and asked[0]["max_tokens"] == 16 and "top_k" not in asked[0]


def test_more_requests_than_prompts_where_many_are_under_way() -> None:
    fake = FakeServer()
    with fake.served() as url:
        found = load(url, concurrency=(1, 2), requests=None)
    assert [level.requests for level in found.levels] == [4, 8]


def test_requests_are_under_way_at_a_time() -> None:
    fake = FakeServer()
    with fake.served() as url:
        found = load(url, sets=(PromptSet("first", ("the longest one asks first", "TOGETHER")),), concurrency=(3,))
    assert not found.problems and fake.most_at_once == 3


def test_against_a_plain_server() -> None:
    sets = (PROMPTS, PromptSet("second", ("d", "DIFFER")))
    plain = FakeServer(drafts=False)
    with FakeServer().served() as url, plain.served() as other:
        found = load(url, other, sets=sets, params=(SAMPLED,), raw=True)
    assert found.equality is not None
    assert (found.equality.prompts, found.equality.identical) == (5, 4)
    [difference] = found.equality.differences
    assert (difference.prompt_set, difference.prompt, difference.at) == ("second", 2, len("one two "))
    assert difference.text == "many " and difference.other.startswith("three ")
    assert [level.server for level in found.levels] == ["url", "against"] * 4
    own, others = found.levels[::2], found.levels[1::2]
    for level, other in zip(own, others, strict=True):
        assert level.tokens_per_second and other.tokens_per_second and other.speedup is None
        assert level.speedup == pytest.approx(level.tokens_per_second / other.tokens_per_second)
        assert (level.tau, other.tau) == (2.5, 1.0)
    greedy = plain.bodies[2:7]
    assert [(body["prompt"], body["temperature"]) for body in greedy][-1] == ("DIFFER", 0.0)


def test_a_second_server_that_drafts_is_refused() -> None:
    with FakeServer().served() as url, FakeServer().served() as other, pytest.raises(UsageError, match="drafts, by"):
        load(url, other)


@pytest.mark.parametrize("engine", thinned(["vllm", "llamacpp", "sglang", None], keep=3))
def test_cached_prefixes_are_refused_unless_allowed(engine: str | None) -> None:
    seen = {"vllm": "enable_prefix_caching", "llamacpp": "prompt_tokens_cached_total grew by 10"}
    seen |= {"sglang": "cached_tokens_total grew by 10"}
    how = seen.get(str(engine), "10 cached tokens in the usage")
    with FakeServer(engine, caches=True).served() as url:
        with pytest.raises(UsageError, match=how) as refused:
            load(url)
        assert "--no-enable-prefix-caching" in str(refused.value) and "--allow-prefix-cache" in str(refused.value)
        found = load(url, allow_prefix_cache=True)
    about = found.servers["url"]
    assert about.prefix_caching is True and how in about.seen_by and about.engine != "blockdraft"


def test_failed_requests_are_counted_and_reported() -> None:
    sets = (PromptSet("first", ("long enough to be asked first", "BREAK", "FAIL")),)
    with FakeServer().served() as url:
        found = load(url, sets=sets, concurrency=(2,))
    [level] = found.levels
    assert (level.requests, level.failed) == (6, 4) and level.tokens_per_second
    assert set(found.problems) == {
        'status 500: {"error":{"message":"out of memory"}}',
        "no finish reason, no end, no count of tokens (usage)",
    }


def test_a_server_that_dies_leaves_the_levels_before() -> None:
    with ExitStack() as server:
        url = server.enter_context(FakeServer().served())

        def progress(stage: str, done: int, total: int) -> None:
            if done:
                server.close()

        settings = LoadSettings(concurrency=(1, 3), requests=6)
        found = measure([Client(url, silence=settings.silence)], [PROMPTS], [GREEDY], settings, progress)
    [level] = found.levels
    assert (level.concurrency, level.failed) == (1, 0) and level.tokens_per_second
    assert "cannot be reached" in found.stopped and "This was at first, temperature 0, 3 at a time." in found.stopped


def test_a_server_that_counts_no_tokens_is_refused() -> None:
    sets = (PromptSet("first", ("HUSH",)),)
    with FakeServer().served() as url, pytest.raises(UsageError, match=r"no count of tokens \(usage\)"):
        load(url, sets=sets)


def test_no_server() -> None:
    with pytest.raises(UsageError, match="cannot be reached .* give the address of a running server"):
        load("http://127.0.0.1:9")
    with FakeServer(key="secret").served() as url, pytest.raises(UsageError, match="names no model .status 401"):
        load(url)


def test_tokens_behind_the_busy_time_do_not_count() -> None:
    """Two answers of four tokens; half of the second's text came when fewer streams were busy."""
    first = Answer(0.0, 2.0, [(1.0, 5), (2.0, 15)], "x" * 20, "stop", 4)
    second = Answer(1.0, 4.0, [(2.0, 10), (4.0, 10)], "y" * 20, "stop", 4)
    found = speeds([first, second, Answer(0.0, problem="broken")], 0.0, 3.0)
    assert found["tokens_per_second"] == pytest.approx((4 + 2) / 3)
    assert found["first_median"] == pytest.approx(1.0)
    assert found["token_median"] == pytest.approx((1 / 3 + 2 / 2) / 2)
    assert speeds([], 0.0, 1.0)["tokens_per_second"] is None


def test_reports() -> None:
    with FakeServer().served() as url, FakeServer(drafts=False).served() as other:
        found = load(url, other, sets=(PromptSet("first", ("a", "DIFFER")),), concurrency=(2,))
    body = json.loads(report.as_json(found, {"limit": 3}))
    assert body["arguments"] == {"limit": 3} and len(body["levels"]) == 2 and body["equality"]["identical"] == 1
    assert [level["server"] for level in body["levels"]] == ["url", "against"] and body["levels"][0]["speedup"] > 0
    shown_in = io.StringIO()
    report.show(Console(width=200, file=shown_in, force_terminal=False), found)
    shown = shown_in.getvalue()
    assert "1 of 2 are identical" in shown and "prompt 2 of first, from character 8 on: 'many '" in shown
    assert "engine vLLM, prefix caching off" in shown and "100 50" in shown and "speed-up" in shown


def test_settings() -> None:
    assert LoadSettings().concurrency == (1, 4, 16)
    for wrong in ((0,), (65,), ()):
        with pytest.raises(UsageError, match="concurrency"):
            LoadSettings(concurrency=wrong)
