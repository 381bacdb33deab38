"""Train the bundled target and its two drafters: `python -m scripts.train_bundled STAGE`, from the repository's root.

Stages, in order:

    corpus     check the standard library's files against manifest.txt, hold modules out, train the
               tokenizer, encode (CPU, 2 minutes)
    target     train the target on the text (2 minutes on one H200)
    refine     teach it not to loop, on text of its own (1 to 2 minutes)
    drafter    let the target write texts, train the DFlash drafter on them (8 minutes)
    assistant  the same for the MTP assistant (8 minutes)
    export     write jaxspec/bundled in the Hugging Face layout (seconds)
    evaluate   bits per byte, repetition and acceptance lengths on the held-out modules (CPU, 2 minutes)

The weights in jaxspec/bundled come from H200s with jax 0.11.2. The target's schedule is the one here. The
drafters had the loss and the numbers of updates of recipe.py, on 292,345 texts: nine of ten with prompts of
64 tokens, the others of up to 512. A loop of its own trained them by parts of `jaxspec.training`; its rate
followed the time. A run by the stages here was not made in full.

`corpus` wants the library of the Python version in recipe.py, of any build: run it with that Python, or
name its directory with `--stdlib`. Every stage is seeded, but GPU reductions are not bitwise repeatable.
`--schedule smoke` does a few steps of each, to try the script on a CPU. Needs optax, which flax brings
along.

Read recipe.py, then corpus.py, target.py, refine.py and drafter.py. The sources and so the
held-out prompts are under the Python Software Foundation's licence.
"""
