"""Train the bundled pair: `python -m scripts.train_bundled STAGE`, from the repository's root.

Stages, in order, and what they take on one H200 (jax 0.11.2) or on two CPU cores:

    corpus     check the standard library's files against manifest.txt, hold modules out, train the
               tokenizer, encode (CPU, 2 minutes)
    target     train the target with the drafter beside it, then against repetition
    drafter    let the target write texts, train the drafter on them
    export     write jaxspec/bundled in the Hugging Face layout (seconds)
    evaluate   bits per byte, repetition and acceptance lengths on the held-out modules

On one H200 the target's full schedule took 410 to 475 s. The drafter's full schedule has not been run.
The weights in jaxspec/bundled are not from these schedules: they come from a brief first training without
the joint loss and without the steps against repetition (revision 46322e3, schedule "brief", 120 s and
61 s). Those steps are not good enough yet: they cut repetition, but in three runs of four the greedy text
fell into stray bytes.

`corpus` wants the library of the Python version in recipe.py, of any build: run it with that Python, or
name its directory with `--stdlib`. Every stage is seeded, but GPU reductions are not bitwise repeatable. `--schedule smoke` does a few steps of each, to
try the script on a CPU. Needs optax besides jaxspec's own dependencies, which flax brings along.

Read recipe.py, then corpus.py, target.py and drafter.py. The sources and so the held-out prompts are
under the Python Software Foundation's licence.
"""
