"""The formats of quantised weights that a config.json announces. Read `read_quantization_config`.

A config names formats, the modules that have each of them, and modules that stay as they are.
`QuantizationConfig.of` returns the format of one module. `view.py` compares it with the tensors.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NoReturn

from checkpoints_convert.errors import CheckpointError, listed

WAY_OUT = (
    "take a build in a format that is read (FP8, 4-bit groups, NVFP4 or MXFP4 of compressed-tensors, "
    "NVFP4 or FP8 of ModelOpt, AWQ, GPTQ), or the bfloat16 release with --quantize int8"
)


@dataclass(frozen=True)
class Spec:
    """The format in which the numbers of a weight are stored.

    Attributes:
      kind: "int8", "fp8", "int4", "nvfp4" or "mxfp4".
      per: what shares a scale: a "tensor", a "channel", a "group" of inputs, or a "block" of
        128 x 128.
      group: the number of inputs of a group; 0 where `per` is not "group".
      symmetric: whether there are no zero points.
      scales: the dtype of the scales in the file, where they are not e4m3 or powers of two. Configs
        do not announce it.
    """

    kind: str
    per: str
    group: int = 0
    symmetric: bool = True
    scales: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        """Return the format in words."""
        shared = {
            "tensor": "one scale a matrix",
            "channel": "one scale a channel",
            "block": "blocks of 128 x 128",
            "group": f"groups of {self.group}",
        }[self.per]
        return f"{self.kind}, {shared}" + ("" if self.symmetric else ", with zero points")


@dataclass(frozen=True)
class QuantizationConfig:
    """The formats that a config announces, and for which modules.

    Attributes:
      title: what made the file, for messages.
      groups: patterns of modules, and the format that these have.
      ignored: patterns of modules that are not quantised. They win over `groups`.
      style: how patterns are written, beside `re:` expressions. "ct": names, or classes such as
        Linear. "modelopt": names of modules and of what holds them, with wildcards. "parts": parts
        of names.
      everywhere: whether all linears that are not ignored are quantised. If not, only those of
        attention, MLP and experts are.
    """

    title: str
    groups: tuple[tuple[tuple[str, ...], Spec], ...]
    ignored: tuple[str, ...]
    style: str
    everywhere: bool = True

    def of(self, module: str) -> Spec | None:
        """Return the format that is announced for a linear or an embedding; None for none."""
        names = spellings(module)
        if any(map(_matcher(self.style, self.ignored), names)):
            return None
        if not self.everywhere and not re.search(r"\.(self_attn|mlp|experts)\.", module):
            return None
        # A name says more than a class does.
        for patterns, spec in self.groups:
            if any(map(_matcher(self.style, patterns), names)):
                return spec
        linear = not re.search(r"embed_tokens(_per_layer)?$", module)
        classes = [spec for patterns, spec in self.groups if linear and "Linear" in patterns]
        return classes[0] if classes else None


@functools.cache
def _matcher(style: str, patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a function that tells whether a name matches one of some patterns.

    26B-A4B has 11,520 matrices, and a build of it lists more than a hundred patterns.
    """
    expressions = [re.compile(p[3:]) for p in patterns if p.startswith("re:")]
    words = [p for p in patterns if not p.startswith("re:")]
    if style == "modelopt":
        wild = [fnmatch.translate(p) for p in words if any(letter in p for letter in "*?[")]
        expressions += [re.compile("|".join(wild))] if wild else []
    exact, under = frozenset(words), tuple(f"{word}." for word in words)

    def matches(name: str) -> bool:
        if any(expression.match(name) for expression in expressions):
            return True
        if style == "parts":
            return any(word in name for word in words)
        return name in exact or (style == "modelopt" and name.startswith(under))

    return matches


