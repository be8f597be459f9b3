from pathlib import Path

import pytest

from blockdraft.engine import Engine
from blockdraft.prompt_sets import PromptSet
from blockdraft.targets import load_target
from blockdraft.timing import CONTEXT, DRAFT_CHOICE, FORWARD, HEAD, PARTS, PASS, listening
from blockdraft.types import SamplingParams
from blockdraft_bench.methods import parse_methods
from blockdraft_bench.settings import MeasureSettings
from blockdraft_bench.speed import host_share, load_methods, measure, profiles


@pytest.fixture(scope="module")
def engines(tiny_target_dir: Path, tiny_drafter_dir: Path) -> dict[str, Engine]:
    methods = parse_methods("none,chain,tree:5", str(tiny_drafter_dir), None, 5)
    return load_methods(methods, load_target(tiny_target_dir, device="cpu"), 2)


def test_every_part_of_a_step_is_found(engines: dict[str, Engine]) -> None:
    sets, settings, params = (
        [PromptSet("few", ("one", "two", "three"))],
        MeasureSettings(batch_size=2, repeats=2),
        SamplingParams(8),
    )
    trials = measure(engines, sets, params, settings)
    seen: list[tuple[str, int, int]] = []
    found = profiles(engines, sets, params, settings, trials, lambda *step: seen.append(step))
    assert list(found) == list(engines) and seen[-1] == ("profile", 9, 9)
    timed = {name: sum(t.steps for t in trials if t.method == name and t.repeat == 0) for name in engines}
    for name, one in found.items():
        assert list(one.seconds) == list(PARTS) and one.steps == timed[name]
        drafted = [one.seconds[part] > 0 for part in (PASS, HEAD, CONTEXT)]
        assert drafted == [name != "none"] * 3
        assert all(spent > 0 for part, spent in one.seconds.items() if part not in (PASS, HEAD, CONTEXT))
        assert one.host == pytest.approx(host_share(one.seconds)) and 0 < one.host < 1


def test_host_share_excludes_networks() -> None:
    assert (
        host_share(dict.fromkeys(PARTS, 0.0) | {FORWARD: 6.0, PASS: 1.0, HEAD: 0.5, CONTEXT: 0.5, DRAFT_CHOICE: 2.0})
        == 0.2
    )


def test_prompts_are_no_part_of_steps(engines: dict[str, Engine]) -> None:
    engine = engines["chain"]
    with listening() as seconds:
        engine.generate([[5, 6, 7]], SamplingParams(1))  # its prompt yields the one token
    assert not any(seconds.values())
