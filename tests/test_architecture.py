"""The shape of the house: who may import whom, and which names are public."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import blockdraft

SOURCE = Path(__file__).parents[1] / "src" / "blockdraft"

# From the ground up. A module may import its own package and lower groups; members of one group are strangers.
LAYERS = [
    {"errors", "machine", "plugins", "timing"},
    {"settings", "folders", "chat_text"},
    {"types", "models"},
    {"decode", "nn"},
    {"kernels", "kernels.cpu", "kernels.cuda", "jax", "mlx"},
    {"formats"},
    {"targets"},
    {"diffusion.model"},
    {"diffusion.folder"},
    {"drafters"},
    {"engine"},
    {"data"},
    {"training", "evaluation"},
    {"compat", "tools.inspect"},
    {"tools", "tools.fit", "radar"},
    {"tools.quantize", "diffusion"},
    {"serving", "tools.doctor", "tools.push"},
    {"cli"},
]
HEIGHT = {name: height for height, group in enumerate(LAYERS) for name in group}

# What these packages may import of `decode`: a target scores proposals, a drafter makes them, and the engine verifies.
DECODE_FOR = {
    "targets": {"blockdraft.decode.proposal"},
    "drafters": {
        f"blockdraft.decode.{name}"
        for name in ("proposal", "tree", "merging", "distributions", "sampling", "suffix_index", "prediction")
    },
}

# A drafter is a folder of `drafters`, whose files stand among the layers by the part that they play.
PARTS = {
    **dict.fromkeys(("network", "target_network", "config"), "nn"),
    "compiled": "kernels.cpu",
    "captured": "kernels.cuda",
    "jax": "jax",
    "mlx": "mlx",
    **dict.fromkeys(("layout", "gguf", "in_target"), "formats"),
    "drafter": "drafters",
    **dict.fromkeys(("train", "train_pass"), "training"),
    "checks": "tools.doctor",
}

# Circles of imports inside one package that are still to be cut.
KNOWN_CIRCLES: set[tuple[str, ...]] = set()

PUBLIC_NAMES = {
    "Completion",
    "DFlashConfig",
    "DFlashGenerationMixin",
    "Drafter",
    "Drafting",
    "Engine",
    "Grammar",
    "RequestDrafting",
    "SamplingParams",
    "Target",
    "load_drafter",
    "load_target",
}


class Module(NamedTuple):
    name: str
    source: str
    is_package: bool = False

    @property
    def unit(self) -> str:
        """The package or file right under `blockdraft`; empty for the root itself."""
        return unit_of(self.name)


def unit_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def layer_of(name: str) -> str:
    """The unit with which a module stands in LAYERS: a tool and files named there by
    themselves, a drafter's file by its part."""
    _, *path = name.split(".")
    if path[:1] == ["drafters"] and len(path) == 3:
        return PARTS.get(path[2], f"a part {path[2]} of drafters")
    two = ".".join(path[:2])
    return two if path[:1] in (["tools"], ["kernels"]) or two in HEIGHT else unit_of(name)


def folder_of(name: str) -> str | None:
    """The drafter's folder that a module lies in, or is."""
    path = name.split(".")
    return path[2] if len(path) >= 3 and path[1] == "drafters" and path[2] != "base" else None


@cache
def read_modules() -> tuple[Module, ...]:
    modules = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return tuple(modules)


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes_in(source: str) -> list[ast.AST]:
    return list(ast.walk(parsed(source)))


