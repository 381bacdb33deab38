"""Prefixes that were read once and are not read again: what a row holds after some tokens, kept for other rows.

A prompt that begins as an earlier one gets its row's caches by a copy. Only the rest is read. Read `entries` and
`store`, then `reading`; `pool` has the arrays and the programs that copy them.

An *entry* is what a row holds after its first q tokens. Its parts are of two kinds:

    blocks       K/V of full layers, target's and drafter's, for 128 tokens each. Entries that begin alike share them.
    a snapshot   all else of a row: rings, which hold the newest tokens only, and a drafter's other state.

A snapshot is worth nothing without its blocks, nor they without it. So an entry has them all, and is evicted as a
whole. All arrays live in a pool of fixed shapes, which is allocated once and written in place. The pool is split
so that each snapshot has blocks for half a slot.

**Where entries are made.** At the end of each prompt; where passes over a prompt end; and where two prompts part. The
last one is known when the second prompt comes: the pass over it is cut there. Only prompt tokens are stored, since
they are committed, and a pass that only read them was rolled back nowhere.

**Where a row goes on.** A ring of a window and some slack still serves a row that is a few tokens shorter, as after
rejected drafts. So an entry of q tokens serves every prompt that agrees with its first p, for q - slack <= p <= q. That
is why a prompt that comes again reads one token alone, and why a chat template may render the end of a turn in
another way. The row's rings then still have the longer entry's positions, which took the places of older ones. So
its own entry remembers how far they reach, and serves prompts that agree with its first p for reach - slack <= p.
The last token of a prompt is always read: the first token's logits come of it, and MTP's state.

**Who goes first.** The least recently used entry is evicted first. But entries where passes end by chance, which
nobody used yet, go before all others: else one long prompt would evict every conversation. With host memory, an
evicted entry moves there, and back when a prompt hits it.

**Who waits.** Prompts that come together with a common beginning are read one after the other: the others wait until
the first one has read what they share, and copy it.

**Identity.** Entries are found by chained hashes of their blocks, and then their tokens are compared. A store
belongs to one engine, with its models and dtype. Other weights empty it, and rows that were being read then store
nothing.

**Invariance.** With `invariant=True` a row goes on only where a pass over its own prompt would have ended, from an
entry that passes of the same widths made. So its numbers are those of a cold run, to the last bit. It never rolls
back, and its passes are not cut.
"""
