"""Run the algorithm: compiled programs, the shapes they are compiled for, and where their arrays are.

`prefill` says which passes read prompts, `step_output` what the host gets of a step, and `memory` what fits a device.
Read `runtime` first.
"""