def spellings(module: str) -> tuple[str, ...]:
    """Return the names under which a config may know a module of the file.

    Programs load the same file under several prefixes, and write a config with their own.
    """
    rest = re.sub(
        r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)", "", module
    )
    tails = {
        rest,
        rest.replace(".moe.experts.", ".experts."),
        re.sub(r"(?<!moe)\.experts\.", ".moe.experts.", rest),
    }
    prefixes = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
    return (module, *(prefix + tail for prefix in prefixes for tail in sorted(tails)))


def read_quantization_config(
    config: Mapping[str, Any], beside: Mapping[str, Any] | None = None
) -> QuantizationConfig | None:
    """Return what the files of a checkpoint announce; None for a checkpoint of plain numbers.

    Args:
      config: the parsed config.json.
      beside: the parsed hf_quant_config.json, which ModelOpt writes.

    Raises:
      CheckpointError: the format is not read. The message names it, and what is read.
    """
    text = config.get("text_config")
    configs = [
        part[key]
        for part in (config, text)
        if isinstance(part, Mapping)
        for key in ("quantization_config", "compression_config")
        if part.get(key)
    ]
    if not configs and beside is not None:
        configs = [{"quant_method": "modelopt", **_object(beside, "quantization")}]
    if not configs:
        return None
    values = configs[0]
    if any(other != values for other in configs[1:]):
        raise CheckpointError(
            "config.json has several configs of quantisation, which differ (quantization_config, "
            "compression_config, those of text_config): leave the one that its weights were made with"
        )
    if not isinstance(values, Mapping):
        raise CheckpointError(f"config.json has a quantization_config that is no object: {WAY_OUT}")
    method = str(values.get("quant_method", "")).lower()
    reader = _READERS.get(method)
    if reader is None:
        name = (
            _TITLES.get(method)
            or f"by a method that is not known, {_short(values.get('quant_method'))}"
        )
        raise CheckpointError(
            f"config.json has a quantization_config: its weights are quantised, {name}. Such files "
            f"are not read; {WAY_OUT}"
        )
    return reader(values)


_TITLES = {
    "bitsandbytes": "bitsandbytes, which needs its own kernels",
    "gemma": "Gemma's mobile format of 2, 4 and 8 bits, which rounds activations as well",
    "mxfp4": "MXFP4 as gpt-oss stores it",
    "gguf": "GGUF inside of transformers",
    "hqq": "HQQ",
    "quanto": "Quanto",
    "torchao": "torchao",
    "eetq": "EETQ",
    "aqlm": "AQLM",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "auto-round": "AutoRound",
    "quark": "AMD Quark",
    "nvfp4": "NVFP4 as transformers makes it",
}
"""Methods that are known and not read."""


# --- compressed-tensors --------------------------------------------------------------------------


def _compressed_tensors(values: Mapping[str, Any]) -> QuantizationConfig:
    title = f"compressed-tensors {_short(values.get('format'))}"
    if values.get("transform_config"):
        _refuse(title, "rotates weights and activations (transform_config)")
    if _object(values, "sparsity_config").get("format", "dense") != "dense":
        _refuse(title, "leaves zeros out (sparsity_config)")
    groups = []
    for name, group in _object(values, "config_groups").items():
        if not isinstance(group, Mapping):
            _refuse(title, f"has a group {_short(name)} that is no object")
        args = _object(group, "weights")
        if args:
            groups.append((_patterns(group, "targets"), _ct_spec(title, args)))
    if not groups:
        _refuse(title, "announces no groups of weights")
    return QuantizationConfig(title, tuple(groups), _patterns(values, "ignore"), "ct")


