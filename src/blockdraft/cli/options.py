"""Commands and their options, generated from settings classes.

A command is a function whose parameters are settings classes. `with_options` gives it one flag per field, reads the
flags with `settings.from_text`, and names the flag in errors.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic_core import PydanticUndefined
from typer.core import TyperCommand, TyperGroup, TyperOption

from blockdraft.errors import UsageError
from blockdraft.plugins import COMMANDS, entry_points, install_hint, load, missing_commands
from blockdraft.settings import Flag, SettingsError, field_info, from_text, with_flag

Function = TypeVar("Function", bound=Callable[..., None])

HELP, HELP_ALL = "--help", "--help-all"
MODEL, DRAFTING, SAMPLING, DATA, OUTPUT = PANELS = ("Model", "Drafting", "Sampling", "Data", "Output")


class Only:
    """Restricts a settings parameter of a command to some fields: `Annotated[SamplingParams, Only("seed top_k")]`.

    The default of the parameter, if any, holds the defaults of the flags and the values of the other fields.

    Args:
        names: Names of the fields, separated by spaces; "" are all.
        panel: Panel of `--help`, for fields that name none.
        flags: Flags by field name, where they differ from the field's own.
    """

    def __init__(self, names: str = "", panel: str | None = None, **flags: str) -> None:
        self.names, self.panel, self.flags = names, panel, flags


class _Option:
    """Flag of one field. A text is read only where the flag is given, so `--help` alone knows the default."""

    def __init__(self, owner: type, name: str, default: Any, only: Only) -> None:
        info = field_info(owner, name)
        self.name, self.help = name, info.description or ""
        self.how = next((item for item in info.metadata if isinstance(item, Flag)), Flag())
        self.panel = self.how.panel or only.panel
        self.default = info.get_default(call_default_factory=True) if default is None else getattr(default, name)
        kinds = get_args(info.annotation) if get_origin(info.annotation) in (Union, types.UnionType) else ()
        self.kinds = [kind for kind in kinds or (info.annotation,) if kind is not NoneType]
        self.is_switch = self.kinds == [bool]
        self.spelled = only.flags.get(name) or self.how.name or f"--{name.replace('_', '-')}"
        if self.is_switch and self.default and "/" not in self.spelled:
            self.spelled += f"/--no-{name.replace('_', '-')}"
        self.flag = self.spelled.partition("/")[0]
        # Two groups of a command may have a field of the same name, if one of them is renamed.
        self.parameter_name = self.flag.strip("-").replace("-", "_") if name in only.flags else name

    def parameter(self) -> inspect.Parameter:
        """Return the option as typer reads it from a signature."""
        kind: Any = bool | None if self.is_switch else list[str] | None if self.how.repeat else str | None
        metavar = self.how.metavar or "|".join(dict.fromkeys(map(_placeholder, self.kinds)))
        text = self.help
        if self.default not in (None, (), "", PydanticUndefined) and not self.is_switch:
            values = self.default if isinstance(self.default, tuple) else (self.default,)
            shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
            text += f" [dim]\\[default: {shown}][/dim]"
        option = typer.Option(
            self.spelled,
            help=text,
            metavar="" if self.is_switch else metavar,
            rich_help_panel=self.panel,
            envvar=self.how.environment,
            show_default=False,
        )
        required = self.default is PydanticUndefined
        keyword = inspect.Parameter.KEYWORD_ONLY
        annotation = Annotated[kind, option]
        return inspect.Parameter(self.parameter_name, keyword, default=... if required else None, annotation=annotation)


class _Group:
    """The fields of one settings parameter that are flags of a command."""

    def __init__(self, parameter: inspect.Parameter, owner: type, only: Only) -> None:
        self.name, self.owner = parameter.name, owner
        self.default = None if parameter.default is inspect.Parameter.empty else parameter.default
        names = only.names.split() or [field.name for field in fields(owner)]
        self.options = [_Option(owner, name, self.default, only) for name in names]

    def take(self, given: dict[str, Any], problems: dict[str, str]) -> Any:
        """Remove this group's texts from `given` and return the settings. Add what is wrong to `problems`."""
        values: dict[str, Any] = {}
        wrong: dict[str, str] = {}
        for option in self.options:
            text = given.pop(option.parameter_name)
            if text is None or text == []:
                continue
            try:
                read = isinstance(text, bool)
                values[option.name] = text if read else from_text(self.owner, option.name, text, none=False)
            except SettingsError as error:
                wrong |= error.problems
        settings: Any = None
        try:
            if not wrong:
                settings = self.owner(**values) if self.default is None else replace(self.default, **values)
        except SettingsError as error:
            wrong |= error.problems
        except UsageError as error:
            wrong[self.name] = str(error)
        flags = {option.name: option.flag for option in self.options}
        problems |= {f"{self.name}.{name}": with_flag(problem, flags) for name, problem in wrong.items()}
        return settings


