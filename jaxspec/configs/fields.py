"""The ranges of the fields of configs, and their readers from files.

Each field of a config declares its range with `size`, `limited`, `flag` or `several`. `check_fields` refuses a config
that was made in Python; `read_fields` refuses a file, and names the file's own key. Ranges keep out what no model can
be, so that no arithmetic on sizes fails or allocates later.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.options import REQUIRED, Range, at_least, shown, whole

MOST_LAYERS = 512  # the shapes of so many are known within seconds
MOST_DRAFTS = 1000

SIZES = at_least(1)  # and below 2**31, as all whole numbers
COUNTS = at_least(0)
LAYERS = whole(1, MOST_LAYERS)
DRAFTS = whole(1, MOST_DRAFTS)
IDS = COUNTS
FLAGS = Range("true or false", lambda _: True, kind="true or false")
WORDS = Range("a word", lambda _: True, kind="a word")
EVEN = Range("even, 2 or more", lambda x: x >= 2 and x % 2 == 0, kind="a whole number")
# Beyond these, float32 makes zeros, infinities or NaN of them.
EPS = Range("from 1e-30 to 1", lambda x: 1e-30 <= x <= 1)
THETAS = Range("from 1 to 1e20", lambda x: 1 <= x <= 1e20)
SOFTCAPS = Range("from 0.001 to 1e20; null: none", lambda x: 1e-3 <= x <= 1e20)
FACTORS = Range("from 0.001 to 1e6", lambda x: 1e-3 <= x <= 1e6)
SHARES = Range("from 0.001 to 1", lambda x: 1e-3 <= x <= 1)


class ConfigError(ValueError):
    """A config is not supported. The message names the field, and what was expected and given."""


# --- fields declare their ranges ---------------------------------------------------------------------


def limited(range: Range, default: Any = REQUIRED, *, none: bool = False) -> Any:
    """Declare a field with a range.

    Args:
      none: whether None is allowed too. It is where it is the default.
    """
    return dataclasses.field(default=default, metadata=dict(range=range, none=none))


def size(default: Any = REQUIRED) -> Any:
    """Declare a size: a whole number, 1 or more, of 32 bits."""
    return limited(SIZES, default)


def count(default: Any = 0) -> Any:
    """Declare a size that may be 0."""
    return limited(COUNTS, default)


def flag(default: Any = REQUIRED) -> Any:
    """Declare a field that is true or false."""
    return limited(FLAGS, default)


def several(range: Range, default: Any = REQUIRED, *, least: int = 1, limit: int = 2**31) -> Any:
    """Declare a tuple, each entry of it in a range.

    Args:
      least, limit: bounds of its number of entries.
    """
    metadata = dict(range=range, entries=(least, limit))
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(config: Any) -> None:
    """Refuse a config with a field out of its range.

    Raises:
      ConfigError: naming the first such field.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if "entries" in field.metadata and not isinstance(value, tuple):
            raise ConfigError(f"{field.name} is {shown(value)}; it must be a tuple")
        if wrong := refusal(field, field.name, value):
            raise ConfigError(wrong)


def refusal(field: dataclasses.Field[Any], name: str, value: Any) -> str | None:
    """Return why the value of a field is refused; None if it is allowed.

    Args:
      name: what the message calls the field.
    """
    about = field.metadata
    may_be_none = about.get("none") or field.default is None
    if "range" not in about or (value is None and may_be_none):
        return None
    if "entries" in about:
        least, limit = about["entries"]
        return _refusal_of_entries(about["range"], least, limit, name, value)
    wrong = about["range"].refusal(value)
    return f"{name} {wrong}" if wrong else None


def _refusal_of_entries(
    allowed: Range, least: int, limit: int, name: str, values: Any
) -> str | None:
    if not least <= len(values) <= limit:
        expected = f"{least:,} or more" if len(values) < least else f"at most {limit:,}"
        return f"{name} has {len(values):,} entries; expected {expected}"
    refusals = ((i, allowed.refusal(value)) for i, value in enumerate(values))
    return next((f"{name}[{i}] {wrong}" for i, wrong in refusals if wrong), None)


# --- files are read by their keys --------------------------------------------------------------------


