"""A command with fields of a recipe among its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockdraft.cli.options import Command
from blockdraft.errors import UsageError


class RecipeCommand(Command):
    """A command that keeps its unknown options, which are fields of a recipe, in `context.obj`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.get_params(ctx) for name in (*parameter.opts, *parameter.secondary_opts)}
        own, ctx.obj = _split(args, known)
        return super().parse_args(ctx, own)


def _split(arguments: Sequence[str], known: set[str]) -> tuple[list[str], dict[str, str]]:
    """Split a command line into the command's own words and recipe fields: `--name value` or `--name=value`."""
    own: list[str] = []
    recipe: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in known:
            own.append(word)
            continue
        following = value if equals else next(words, None)
        if following is None:
            raise UsageError(f"{name} has no value; recipe fields are given as --name value.")
        recipe[name.removeprefix("--")] = following
    return own, recipe
