import json
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import train_ablations
from benchmarks.train_ablations import (
    ARMS,
    BASE,
    arguments,
    draw,
    forget_pairs,
    read_decoding,
    read_taus,
    stages,
    taus_table,
)
from blockdraft.decode.proposal import ChainPlan, Plan, Proposal
from blockdraft.drafters import load_drafter
from blockdraft.drafters.dflash.drafter import DFlashDrafter, independent_draft_tokens
from blockdraft.settings import read_settings
from blockdraft.targets import Target, load_target
from blockdraft.training.variant import find_variant
from blockdraft.types import Drafting, SamplingParams

RECIPE = Path(__file__).parents[2] / "recipes/tiny/ablation.toml"
DATA = {"written": Path("written"), "original": Path("original")}
OPTIONS = partial(arguments, RECIPE, DATA, Path("hidden_states"))


def flags_of(options: list[str]) -> dict[str, str]:
    names = [name.removeprefix("--").replace("-", "_") for name in options[::2]]
    return dict(zip(names, options[1::2], strict=True))


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_changes_one_thing_of_the_base(arm: str) -> None:
    variant, recipe, *options = OPTIONS(arm)
    flags = flags_of(options)
    assert flags.pop("data") == ("original" if arm == "original text" else "written")
    kind = find_variant(variant)
    base, changed = read_settings(kind.recipe_class, RECIPE), read_settings(kind.recipe_class, Path(recipe), flags)
    stored = {"1 tap": "written-1", "original text": "original-5"}
    stored |= {arm: "written-teacher"} if kind(changed).needs_teacher else {}
    assert flags.pop("hidden_states") == str(Path("hidden_states") / stored.get(arm, "written-5"))
    differing = [name for name, value in vars(base).items() if getattr(changed, name) != value]
    assert sorted(differing) == sorted([*flags, "hidden_states"])
    changes = len(flags) + (variant != "dflash") + (arm == "original text") + ARMS[arm].warm
    assert changes == (0 if arm == BASE else 2 if arm in TWO_CHANGES else 1)


TWO_CHANGES = ["small DFlash2", "DFlash2 from DFlash", "DSpark from DFlash", "block verification from DFlash"]


def test_an_arm_that_begins_with_a_drafter_takes_as_many_steps() -> None:
    assert stages(OPTIONS, "3 layers", 2, 101, Path("out")) == [
        (Path("out/3_layers-2"), [*OPTIONS("3 layers"), "--out", "out/3_layers-2", "--seed", "2", "--steps", "101"])
    ]
    for arm in ("DSpark from DFlash", "DFlash2 from DFlash"):
        (first, begin), (folder, then) = stages(OPTIONS, arm, 2, 101, Path("out"))
        assert begin[: len(OPTIONS(BASE))] == OPTIONS(BASE)
        assert then[: len(OPTIONS(arm))] == OPTIONS(arm) and folder == Path("out") / f"{arm.replace(' ', '_')}-2"
        flags = [flags_of(options[2:]) for options in (begin, then)]
        assert [each["steps"] for each in flags] == ["50", "51"]
        assert flags[0]["out"] == str(first) == flags[1]["init"] and "init" not in flags[0]
        assert flags[0]["seed"] != flags[1]["seed"] == "2"  # the same seed would read the same rows again
        assert "init" in {field.name for field in fields(find_variant(then[0]).recipe_class)}


def test_ways_to_decode() -> None:
    greedy = SamplingParams()
    assert read_decoding("chain") == ("chain", Drafting(None), greedy)
    for kind in ("tree", "path", "draft"):
        assert read_decoding(f"{kind}:12") == (kind, Drafting(tree_budget=12), greedy)
    kind, drafting, params = read_decoding("sampled")
    assert (kind, drafting) == ("sampled", Drafting(sampled=True))
    assert params.temperature == 1 and params.seed is not None
    assert read_decoding("drawn")[0] == "sampled"  # its name before
    for wrong in ("tree", "tree:0", "tree:x", "chain:3", "sampled:", "sampled:2", "lattice:4", ""):
        with pytest.raises(ValueError, match=f"decoding is '{wrong}'; give"):
            read_decoding(wrong)


def test_names_of_before_are_read(tmp_path: Path) -> None:
    file = tmp_path / "base-0.tau.json"
    file.write_text(json.dumps({"gsm8k": 1.0, "gsm8k, drawn": 2.0, "gsm8k, tree:32": 3.0}))
    assert read_taus(file) == {"gsm8k": 1.0, "gsm8k, sampled": 2.0, "gsm8k, tree:32": 3.0}


