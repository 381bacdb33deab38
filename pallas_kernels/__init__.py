"""GPU kernels in Pallas: one folder per operation, with the same operation in plain JAX.

- `attention`: few queries over caches, rings and each other.
- `qkv`: norms, rotary embedding and the write to a cache, between a projection and its attention.
- `norms`: between two products of a layer, a norm, the sum with the residual, and the norms of
  that sum.
- `experts`: a mixture of experts for few tokens.
- `eight_bits`: a product with a weight of 8-bit codes and a scale for each output.
- `grouped`: a product with a weight of four-bit codes and a scale for each group of inputs.

In each folder, `__init__.py` has the public function and its checks. `reference.py` has the same
operation in plain JAX. Each kernel has a file named after its language: `triton.py`, or
`mosaic_h512.py` for Mosaic at head dim 512. `tuning.py` has tile sizes. `cases.py` has shapes of
real models, which tests and benchmarks share.

The folders share some files. `dispatch.py` chooses an implementation. `elementary.py` has the parts
of the references. `lone_row.py` has a workaround for single rows. `triton.py` has loads, stores and
products for Triton kernels. Nothing here may import `jaxspec`.
"""
