"""The options of commands, which are functions of records: fields become options.

Read `command`. It makes a Typer option of each field, from the field's type and metadata
(`jaxspec.options.option`), and builds the records when the command is called. A new field of a
record is a new option, with no edit here. `explained` ends a command on a mistake, with one message
that names flags.

Nothing here needs JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import typer
from rich.console import Console

from jaxspec.commands import interruption
from jaxspec.commands.interruption import Left
from jaxspec.options import BIAS, DEFAULTS, Drafting, FieldError, Range, Sampling, check_ranges

RecordT = TypeVar("RecordT")


class UsageError(ValueError):
    """Impossible options: names the option, the expectation and the way out."""


@dataclass(frozen=True)
class Fields:
    """The fields of a record that a command takes, and their heading in `--help`.

    Attributes:
      panel: the heading.
      only: these fields; () for all of them.
      without: all fields but these.
    """

    panel: str | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartialRecord(Generic[RecordT]):
    """The explicit fields of a record, so that defaults of the others may come from elsewhere."""

    kind: type[RecordT]
    values: Mapping[str, Any]

    def over(self, defaults: Mapping[str, Any] | None = None) -> RecordT:
        """Return the record: explicit values, then `defaults`, then the record's own."""
        return self.kind(**{**(defaults or {}), **self.values})


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
      path: the field of the record; of a record in a record, both fields.
      parameter: the source of Typer's option.
      read: converts Typer's value into the field's.
    """

    path: tuple[str, ...]
    parameter: inspect.Parameter
    read: Callable[[Any], Any]


# --- commands ------------------------------------------------------------------------------------


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a Typer command of a function of records.

    A parameter whose type is a record, or `PartialRecord` of one, becomes an option for each of its
    fields; `Annotated` with `Fields` selects them. Other parameters are Typer's.

    The type of a field decides how it is read: `bool` is a flag, `tuple[X, ...]` may be repeated, a
    `Literal` is a choice, a record in a record has a flag for each of its own fields, all or none
    of them. For others see `_READERS`.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    records: dict[str, tuple[Any, list[Option]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind, fields = _split(hints[name])
        if _record_of(kind) is None:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        options = list(_options(kind, fields))
        records[name] = kind, options
        parameters += [option.parameter for option in options]

    @functools.wraps(function)
    def run(**values: Any) -> None:
        with explained():
            made = {name: _build(*of, values) for name, of in records.items()}
            taken = {o.parameter.name for _, options in records.values() for o in options}
            function(**made, **{n: v for n, v in values.items() if n not in taken})

    required_first = sorted(parameters, key=lambda p: p.default is not p.empty)
    run.__signature__ = inspect.Signature(  # pyright: ignore[reportAttributeAccessIssue]
        [p.replace(kind=p.KEYWORD_ONLY) for p in required_first]
    )
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _split(hint: Any) -> tuple[Any, Fields]:
    """Split `Annotated` with `Fields`."""
    if typing.get_origin(hint) is Annotated:
        kind, *notes = typing.get_args(hint)
        return kind, next((note for note in notes if isinstance(note, Fields)), Fields())
    return hint, Fields()


def _record_of(kind: Any) -> type | None:
    """Return the record of a parameter's type; None if it has none."""
    if typing.get_origin(kind) is PartialRecord:
        (kind,) = typing.get_args(kind)
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _options(kind: Any, chosen: Fields) -> Iterator[Option]:
    """Yield an option for each chosen field of a record."""
    record = _record_of(kind)
    assert record is not None
    hints = typing.get_type_hints(record)
    for field in dataclasses.fields(record):
        if field.name in chosen.without or (chosen.only and field.name not in chosen.only):
            continue
        hint = _without_none(hints[field.name])
        nested = _record_of(hint)
        if nested is None:
            yield _option((field.name,), field, hint, chosen.panel, optional=kind is not record)
            continue
        inner = typing.get_type_hints(nested)
        for part in dataclasses.fields(nested):
            path = (field.name, part.name)
            yield _option(path, part, inner[part.name], chosen.panel, optional=True)


