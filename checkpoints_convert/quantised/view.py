"""Quantised files as the tables of rules see them: one tensor a weight, whatever it is stored as.

`open_view` groups the tensors of a module, such as `weight_packed` and `weight_scale`, into one
weight of the shape of its numbers. It also puts experts together that are stored one by one. So
`rules.match` needs to know nothing of formats. What tensors hold is compared with what config.json
announces, weight by weight.

`View.numbers` reads a weight as numbers, and `View.source` reads codes and scales as they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from checkpoints_convert.errors import CheckpointError, listed
from checkpoints_convert.headers import DTYPES
from checkpoints_convert.hf_io import HFCheckpoint
from checkpoints_convert.quantised import layouts, stored_weights
from checkpoints_convert.quantised.layouts import SCALES, UNUSED, WEIGHTS
from checkpoints_convert.quantised.quantization_config import QuantizationConfig, Spec
from checkpoints_convert.quantised.stored_weights import StoredWeight
from checkpoints_convert.rules import RuleSet, Shape, Stack, TensorSpec, find_prefix

See = Callable[[str, np.ndarray], None]

_PLAIN = "BF16"
"""The dtype under which a quantised weight is matched: that of the releases."""


@dataclass(frozen=True)
class Matrix:
    """One matrix of a file: tensors of one module, and what they hold.

    Attributes:
      parts: the full names of its tensors, by the last part of the name.
      spec: how it is quantised; None for plain numbers.
    """

    name: str
    parts: dict[str, str]
    spec: Spec | None
    shape: Shape
    dtype: str = _PLAIN


@dataclass(frozen=True)
class Weight:
    """A tensor that the rules know: one matrix, or those of all experts, stacked.

    Attributes:
      matrices: of each expert its matrices, whose rows follow each other.
    """

    matrices: tuple[tuple[Matrix, ...], ...]
    stacked: bool
    spec: Spec | None
    shape: Shape

    def __iter__(self) -> Iterator[Matrix]:
        for row in self.matrices:
            yield from row


@dataclass(frozen=True)
class View:
    """A checkpoint with one tensor a weight.

    Attributes:
      tensors: every tensor, by the name that the rules know. A quantised weight has the shape of
        its numbers.
      weights: those of them that are not simply a tensor of the file.
      quantised: the names of all quantised tensors, those that no rule needs among them.
      skipped: tensors of the file that no weight needs, with the reason.
      origins: the tensors of the file behind a name of `tensors`.
    """

    checkpoint: HFCheckpoint
    tensors: dict[str, TensorSpec]
    weights: dict[str, Weight]
    quantised: frozenset[str]
    skipped: dict[str, str]
    origins: dict[str, tuple[str, ...]]

    def spec(self, name: str) -> Spec | None:
        """Return how a tensor is quantised; None for plain numbers."""
        return self.weights[name].spec if name in self.weights else None

    def numbers(self, name: str, dtype: np.dtype | None, see: See) -> np.ndarray:
        """Read a tensor as numbers of a dtype; None for that of the file.

        Args:
          see: looks at each tensor that is read.
        """
        if name not in self.weights:
            array = self.checkpoint.read(self.origins[name][0], dtype)
            see(name, array)
            return array
        weight = self.weights[name]
        wanted = dtype or DTYPES[self.tensors[name].dtype]
        out = np.empty(weight.shape, wanted)
        for index, row in enumerate(weight.matrices):
            start, target = 0, out[index] if weight.stacked else out
            for matrix in row:
                rows = slice(start, start + matrix.shape[0])
                if matrix.spec is None:
                    array = self.checkpoint.read(matrix.parts["weight"], wanted)
                    see(matrix.name, array)
                    target[rows] = array
                else:
                    target[rows] = stored_weights.numbers(self._read(matrix, see), wanted)
                    see(matrix.name, target[rows])
                start += matrix.shape[0]
        return out

    def source(self, name: str, see: See) -> StoredWeight:
        """Read a quantised tensor as it is stored."""
        weight = self.weights[name]
        parts = [self._read(matrix, see) for matrix in weight]
        if not weight.stacked:
            return parts[0]
        count = len(weight.matrices)
        return stored_weights.arrange(
            parts, lambda xs: np.concatenate(xs).reshape(count, -1, *xs[0].shape[1:])
        )

    def _read(self, matrix: Matrix, see: See) -> StoredWeight:
        assert matrix.spec is not None
        tensors = {part: self.checkpoint.tensors[name] for part, name in matrix.parts.items()}

        def get(part: str) -> np.ndarray:
            array = self.checkpoint.read(matrix.parts[part])
            see(matrix.parts[part], array)
            return array

        stored = layouts.read(matrix.name, matrix.spec, matrix.shape, tensors, get)
        if (
            scales := getattr(stored, "scales", None)
        ) is not None:  # also those inside of blocks of bytes
            see(f"{matrix.name}, its scales", stored_weights.as_floats(scales))
        return stored


def open_view(
    checkpoint: HFCheckpoint, rules: RuleSet, quantization: QuantizationConfig | None, where: str
) -> View:
    """Group the tensors of a checkpoint, and compare what they hold with its config.

    Args:
      quantization: the formats that its config announces; None for none.
      where: the name of the checkpoint, for messages.

    Raises:
      CheckpointError: a quantised weight is incomplete or of wrong shapes, or is not what its config
        announces. The message lists such weights.
    """
    groups = _grouped(checkpoint, rules, quantization is not None)
    reader = _Reader(groups, quantization)
    prefix = find_prefix(rules, {*groups.tensors, *groups.modules, *groups.stacked(rules.stacks)})
    for rule in rules.rules:
        for name in rule.names(prefix):
            reader.look(name, rules.stacks)
    if reader.wrong:
        says = "announces no format" if quantization is None else f"announces {quantization.title}"
        raise CheckpointError(
            f"{where}: its config.json {says}, and its tensors do not fit that, "
            f"{len(reader.wrong):,} problem{'' if len(reader.wrong) == 1 else 's'}:\n  "
            + listed(reader.wrong, "\n  ")
            + "\nGet the files again. If they are whole, the build is at fault: take another one, or the "
            "bfloat16 release with --quantize int8"
        )
    tensors, origins = dict(groups.tensors), dict(groups.origins)
    # Nothing is known of a module that no rule needs. If nothing skips it, that is an error.
    tensors |= {name: TensorSpec((), _PLAIN) for name in groups.modules}
    for name, weight in reader.weights.items():
        dtypes = {matrix.dtype for matrix in weight if matrix.spec is None}
        if weight.stacked:
            for matrix in weight:
                origins[name] = (*origins.get(name, ()), *origins.pop(matrix.name))
                del tensors[matrix.name]
        tensors[name] = TensorSpec(weight.shape, dtypes.pop() if len(dtypes) == 1 else _PLAIN)
    quantised = frozenset(groups.modules)
    return View(checkpoint, tensors, reader.weights, quantised, groups.skipped, origins)


@dataclass(frozen=True)
class _Groups:
    """The tensors of a file by the weights that they belong to.

    Attributes:
      modules: of each quantised weight its tensors, by the last parts of their names.
      tensors: all other tensors.
      skipped, origins: as `View` has them.
    """

    checkpoint: HFCheckpoint
    modules: dict[str, dict[str, str]]
    tensors: dict[str, TensorSpec]
    skipped: dict[str, str]
    origins: dict[str, tuple[str, ...]]

    def stacked(self, stacks: Iterable[Stack]) -> Iterator[str]:
        """Yield the names of stacked tensors of which there is a first matrix."""
        names = {*self.modules, *self.tensors}
        for stack in stacks:
            first = f".0.{stack.parts[0]}.weight"
            for name in names:
                if name.endswith(first):
                    yield f"{name.removesuffix(first)}.{stack.pattern.rpartition('.')[2]}"


def _grouped(checkpoint: HFCheckpoint, rules: RuleSet, configured: bool) -> _Groups:
    by_module: dict[str, dict[str, str]] = {}
    groups = _Groups(checkpoint, {}, {}, {}, {})
    for name in checkpoint.tensors:
        base, _, last = name.rpartition(".")
        if configured and (match := _FUSED.fullmatch(name)):
            if match[2]:
                base, last = match[1], f"weight_{match[2]}"
            elif checkpoint.tensors[name].dtype in layouts.CODES:
                base, last = match[1], "weight"
        if last in UNUSED:
            groups.skipped[name] = UNUSED[last]
        elif last in (*WEIGHTS, *SCALES):
            by_module.setdefault(base, {})[last] = name
        else:
            groups.tensors[_known_as(name, rules)] = checkpoint.tensors[name]
            groups.origins[_known_as(name, rules)] = (name,)
    for base, named in by_module.items():
        module = _known_as(base, rules)
        stored = {part: checkpoint.tensors[name] for part, name in named.items()}
        if layouts.is_quantised(stored, configured):
            fused = any(module.endswith(stack.pattern) for stack in rules.stacks)
            name = module if fused else f"{module}.weight"
            groups.modules[name] = named
        else:
            name = f"{module}.weight"
            groups.tensors[name] = stored["weight"]
        groups.origins[name] = tuple(named.values())
    return groups


_FUSED = re.compile(
    r"(.+\.experts\.(?:gate_up|down)_proj)"
    r"(?:_(packed|scale|scale_inv|shape|zero_point|global_scale))?"
)
"""How compressed-tensors and transformers name the parts of a stacked parameter, which is no module of its own."""


def _known_as(name: str, rules: RuleSet) -> str:
    for written, meant in rules.aliases:
        name = name.replace(written, meant)
    return name


class _Reader:
    """A reader of the weights that rules need, one by one.

    Attributes:
      weights: those that are quantised or stacked.
      wrong: what is wrong with them.
    """

    def __init__(self, groups: _Groups, quantization: QuantizationConfig | None):
        self._groups, self._quantization = groups, quantization
        self.weights: dict[str, Weight] = {}
        self.wrong: list[str] = []

    def look(self, name: str, stacks: Iterable[Stack]) -> None:
        """Read what a tensor holds that a rule needs. `rules.match` refuses absent tensors."""
        if name in self._groups.modules or name in self._groups.tensors:
            matrix = self._matrix(name)
            if matrix is not None and matrix.spec is not None:
                self.weights[name] = Weight(((matrix,),), False, matrix.spec, matrix.shape)
            return
        for stack in stacks:
            if name.endswith(stack.pattern):
                self._stack(name, stack)

    def _matrix(self, name: str) -> Matrix | None:
        """Return a matrix; None if it is not whole, which is then in `wrong`."""
        groups = self._groups
        try:
            configured = self._of(name)
            if name not in groups.modules:
                tensor = groups.tensors[name]
                if configured is not None and len(tensor.shape) == 2 and name.endswith(".weight"):
                    raise CheckpointError(f"{name}: is {tensor.dtype}, announced is {configured}")
                parts = {"weight": groups.origins[name][0]}
                return Matrix(name, parts, None, tensor.shape, tensor.dtype)
            parts = groups.modules[name]
            stored = {part: groups.checkpoint.tensors[full] for part, full in parts.items()}
            spec, shape = layouts.recognise(name, stored, configured)
            if not groups.checkpoint.self_described and spec != configured:
                raise CheckpointError(
                    f"{name}: is {spec}, announced is {configured or 'no format'}"
                )
            return Matrix(name, parts, spec, shape)
        except CheckpointError as error:
            self.wrong.append(str(error))
            return None

    def _of(self, name: str) -> Spec | None:
        """Return what the config announces for a weight, by the name that its module has in the file."""
        if self._quantization is None:
            return None
        full = self._groups.origins[name][0]
        if match := _FUSED.fullmatch(full):
            return self._quantization.of(match[1])
        return self._quantization.of(full.rpartition(".")[0] if name.endswith(".weight") else full)

    def _stack(self, name: str, stack: Stack) -> None:
        """Put the matrices of a stacked tensor together."""
        rows: list[tuple[Matrix, ...]] = []
        is_whole = True
        known = {*self._groups.modules, *self._groups.tensors}
        while (names := stack.names(name, len(rows)))[0] in known:
            if absent := [n for n in names if n not in known]:
                self.wrong.append(f"{absent[0]}: missing")
                return
            matrices = [self._matrix(n) for n in names]
            rows.append(tuple(m for m in matrices if m is not None))
            is_whole &= all(m is not None for m in matrices)
        if not rows or not is_whole:
            return
        specs = {matrix.spec for row in rows for matrix in row}
        if len(specs) > 1:
            words = " and ".join(sorted(str(spec or "plain numbers") for spec in specs))
            self.wrong.append(f"{name}: its experts have several formats, {words}")
            return
        shapes = {tuple(matrix.shape for matrix in row) for row in rows}
        if len(shapes) > 1 or len({shape[-1] for shape in next(iter(shapes))}) > 1:
            self.wrong.append(f"{name}: its experts have several shapes, {sorted(shapes)}")
            return
        out = sum(shape[0] for shape in next(iter(shapes)))
        shape = (len(rows), out, rows[0][0].shape[1])
        self.weights[name] = Weight(tuple(rows), True, specs.pop(), shape)
