"""Parts that the kernels of several folders share.

- `reference_ops.py`: norm, rotary embedding, activations and products of the references.
- `single_row.py`: a workaround for passes of one row.
- `triton.py`: loads, stores and products of Triton kernels.
- `tiles.py`, `tile_schedule.py`: tile sizes of Mosaic kernels, and the tiles of each block of
  threads.
- `mosaic.py`: the Mosaic kernel of products with codes.
- `gated.py`: gate and up with their activation.
- `mma.py`, `registers.py`: products of few rows by `mma.sync`, and assembly on registers.
- `small_m.py`: the kernel for very few rows.
"""
