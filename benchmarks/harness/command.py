"""Command lines of benchmarks: options, errors in one line, settings that must not change between runs."""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
from benchmarks.harness.process import PeerError

from blockdraft.errors import BlockdraftError
from blockdraft_train.settings_files import describe, read_settings

S = TypeVar("S")

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "benchmarks" / "peers" / "prompts.jsonl"
CORES = psutil.cpu_count(logical=False) or 1


class Parser(argparse.ArgumentParser):
    """A parser whose description keeps its line breaks.

    Args:
        doc: Description.
        out: Default of --out.
        quick: Defaults of a run that only shows that everything works; adds --quick.
        resumes: Whether results are kept between runs; adds --anew.
        threads: Default of --threads; None leaves the option out.
    """

    def __init__(
        self,
        doc: str | None,
        out: Path | None = None,
        quick: Mapping[str, Any] | None = None,
        resumes: bool = False,
        threads: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._quick = quick
        if out is not None:
            self.add_argument("--out", type=Path, metavar="DIR", default=out)
        if quick is not None:
            told = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in quick.items() if value)
            self.add_argument("--quick", action="store_true", help=f"a short run that shows that all works: {told}")
        if resumes:
            self.add_argument("--anew", action="store_true", help="forget earlier results")
        if threads is not None:
            self.add_argument("--threads", type=int, default=threads, help=f"({threads})")

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse, with the defaults of a quick run where --quick is given."""
        given = self.parse_args(words)
        if self._quick is not None and given.quick:
            self.set_defaults(**self._quick)
            given = self.parse_args(words)
        return given


def listed(kind: Callable[[str], Any] = str, known: Collection[Any] = ()) -> Callable[[str], list[Any]]:
    """Return the type of an option of comma-separated values. Unknown values are refused."""

    def read(text: str) -> list[Any]:
        try:
            found = [kind(word.strip()) for word in text.split(",") if word.strip()]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        if unknown := [value for value in found if known and value not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; there are {', '.join(map(str, known))}")
        return found

    return read


def add_settings(parser: argparse.ArgumentParser, kind: type, title: str | None = None) -> None:
    """Add an option for each field of a class of settings, with its description.

    Args:
        title: Of the group of these options.
    """
    group = parser.add_argument_group(title) if title else parser
    for field in fields(kind):
        default = getattr(kind(), field.name)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        told = describe(kind, field.name).replace("%", "%%")
        group.add_argument(f"--{field.name.replace('_', '-')}", metavar="VALUE", help=f"{told} ({shown})")


def read_options(kind: type[S], given: argparse.Namespace, **defaults: Any) -> S:
    """Return the settings that the options of `add_settings` name, with other defaults for some."""
    named = {field.name: getattr(given, field.name) for field in fields(kind)}
    read = read_settings(kind, flags={name: text for name, text in named.items() if text is not None})
    return replace(read, **{name: value for name, value in defaults.items() if named[name] is None})


def command_line(module: str) -> str:
    """Return this command line for a published page, with paths cut to names."""
    return shlex.join(["python", "-m", module, *(Path(word).name if "/" in word else word for word in sys.argv[1:])])


def tell(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def digest(values: Any) -> str:
    """Return a short hash of a JSON value, or of a file's content."""
    content = values.read_bytes() if isinstance(values, Path) else json.dumps(values).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def keep_settings(
    out: Path, measured: dict[str, Any], anew: bool = False, remedy: str = "choose another --out, or add --anew"
) -> None:
    """Write the settings that all results of a folder share to its settings.json.

    Args:
        anew: Delete the folder first.
        remedy: What to do where the folder holds other results.

    Raises:
        ValueError: The folder holds results of other settings.
    """
    if anew and out.exists():
        shutil.rmtree(out)
    path = out / "settings.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measured, indent=2), encoding="utf-8")
    kept, measured = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(measured))
    if other := [name for name in measured if kept.get(name) != measured[name]]:
        raise ValueError(f"{out} holds figures with other {', '.join(other)}; {remedy} to forget them.")


@contextmanager
def in_words(resumes: bool = True) -> Iterator[None]:
    """Report an expected error, or an interruption, in one line and end with status 2 or 130.

    SIGTERM counts as an interruption, so that servers of the benchmark are ended too.

    Args:
        resumes: Whether the same command goes on where it was interrupted.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (ValueError, PeerError, BlockdraftError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        how = "the same command goes on from here" if resumes else "nothing was kept"
        print(f"\nInterrupted; {how}.", file=sys.stderr)
        raise SystemExit(130) from None


def report_failures(failures: Sequence[str]) -> int:
    """Print failures; returns the exit status."""
    print(*[f"FAILED {failure}" for failure in failures], sep="\n")
    return int(bool(failures))
