"""Parts that the kernels of several folders share.

- `reference_ops.py`: norm, rotary embedding, activations and products of the references.
- `single_row.py`: a workaround for passes of one row.
- `triton.py`: loads, stores and products of Triton kernels.
- `tiles.py`, `tile_schedule.py`: how a Mosaic kernel cuts a product, and which block of threads
  multiplies which tile.
- `mosaic.py`: the Mosaic kernel of products with codes.
- `mma.py`, `registers.py`: products of few rows by `mma.sync`, and assembly on registers.
- `small_m.py`: the kernel for very few rows.
"""