def _without_none(hint: Any) -> Any:
    """Return X for `X | None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    return hint


def _option(
    path: tuple[str, ...],
    field: dataclasses.Field[Any],
    hint: Any,
    panel: str | None,
    *,
    optional: bool,
) -> Option:
    """Make the option of a field.

    Args:
      hint: the field's type, without None.
      optional: the option has no default, so that an absent one is known.
    """
    about = field.metadata
    help_text, allowed = about.get("help"), about.get("range")
    metavar = about.get("metavar")
    flag = about.get("flag") or _flag(" ".join(path))
    default = None if field.default is dataclasses.MISSING else field.default
    if isinstance(default, int | float | str) and not isinstance(default, bool):
        shown = f"{default:g}" if isinstance(default, float) else default
        help_text = f"{help_text} Default: {shown}."
    read: Callable[[Any], Any] = lambda value: value  # noqa: E731
    if hint in _READERS:
        typed, reader = _READERS[hint]
        read, default = functools.partial(reader, flag), None
    elif typing.get_origin(hint) is Literal:
        choices, typed, default = typing.get_args(hint), str, None if optional else default
        metavar = metavar or f"<{'|'.join(choices)}>"
        read = functools.partial(_read_choice, flag, choices, about.get("instead", {}))
    elif typing.get_origin(hint) is tuple:
        typed, read, default = list[typing.get_args(hint)[0]], tuple, None
    else:
        typed, default = hint, None if optional else default
    of_whole_numbers = hint is int or typing.get_args(hint)[:1] == (int,)
    limits: Range | None = allowed if of_whole_numbers else None
    info = typer.Option(
        flag,
        help=help_text,
        metavar=metavar,
        rich_help_panel=panel,
        show_default=False,
        min=limits.low if limits else None,
        max=limits.high if limits else None,
    )
    annotation = Annotated[typed if default is not None else typed | None, info]
    parameter = inspect.Parameter(
        "_".join(path), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
    return Option(path, parameter, read)


def _build(kind: Any, options: Sequence[Option], values: Mapping[str, Any]) -> Any:
    """Make a record of the values of its options.

    Raises:
      FieldError: a value is out of range, or excludes another.
      UsageError: a value cannot be read, or needs another option.
    """
    record = _record_of(kind)
    assert record is not None
    fields: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for option in options:
        value = values[option.parameter.name]
        if value is None or value == []:
            continue
        name, *part = option.path
        if part:
            nested.setdefault(name, {})[part[0]] = option.read(value)
        else:
            fields[name] = option.read(value)
    for name, parts in nested.items():
        (field,) = (f for f in dataclasses.fields(record) if f.name == name)
        inner = _record_of(_without_none(typing.get_type_hints(record)[name]))
        assert inner is not None
        names = [f"{name} {f.name}" for f in dataclasses.fields(inner)]
        if len(parts) < len(names) or not set(field.metadata["needs"]) <= set(fields):
            *flags, last = map(as_flag, (*names, *field.metadata["needs"]))
            raise UsageError(f"a {name} needs {', '.join(flags)} and {last} together")
        fields[name] = inner(**parts)
        check_ranges(fields[name])
    if typing.get_origin(kind) is PartialRecord:
        # An absent flag reads as False.
        explicit = {n: v for n, v in fields.items() if v is not False}
        partial: PartialRecord[Any] = PartialRecord(record, explicit)
        check_ranges(partial.over())
        return partial
    made = record(**fields)
    check_ranges(made)
    return made


# --- values --------------------------------------------------------------------------------------


def _read_biases(flag: str, texts: Sequence[str]) -> dict[int, float]:
    """Read biases of tokens, each text "17=-2.5" or a JSON object."""
    biases: dict[int, float] = {}
    for text in texts:
        try:
            pairs = json.loads(text).items() if text.startswith("{") else [text.split("=")]
            pairs = [(int(token), float(bias)) for token, bias in pairs]
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise UsageError(
                f"{flag} {text[:60]}: expected ID=VALUE, such as 17=-2.5, or JSON, such as "
                '{"17": -2.5}'
            ) from None
        for token, bias in pairs:
            if wrong := BIAS.refusal(bias):
                raise UsageError(f"{flag} {text}: the bias of {token} {wrong}")
            if token in biases:
                raise UsageError(f"{flag} names token {token} twice; leave one out")
            biases[token] = bias
    return biases


def _read_choice(flag: str, choices: Sequence[str], instead: Mapping[str, str], value: str) -> str:
    """Read one of a few words; the refusal of another says what to do instead, if that is known."""
    if value not in choices:
        *others, last = choices
        expected = f"{', '.join(others)} or {last}" if others else last
        advice = f": {instead[value]}" if value in instead else ""
        raise UsageError(f"{flag} is {expected}, not {value}{advice}")
    return value


def read_text(flag: str, path: Path) -> str:
    """Return the text of an option's file, or of standard input if that is "-".

    Raises:
      UsageError: it cannot be read, or is not UTF-8 text.
    """
    name = "standard input" if str(path) == "-" else path
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return io.TextIOWrapper(io.BytesIO(data), "utf-8-sig").read()
    except OSError as error:
        raise UsageError(f"{flag}: cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag}: {name} is not UTF-8 text: {error}") from None


def _read_object(flag: str, text: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f'{flag}: expected a JSON object, such as {{"enable_thinking": true}}')
    return values


_READERS: dict[Any, tuple[Any, Callable[[str, Any], Any]]] = {
    Mapping[int, float]: (list[str], _read_biases),
    Mapping[str, Any]: (str, _read_object),
}
"""By a field's type: the type on the command line, and the function (flag, value) that reads it."""


