import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.train_ablations import ARMS, BASE, arguments, picture, table
from blockdraft.settings import read_settings
from blockdraft.training.variants import find_variant

RECIPE = Path(__file__).parents[2] / "recipes/tiny/ablation.toml"
DATA = {"written": Path("written"), "original": Path("original")}


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_changes_one_thing_of_the_base(arm: str) -> None:
    variant, recipe, *options = arguments(RECIPE, DATA, Path("features"), arm)
    flags = dict(zip([name.removeprefix("--").replace("-", "_") for name in options[::2]], options[1::2], strict=True))
    assert flags.pop("data") == ("original" if arm == "original text" else "written")
    stored = {"1 tap": "written-1", "original text": "original-5", "half forward KL": "written-teacher"}
    assert flags.pop("features") == str(Path("features") / stored.get(arm, "written-5"))
    kind = find_variant(variant).recipe_class
    base, changed = read_settings(kind, RECIPE), read_settings(kind, Path(recipe), flags)
    differing = [name for name, value in vars(base).items() if getattr(changed, name) != value]
    assert differing == list(flags)
    assert len(differing) + (variant != "dflash") + (arm == "original text") == (
        0 if arm == BASE else 2 if arm == "small DFlash2" else 1
    )


def test_a_direction_is_found_where_every_seed_has_it(tmp_path: Path) -> None:
    def runs(*taus: float) -> dict[str, dict[str, float]]:
        return {str(seed): {"a": tau, "b": 2.0 * tau} for seed, tau in enumerate(taus)}

    results = {BASE: runs(2.0, 3.0), "1 tap": runs(1.9, 2.7), "3 layers": runs(2.2, 3.3, 9.0)}
    results |= {"D-PACE": runs(1.9, 3.3), "1 layer": runs(1.2, 3.1)}  # means above and below 1, seeds on both sides
    lines = table(results, ["a", "b"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells[0] == [BASE, "2", "2.50 (2.00 to 3.00)", "1.00", "5.00 (4.00 to 6.00)", "1.00", "", ""]
    assert [row[-2:] for row in cells[1:]] == [
        ["less", "less"],
        ["more", "more"],
        ["more", "neither"],
        ["less", "neither"],
    ]
    assert cells[1][3] == "0.93"  # mean of 1.9 / 2 and 2.7 / 3
    assert cells[2][1:4] == ["3", "4.83 (2.20 to 9.00)", "1.10"]  # a seed that the base lacks has no ratio
    picture(results, ["a", "b"], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
