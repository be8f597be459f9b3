"""How commands are found and explained: options in panels, a short `--help`, and `--help-all` with every option."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from inspect import getdoc
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from blockdraft.cli.options import with_options
from blockdraft.errors import UsageError

HELP, HELP_ALL = "--help", "--help-all"
# Options by the panel that shows them, unless they name one themselves. All others are in the first, "Options".
PANELS = {
    "Model": "target adapter revision dtype target_dtype device backend threads compile quantize kv_dtype "
    "round_drafters exact",
    "Drafting": "drafter drafter_device draft_ahead draft_vocab block_size tree_budget draft_window draft_passes "
    "sampled",
    "Sampling": "max_new_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty "
    "stop seed",
    "Data": "prompts data suite_data limit split subset text_field prompt_field response_field",
    "Output": "out overwrite as_json compare profile pictures",
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}
ORDER = {panel: number for number, panel in enumerate(PANELS)}
# Options that are commands of their own now: `bench --url URL` is `bench server URL`.
MOVED = {"--url": "bench server", "--suite": "bench suite"}


class Command(TyperCommand):
    """A command whose `--help` shows the options that most people need.

    Attributes:
        short: Names of these options; if empty, `--help` shows all.
    """

    short: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.context_settings.setdefault("help_option_names", [HELP, HELP_ALL])
        for parameter in self.params:
            if isinstance(parameter, TyperOption):
                parameter.rich_help_panel = parameter.rich_help_panel or PANEL_OF.get(parameter.name or "")
        self.params.sort(key=_place)

    def get_help_option(self, ctx: Any) -> Any:
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.opts.sort()  # in the order of a set, which varies
            option.help = "Show the common options, or all of them, and exit." if self.short else option.help
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[HELP_ALL] = HELP_ALL in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise UsageError(as_typed(str(error), self.typed(ctx))) from error

    def typed(self, ctx: Any) -> dict[str, tuple[str, Any]]:
        """Flag and value of each option, by the names of what it sets: the parameter's, and that in the flag."""
        shown = {each.opts[0]: each for each in self.params if _flags(each)}
        names = {flag.strip("-").replace("-", "_"): flag for flag in shown} | {shown[flag].name: flag for flag in shown}
        # Drafters know their own settings without the word that tells them from the target's on a command line.
        names = {name.removeprefix("draft_"): flag for name, flag in names.items()} | names
        return {name: (flag, ctx.params.get(shown[flag].name)) for name, flag in names.items()}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        everything = ctx.meta.get(HELP_ALL) or not self.short
        left_out = [
            each for each in self.params if isinstance(each, TyperOption) and not each.required and not each.hidden
        ]
        left_out = [] if everything else [each for each in left_out if each.name not in self.short]
        for option in left_out:
            option.hidden = True
        before, self.epilog = self.epilog, f"{HELP_ALL} shows {len(left_out)} more options." if left_out else None
        try:
            super().format_help(ctx, formatter)
        finally:
            self.epilog = before
            for option in left_out:
                option.hidden = False


def _place(parameter: Any) -> int:
    """Where a parameter is shown: arguments and options without a panel first, panels of their own last."""
    panel = getattr(parameter, "rich_help_panel", None)
    return -1 if panel is None else ORDER.get(panel, len(ORDER))


class Commands(TyperGroup):
    """Commands whose names may have two words, such as `bench server`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] == "bench" and " ".join(args[:2]) not in self.commands:
            args = present_spelling(args)
        two = " ".join(args[:2])
        words = [two, *args[2:]] if two in self.commands else args
        self._check_options(words)
        return super().resolve_command(ctx, words)

    def _check_options(self, words: list[str]) -> None:
        """Refuse an option of a sibling, such as one of `bench server` that is given to `bench`."""
        name = words[0]
        family = [each for each in self.commands if each.split()[0] == name.split()[0]]
        if name not in self.commands or len(family) == 1:
            return
        options = {each: {flag for one in self.commands[each].params for flag in _flags(one)} for each in family}
        for word in words[1:]:
            flag = word.partition("=")[0]
            owners = [f"`blockdraft {each}`" for each in family if flag in options[each]]
            if owners and flag not in options[name]:
                raise UsageError(
                    f"{flag} is an option of {' and '.join(owners)}, not of `blockdraft {name}`; leave it out."
                )


def as_typed(message: str, options: Mapping[str, tuple[str, Any]]) -> str:
    """A message of the library in which settings have the names of their options, and no one is told to give None.

    Args:
        options: Flag and value by the setting's name. A name that stands before another value is that of something
            else, such as a field of a file, and one without an underscore may be any word unless its value follows.
    """
    for name, (flag, value) in options.items():
        its_own = rf" is (?:{re.escape(str(value))}|{re.escape(repr(value))})(?!\w|\.\d)"
        other = r"(?! is )" if "_" in name else "(?!)"
        message = re.sub(rf"(?<![\w./-]){name}(?![\w/-]|\.\w)(?:(?={its_own})|{other})", flag, message)
    return re.sub(r",? or None(?=[.;])", ", or leave it out", message)


def _flags(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts] if isinstance(parameter, TyperOption) else []


def present_spelling(words: list[str]) -> list[str]:
    """`bench --url URL` and `bench --suite NAME` of before as `bench server URL` and `bench suite NAME`."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in MOVED:
            values = [value] if equals else words[at + 1 : at + 2]
            rest = words[1:at] + words[at + 1 if equals else at + 2 :]
            return [*MOVED[flag].split(), *values, *rest]
    return words


def add(
    app: typer.Typer,
    command: Callable[..., None],
    name: str | None = None,
    *,
    panel: str | None = None,
    short: str = "",
    kind: type[Command] = Command,
) -> None:
    """Add a command to `app`, with `with_options`. Its docstring is the help.

    Args:
        name: By default the function's.
        panel: Where the list of commands shows it.
        short: Names of the options that its `--help` shows, with spaces between them; "" shows all.
        kind: How it reads its command line.
    """
    # Typer keeps the line breaks of the source from the second paragraph on.
    paragraphs = (getdoc(command) or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    own = type(kind.__name__, (kind,), {"short": frozenset(short.split())})
    app.command(name, cls=own, rich_help_panel=panel, help=text)(with_options(command))
