"""Figures of README, docs and packages are those of the benchmark page that they link to, so that none goes stale.

A sentence, or a row of a table, that links to a page of `benchmarks` or `recipes` may only have decimal fractions,
percentages, times and tokens/s of that page, rounded. Rows without a link follow the paragraph before their table.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    *(str(p.relative_to(ROOT)) for glob in ("docs/*.md", "packages/*/README.md") for p in ROOT.glob(glob)),
]
NUMBER = re.compile(r"(?<![\w.])(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?![\w.]*\w)")
UNIT = re.compile(r"\s?(times|%|tokens/s)")
LINK = re.compile(r"\]\(([^)#]*(?:benchmarks|recipes)/[^)#]*\.md)[^)]*\)")
NO_FIGURE = re.compile(r"\]\([^)]*\)|`[^`]*`|arXiv \S+|vLLM [\d.]+")
DEFAULTS = {("docs/training.md", "0.6")}  # values to choose, which were not measured


def parts_of(page: str) -> Iterator[tuple[str, list[Path]]]:
    """Yield paragraphs and rows of tables, with the pages that their figures come from."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    before: list[Path] = []
    for paragraph in re.split(r"\n\s*\n", text):
        is_table = paragraph.startswith("|")
        for part in paragraph.splitlines() if is_table else [paragraph]:
            links = [(ROOT / page).parent / link for link in LINK.findall(part)]
            yield part, links or (before if is_table else [])
        before = links


def figures_of(text: str) -> Iterator[str]:
    plain = NO_FIGURE.sub(" ", text)
    for found in NUMBER.finditer(plain):
        if found[2] or UNIT.match(plain, found.end()):
            yield found[0].replace(",", "")


def is_in(figure: str, page: str) -> bool:
    half = 0.5001 * 10 ** -len(figure.partition(".")[2])
    return any(abs(float(found[0].replace(",", "")) - float(figure)) <= half for found in NUMBER.finditer(page))


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_benchmark(page: str) -> None:
    wrong = [
        f"{figure} in {part[:80]!r} is not in {[source.name for source in sources]}"
        for part, sources in parts_of(page)
        if sources
        for figure in figures_of(part)
        if (page, figure) not in DEFAULTS
        and not is_in(figure, " ".join(source.read_text(encoding="utf-8") for source in sources))
    ]
    assert wrong == []


def test_many_figures_are_checked() -> None:
    assert sum(len([*figures_of(part)]) for page in PAGES for part, sources in parts_of(page) if sources) > 60


def test_a_wrong_figure_is_found() -> None:
    assert is_in("3.2", "| 3.22 |") and not is_in("3.0", "| 3.22 |") and is_in("2323", "2,323 tokens/s")
    assert [*figures_of("1.5 [times](x/2.5.md), 3 % of 4, `0.7`, 44 tokens/s")] == ["1.5", "3", "44"]
