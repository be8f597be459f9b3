"""Who may import whom, and which names are public."""

import ast
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import blockdraft

SOURCE = Path(__file__).parents[1] / "src" / "blockdraft"

# From the ground up. A module may import its own package and lower groups.
LAYERS = [
    {"errors", "machine", "plugins", "timing"},
    {"text_files", "prompt_sets"},
    {"settings", "folders", "diskcache", "chat_text"},
    {"types", "models"},
    {"decode"},
    {"nn"},
    {"kernels", "kernels.cpu", "kernels.cuda"},
    {"formats"},
    {"targets"},
    {"drafters"},
    {"engine"},
    {"serving"},
    {"cli"},
]
HEIGHT = {name: height for height, group in enumerate(LAYERS) for name in group}

# What these packages may import of `decode`: a target scores proposals, a drafter makes them, and the engine verifies.
DECODE_FOR = {
    "nn": {"blockdraft.decode.proposal"},
    "targets": {"blockdraft.decode.proposal"},
    "drafters": {
        f"blockdraft.decode.{name}"
        for name in (
            "proposal",
            "drafting",
            "step_time",
            "tree",
            "merging",
            "distributions",
            "sampling",
            "suffix_index",
            "prediction",
        )
    },
}

# Layers of the files of a drafter's folder.
PARTS = {
    **dict.fromkeys(("network", "target_network", "decoder_network", "config"), "nn"),
    **dict.fromkeys(("layout", "gguf", "in_target"), "formats"),
    "drafter": "drafters",
}

# Modules that name a kind of drafter: the registry, and a value in z-lab's files.
NAMING = {"blockdraft.plugins", "blockdraft.formats.zlab"}

ROOT = Path(__file__).parents[1]
# What packages import that docs/plugins.md does not call public, and why.
EXCEPTIONS = {
    "blockdraft.cli.generate": "diffusion generates like `generate`, with the same options for prompts",
    "blockdraft.drafters.dflash.drafter": "flow maps are DFlash with other passes",
    "blockdraft.engine.adaptive.costs": "bench and fit time steps with `Probe`, and Radar reads stored step times",
    "blockdraft.engine.kv_slots": "Radar plans memory as the engine does",
    "blockdraft.kernels.cpu.build": "Radar asks whether kernels are compiled for this machine",
}
# Packages, and those of this project that each imports.
PACKAGES: dict[str, set[str]] = {
    "tools": set(),
    "bench": set(),
    "compat": set(),
    "medusa": {"blockdraft_train"},
    "train": {"blockdraft_bench", "blockdraft_tools"},
    "diffusion": {"blockdraft_tools", "blockdraft_train"},
    "radar": set(),
    "jax": set(),
    "mlx": set(),
}


class Module(NamedTuple):
    name: str
    source: str
    is_package: bool = False

    @property
    def unit(self) -> str:
        """Package or file right under `blockdraft`; empty for the root itself."""
        return unit_of(self.name)


def unit_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def layer_of(name: str) -> str:
    """Return the name of a module's layer in LAYERS; for a file of a drafter, by its part."""
    _, *path = name.split(".")
    if path[:1] == ["drafters"] and len(path) == 3:
        return PARTS.get(path[2], f"a part {path[2]} of drafters")
    two = ".".join(path[:2])
    return two if path[:1] == ["kernels"] or two in HEIGHT else unit_of(name)


def folder_of(name: str) -> str | None:
    """Return the drafter's folder that a module is in."""
    path = name.split(".")
    return path[2] if len(path) >= 3 and path[1] == "drafters" and path[2] != "base" else None


@cache
def read_modules(source: Path = SOURCE) -> tuple[Module, ...]:
    modules = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return tuple(modules)


