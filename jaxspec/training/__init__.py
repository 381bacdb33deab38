"""Training of drafters, on texts that their target wrote.

Read `passes`, which runs target and drafter over whole texts as decoding runs them at one place after the
other. Then read `objectives`, which turns what was predicted into a loss.
"""