@cache
def imports_in(source: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in nodes_in(source) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(module: Module, known: set[str]) -> Iterator[str]:
    """The modules of blockdraft that `module` imports anywhere in its code, also inside functions."""
    for node in imports_in(module.source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                parts = parts[: len(parts) - node.level + module.is_package]
                base = ".".join([*parts, base] if base else parts)
            # `from package import name` imports a module where there is one of that name.
            inside = [f"{base}.{alias.name}" for alias in node.names]
            names = sorted({name if name in known else base for name in inside})
        yield from (name for name in names if name.split(".")[0] == "blockdraft")


def wrong_order(modules: Iterable[Module]) -> list[str]:
    """Imports that run upward, sideways, or to the package root."""
    modules = list(modules)
    known = {module.name for module in modules}
    reports = []
    for module in modules:
        if module.name in ("blockdraft", "blockdraft.__main__"):
            continue
        own = layer_of(module.name)
        if own not in HEIGHT:
            reports.append(f"{module.name} has no layer; give {own!r} one in LAYERS or PARTS")
            continue
        for name in imports_of(module, known):
            layer = layer_of(name)
            if layer != own and HEIGHT.get(layer, len(LAYERS)) >= HEIGHT[own]:
                reports.append(f"{module.name} imports {name}, which does not lie below it")
    return reports + [f"{' and '.join(names)} import each other" for names in circles(modules) - KNOWN_CIRCLES]


def circles(modules: Iterable[Module]) -> set[tuple[str, ...]]:
    """Files of one package that import each other, be it through others or for the type checker alone."""
    modules = list(modules)
    known = {module.name for module in modules}
    reached = {}  # from each module, those of its package
    for module in modules:
        inside = {name for name in set(imports_of(module, known)) & known if unit_of(name) == module.unit != ""}
        reached[module.name] = inside - {module.name}
    for middle in reached:  # Warshall's closure: paths through one more module at a time
        for found in reached.values():
            found |= reached[middle] if middle in found else set()
    circular = {one: found for one, found in reached.items() if one in found}
    return {tuple(sorted(two for two in found if one in reached[two])) for one, found in circular.items()}


# The interface of z-lab's package, which has DFlash and DFlash2 alone.
NAMED = {"blockdraft.compat.zlab": "blockdraft.drafters.dflash"}


def named_plugins(modules: Iterable[Module]) -> list[str]:
    """Imports of one drafter's or one target's own file from outside its package."""
    modules = list(modules)
    known = {module.name for module in modules}
    return [
        f"{module.name} names {name}; use blockdraft.{unit} or blockdraft.{unit}.base"
        for module in modules
        for name in imports_of(module, known)
        if (unit := unit_of(name)) in ("drafters", "targets")
        and unit != module.unit
        and name not in (f"blockdraft.{unit}", f"blockdraft.{unit}.base")
        and not (module.name in NAMED and name.startswith(NAMED[module.name]) and name.endswith(".network"))
    ]


def test_imports_run_downward() -> None:
    assert wrong_order(read_modules()) == []


def test_targets_and_drafters_import_no_more_of_decode_than_they_need() -> None:
    modules = read_modules()
    known = {module.name for module in modules}
    found = {
        (module.name, name)
        for module in modules
        if module.unit in DECODE_FOR
        for name in imports_of(module, known)
        if unit_of(name) == "decode" and name not in DECODE_FOR[module.unit]
    }
    assert found == set()


def test_known_circles_are_still_there() -> None:
    assert circles(read_modules()) >= KNOWN_CIRCLES


def test_drafters_and_targets_are_not_imported_by_file_name() -> None:
    assert named_plugins(read_modules()) == []


def kinds_asked_for(modules: Iterable[Module]) -> list[str]:
    """Type checks on a class of one drafter's folder from outside of `drafters`, or from another drafter's folder."""
    modules = list(modules)
    owner = {
        node.name: folder
        for module in modules
        if (folder := folder_of(module.name)) is not None and module.name.count(".") == 3
        for node in nodes_in(module.source)
        if isinstance(node, ast.ClassDef)
    }
    reports = []
    for module in modules:
        for node in nodes_in(module.source):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("isinstance", "issubclass"):
                continue
            asked = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
            asked |= {name.attr for name in ast.walk(node.args[1]) if isinstance(name, ast.Attribute)}
            wrong = sorted(name for name in asked if owner.get(name, folder_of(module.name)) != folder_of(module.name))
            reports += [f"{module.name} asks whether something is a {name} of {owner[name]}" for name in wrong]
    return reports


def test_kinds_of_drafters_are_not_asked_for_outside_of_their_folders() -> None:
    assert kinds_asked_for(read_modules()) == []


def test_a_kind_that_is_asked_for_is_reported() -> None:
    kind = Module("blockdraft.drafters.dflash.network", "class DFlashNetwork: pass")
    asking = "def f(x): return isinstance(x, (int, network.DFlashNetwork))"
    [report] = kinds_asked_for([kind, Module("blockdraft.tools.inspect.look", asking)])
    assert report.startswith("blockdraft.tools.inspect.look asks whether something is a DFlashNetwork of dflash")
    assert len(kinds_asked_for([kind, Module("blockdraft.drafters.eagle3.layout", asking)])) == 1
    assert kinds_asked_for([kind, Module("blockdraft.drafters.dflash.train", asking)]) == []


# What is called like a kind: a value in z-lab's files, a layout, and the kind that is advised.
NAMING = {
    "blockdraft.plugins",  # the registry
    "blockdraft.formats.zlab",
    "blockdraft.radar.drafting",
    "blockdraft.tools.inspect.drafters",
}


def kinds_named(modules: Iterable[Module], kinds: set[str]) -> set[str]:
    """Modules outside of `drafters` with a string that is the name of a drafter's folder."""
    return {
        module.name
        for module in modules
        if module.unit != "drafters"
        for node in nodes_in(module.source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in kinds
    }


def test_kinds_of_drafters_are_not_named_outside_of_their_folders() -> None:
    modules = read_modules()
    kinds = {folder for module in modules if module.is_package and (folder := folder_of(module.name)) is not None}
    assert {"dflash", "eagle3", "mtp"} <= kinds
    assert kinds_named(modules, kinds) == NAMING
    assert kinds_named([Module("blockdraft.radar.step", "SERIAL = {'mtp'}")], kinds) == {"blockdraft.radar.step"}


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_public_names() -> None:
    assert set(blockdraft.__all__) == PUBLIC_NAMES
    assert len(blockdraft.__all__) == len(PUBLIC_NAMES)


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_public_name_resolves(name: str) -> None:
    assert getattr(blockdraft, name) is not None


# The checkers themselves, on small made-up packages.

TWO_DRAFTERS = [
    Module("blockdraft", "", is_package=True),
    Module("blockdraft.drafters", "", is_package=True),
    Module("blockdraft.drafters.base", ""),
    Module("blockdraft.drafters.dflash", "", is_package=True),
    Module("blockdraft.drafters.dflash.drafter", ""),
    Module("blockdraft.drafters.dflash.network", ""),
    Module("blockdraft.targets", "", is_package=True),
    Module("blockdraft.targets.base", ""),
    Module("blockdraft.targets.hf", ""),
    Module("blockdraft.engine", "", is_package=True),
    Module("blockdraft.types", ""),
]


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("blockdraft.decode.sampling", "from blockdraft.engine import Engine"),  # upward
        ("blockdraft.decode.sampling", "import blockdraft.engine.engine"),
        ("blockdraft.decode.sampling", "from blockdraft import engine"),
        ("blockdraft.decode.sampling", "from blockdraft import Engine"),  # through the root
        ("blockdraft.decode.sampling", "def f():\n    from ..engine import Engine"),
        ("blockdraft.nn.cache", "from ..engine import Engine"),
        ("blockdraft.nn.cache", "from blockdraft.decode.proposal import Proposal"),  # sideways
        ("blockdraft.decode.verification", "from blockdraft.targets.base import Target"),
        ("blockdraft.unheard_of", "import torch"),
        ("blockdraft.drafters.dflash.network", "from blockdraft.formats import read_drafter"),  # a part of `nn`
        ("blockdraft.drafters.dflash.drafter", "from blockdraft.drafters.dflash.train import VARIANT"),
        ("blockdraft.drafters.dflash.compiled", "from blockdraft.drafters.dflash.drafter import DRAFTER"),
        ("blockdraft.drafters.dflash.unheard_of", "import torch"),
    ],
)
def test_wrong_order_is_reported(importer: str, source: str) -> None:
    [report] = wrong_order([*TWO_DRAFTERS, Module(importer, source)])
    assert report.startswith(importer)


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("blockdraft.decode.sampling", "import torch\nfrom blockdraft.types import SamplingParams"),
        ("blockdraft.nn.cache", "from .layers import RMSNorm\nfrom . import attention"),
        ("blockdraft.engine.stats", "from ..drafters.base import Drafter\nfrom blockdraft import targets"),
        ("blockdraft.drafters.dflash.train", "from blockdraft.drafters.dflash.network import Net"),
        ("blockdraft.drafters.dflash.drafter", "from blockdraft.drafters.base import Entry"),
        ("blockdraft.__main__", "from blockdraft.cli import main"),
        ("blockdraft.cli.generate", "from blockdraft.engine import Engine\nimport blockdraft_extras"),
    ],
)
def test_right_order_is_not_reported(importer: str, source: str) -> None:
    assert wrong_order([*TWO_DRAFTERS, Module(importer, source)]) == []


