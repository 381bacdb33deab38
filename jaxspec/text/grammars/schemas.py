"""Turn JSON schemas into grammars of a notation: JSON on one line, or that of a model's calls.

`Schemas` reads a schema, and a `Notation` writes the grammar. `json_regex` has JSON as a regular
expression, which an automaton can follow, and `chat.gemma_calls` the notation of Gemma 4's calls.

The grammar is narrower than the schema. Properties come in one order, undeclared properties are
never written, and the only white space is one blank where a notation has it.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.options import FieldError, shown

FIELD = "json_schema"
_ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "format",
        "nullable",
        "strict",
        "$schema",
        "$id",
        "$comment",
        "$anchor",
        "$defs",
        "definitions",
    )
)
"""Keywords that do not make a document invalid. `format` is one of them unless asserted."""
FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uuid", "uri", "unknown"),
    )
)
"""Formats that llguidance asserts."""
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose value maps free names to schemas."""
_EVERY_STRING: dict[str, tuple[Any, ...]] = {
    "type": ("string", ["string"]),
    "minLength": (0,),
    "pattern": ("", ".*", "^", "^.*"),
}
"""Values with which keywords are true of every string."""
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "boolean": (),
    "null": (),
}
_MAX_VALUES = 2_000
_MAX_DEPTH = 32


class Unsupported(FieldError):
    """A schema has a part that no grammar here can follow."""

    def __init__(self, why: str):
        """Make an error. `why` follows the name of the field."""
        self.why = why
        super().__init__(FIELD, why)


def changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema after a change of each of its parts, and then of itself."""
    if isinstance(schema, list):
        return [changed(part, change) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    parts = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, Mapping):  # the names are no keywords
            parts[name] = {n: changed(part, change) for n, part in value.items()}
        else:
            parts[name] = value if name in ("const", "enum") else changed(value, change)
    return change(parts)


def without_annotations(schema: Any) -> Any:
    """Return a schema without keywords that refuse nothing, and that llguidance does not know."""
    return changed(schema, _without_annotations)


def _without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    drop = {"propertyNames"} if _is_true_of_names(schema.get("propertyNames")) else set()
    if isinstance(name := schema.get("format"), str) and name not in FORMATS:
        drop.add("format")
    return {name: value for name, value in schema.items() if name not in drop}


def _is_true_of_names(schema: Any) -> bool:
    """Return whether a schema is true of every string."""
    if not isinstance(schema, Mapping):
        return schema is True
    used = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
    return all(value in _EVERY_STRING.get(name, ()) for name, value in used.items())


class Notation(abc.ABC):
    """Writes a grammar, bottom up. All methods take and return pieces of it."""

    @abc.abstractmethod
    def text(self, text: str) -> str:
        """Return the piece for a literal text."""

    @abc.abstractmethod
    def sequence(self, *parts: str) -> str:
        """Return the parts one after the other."""

    @abc.abstractmethod
    def either(self, *parts: str) -> str:
        """Return a choice of one of the parts."""

    @abc.abstractmethod
    def repeated(self, part: str, lower: int, upper: int | None) -> str:
        """Return a part `lower` to `upper` times; None: any number of times."""

    @abc.abstractmethod
    def shared(self, part: str) -> str:
        """Return a part that is used in several places."""

    @abc.abstractmethod
    def recursive(self, name: str) -> str:
        """Return a definition that contains itself. Raises `Unsupported` if there are none."""

    @abc.abstractmethod
    def define(self, name: str, part: str) -> str:
        """Return a definition, which may contain itself by `recursive`."""

    @abc.abstractmethod
    def anything(self) -> str:
        """Return any value."""

    @abc.abstractmethod
    def constant(self, value: Any) -> str:
        """Return a value that is neither an object nor an array."""

    @abc.abstractmethod
    def string(self, lower: int, upper: int | None, pattern: str | None) -> str:
        """Return a string of `lower` to `upper` characters that contains a match of `pattern`."""

    @abc.abstractmethod
    def number(self, schema: Mapping[str, Any]) -> str:
        """Return a number of a schema that has only the keywords of numbers."""

    @abc.abstractmethod
    def key(self, name: str | None) -> str:
        """Return a key with its colon; None: any."""

    @abc.abstractmethod
    def comma(self) -> str:
        """Return the separator of two items."""

    @abc.abstractmethod
    def order(self, names: Sequence[str]) -> list[str]:
        """Return the order in which properties are written."""


class Schemas:
    """Reads one schema for a notation.

    Args:
      lenient: whether keywords that cannot be followed are ignored, and parts that cannot be are
        any value.
    """

    def __init__(self, root: Any, notation: Notation, *, lenient: bool = False):
        self.root, self.to, self.lenient = root, notation, lenient
        self._open: list[str] = []  # references that are being read
        self._done: dict[str, str] = {}
        self._count = self._depth = 0

    def whole(self) -> str:
        """Return the grammar of the schema.

        Raises:
          Unsupported: naming the keyword.
        """
        return self._value(self.root)

    def value(self, schema: Any) -> str:
        """Return the grammar of a part of the schema."""
        self._count, self._depth = self._count + 1, self._depth + 1
        try:
            if self._count > _MAX_VALUES or self._depth > _MAX_DEPTH:
                raise Unsupported("is too large, or its parts are nested too deeply")
            return self._value(schema)
        except Unsupported:
            if not self.lenient:
                raise
            return self.to.anything()
        finally:
            self._depth -= 1

    def _value(self, schema: Any) -> str:
        if schema is True:
            return self.to.anything()
        if not isinstance(schema, Mapping):
            raise Unsupported(f"has {shown(schema)} in place of a schema")
        schema = _without_annotations(dict(schema))
        used = {k: v for k, v in schema.items() if k not in _ANNOTATIONS}
        for name, read in (("$ref", self._reference), ("enum", self._enum), ("const", self._const)):
            if name in used:
                self._only(used, name, *(() if name == "$ref" else ("type",)))
                return read(used)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in used and self._is_choice(used, name):
                self._only(used, name)
                return self.to.either(*(self.value(one) for one in used[name]))
        return self._typed(used)

    def _is_choice(self, used: Mapping[str, Any], name: str) -> bool:
        """Tell whether a list of schemas can be followed as a choice of one of them."""
        parts = used[name]
        if self.lenient and {"type", "properties", "items"} & {*used}:
            return False
        if not _is_list(parts) or not parts:
            raise Unsupported(f"has {name}: {shown(parts)}; expected a list of schemas")
        if name == "anyOf" or len(parts) == 1:
            return True
        if self.lenient:
            return name == "oneOf"
        raise Unsupported(f"has {name}, which is not supported")

    def _only(self, used: Mapping[str, Any], *names: str) -> None:
        """Refuse keywords beside those, unless they may be ignored."""
        if others := [] if self.lenient else sorted(set(used) - {*names}):
            where = f" beside {names[0]}" if names else ""
            raise Unsupported(f"has {', '.join(others)}{where}, which is not supported")

    def _reference(self, used: Mapping[str, Any]) -> str:
        name = used["$ref"]
        if not isinstance(name, str):
            raise Unsupported(f"has $ref: {shown(name)}; expected text")
        if name in self._done:
            return self._done[name]
        if name in self._open:
            return self.to.recursive(name)
        definition: Any = self.root
        parts = name.split("/")
        for part in parts[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            definition = definition.get(part) if isinstance(definition, Mapping) else None
        if parts[0] != "#" or definition is None:
            raise Unsupported(f"has $ref: {shown(name)}, which is nothing of its own")
        self._open.append(name)
        try:
            self._done[name] = self.to.define(name, self.value(definition))
        finally:
            self._open.pop()
        return self._done[name]

    def _const(self, used: Mapping[str, Any]) -> str:
        return self._enum({**used, "enum": [used["const"]]})

    def _enum(self, used: Mapping[str, Any]) -> str:
        types = _types(used)
        values = used["enum"] if _is_list(used["enum"]) else ()
        fits = [v for v in values if types is None or any(_is_type(v, t) for t in types)]
        if not fits:
            raise Unsupported(f"has enum: {shown(used['enum'])}, none of which is of its type")
        return self.to.either(*(self._constant(v) for v in fits))

    def _constant(self, value: Any) -> str:
        if isinstance(value, Mapping):
            names = self.to.order([*value])
            pairs = [self.to.sequence(self.to.key(n), self._constant(value[n])) for n in names]
            return self._list("{", pairs, "}")
        if isinstance(value, list):
            return self._list("[", [self._constant(v) for v in value], "]")
        return self.to.constant(value)

    def _list(self, begin: str, items: Sequence[str], end: str) -> str:
        rest = [x for item in items[1:] for x in (self.to.comma(), item)]
        return self.to.sequence(self.to.text(begin), *items[:1], *rest, self.to.text(end))

    def _typed(self, used: Mapping[str, Any]) -> str:
        types = _types(used)
        if types is None:
            implied = [t for t, names in _KEYWORDS.items() if t != "integer" and {*names} & {*used}]
            if not implied:
                self._only(used)
                return self.to.anything()
            types = implied
        known = [name for t in types for name in _KEYWORDS[t]]
        self._only(used, "type", *known)
        parts = []
        for kind in types:
            parts.append(
                getattr(self, f"_{kind}")({k: used[k] for k in _KEYWORDS[kind] if k in used})
            )
        return self.to.either(*parts)

    def _boolean(self, used: Mapping[str, Any]) -> str:
        del used
        return self.to.either(self.to.text("true"), self.to.text("false"))

    def _null(self, used: Mapping[str, Any]) -> str:
        del used
        return self.to.text("null")

    def _string(self, used: Mapping[str, Any]) -> str:
        lower, upper = _range(used, "minLength", "maxLength")
        pattern = used.get("pattern")
        try:
            if not isinstance(pattern, str | None):
                raise Unsupported(f"has pattern: {shown(pattern)}; expected text")
            return self.to.string(lower, upper, pattern)
        except Unsupported:
            if not self.lenient:
                raise
            return self.to.string(lower, upper, None)

    def _integer(self, used: Mapping[str, Any], kind: str = "integer") -> str:
        for name, value in used.items():
            is_odd = isinstance(value, float) and not math.isfinite(value)
            if is_odd or not isinstance(value, int | float):
                raise Unsupported(f"has {name}: {shown(value)}; expected a number")
        return self.to.number({"type": kind, **used})

    def _number(self, used: Mapping[str, Any]) -> str:
        return self._integer(used, "number")

    def _array(self, used: Mapping[str, Any]) -> str:
        lower, upper = _range(used, "minItems", "maxItems")
        if not _is_list(first := used.get("prefixItems", [])):
            raise Unsupported(f"has prefixItems: {shown(first)}; expected a list of schemas")
        rest = used.get("items", True)
        if rest is False:
            upper = min(len(first), len(first) if upper is None else upper)
        if upper is not None and lower > upper:
            raise Unsupported(f"wants {lower} items or more, and {upper} at most")
        # From the last item to the first, each with what may follow it.
        after, comma = "", self.to.comma()
        if upper is None or upper > len(first):
            item = self.to.shared(self.value(rest))
            begin, end = max(lower, len(first)), upper
            bounds = (begin - len(first), None if end is None else end - len(first))
            if not first:
                more = max(bounds[0] - 1, 0), None if bounds[1] is None else bounds[1] - 1
                after = self.to.sequence(
                    item, self.to.repeated(self.to.sequence(comma, item), *more)
                )
                after = after if lower else self.to.repeated(after, 0, 1)
            else:
                after = self.to.repeated(self.to.sequence(comma, item), *bounds)
                after = after if bounds[0] else self.to.repeated(after, 0, 1)
        for i in reversed(range(min(len(first), len(first) if upper is None else upper))):
            here = self.value(first[i])
            after = self.to.sequence(*([comma] if i else []), here, *([after] if after else []))
            after = after if i < lower else self.to.repeated(after, 0, 1)
        return self.to.sequence(self.to.text("["), *([after] if after else []), self.to.text("]"))

    def _object(self, used: Mapping[str, Any]) -> str:
        properties = used.get("properties")
        others, required = used.get("additionalProperties", True), used.get("required", [])
        if not isinstance(properties, Mapping | None):
            raise Unsupported(f"has properties: {shown(properties)}; expected an object")
        if not _is_list(required) or not all(isinstance(name, str) for name in required):
            raise Unsupported(f"has required: {shown(required)}; expected a list of names")
        if others is False or properties or (required and others is True):
            return self._fields(properties or {}, required, others)
        if required:
            raise Unsupported("has required, and declares no properties")
        if properties is not None and others is True:
            return self.to.text("{}")
        pair = self.to.shared(self.to.sequence(self.to.key(None), self.value(others)))
        more = self.to.repeated(self.to.sequence(self.to.comma(), pair), 0, None)
        fields = self.to.repeated(self.to.sequence(pair, more), 0, 1)
        return self.to.sequence(self.to.text("{"), fields, self.to.text("}"))

    def _fields(self, properties: Mapping[str, Any], required: Sequence[Any], others: Any) -> str:
        """Return an object of these properties. Optional ones may be left out."""
        undeclared = [name for name in required if name not in properties]
        if undeclared and others is False:
            raise Unsupported(f"has required: {shown(undeclared)}, which are not declared")
        schemas = {**properties, **dict.fromkeys(undeclared, others)}
        # From the last to the first: the rest behind a property, and the rest at the beginning.
        rest, begin, may_be_empty = "", [], True
        for name in reversed(self.to.order([*schemas])):
            pair = self.to.sequence(self.to.key(name), self.value(schemas[name]))
            pair = self.to.shared(pair)
            here = self.to.sequence(pair, rest) if rest else pair
            after = self.to.sequence(self.to.comma(), pair)
            if name in required:
                begin, may_be_empty = [here], False
            else:
                begin, after = [here, *begin], self.to.repeated(after, 0, 1)
            rest = self.to.shared(self.to.sequence(after, rest) if rest else after)
        fields = [self.to.either(*begin)] if begin else []
        if may_be_empty and fields:
            fields = [self.to.repeated(fields[0], 0, 1)]
        return self.to.sequence(self.to.text("{"), *fields, self.to.text("}"))


def _types(used: Mapping[str, Any]) -> list[Any] | None:
    if (kind := used.get("type")) is None:
        return None
    kinds = [*kind] if _is_list(kind) else [kind]
    wrong = [one for one in kinds if not isinstance(one, str) or one not in _KEYWORDS]
    if wrong or not kinds:
        raise Unsupported(f"has type: {shown(wrong[0] if wrong else kind)}, which is none of JSON")
    return kinds


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_type(value: Any, kind: str) -> bool:
    """Tell whether a constant is of a type, as schemas see it."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value % 1 == 0)
    of: Any = {"string": str, "object": Mapping, "array": list}.get(kind, ())
    return isinstance(value, of)


def _range(used: Mapping[str, Any], lower: str, upper: str) -> tuple[int, int | None]:
    low, high = used.get(lower), used.get(upper)
    for name, value in ((lower, low), (upper, high)):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not is_whole or value < 0):
            raise Unsupported(f"has {name}: {shown(value)}; expected a whole number")
    if high is not None and (low or 0) > high:
        raise Unsupported(f"has {lower}: {low} and {upper}: {high}")
    return low or 0, high
