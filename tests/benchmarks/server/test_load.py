"""Order of the requests of a load, and figures of its runs."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.harness.process import PeerError
from benchmarks.harness.records import Records
from benchmarks.server import __main__ as program
from benchmarks.server import chats, offline, report
from benchmarks.server.client import Heard
from benchmarks.server.load import ENGINE, LLAMA, PLAIN, SERVER, WAYS, LoadSettings, Run, Ways, broken
from benchmarks.server.report import draw, page, ratios
from benchmarks.server.servers import Server, gauges

from blockdraft import Drafting, Engine, SamplingParams, load_drafter, load_target


def run(way: str, speed: float, repeat: int = 0, width: int = 4, streams: int = 16, unequal: int = 0) -> Run:
    names = ("first_median", "first_p95", "token_median", "token_p95", "piece_median", "piece_p95")
    times = dict(zip(names, (0.1, 0.2, 0.01, 0.02, 0.03, 0.04), strict=True))
    place = {"width": width, "parameters": 75_000_000, "way": way, "streams": streams, "repeat": repeat}
    counts = {"requests": 9, "answers": 10, "unequal": unequal, "problems": 0, "peak_bytes": 2**30, "seconds": 24.0}
    return Run(**place, tokens_per_second=speed, **times, **counts)


RUNS = [
    run(way, speed + repeat, repeat)
    for way, speed in ((SERVER, 95.0), (PLAIN, 50.0), (ENGINE, 100.0), (LLAMA, 60.0))
    for repeat in range(3)
]


def test_ratios_are_taken_within_repeats() -> None:
    assert ratios(RUNS, 4, 16, SERVER, ENGINE) == [95 / 100, 96 / 101, 97 / 102]


@pytest.mark.slow
def test_the_published_page_is_made_of_the_published_runs(tmp_path: Path) -> None:
    folder = Path(report.__file__).parent
    runs, published = Records(Run, folder / "runs.csv").all, (folder / "server.md").read_text()
    assert page(runs, {}).strip() == published.partition("## Missing")[0].strip()
    draw(runs, tmp_path / "server.png")
    assert (tmp_path / "server.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_answers_of_ours_are_failures() -> None:
    assert broken([*RUNS, run(LLAMA, 1.0, unequal=3)]) == []
    assert broken([run(PLAIN, 1.0, unequal=3)]) == ["server-plain at 16 streams, width 4: 3 answers differ, 0 failed"]


def test_no_two_requests_are_the_same() -> None:
    asked = chats.make(64)
    assert len({str(each["messages"]) for each in asked}) == 64 and asked == chats.make(64) != chats.make(64, 1)
    assert {len(each["messages"]) for each in asked} == {1, 5}
    body = chats.body(asked[0], "m", False)
    assert body["speculation"] == {"enabled": False} and body["stream_options"] and body["temperature"] == 0
    assert "speculation" not in chats.body(asked[0], "m", None)


def test_an_answer_must_be_its_own() -> None:
    known = [{"text": "a", "finish": "stop", "tokens": 1}, {"text": "b", "finish": "length", "tokens": 2}]
    heard = [Heard(0, 0, [], "a", "stop", 1), Heard(1, 0, [], "a", "length", 2), Heard(1, 0, [], "b", "stop", 2)]
    ways: Any = SimpleNamespace(known=known)
    assert Ways.judge(ways, [*heard, Heard(0, 0, [], problem="no end")]) == (2, ["no end"])


@pytest.mark.parametrize(("way", "error"), [(LLAMA, PeerError), (SERVER, ValueError)])
def test_a_server_that_ended_under_load_has_no_figures(way: str, error: type[Exception]) -> None:
    """Another engine's server that ends is started again; ours fails the run."""
    process = SimpleNamespace(pid=1 << 30, poll=lambda: -6)
    started: list[str] = []
    ways: Any = SimpleNamespace(
        requests=chats.make(1),
        streams={way: SimpleNamespace(ask=lambda *_: {"heard": []})},
        servers={way: SimpleNamespace(process=process)},
        start=started.append,
    )
    with pytest.raises(error, match="ended with -6 under the load of 4 streams"):
        Ways.ask(ways, way, 4, 1.0, 0)
    assert started == ([LLAMA] if way == LLAMA else [])
    process.poll = lambda: None
    assert Ways.ask(ways, way, 4, 1.0, 0) == ([], 0)


@pytest.mark.slow
def test_the_engine_alone(tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    """Closed loop: same answers as plain decoding, and never more requests than streams at a time."""
    target = load_target(tiny_target_dir)
    drafter = load_drafter(tiny_drafter_dir, target=target)
    asked = [{"messages": [{"role": "user", "content": text}], "max_tokens": 6} for text in ("One", "Two")]
    with Engine(target, drafter, 2, Drafting(block_size="auto")) as engine:
        heard, seconds = list[Heard](), 0.3
        while len(heard) <= 2:  # on a busy machine it takes longer
            heard, seconds = offline.closed_loop(engine, asked, 2, seconds, 1), 3 * seconds
    assert heard[0].index == 1 and {each.index for each in heard} == {0, 1}
    with Engine(target, None, 1) as plain:
        for each in heard:
            [said] = plain.generate([asked[each.index]["messages"]], SamplingParams(6))
            assert (each.text, each.finish, each.tokens) == (said.text, said.finish_reason, len(said.token_ids))
    for each in heard:
        under_way = [h for h in heard if h.sent <= each.sent < h.times[-1][0]]
        assert len(under_way) <= 2 and sum(amount for _, amount in each.times) == each.tokens


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="it ended with 3: no model"):
        Server([sys.executable, "-c", "print('no model'); raise SystemExit(3)"], tmp_path / "log", 1)
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(PeerError, match="did not come up in time"):
        Server(sleeps, tmp_path / "log", 1, patience=0.3)


def test_gauges_that_are_left() -> None:
    text = '# TYPE x_running gauge\nx_running 0.0\nx_waiting{model="a b"} 2.0\ny_total 5.0\n'
    assert gauges(text) == {'x_waiting{model="a b"}': 2.0}


def test_the_command_line(tmp_path: Path) -> None:
    measured: list[LoadSettings] = []

    def measure(how: LoadSettings, out: Path, runs: Records[Run]) -> dict[str, str]:
        measured.append(how)
        runs.add(run(SERVER, 1.0, repeat=len(runs.all), unequal=len(runs.all)))
        return {}

    def asked(*words: str) -> list[str]:
        return program.run(program.arguments([*words, "--out", str(tmp_path)]), measure)

    assert asked("--quick", "--streams", "2", "--ways", "server,engine") == []
    assert (measured[0].streams, measured[0].ways, measured[0].seconds) == ((2,), (SERVER, ENGINE), 4.0)
    assert len(asked("--quick")) == 1  # the second run has a wrong answer
    with pytest.raises(ValueError, match="other seconds"):
        asked()
    assert asked("--anew") == [] and measured[-1] == LoadSettings() and LoadSettings().ways == WAYS
