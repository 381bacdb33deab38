"""A quantised copy of the target's head, which drafts alone are made with.

A DFlash drafter borrows the target's head, so a step reads that table twice: to draft and to verify.
A copy in 8 or 4 bits is fewer bytes to draft with. The target verifies with its own head. So the
copy changes which drafts are accepted, and no token of the output.

Read `with_draft_head`. The copy is made when a pair is loaded. It is never stored.
"""

from __future__ import annotations

import dataclasses

import jax

from checkpoints_convert.errors import CheckpointError
from jaxspec.options import FieldError
from jaxspec.quantised import get_format
from jaxspec.quantised.choice import check_format
from jaxspec.registry import family_of
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.memory import check_weights_fit
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import mesh_of

FIELD = "quantize_draft_head"
HEAD = "head"  # what drafters call the copy


def with_draft_head(drafter: LoadedModel, target: LoadedModel, format: str) -> LoadedModel:
    """Return a drafter that drafts with a copy of the target's head.

    The copy lies on the devices as the target's table does. It is made slice by slice, and the
    target keeps its table. Of a table that is quantised already it is made from what that stands for.

    Args:
      format: of the copy, such as "int8".

    Raises:
      ConfigError: the drafter does not fit the target.
      DeviceMemoryError: the devices have no room for the copy.
      FieldError: as `model_def_with_head`.
    """
    drafter.config.check_fits(target.config)
    model_def = model_def_with_head(drafter.model_def, target.model_def, format)
    assert target.model_def.head is not None
    table = target.params[target.model_def.head]
    if isinstance(jax.tree.leaves(table)[0], jax.ShapeDtypeStruct):  # loaded without weights
        shapes = model_def.placed_shapes(mesh_of(target=target.params))
        return dataclasses.replace(drafter, model_def=model_def, params=shapes)
    check_weights_fit(model_def, mesh_of(target=target.params), target.model_def)
    copy = model_def.pack(HEAD, table)
    return dataclasses.replace(drafter, model_def=model_def, params={**drafter.params, HEAD: copy})


def model_def_with_head(drafter: ModelDef, target: ModelDef, format: str) -> ModelDef:
    """Return the model definition of a drafter that drafts with a copy of the target's head.

    Raises:
      FieldError: as `check_borrows` and `check_differs`; or the target's head is not known.
    """
    check_borrows(drafter, format)
    if target.head is None:
        raise FieldError(
            FIELD, f"was given, but {target.module.__name__} names no table as its head"
        )
    check_differs(format, dict(target.formats).get(target.head))
    with_head = family_of(drafter.config).with_head(drafter.config)
    assert with_head is not None
    model_def = dataclasses.replace(drafter, module=with_head)
    return model_def.with_formats({**dict(drafter.formats), HEAD: format})


def check_borrows(drafter: ModelDef | None, format: str) -> None:
    """Refuse what no copy of any target's head can be made for.

    Args:
      drafter: None where there is none.

    Raises:
      FieldError: the format is not known or does not run here, there is no drafter, or it does not
        borrow the target's head.
    """
    check_format(FIELD, format)
    if drafter is None:
        raise FieldError(FIELD, "was given, but there is no drafter: leave it out")
    family = family_of(drafter.config)
    if family.with_head(drafter.config) is None:
        raise FieldError(
            FIELD,
            lambda format_field: (
                f"{format_field(FIELD)} is for drafters that borrow the target's head, and this one, "
                f"{family.title}, does "
                f"not: leave it out; {format_field('quantize_drafter')} quantises a head of the "
                "drafter's own"
            ),
        )


def check_differs(format: str, stored: str | None) -> None:
    """Refuse a copy that would make the same drafts as the target's head.

    Args:
      stored: the format of the target's head; None where it is not quantised.

    Raises:
      FieldError: both have one format, and it rounds weights only.
    """
    if format == stored and not get_format(format).rounds_activations:
        raise FieldError(
            FIELD,
            f"is {format}, and the target's head is {stored} already, which the drafter borrows as "
            "it is: "
            "leave this out, or choose another format",
        )


def refuse_copy(model: LoadedModel) -> None:
    """Refuse to write a drafter with a copy of the target's head.

    Raises:
      CheckpointError: it has one.
    """
    with_head = family_of(model.config).with_head(model.config)
    if with_head is not None and model.model_def.module is with_head:
        raise CheckpointError(
            f"{model.source} was loaded with quantize_draft_head: it holds a copy of its target's "
            "head, "
            "which no checkpoint of a drafter has. Load it without that, and save it then"
        )
