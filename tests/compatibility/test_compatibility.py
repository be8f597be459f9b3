"""Every family of targets generates the same tokens with each drafter on each backend as without a drafter."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from compatibility_cells import (
    BACKENDS,
    CELLS,
    DOCUMENT,
    DRAFTERS,
    PACKAGES,
    REFUSED,
    TESTED,
    Cell,
    document,
    expected,
    is_refused,
)
from tiny_families import ATTENTION, FAMILIES, write_model

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, RequestDrafting, SamplingParams

PROMPTS = [[5, 9, 3, 5, 9], [4, 60, 33, 12, 9, 4, 60], [6]]
PARAMS = [SamplingParams(7, temperature, seed=7, ignore_eos=True) for temperature in (0.0, 0.0, 0.8)]
LIMITS = [None, RequestDrafting(tree_budget=0), None]  # a tree, a chain, a tree
QUICK_FAMILIES = ("gpt_oss", "deepseek_v3", "qwen3_moe")
QUICK = {Cell(family, "dflash", "transformers") for family in QUICK_FAMILIES}


def marks(backend: str, quick: bool, long: bool = False) -> list[pytest.MarkDecorator]:
    own = [getattr(pytest.mark, backend)] if backend in PACKAGES else []
    return own if quick else [*own, pytest.mark.slow, *([pytest.mark.long] if long else [])]


def is_long(cell: Cell) -> bool:
    """Return whether a cell is left to `make test-long`, which tests the whole table.

    `make test` tests every family on every backend with one of the eight drafters, another one on each backend.
    """
    places = [*FAMILIES].index(cell.family), [*DRAFTERS].index(cell.drafter), [*BACKENDS].index(cell.backend)
    return (places[0] + places[1] + 3 * places[2]) % len(DRAFTERS) != 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """`folders(family, for_mlx)`."""
    return cache(lambda family, for_mlx: write_model(family, tmp_path_factory.mktemp(family), for_mlx))


@pytest.fixture(scope="module")
def targets(folders: Callable[[str, bool], Path]) -> Callable[[str, str], Target]:
    """`targets(family, backend)`."""

    @cache
    def target(family: str, backend: str) -> Target:
        return load_target(folders(family, backend == "mlx"), dtype="float32", device="cpu", **BACKENDS[backend])

    return target


@cache
def plain(target: Target) -> list[list[int]]:
    """Return the outputs without a drafter, each request alone."""
    engine = Engine(target, load_drafter("none", target=target))
    return [engine.generate([prompt], params)[0].token_ids for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=marks(cell.backend, cell in QUICK, is_long(cell)), id="-".join(cell))
        for cell in CELLS
        if not is_refused(cell.family, cell.backend)
    ],
)
def test_drafting_changes_no_output(
    cell: Cell,
    targets: Callable[[str, str], Target],
    folders: Callable[[str, bool], Path],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    if cell.backend in PACKAGES:
        pytest.importorskip(PACKAGES[cell.backend])
    target, fixture = targets(cell.family, cell.backend), DRAFTERS[cell.drafter]
    own = cell.family if cell.family in ATTENTION else "llama"  # states of recurrent layers cannot be cut
    # A draft model is run by another backend, and no other reads gpt-oss's experts as mlx-lm names them.
    for_mlx = cell.backend == "mlx" and own != "gpt_oss"
    path = folders(own, for_mlx) if cell.drafter == "draft_lm" else cell.drafter
    drafter = load_drafter(request.getfixturevalue(fixture) if fixture else path, target=target)
    with Engine(target, drafter, 3, Drafting(tree_budget=6)) as engine:
        requests = [
            engine.submit(prompt, params, drafting=limits)
            for prompt, params, limits in zip(PROMPTS, PARAMS, LIMITS, strict=True)
        ]
        completions = [request.result().checked() for request in requests]
    assert [completion.token_ids for completion in completions] == plain(target)
    assert any(drafted for completion in completions for drafted in completion.stats.drafted)
    if cell.drafter == "draft_lm" and own == cell.family:
        assert max(completions[0].stats.committed) > 2
    record_property("cells", [[[*cell], TESTED]])


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param(family, backend, marks=marks(backend, family in QUICK_FAMILIES))
        for family in FAMILIES
        for backend in BACKENDS
        if is_refused(family, backend)
    ],
)
def test_a_family_that_a_backend_lacks_is_refused_by_name(
    family: str,
    backend: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    if backend in PACKAGES:
        pytest.importorskip(PACKAGES[backend])
    reasons = rf"{family} is none of its families|fused projections|routed experts|recurrent layers|short convolutions"
    reasons += "|layers of several|latent attention"
    if backend == "mlx":
        reasons = "of mlx-lm, which cannot be cut to|mlx-lm .* does not know the model|mlx-lm .* cannot run its files"
    with pytest.raises(ValueError, match=reasons):
        load_target(write_model(family, tmp_path, backend == "mlx"), dtype="float32", device="cpu", **BACKENDS[backend])
    record_property("cells", [[[family, drafter, backend], REFUSED] for drafter in DRAFTERS])


def test_the_page_lists_what_the_tests_check() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(expected()), "run: python tests/compatibility"
