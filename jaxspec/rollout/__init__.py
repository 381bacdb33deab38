"""Many prompts in one compiled program, for training and evaluation: params and prompts in, arrays out.

`batch` is what goes in and comes out, `rollout` and `refill` are the functions that programs are compiled of, and
`scoring` computes log-probabilities with gradients. Read `sampler` first.
"""