def _placeholder(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return _placeholder(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def with_options(command: Function) -> Function:
    """Give a command one flag for each field of its parameters that are settings classes, in the place of those."""
    groups: list[_Group] = []
    shown: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        owner, *metadata = get_args(parameter.annotation) or (parameter.annotation,)
        if not is_dataclass(owner):
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        only = next((item for item in metadata if isinstance(item, Only)), Only())
        groups.append(_Group(parameter, owner, only))  # type: ignore[arg-type]
        shown += [option.parameter() for option in groups[-1].options]

    flags = {option.name: option.flag for group in groups for option in group.options}

    @wraps(command)
    def whole(**given: Any) -> None:
        problems: dict[str, str] = {}
        made = {group.name: group.take(given, problems) for group in groups}
        if problems:
            raise SettingsError(problems)
        try:
            command(**made, **given)
        except UsageError as error:  # the library names a field where it has a flag here
            raise UsageError(with_flag(str(error), flags)) from error

    whole.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return whole  # type: ignore[return-value]


class Command(TyperCommand):
    """A command whose `--help` shows the common options, and whose `--help-all` shows all of them.

    Attributes:
        common: Names of the common options; if empty, all are.
    """

    common: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.context_settings.setdefault("help_option_names", [HELP, HELP_ALL])
        self.params.sort(key=_position)

    def get_help_option(self, ctx: Any) -> Any:
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.opts.sort()  # they come in the random order of a set
            option.help = "Show the common options, or all of them, and exit." if self.common else option.help
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[HELP_ALL] = HELP_ALL in args
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        options = [param for param in self.params if isinstance(param, TyperOption) and not param.required]
        shows_all = ctx.meta.get(HELP_ALL) or not self.common
        rare = [] if shows_all else [option for option in options if option.name not in self.common]
        for option in rare:
            option.hidden = True
        self.epilog = f"{HELP_ALL} shows {len(rare)} more options." if rare else None
        super().format_help(ctx, formatter)
        for option in rare:
            option.hidden = False


def _position(parameter: Any) -> int:
    """Return where a parameter is shown: those without a panel first, then the shared panels, then a command's own."""
    panel = getattr(parameter, "rich_help_panel", None)
    return -1 if panel is None else PANELS.index(panel) if panel in PANELS else len(PANELS)


# Panels of the list of commands.
RUN, MAKE, MEASURE, MACHINE = "Run models", "Make a drafter of your own", "Measure", "This machine"
LISTED = {panel: place for place, panel in enumerate((RUN, MAKE, MEASURE, MACHINE))}


@dataclass(frozen=True)
class CommandSpec:
    """A command: its function, and how the command line shows it.

    Attributes:
        function: Function whose parameters are settings classes, or parameters of typer, and whose docstring is the
            help; or an application of typer with commands of its own.
        panel: Panel in the list of commands.
        common: Names of the options that `--help` shows, separated by spaces; "" shows all.
        kind: How the command reads its command line.
    """

    function: Callable[..., None] | typer.Typer
    panel: str
    common: str = ""
    kind: type[Command] = Command

    def click_command(self, name: str) -> Any:
        """Return the command, with one flag for each field of its settings."""
        if isinstance(self.function, typer.Typer):
            group: Any = typer.main.get_group(self.function)
            group.name, group.rich_help_panel = name, self.panel
            return group
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        add(app, self.function, name, panel=self.panel, common=self.common, kind=self.kind)
        return typer.main.get_command(app)


def add(
    app: typer.Typer,
    command: Callable[..., None],
    name: str | None = None,
    *,
    panel: str | None = None,
    common: str = "",
    kind: type[Command] = Command,
) -> None:
    """Add a command to `app`. Arguments as for `CommandSpec`; `name` is by default the function's."""
    # Typer keeps the line breaks of the source from the second paragraph on.
    paragraphs = _docstring(command).split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    own = type(kind.__name__, (kind,), {"common": frozenset(common.split())})
    app.command(name, cls=own, rich_help_panel=panel, help=text)(with_options(command))


def _docstring(command: Callable[..., None]) -> str:
    """Return the docstring of a command. `python -OO` removes it, so it is then read from the source."""
    if command.__doc__ is not None or sys.flags.optimize < 2:
        return inspect.getdoc(command) or ""
    try:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(command))).body
    except (OSError, SyntaxError):  # there is no source
        return ""
    return (isinstance(function, ast.FunctionDef) and ast.get_docstring(function)) or ""


class Commands(TyperGroup):
    """Commands of this package and of plugins. Names may have two words, such as `bench server`.

    A plugin's command is imported and made when it is run or listed.
    """

    specs: ClassVar[Mapping[str, CommandSpec]] = {}

    @property
    def _names(self) -> list[str]:
        return [*self.specs, *(name for name in entry_points(COMMANDS) if name not in self.specs)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        missing = (f"{package} ({', '.join(names)})" for package, names in missing_commands().items())
        named = ", ".join(missing)
        self.epilog = f"More commands come with the packages {named}." if named else None
        super().format_help(ctx, formatter)

    def list_commands(self, ctx: Any) -> list[str]:
        specs = {name: self._spec(name) for name in self._names}
        panels = {name: LISTED.get(spec.panel, len(LISTED)) for name, spec in specs.items() if spec is not None}
        return sorted(panels, key=panels.__getitem__)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and (spec := self._spec(cmd_name)) is not None:
            self.commands[cmd_name] = spec.click_command(cmd_name)
        return self.commands.get(cmd_name)

    def _spec(self, name: str) -> CommandSpec | None:
        if name in self.specs:
            return self.specs[name]
        spec: CommandSpec | None = load(COMMANDS, name) if name in entry_points(COMMANDS) else None
        return spec

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        words = " ".join(args[:2])
        args = [words, *args[2:]] if words in self._names else args
        if self.get_command(ctx, args[0]) is None and (hint := install_hint(COMMANDS, args[0])) is not None:
            raise UsageError(f"The command {args[0]} is not installed; {hint} brings it.")
        return super().resolve_command(ctx, args)