def test_what_is_measured_is_kept_and_only_what_is_not_yet_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, trained, measured = tmp_path / "some.jsonl", list[str](), list[tuple[str, str]]()
    prompts.write_text('{"prompt": "a"}\n')

    def measure(drafter: str, target: object, sets: object, tokens: int, decoding: str) -> dict[str, float]:
        measured.append((Path(drafter).name, decoding))
        return {train_ablations.name_of("some", decoding): 2.0}

    monkeypatch.setattr(train_ablations, "train", lambda *options: trained.append(flags_of([*options[2:]])["out"]))
    monkeypatch.setattr(train_ablations, "measure", measure)
    monkeypatch.setattr(train_ablations, "load_target", lambda path: None)
    monkeypatch.setattr(train_ablations, "draw", lambda *args: None)

    def run(*more: str) -> None:
        command = ["x", str(RECIPE), "--written", "w", "--original", "o", "--prompts", str(prompts)]
        monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path), "--seeds", "1", *more])
        train_ablations.main()

    run("--arms", "base,1 tap")
    assert measured == [("base-0", "chain"), ("1_tap-0", "chain")]
    first = (tmp_path / "results.md").read_text()
    assert "1 tap" in first and "trees" not in first
    measured.clear()
    trained.clear()
    run("--arms", "base,DFlash from DFlash", "--decoding", "chain, tree:4")
    assert measured == [("base-0", "tree:4"), *(("DFlash_from_DFlash-0", decoding) for decoding in ("chain", "tree:4"))]
    warm = [str(tmp_path / name) for name in ("first_half-0", "DFlash_from_DFlash-0")]
    assert trained == [str(tmp_path / "base-0"), *warm, *warm]
    text = (tmp_path / "results.md").read_text()
    assert "some, tree:4: tau" in text and "1 tap" not in text  # which was not measured with trees
    measured.clear()
    run("--arms", "base,1 tap")
    assert not measured and (tmp_path / "results.md").read_text().startswith(first.rstrip())
    assert json.loads((tmp_path / "results.json").read_text())[BASE] == {"0": {"some": 2.0}}


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


def proposed(drafter: DFlashDrafter, kind: str, budget: int) -> tuple[Proposal, Tensor, Tensor, Plan]:
    """Proposal of one kind after a random context, with anchor and logits of its pass, and its plan."""
    forget_pairs(drafter, kind)
    hidden_states = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(5))
    state, anchor = drafter.new_state(1, 40), torch.tensor([7])
    drafter.observe(state, torch.zeros(1, 9, dtype=torch.long), hidden_states, [9])
    plan = ChainPlan(drafter.block_size, [SamplingParams()]).as_tree(budget)
    logits = drafter._refined_pass(state, anchor, plan)[1]
    return drafter.propose(state, anchor, plan), anchor, logits, plan


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["tiny_dflash2_dir", "tiny_dspark_dir"])
def test_trees_that_do_not_know_which_guess_follows_which(
    folder: str, target: Target, request: pytest.FixtureRequest
) -> None:
    def of_kind(kind: str) -> tuple[Proposal, Tensor, Tensor, Plan]:
        drafter = load_drafter(request.getfixturevalue(folder), target=target)
        assert isinstance(drafter, DFlashDrafter)
        # Of these distributions a tree of 24 guesses is neither a chain nor one level.
        drafter.network.config = replace(drafter.network.config, output_multiplier=2.0)
        drafter.network.confidence_head = None
        return proposed(drafter, kind, 24)

    trees = {kind: of_kind(kind)[0] for kind in ("tree", "path")}
    alone, anchor, logits, plan = of_kind("draft")
    expected = independent_draft_tokens(anchor, logits, plan)
    assert torch.equal(alone.tokens, expected.tokens) and torch.equal(alone.parents, expected.parents)
    # On the way of the best chain both know the same, and a node's first child is the likeliest.
    ways = {kind: first_children(tree) for kind, tree in trees.items()}
    shorter = min(map(len, ways.values()))
    assert shorter > 1 and ways["tree"][:shorter] == ways["path"][:shorter]
    assert trees["tree"].tokens.tolist() != trees["path"].tokens.tolist() != alone.tokens.tolist()
    # With one distribution a slot, siblings at a depth are the same tokens in the same order behind each node.
    assert not one_order(trees["tree"]) and one_order(trees["path"]) and one_order(alone)


def children_of(tree: Proposal, node: int) -> list[int]:
    return [child for child, parent in enumerate(tree.parents[0].tolist()) if parent == node and child != node]


def first_children(tree: Proposal) -> list[int]:
    node, found = 0, list[int]()
    while children := children_of(tree, node):
        node = children[0]
        found.append(int(tree.tokens[0, node]))
    return found


def one_order(tree: Proposal) -> bool:
    orders: dict[int, list[int]] = {}
    depths = {0: 0}
    for node in range(tree.tokens.size(1)):
        children = children_of(tree, node)
        depths.update(dict.fromkeys(children, depths[node] + 1))
        tokens = [int(tree.tokens[0, child]) for child in children]
        before = orders.get(depths[node], [])
        shorter = min(len(tokens), len(before))
        if tokens[:shorter] != before[:shorter]:
            return False
        orders[depths[node]] = max(tokens, before, key=len)
    return True


def test_a_direction_is_found_where_every_seed_has_it(tmp_path: Path) -> None:
    def runs(*taus: float) -> dict[str, dict[str, float]]:
        return {str(seed): {"a": tau, "b": 2.0 * tau} for seed, tau in enumerate(taus)}

    results = {BASE: runs(2.0, 3.0), "1 tap": runs(1.9, 2.7), "3 layers": runs(2.2, 3.3, 9.0)}
    results |= {"D-PACE": runs(1.9, 3.3), "1 layer": runs(1.2, 3.1)}  # means above and below 1, seeds on both sides
    lines = taus_table(results, ["a", "b"]).splitlines()
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
    draw(results, ["a", "b"], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
