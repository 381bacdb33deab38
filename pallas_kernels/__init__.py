"""GPU kernels in Pallas, one folder an operation. No kernel has landed yet: attention and experts run as XLA.

A kernel will be a folder with the public function and its checks in `__init__.py`, the same function in
plain JAX in `reference.py`, a Pallas file for each backend (`mosaic.py`, `triton.py`), and in `cases.py` the
shapes of real models that its tests and its benchmark share. Nothing here may import `jaxspec`.
"""