def _ct_spec(title: str, args: Mapping[str, Any]) -> Spec:
    """Return the format that the arguments of a group describe."""
    bits, kind = args.get("num_bits", 8), args.get("type", "int")
    group, symmetric = args.get("group_size"), bool(args.get("symmetric", True))
    strategy = args.get("strategy") or (
        "group" if isinstance(group, int) and group > 0 else "tensor"
    )
    if group == -1:
        strategy = "channel"
    if strategy in ("group", "tensor_group") and not (isinstance(group, int) and group > 0):
        _refuse(title, f"has groups of {_short(group)} inputs")
    if args.get("actorder") == "group":
        _refuse(title, "orders groups by activation (actorder)")
    if (bits, kind) == (8, "float") and strategy in ("tensor", "channel", "block"):
        blocks = re.findall(r"\d+", str(args.get("block_structure")))
        if strategy == "block" and blocks != ["128", "128"]:
            _refuse(title, f"has blocks of {_short(args.get('block_structure'))}, not 128 x 128")
        return Spec("fp8", strategy)
    if (bits, kind) == (8, "int") and strategy in ("tensor", "channel") and symmetric:
        return Spec("int8", strategy)
    if (bits, kind, strategy) == (8, "int", "group") and symmetric:
        return Spec("int8", "group", group or 0)
    if (bits, kind) == (4, "int") and strategy in ("group", "channel"):
        return Spec("int4", strategy, (group or 0) if strategy == "group" else 0, symmetric)
    if (bits, kind, strategy, group) == (4, "float", "tensor_group", 16):
        return Spec("nvfp4", "group", 16)
    if (bits, kind, strategy, group) == (4, "float", "group", 32):
        return Spec("mxfp4", "group", 32)
    words = (
        f"{_short(bits)}-bit {_short(kind)} with strategy {_short(strategy)}, group {_short(group)}"
    )
    _refuse(title, f"has weights of {words}{'' if symmetric else ', not symmetric'}")


# --- others --------------------------------------------------------------------------------------

_MODELOPT = {
    "NVFP4": Spec("nvfp4", "group", 16),
    "W4A16_NVFP4": Spec("nvfp4", "group", 16),
    "FP8": Spec("fp8", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Spec("fp8", "channel"),
    "FP8_PB_WO": Spec("fp8", "block"),
}


def _modelopt(values: Mapping[str, Any]) -> QuantizationConfig:
    title = "NVIDIA ModelOpt"
    ignored = (*_patterns(values, "ignore"), *_patterns(values, "exclude_modules"))
    layers = _object(values, "quantized_layers")
    groups = [((name,), _modelopt_spec(title, layer)) for name, layer in layers.items()]
    if not groups:
        groups = [(("Linear",), _modelopt_spec(title, values))]
    return QuantizationConfig(
        f"{title} {_short(values.get('quant_algo'))}", tuple(groups), ignored, "modelopt"
    )


def _modelopt_spec(title: str, values: Any) -> Spec:
    if not isinstance(values, Mapping):
        _refuse(title, f"has a layer of {_short(values)}")
    algorithm, group = values.get("quant_algo"), values.get("group_size")
    spec = _MODELOPT.get(str(algorithm).upper())
    if spec is None:
        _refuse(title, f"has the quant_algo {_short(algorithm)}, and not {', '.join(_MODELOPT)}")
    if spec.group and group not in (None, spec.group):
        _refuse(title, f"has groups of {_short(group)}, not {spec.group}")
    return spec


def _fp8(values: Mapping[str, Any]) -> QuantizationConfig:
    title, blocks = "FP8", values.get("weight_block_size")
    if blocks is not None and blocks != [128, 128]:
        _refuse(title, f"has blocks of {_short(blocks)}, not 128 x 128")
    if values.get("fmt", "e4m3") != "e4m3":
        _refuse(title, f"has numbers of {_short(values.get('fmt'))}, not e4m3")
    spec = Spec("fp8", "tensor" if blocks is None else "block")
    kept = ("lm_head", *_patterns(values, "modules_to_not_convert"))
    return QuantizationConfig(title, ((("Linear",), spec),), kept, "parts", everywhere=False)


def _awq(values: Mapping[str, Any]) -> QuantizationConfig:
    title = "AWQ"
    if str(values.get("version", "gemm")).lower() != "gemm":
        _refuse(title, f"has the layout {_short(values.get('version'))}, not gemm")
    spec = _four_bits(title, values, symmetric=not values.get("zero_point", True))
    kept = ("lm_head", *_patterns(values, "modules_to_not_convert"))
    return QuantizationConfig(title, ((("Linear",), spec),), kept, "parts", everywhere=False)


def _gptq(values: Mapping[str, Any]) -> QuantizationConfig:
    title = "GPTQ"
    if (version := values.get("checkpoint_format", "gptq")) != "gptq":
        _refuse(title, f"has the layout {_short(version)}, not gptq")
    spec = _four_bits(title, values, symmetric=bool(values.get("sym", True)))
    dynamic = _object(values, "dynamic")
    if more := [pattern for pattern in dynamic if not pattern.startswith("-:")]:
        _refuse(title, f"has other settings for some modules (dynamic: {listed(more)})")
    kept = ("lm_head", *_patterns(values, "modules_to_not_convert"))
    layers = [f"re:{pattern[2:]}" for pattern in dynamic]
    return QuantizationConfig(
        title, ((("Linear",), spec),), (*kept, *layers), "parts", everywhere=False
    )


def _four_bits(title: str, values: Mapping[str, Any], *, symmetric: bool) -> Spec:
    bits, group = (
        values.get("bits", values.get("w_bit")),
        values.get("group_size", values.get("q_group_size")),
    )
    if bits != 4:
        _refuse(title, f"has weights of {_short(bits)} bits, not 4")
    if not isinstance(group, int) or (group < 1 and group != -1):
        _refuse(title, f"has groups of {_short(group)} inputs")
    return (
        Spec("int4", "channel", 0, symmetric)
        if group == -1
        else Spec("int4", "group", group, symmetric)
    )


_READERS = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
}


