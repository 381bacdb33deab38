"""Rollouts: many prompts in one compiled program, for training and evaluation.

`batch` has the prompts and results, `rollout` and `refill` the functions that programs are compiled
from, and `scoring` computes log-probabilities with gradients. Read `sampler` first.
"""