def find_key(config: Mapping[str, Any], keys: Sequence[str]) -> tuple[str | None, Any]:
    """Return the first of these keys that has a value, and that value.

    The key "a.b" stands for key "b" of object "a". Returns (None, None) if no key has a value.

    Raises:
      ConfigError: "a" has a value that is no object, or two keys have different values.
    """
    present: list[tuple[str, Any]] = []
    for key in keys:
        value: Any = config
        *objects, last = key.split(".")
        for name in objects:
            value = object_of(value, name)
        if (value := value.get(last)) is not None:
            present.append((key, value))
    for key, value in present[1:]:
        if value != present[0][1]:
            raise ConfigError(
                f"config.json has {present[0][0]} = {shown(present[0][1])} and {key} = {shown(value)}, which "
                "are one thing; take the wrong one out"
            )
    return present[0] if present else (None, None)


def object_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object at a key; {} where there is none.

    Raises:
      ConfigError: the value is no object.
    """
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json has {key} = {shown(value)}; it must be an object")
    return value


def words_of(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the list of words at a key; () where there is none.

    Raises:
      ConfigError: the value is no such list.
    """
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise ConfigError(f"config.json has {key} = {shown(value)}; it must be a list of words")
    return tuple(value)


def read(
    config: Mapping[str, Any],
    keys: str | Sequence[str],
    allowed: Range,
    default: Any = REQUIRED,
    file: str = "config.json",
) -> Any:
    """Return one value of a file: of the first of these keys that has one.

    Args:
      default: the value where no key has one; without it, that is an error.
      file: its name, for messages.

    Raises:
      ConfigError: there is no value, or it is out of range.
    """
    keys = (keys,) if isinstance(keys, str) else keys
    key, value = find_key(config, keys)
    if key is None:
        if default is REQUIRED:
            raise ConfigError(f"{file} has no {' or '.join(keys)}")
        return default
    if wrong := allowed.refusal(value):
        raise ConfigError(f"{file}: {key} {wrong}")
    return float(value) if allowed.kind == "a number" else value


def read_fields(
    kind: type[Any],
    config: Mapping[str, Any],
    keys: Mapping[str, Sequence[str]],
    file: str = "config.json",
    **defaults: Any,
) -> dict[str, Any]:
    """Read fields of a config from a file.

    Args:
      kind: the class of the config, which declares what its fields may hold.
      keys: for each field, the keys that may have it, see `find_key`.
      file: its name, for messages.
      defaults: values of fields that the file may leave out, where they differ from the class's own.

    Raises:
      ConfigError: naming the key that is missing or wrong.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, places in keys.items():
        field = fields[name]
        default = defaults.get(name, field.default)
        if "entries" not in field.metadata:
            values[name] = read(config, places, field.metadata["range"], default, file)
            continue
        key, value = find_key(config, places)
        if key is None and default is REQUIRED:
            raise ConfigError(f"{file} has no {' or '.join(places)}")
        values[name] = default if key is None else entries(field, f"{file}: {key}", value)
    return values


def entries(field: dataclasses.Field[Any], name: str, value: Any) -> tuple[Any, ...]:
    """Return a list of a file as the tuple that a field holds.

    Args:
      name: what the message calls it.

    Raises:
      ConfigError: it is no list, or an entry is out of range.
    """
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} is {shown(value)}; it must be a list")
    if wrong := refusal(field, name, tuple(value)):
        raise ConfigError(wrong)
    return tuple(value)


def refuse_unless(
    config: Mapping[str, Any], key: str, allowed: Sequence[Any], default: Any = None
) -> None:
    """Refuse a file that has another value at a key than the ones that are supported.

    Raises:
      ConfigError: naming the key.
    """
    value = config.get(key, default)
    kinds = {type(value), *((int, float) if type(value) in (int, float) else ())}
    if not any(type(one) in kinds and value == one for one in allowed):
        raise ConfigError(
            f"config.json has {key} = {shown(value)}; only {list(allowed)} is supported"
        )


# --- configs are shown -------------------------------------------------------------------------------


def short_repr(config: Any) -> str:
    """Show a config in one line: what differs from the defaults, and long tuples as counts."""
    values = {f.name: (getattr(config, f.name), f.default) for f in dataclasses.fields(config)}
    parts = [f"{name}={_short(value)}" for name, (value, usual) in values.items() if value != usual]
    return f"{type(config).__name__}({', '.join(parts)})"


def _short(value: Any) -> str:
    if not isinstance(value, tuple) or len(value) <= 8:
        return repr(value)
    counts = Counter(value).most_common(3)
    if len(set(value)) > 3:
        return f"<{len(value)} entries>"
    return f"<{' + '.join(f'{number} {entry}' for entry, number in counts)}>"
