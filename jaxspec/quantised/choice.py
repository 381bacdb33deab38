"""Which weights of a model are quantised, and where a format can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from checkpoints_convert.errors import CheckpointError
from jaxspec.options import FieldError, shown
from jaxspec.quantised.array import QuantisedArray
from jaxspec.quantised.formats import get_format, names
from pallas_kernels.dispatch import capability

if TYPE_CHECKING:
    from jaxspec.weights.model_def import ModelDef


def formats_for(
    model_def: ModelDef, linears: str | None = None, tables: str | None = None
) -> dict[str, str]:
    """Return the format of every weight that is to be quantised, by name.

    Norms, scalars, routers and per-layer inputs stay as they are: they are small, or feel rounding
    most.

    Args:
      linears: of linears and experts; None leaves them as they are.
      tables: of embedding and head, likewise. Where they are one table (a tied head), its rows are
        rounded on the way in and on the way out.
    """
    found = {}
    for name, about in model_def.declared().items():
        format = tables if about.table else linears
        if about.contracting_axes and format is not None:
            found[name] = format
    return found


def quantised_def(
    model_def: ModelDef, source: str, quantize: str | None, quantize_head: str | None, field: str
) -> ModelDef:
    """Return the model definition of a model that is to be quantised while it is loaded.

    What is stored quantised stays as it is. The options are for the rest. Only a format of the same
    arrays may take the place of another: fp8-dynamic that of fp8.

    Args:
      model_def: of what is stored at `source`.
      field: how the option that names the format of linears is called.

    Raises:
      FieldError: a format is not known or does not run here, or all that it is meant for is quantised
        already.
      CheckpointError: what is stored does not run here.
    """
    asked = {field: quantize, "quantize_head": quantize_head}
    asked = {name: format for name, format in asked.items() if format is not None}
    for name, format in asked.items():
        check_format(name, format)
    stored = dict(model_def.formats)
    of_option = {
        field: formats_for(model_def, linears=quantize),
        "quantize_head": formats_for(model_def, tables=quantize_head),
    }
    chosen: dict[str, str] = {}
    for name, wanted in of_option.items():
        can = {n: f for n, f in wanted.items() if n not in stored or _same_arrays(model_def, n, f)}
        if wanted and not can:
            raise FieldError(
                name,
                lambda format_field: (
                    f"{source} is quantised already, its weights are {model_def.storage}: leave "
                    "out "
                    f"{' and '.join(format_field(option) for option in asked)}, or load the model "
                    "that it "
                    "was made of"
                ),
            )
        chosen |= can
    for format in sorted(set(stored.values())):
        if (lacking := _lacking(format)) is not None:
            needs, works = lacking
            build = f"a build in {works}, or " if works else ""
            later = " with --quantize int8" if works else ""
            raise CheckpointError(
                f"the weights of {source} are {format}, {needs}: take {build}the bfloat16 "
                f"release{later}"
            )
    return model_def.with_formats(stored | chosen)


def _same_arrays(model_def: ModelDef, name: str, format: str) -> bool:
    """Tell whether the stored arrays of a quantised weight are those of another format too."""
    weight = model_def.abstract_weights()[name]
    assert isinstance(weight, QuantisedArray)
    return weight.parts == get_format(format).parts(weight.shape, weight.contracting_axes)


def check_format(field: str, format: str) -> None:
    """Refuse a format that weights cannot be quantised to on load, or not for this device.

    Raises:
      FieldError: naming the option, and what works.
    """
    known = names(on_load=True)
    if format not in known:
        raise FieldError(field, f"is {shown(format)}; expected one of {', '.join(known)}")
    check_device(field, format)


def check_device(field: str, format: str) -> None:
    """Refuse a format that the GPU of this machine cannot multiply.

    Raises:
      FieldError: naming the option, and what works there.
    """
    if (lacking := _lacking(format)) is not None:
        needs, works = lacking
        instead = f"use {works}" if works else "leave the weights unquantised"
        raise FieldError(field, f"is {format}, {needs}: {instead}")


def _lacking(format: str) -> tuple[str, str] | None:
    """Return what a format needs that this GPU lacks, and which formats work; None if it lacks nothing.

    Of formats with variants only the first is named: int4 stands for int4-g64 too.
    """
    least, found = get_format(format).least_capability, capability()
    if found is None or found >= least:
        return None
    works = [name for name in names(on_load=True) if get_format(name).least_capability <= found]
    kind = jax.devices()[0].device_kind
    return (
        f"which needs an NVIDIA GPU of compute capability {least}; {kind} has {found}",
        " or ".join(name for name in works if "-" not in name),
    )
