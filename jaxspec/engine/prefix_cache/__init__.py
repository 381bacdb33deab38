"""The prefix cache: contents of rows after some tokens of their prompts, stored for other rows.

A prompt that begins as an earlier one gets its row's caches by a copy. Only the rest is prefilled.
Read `entries` and `store`, then `planner`; `pool` has the arrays and the programs that copy them.

An *entry* has the contents of a row after its first q tokens. Its parts are of two kinds:

    blocks       K/V of full layers, target's and drafter's, for 128 tokens each. Entries that begin alike share them.
    a snapshot   all else of a row: rings, which hold the newest tokens only, and a drafter's other
    state.

A snapshot is useless without its blocks, and blocks without a snapshot. So an entry has all of
them, and is evicted as a whole. All arrays live in a pool of fixed shapes, which is allocated once
and written in place. The pool is split so that each snapshot has blocks for half a slot.

**Where entries are made.** At the end of each prompt; where passes over a prompt end; and where two
prompts part. The last point is known when the second prompt comes. Its pass is cut there. Only
prompt tokens are stored. They are committed, and no pass over them was ever rolled back.

**Where a row goes on.** A ring of a window and some slack still serves a row that is a few tokens
shorter, as after rejected drafts. So an entry of q tokens serves every prompt that agrees with its
first p, for q - slack <= p <= q. That is why a repeated prompt prefills one token alone, and why a
chat template may render the end of a turn differently. The row's rings still have the longer
entry's positions, in place of older ones. So the row's own entry remembers their reach, and serves
prompts that agree with its first p for reach - slack <= p. The last token of a prompt is always
prefilled: it makes the first token's logits, and MTP's state.

**Eviction.** The least recently used entry is evicted first. But unused entries where passes ended
by chance go before all others: else one long prompt would evict every conversation. With host
memory, an evicted entry moves there, and back when a prompt hits it.

**Waiting.** Prompts that come together with a common beginning are prefilled one after the other.
The others wait until the first one has prefilled the common part, and copy it.

**Identity.** Entries are found by chained hashes of their blocks, and then their tokens are
compared. A store belongs to one engine, with its models and dtype. Other weights empty it, and rows
that are being prefilled then store nothing.

**Invariance.** With `invariant=True` a row goes on only where a pass over its own prompt would have
ended, from an entry that passes of the same widths made. So its numbers are those of a run without
the cache, to the last bit. It never rolls back, and its passes are not cut.
"""