# --- mistakes ------------------------------------------------------------------------------------


def _flag(words: str) -> str:
    return "--" + re.sub("[ _]", "-", words)


def _nested_flags(*records: type) -> dict[str, str]:
    """Return the names of fields that are records: the flags of their own fields."""
    named: dict[str, str] = {}
    for record in records:
        for name, hint in typing.get_type_hints(record).items():
            if inner := _record_of(_without_none(hint)):
                flags = [_flag(f"{name} {f.name}") for f in dataclasses.fields(inner)]
                named[name] = " and ".join(flags)
    return named


_NESTED = _nested_flags(Sampling, Drafting)


def as_flag(field: str, value: object = None) -> str:
    """Return a field as on the command line: `--num-draft-tokens`, or `--num-draft-tokens 7`."""
    flag = _NESTED.get(field) or _flag(field)
    return flag if value is None else f"{flag} {value}"


def idle_when_greedy(values: Mapping[str, Any], drafting: Drafting) -> list[str]:
    """Return the options that change nothing at temperature 0: filters, and how drafts are judged.

    Args:
      values: of fields of `Sampling`.
    """
    filters = ("top_k", "top_p", "min_p")
    idle = [as_flag(name) for name in filters if values.get(name, DEFAULTS[name]) != DEFAULTS[name]]
    return idle + [as_flag(*shown) for _, shown in drafting.changes_acceptance]


def error_message(error: Exception | str) -> str:
    """Return the message of an error, with flags for fields."""
    return error.format_message(as_flag) if isinstance(error, FieldError) else str(error)


@contextlib.contextmanager
def explained(*mistakes: type[Exception], interrupted: Left = "") -> Iterator[None]:
    """End a command on a mistake (exit code 2) or Ctrl-C (130), with one message and no traceback.

    Args:
      mistakes: errors that are mistakes, beside `UsageError` and `FieldError`.
      interrupted: a description of what Ctrl-C leaves behind, or a function that returns it.
    """
    try:
        with interruption.leaving(interrupted):
            yield
    except BrokenPipeError:
        raise typer.Exit(interruption.CLOSED_PIPE) from None
    except (UsageError, FieldError, *mistakes) as error:
        interruption.await_end_if_interrupted()
        message, code = f"error: {error_message(error)}", 2
    except KeyboardInterrupt:  # in a process that is not the command's own
        message, code = interruption.message(interrupted), 130
    else:
        return
    console = Console(stderr=True, highlight=False)
    console.print(message, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def note(console: Console, message: str) -> None:
    """Print a note about a run that goes on."""
    console.print(f"note: {message}", style="yellow", markup=False, soft_wrap=True)