def _refuse(title: str, why: str) -> NoReturn:
    raise CheckpointError(f"config.json: {title} {why}, which is not read; {WAY_OUT}")


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"quantization_config: {key} is {_short(value)}, expected an object")
    return value


def _words(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = values.get(key) or []
    if not isinstance(value, Sequence) or not all(isinstance(word, str) for word in value):
        raise CheckpointError(f"quantization_config: {key} is {_short(value)}, expected names")
    return tuple(value)


def _patterns(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return patterns of modules. Those that are regular expressions match within milliseconds."""
    patterns = _words(values, key)
    for pattern in patterns:
        if not pattern.startswith("re:"):
            continue
        try:
            repeats = _repeats(_parser.parse(pattern[3:]))
            re.compile(pattern[3:])
        except (re.error, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"quantization_config: {key} has {_short(pattern)}, no regular expression ({error})"
            ) from None
        if repeats > _MOST_REPEATS:
            raise CheckpointError(
                f"quantization_config: {key} has {_short(pattern)}, with repeats in repeats or too many of them: "
                "to match a name may take for ever. Write it with fewer"
            )
    return patterns


_MOST_REPEATS = 5
_ENDLESS = 1000


def _repeats(items: Any) -> int:
    """Return how many repeats of a parsed expression can trade characters; `_ENDLESS` for nested ones.

    A name of n letters that does not match costs up to n to the power of that.
    """
    count = 0
    for operation, about in items:
        word = str(operation)
        if word in ("MAX_REPEAT", "MIN_REPEAT"):
            _, high, inner = about
            inside = _repeats(inner)
            choices = any(str(op) == "BRANCH" for op, _ in _flat(inner))
            if high <= 4:
                count += int(high) * inside
            else:
                count += _ENDLESS if inside or choices else 1
        elif word == "BRANCH":
            count += max(_repeats(branch) for branch in about[1])
        elif word in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            count += _repeats(about[-1])
    return count


def _flat(items: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a parsed expression, and those of its groups."""
    for operation, about in items:
        yield operation, about
        if str(operation) == "SUBPATTERN":
            yield from _flat(about[-1])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
