from pathlib import Path

import pytest
import torch
from thinned import thinned

from benchmarks.rivals import kinds
from benchmarks.rivals.kinds import (
    KINDS,
    fitted,
    largest,
    new_network,
    parameters,
    read_tables,
    recipe_of,
    weights_read,
)
from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target

RECIPE = Path(kinds.__file__).with_name("recipe.toml")
TRAINED = [name for name, kind in KINDS.items() if kind.trained]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, compile="off")


@pytest.mark.parametrize("name", thinned(TRAINED, keep=2))
def test_every_kind_is_made_about_as_large_as_the_budget(name: str, target: Target) -> None:
    kind, budget = KINDS[name], 40_000
    values = read_tables(RECIPE)[name]
    recipe = fitted(kind, values, target, budget)
    count = parameters(kind, recipe, target)
    network = new_network(kind, recipe, target)
    assert count == sum(each.numel() for each in network.parameters())
    if name not in ("eagle3", "small_lm"):  # with all of the few tokens of this target, and in coarse steps
        assert 0.85 < count / budget < 1.15
    for size in (getattr(recipe, kind.free) - kind.step, getattr(recipe, kind.free) + kind.step):
        if kind.step <= size and not (name == "eagle3" and size > target.vocab_size):
            other = parameters(kind, recipe_of(kind, {**values, kind.free: size}), target)
            assert abs(other - budget) >= abs(count - budget)
    assert fitted(kind, {**values, kind.free: 16}, target, budget) == recipe_of(kind, {**values, kind.free: 16})


def test_the_weights_of_a_pass(target: Target) -> None:
    tables, head, walked = read_tables(RECIPE), target.vocab_size * target.hidden_size, 16 * target.vocab_size
    for name, expected in (
        ("dflash", lambda own: sum(own[n] for n in own if n.startswith(("layers", "norm"))) + head),
        ("dspark", lambda own: sum(own[n] for n in own if n.startswith(("layers", "norm"))) + head + 7 * walked),
        ("flow", lambda own: sum(own[n] for n in own if n.startswith(("layers", "norm", "state", "time"))) + head),
        ("eagle3", lambda own: sum(own[n] for n in own if n != "fc.weight")),
        ("medusa", lambda own: sum(own.values()) + head),
        ("small_lm", lambda own: sum(own.values())),
    ):  # fmt: skip
        with torch.device("meta"):
            recipe = fitted(KINDS[name], tables[name], target, 40_000)
            network = new_network(KINDS[name], recipe, target)
        own = {each: weight.numel() for each, weight in network.named_parameters()}
        passed, observed = weights_read(KINDS[name], network, 7, target)
        assert passed == expected(own), name
        hidden_states = [
            n for n in own if n.startswith(("fc", "hidden_norm")) or n.endswith(("k_proj.weight", "v_proj.weight"))
        ]
        assert observed == (sum(own[n] for n in hidden_states) if name in ("dflash", "dspark", "flow", "eagle3") else 0)


def test_a_forward_reads_a_tied_embedding_once(target: Target) -> None:
    weights = sum(weight.numel() for name, weight in target.named_weights())
    table = target.vocab_size * target.hidden_size
    tied = not any("lm_head" in name for name, _ in target.named_weights())
    assert kinds.target_weights_read(target) == weights - (0 if tied else table)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[dflahs]\nlayers = 1", "tables dflahs"),
        ("[dflash]\nlayer = 1", "The recipe of dflash: layer is unknown; did you mean layers"),
        ("[all]\nlength = 64\nbatch = 2", "The recipe of dflash has no held_out"),
        ("nothing", "cannot be read"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(UsageError, match=told):
        recipe_of(KINDS["dflash"], read_tables(tmp_path / "recipe.toml")["dflash"])


def test_the_largest_number_is_found() -> None:
    for wanted in (1, 2, 3, 4, 7, 8, 100):
        assert largest(lambda n, wanted=wanted: n <= wanted) == wanted
        assert largest(lambda n, wanted=wanted: n <= wanted, most=5) == min(wanted, 5)
    assert largest(lambda n: False) == 1
