"""GPU kernels in Pallas, one folder an operation, each beside the same operation in plain JAX.

- `attention`: few queries over caches, rings and each other.
- `qkv`: norms, rotary embedding and the write to a cache, between a projection and its attention.
- `norms`: a norm, the sum with the residual, and the norms of that, between two products of a
  layer.
- `experts`: a mixture of experts for few tokens.

A folder has the public function with its checks in `__init__.py`, the plain twin in `reference.py`,
and one file a kernel, named after what it is written in: `triton.py`, `mosaic_h512.py` (Mosaic,
head dim 512). `tuning.py` has its tile sizes. `cases.py` has shapes of real models, which tests and
benchmarks share. Beside the folders stands what they share: `dispatch.py` chooses an
implementation, `elementary.py` is what references are made of, `lone_row.py` a workaround,
`triton.py` loads and stores. Nothing here may import `jaxspec`.
"""
