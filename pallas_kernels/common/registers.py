"""32-bit registers of a thread in Mosaic kernels, and assembly that works on them.

Import it late: older versions of jax lack Mosaic's parts.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector


def words(code: str, results: int, *registers: Any, effects: bool = True) -> list[Any]:
    """Apply assembly to registers of 32 bits.

    Args:
      results: number of registers that it makes.
      effects: whether the assembly is marked as having effects. Without the mark the compiler moves
        the code that makes wgmma's operand behind the start of a wgmma.
    """
    operands = [utils.bitcast(register, i32()) for register in registers]
    asm: Any = code, ",".join(["=r"] * results + ["r"] * len(operands))
    if results == 1:
        return [llvm.inline_asm(i32(), operands, *asm, has_side_effects=effects)]
    struct = llvm.StructType.get_literal([i32()] * results)
    made: Any = llvm.inline_asm(struct, operands, *asm, has_side_effects=effects)
    return [llvm.extractvalue(i32(), made, [i]) for i in range(results)]


def word(number: int) -> Any:
    """Return a constant of 32 bits, given as a number from 0 on."""
    return utils.c(number - (1 << 32) if number >= 1 << 31 else number, i32())


def twice(number: float) -> Any:
    """Return a register that holds a number as bfloat16 twice."""
    bits = int(np.asarray(number, jnp.bfloat16).view(np.uint16))
    return word(bits << 16 | bits)


def four_words(memory: Any, offset: Any) -> list[Any]:
    """Load 16 bytes of shared memory from an offset that is a multiple of 16."""
    loaded = llvm.load(ir.VectorType.get((4,), i32()), at(memory, offset), alignment=16)
    return [vector.extract(loaded, [], [i]) for i in range(4)]


def at(memory: Any, offset: Any) -> Any:
    """Return a pointer that is an offset of bytes further."""
    return utils.getelementptr(memory, [offset], ir.IntegerType.get_signless(8))


def i32() -> Any:
    """Return MLIR's type of a register."""
    return ir.IntegerType.get_signless(32)
