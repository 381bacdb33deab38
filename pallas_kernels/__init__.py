"""GPU kernels in Pallas, one folder an operation.

`attention` is over a cache, for few queries; `qkv` stands before it, `norms` between the products of a layer;
`experts` are those of a mixture.

A kernel is a folder with the public function and its checks in `__init__.py`, the same function in plain
JAX in `reference.py`, a Pallas file for each backend it has (`mosaic.py`, `triton.py`), its tile sizes in
`tuning.py`, and in `cases.py` the shapes of real models that its tests and its benchmark share. What kernels
have in common stands beside the folders: `platform.py` where they can run, `triton.py` loads and stores.
Nothing here may import `jaxspec`.
"""
