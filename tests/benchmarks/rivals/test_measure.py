from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.rivals import measure
from benchmarks.rivals.kinds import drafter_of
from benchmarks.rivals.records import NATIVE, PLAIN, TORCH, Answers, parse
from benchmarks.sizes.widen import widen
from blockdraft.drafters import load_drafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.evaluation.prompts import PromptSet
from blockdraft.targets import Target, load_target

PROMPTS = PromptSet("questions", ("What floats?", "Count to three."))
WAYS = [parse("chain:3"), parse("chain:5"), parse("tree:12")]


HOW = {"temperature": 1.0, "tokens": 16, "wanted": WAYS}


@pytest.fixture(scope="module", params=["off", pytest.param("on", marks=pytest.mark.slow)])
def target(tiny_target_dir: Path, request: pytest.FixtureRequest) -> Target:
    return load_target(tiny_target_dir, backend="native", compile=request.param)


@pytest.fixture(scope="module")
def small_lm_dir(tiny_target_dir: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "lm"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=target.vocab_size, **sizes, **heads, max_position_embeddings=256)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(target: Target) -> tuple[list[Answers], dict[int, list[int]]]:
    return measure.answers(target, NoDrafter(), PROMPTS, PLAIN, **HOW)


def test_plain_answers_are_the_reference(plain: tuple[list[Answers], dict[int, list[int]]]) -> None:
    [figures], said = plain
    assert sorted(said) == [0, 1] and (figures.way, figures.tau, figures.draft_tokens, figures.passes) == (
        PLAIN,
        1,
        0,
        "",
    )
    assert figures.tokens == sum(len(ids) - 1 for ids in said.values()) == figures.cycles


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fixture", "tokens", "passes"),
    # Of each way the tokens of its largest pass, and how many passes there are.
    [
        ("dflash", "tiny_drafter_dir", (4, 6, 8), (1, 1, 1)),
        ("dspark", "tiny_dspark_dir", (3, 5, 8), (1, 1, 1)),
        ("flow", "tiny_flow_dir", (4, 6, 8), (2, 2, 2)),
        ("eagle3", "tiny_eagle3_dir", (1, 1, 10), (3, 5, None)),
        ("medusa", "tiny_medusa_dir", (1, 1), (1, 1)),
        ("small_lm", "small_lm_dir", (None, None), (3, 5)),  # whose first pass takes what was committed as well
        ("prompt_lookup", None, (0, 0, 0), (0, 0, 0)),
    ],
)
def test_draft_passes_and_guesses_are_counted(
    kind: str,
    fixture: str | None,
    tokens: tuple[int | None, ...],
    passes: tuple[int | None, ...],
    target: Target,
    plain: tuple[list[Answers], dict[int, list[int]]],
    request: pytest.FixtureRequest,
) -> None:
    path = request.getfixturevalue(fixture) if fixture else None
    drafter = drafter_of(kind, path, target, 1, TORCH, Path())
    found, said = measure.answers(target, drafter, PROMPTS, kind, plain=plain[1], **HOW)
    assert said == plain[1] and all(row.same == 1 and row.seconds > row.draft_seconds > 0 for row in found)
    assert found[0].way == "chain:3"
    for row, largest, count in zip(found, tokens, passes, strict=True):
        assert row.prompts == 2 and row.tokens == sum(len(ids) - 1 for ids in said.values())
        assert row.tau == pytest.approx(1 + sum(row.shares), abs=0.2)  # the last cycle of an answer is cut
        if largest is not None:
            assert max(row.passes_by_tokens, default=0) == largest
        if count is not None:  # near the end of an answer chains are shorter
            assert sum(row.passes_by_tokens.values()) == pytest.approx(count, rel=0.2)
    if kind == "eagle3":  # the first pass of a tree takes the anchor alone
        assert found[2].passes_by_tokens[1] == 1 and 0 < found[2].passes_by_tokens[10] <= 4
    if kind in ("dflash", "eagle3", "small_lm"):
        assert found[0].draft_tokens == pytest.approx(3, rel=0.1)
    if kind in ("dflash", "eagle3"):
        assert found[2].draft_tokens == pytest.approx(12, rel=0.1)


def test_answers_that_are_not_the_targets_are_told(
    target: Target, tiny_drafter_dir: Path, plain: tuple[list[Answers], dict[int, list[int]]]
) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    other = {0: plain[1][0], 1: [*plain[1][1][:-1], plain[1][1][-1] + 1]}
    found, _ = measure.answers(target, drafter, PROMPTS, "dflash", plain=other, **HOW | {"wanted": WAYS[:1]})
    assert found[0].same == 0.5


def test_answers_that_loop_are_left_out(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    plain = {0: [7] * 40, 1: list(range(40))}
    found, said = measure.answers(target, drafter, PROMPTS, "dflash", tokens=4, wanted=WAYS[:1], plain=plain)
    assert list(said) == [1] and (found[0].prompts, found[0].looping) == (1, 1)


def test_forwards_and_cycles_are_timed(target: Target, tiny_eagle3_dir: Path) -> None:
    forwards = measure.forwards(target, 1, NATIVE, 1)
    assert [row.nodes for row in forwards] == list(measure.NODES) and all(row.seconds > 0 for row in forwards)
    drafter = load_drafter(tiny_eagle3_dir, target=target)
    found = measure.cycles(target, drafter, "eagle3", 1, NATIVE, batch=2, wanted=WAYS, repeats=2)
    assert [(row.way, row.repeat) for row in found] == [(way.name, repeat) for repeat in (1, 2) for way in WAYS]
    for row in found:
        assert row.seconds > row.draft_seconds > 0 and row.plain_seconds > 0
        assert row.compiled == (target.compiled is not None)
        assert (row.weight_bytes, row.state_bytes) == (drafter.weight_bytes(), drafter.state_bytes(1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "flow", "eagle3", "medusa", "mtp", "small_lm"])
def test_wider_drafters_draft(kind: str, target: Target, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    path = request.getfixturevalue(
        {"dflash": "tiny_drafter_dir", "small_lm": "small_lm_dir"}.get(kind, f"tiny_{kind}_dir")
    )
    assert target.path is not None

    wide = load_target(widen(target.path, tmp_path / "target", 2), compile="off")
    drafter = drafter_of(kind, path, wide, 2, TORCH, folder)
    narrow = drafter_of(kind, path, target, 1, TORCH, folder)
    assert drafter.weight_bytes() > 1.7 * narrow.weight_bytes()
    [row] = measure.cycles(wide, drafter, kind, 2, TORCH, batch=1, wanted=WAYS[:1], repeats=1)
    assert row.seconds > 0