@cache
def nodes_in(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imports(modules: Iterable[Module]) -> list[tuple[Module, str]]:
    """Return the modules of blockdraft that each module imports, also inside functions."""
    known, found = {module.name for module in modules}, []
    for module in modules:
        for node in nodes_in(module.source):
            names: Iterable[str] = ()
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = module.name.split(".")
                    parts = parts[: len(parts) - node.level + module.is_package]
                    base = ".".join([*parts, base] if base else parts)
                # `from package import name` imports a module where there is one of that name.
                inside = [f"{base}.{alias.name}" for alias in node.names]
                names = sorted({name if name in known else base for name in inside})
            found += [(module, name) for name in names if name.split(".")[0] == "blockdraft"]
    return found


def wrong_order(modules: Sequence[Module]) -> list[str]:
    """Return imports that run upward, sideways, in circles, or to the package root."""
    reports = []
    for module in modules:
        if layer_of(module.name) not in HEIGHT and "." in module.name and module.name != "blockdraft.__main__":
            reports.append(f"{module.name} has no layer; give {layer_of(module.name)!r} one in LAYERS or PARTS")
    for module, name in imports(modules):
        own, layer = layer_of(module.name), layer_of(name)
        if own in HEIGHT and layer != own and HEIGHT.get(layer, len(LAYERS)) >= HEIGHT[own]:
            reports.append(f"{module.name} imports {name}, which does not lie below it")
    return reports + [f"{' and '.join(names)} import each other" for names in circles(modules)]


def circles(modules: Sequence[Module]) -> list[tuple[str, ...]]:
    """Return files of one package that import each other, directly or not, or for the type checker alone."""
    reached: dict[str, set[str]] = {module.name: set() for module in modules}
    for module, name in imports(modules):
        if name in reached and unit_of(name) == module.unit != "" and name != module.name:
            reached[module.name].add(name)
    for middle in reached:  # Warshall's closure: paths through one more module at a time
        for names in reached.values():
            names |= reached[middle] if middle in names else set()
    circular = {name: names for name, names in reached.items() if name in names}
    return sorted({tuple(sorted(two for two in names if name in reached[two])) for name, names in circular.items()})


def named_plugins(modules: Sequence[Module]) -> list[str]:
    """Return imports of one drafter's or one target's own file from outside its package."""
    return [
        f"{module.name} names {name}; use blockdraft.{unit} or blockdraft.{unit}.base"
        for module, name in imports(modules)
        if (unit := unit_of(name)) in ("drafters", "targets")
        and unit != module.unit
        and name not in (f"blockdraft.{unit}", f"blockdraft.{unit}.base")
    ]


def kinds_asked_for(modules: Sequence[Module]) -> list[str]:
    """Return type checks on a class of a drafter's folder from outside of that folder."""
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
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                parts = list(ast.walk(node.args[1]))
                asked = {getattr(part, "id", getattr(part, "attr", "")) for part in parts}
                wrong = sorted(name for name in asked if owner.get(name) not in (None, folder_of(module.name)))
                reports += [f"{module.name} asks whether something is a {name} of {owner[name]}" for name in wrong]
    return reports


def kinds_named(modules: Iterable[Module], kinds: set[str]) -> set[str]:
    """Return modules outside of `drafters` with a string that is the name of a drafter's folder."""
    return {
        module.name
        for module in modules
        if module.unit != "drafters"
        for node in nodes_in(module.source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in kinds
    }


def test_imports_run_downward() -> None:
    assert wrong_order(read_modules()) == []


def test_targets_and_drafters_import_no_more_of_decode_than_they_need() -> None:
    found = {
        (module.name, name)
        for module, name in imports(read_modules())
        if unit_of(name) == "decode" and name not in DECODE_FOR.get(module.unit, {name})
    }
    assert found == set()


def test_drafters_and_targets_are_not_imported_by_file_name() -> None:
    assert named_plugins(read_modules()) == []


def test_kinds_of_drafters_are_not_asked_for_or_named_outside_of_their_folders() -> None:
    modules = read_modules()
    kinds = {folder for module in modules if module.is_package and (folder := folder_of(module.name)) is not None}
    assert {"dflash", "eagle3", "mtp"} <= kinds
    assert kinds_asked_for(modules) == [] and kinds_named(modules, kinds) == NAMING


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def public_modules() -> list[str]:
    """Return the patterns of modules that docs/plugins.md calls public."""
    text = (ROOT / "docs/plugins.md").read_text(encoding="utf-8").partition("## What is public")[2]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return re.findall(r"`(blockdraft[\w.*]*)`", " ".join(rows))


def modules_of(package: str) -> tuple[Module, ...]:
    return read_modules(ROOT / "packages" / package / "src" / f"blockdraft_{package}")


def is_core(module: Module) -> bool:
    return module.name.split(".")[0] == "blockdraft"


def test_the_core_names_no_package() -> None:
    assert {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")} == set(PACKAGES)
    imported = {
        (module.name, name.split(".")[0])
        for module in read_modules()
        for node in nodes_in(module.source)
        for name in imported_names(node)
        if name.startswith("blockdraft_")
    }
    assert imported == set()


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_what_is_public(package: str) -> None:
    allowed = PACKAGES[package] | {f"blockdraft_{package}"}
    core = read_modules()
    used = {
        name for module, name in imports([*core, *modules_of(package)]) if module.name.split(".")[0] != "blockdraft"
    }
    patterns = public_modules()
    assert len(patterns) > 15
    private = {name for name in used if not any(fnmatch(name, pattern) for pattern in patterns)}
    assert private - set(EXCEPTIONS) == set()
    other = {
        name.split(".")[0]
        for module in modules_of(package)
        for node in nodes_in(module.source)
        for name in imported_names(node)
        if name.startswith("blockdraft_")
    }
    assert other <= allowed


def test_exceptions_are_needed() -> None:
    modules = [*read_modules(), *(module for package in PACKAGES for module in modules_of(package))]
    used = {name for module, name in imports(modules) if not is_core(module)}
    assert set(EXCEPTIONS) <= used


def test_a_public_class_has_its_name_alone() -> None:
    """One name for several things makes a reader open several files."""
    modules = [*read_modules(), *(module for package in PACKAGES for module in modules_of(package))]
    places: dict[str, list[str]] = {}
    for module in modules:
        for node in ast.parse(module.source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_public_names_resolve() -> None:
    assert " ".join(sorted(blockdraft.__all__)) == (
        "Completion Drafter Drafting Engine Grammar LoadOptions RequestDrafting SamplingParams Target load_drafter "
        "load_target"
    )
    assert all(getattr(blockdraft, name) is not None for name in blockdraft.__all__)


# The checkers themselves, on small packages.

SMALL = [
    *(Module(f"blockdraft{name}", "", is_package=True) for name in ("", ".drafters", ".drafters.dflash", ".targets")),
    Module("blockdraft.drafters.base", ""),
    Module("blockdraft.drafters.dflash.drafter", ""),
    Module("blockdraft.drafters.dflash.network", "class DFlashNetwork: pass"),
    Module("blockdraft.targets.hf", ""),
    Module("blockdraft.engine", "", is_package=True),
]


@pytest.mark.parametrize(
    ("importer", "source", "is_wrong"),
    [
        ("blockdraft.decode.sampling", "from blockdraft.engine import Engine", True),  # upward
        ("blockdraft.decode.sampling", "from blockdraft import Engine", True),  # through the root
        ("blockdraft.decode.sampling", "def f():\n    from ..engine import Engine", True),
        ("blockdraft.models.names", "from blockdraft.types import SamplingParams", True),  # sideways
        ("blockdraft.unheard_of", "import torch", True),
        ("blockdraft.drafters.dflash.unheard_of", "import torch", True),
        ("blockdraft.drafters.dflash.layout", "from blockdraft.drafters.dflash.drafter import DRAFTER", True),
        ("blockdraft.nn.cache", "from .layers import RMSNorm\nfrom . import attention", False),
        ("blockdraft.engine.stats", "from ..drafters.base import Drafter\nfrom blockdraft import targets", False),
        ("blockdraft.drafters.dflash.drafter", "from blockdraft.drafters.dflash.network import Net", False),
    ],
)
def test_wrong_order_is_reported(importer: str, source: str, is_wrong: bool) -> None:
    reports = wrong_order([*SMALL, Module(importer, source)])
    assert len(reports) == is_wrong and all(report.startswith(importer) for report in reports)


def test_circles_inside_a_package_are_reported() -> None:
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from blockdraft.engine.batch import Batch"
    modules = [
        Module("blockdraft.engine", "from blockdraft.engine.costs import Costs", is_package=True),
        Module("blockdraft.engine.costs", for_types),
        Module("blockdraft.engine.batch", "from .stats import Stats"),
    ]
    assert wrong_order(modules) == []
    [report] = wrong_order([*modules, Module("blockdraft.engine.stats", "def late():\n    from . import costs")])
    assert report == "blockdraft.engine.batch and blockdraft.engine.costs and blockdraft.engine.stats import each other"


def test_named_plugins_and_kinds_are_reported() -> None:
    for source in ("from blockdraft.drafters import dflash", "import blockdraft.targets.hf"):
        assert len(named_plugins([*SMALL, Module("blockdraft.engine.stats", source)])) == 1
    assert not named_plugins([*SMALL, Module("blockdraft.cli.chat", "from blockdraft.drafters import load_drafter")])
    asking = "def f(x): return isinstance(x, (int, network.DFlashNetwork))"
    [report] = kinds_asked_for([*SMALL, Module("blockdraft.engine.stats", asking)])
    assert report.startswith("blockdraft.engine.stats asks whether something is a DFlashNetwork of dflash")
    assert kinds_asked_for([*SMALL, Module("blockdraft.drafters.dflash.drafter", asking)]) == []
    assert kinds_named([Module("blockdraft.engine.step", "SERIAL = {'mtp'}")], {"mtp"}) == {"blockdraft.engine.step"}
