"""Train the bundled target and its two drafters: `python -m scripts.train_bundled STAGE`, from the repository's root.

Stages, in order:

    corpus     check the standard library's files against manifest.txt, hold modules out, train the
               tokenizer, encode (CPU, 2 minutes)
    target     train the target on the text (2 minutes on one H200)
    drafter    let the target write texts, train the DFlash drafter on them (1 minute on one H200)
    assistant  the same for the MTP assistant (26 minutes on two CPU cores, `--dtype float32`)
    export     write jaxspec/bundled in the Hugging Face layout (seconds)
    evaluate   bits per byte, repetition and acceptance lengths on the held-out modules (CPU, 2 minutes)

The weights in jaxspec/bundled come from these schedules: target and DFlash drafter on one H200 with jax
0.11.2, the assistant on a CPU with jax 0.10.2.

`corpus` wants the library of the Python version in recipe.py, of any build: run it with that Python, or
name its directory with `--stdlib`. Every stage is seeded, but GPU reductions are not bitwise repeatable.
`--schedule smoke` does a few steps of each, to try the script on a CPU. Needs optax, which flax brings
along.

Read recipe.py, then corpus.py, target.py, drafter.py and assistant.py. The sources and so the held-out prompts are
under the Python Software Foundation's licence.
"""