def test_circles_inside_a_package_are_reported() -> None:
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from blockdraft.engine.batch import Batch"
    one = Module("blockdraft.engine.costs", for_types)
    other = Module("blockdraft.engine.batch", "from .stats import Stats")
    third = Module("blockdraft.engine.stats", "def late():\n    from blockdraft.engine import costs")
    apart = Module("blockdraft.engine.pace", "from blockdraft.engine.costs import Costs")
    package = Module("blockdraft.engine", "from blockdraft.engine.costs import Costs", is_package=True)
    [report] = wrong_order([package, one, other, third, apart])
    assert report == "blockdraft.engine.batch and blockdraft.engine.costs and blockdraft.engine.stats import each other"
    assert wrong_order([package, one, other, apart]) == []
    through_the_package = Module("blockdraft.engine.pace", "from blockdraft.engine import Costs")
    package = Module("blockdraft.engine", "from blockdraft.engine.pace import Pace", is_package=True)
    [report] = wrong_order([package, through_the_package])
    assert report == "blockdraft.engine and blockdraft.engine.pace import each other"


def test_relative_import_in_a_package_file() -> None:
    """In `nn/__init__.py` one dot is `nn` itself, two are the root."""
    inside = Module("blockdraft.nn", "from . import cache\nfrom .cache import Cache", is_package=True)
    upward = Module("blockdraft.nn", "from ..engine import Engine", is_package=True)
    assert wrong_order([inside]) == []
    assert wrong_order([upward]) == ["blockdraft.nn imports blockdraft.engine, which does not lie below it"]


@pytest.mark.parametrize("importer", ["blockdraft", "blockdraft.engine.stats", "blockdraft.compat.adapt"])
@pytest.mark.parametrize(
    "source",
    [
        "from blockdraft.drafters.dflash.drafter import DFlash",
        "from blockdraft.drafters import dflash",
        "import blockdraft.targets.hf",
    ],
)
def test_named_plugin_is_reported(importer: str, source: str) -> None:
    module = Module(importer, source, is_package=importer == "blockdraft")
    [report] = named_plugins([*TWO_DRAFTERS[1:], module])
    assert report.startswith(f"{importer} names blockdraft.")


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("blockdraft.engine.stats", "from blockdraft.drafters.base import Drafter"),
        ("blockdraft.cli.generate", "from blockdraft.drafters import load_drafter"),
        (
            "blockdraft.drafters.eagle3.drafter",
            "from .dflash import DFlash\nfrom blockdraft.targets.base import Target",
        ),
    ],
)
def test_named_plugin_is_not_reported(importer: str, source: str) -> None:
    assert named_plugins([*TWO_DRAFTERS, Module(importer, source)]) == []
