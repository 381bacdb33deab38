"""GPU kernels in Pallas: one folder per operation, with the same operation in plain JAX.

- `attention`: few queries over caches, rings and each other.
- `qkv`: norms, rotary embedding and the write to a cache, between a projection and its attention.
- `norms`: between two products of a layer, a norm, the sum with the residual, and the norms of
  that sum.
- `experts`: a mixture of experts for few tokens.
- `rounding`: rows as 8-bit floats, with a scale for each row.
- `int8_matmul`: a product with a weight of 8-bit codes (int8, fp8) and a scale for each output.
- `int4_matmul`: a product with a weight of 4-bit codes (int4, mxfp4, nvfp4) and a scale for each
  group of inputs.
- `common`: parts that these share.

In each folder, `__init__.py` has the public function and its checks. `reference.py` has the same
operation in plain JAX. Each kernel has a file named after its language: `triton.py`, or
`mosaic_h512.py` for Mosaic at head dim 512. `tuning.py` has tile sizes.

`dispatch.py` chooses an implementation, for all of them. Nothing here may import `jaxspec`.
"""
