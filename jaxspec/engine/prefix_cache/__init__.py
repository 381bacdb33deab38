"""The prefix cache: contents of rows after some tokens of their prompts, shared with other rows.

A prompt that begins as an earlier one shares that one's pages. Only the rest is prefilled. Read
`entries` and `store`, then `planner`; `copies` has the programs that copy what cannot be shared.

An *entry* has the contents of a row after its first q tokens. Its parts are of two kinds:

    pages        K/V of all layers, target's and drafter's, 64 tokens each
    a snapshot   what a drafter keeps besides: some kilobytes

The pages are those of the row itself, and of every row that goes on from the entry: each page counts
its holders, and is free without any. Rows and entries have one pool of pages. A row is admitted as
if it shared none, and entries are evicted for it.

**What is copied.** A row writes to no page that another holds. So it gets a copy of a page to which
it will write: of the one that its first new token goes to, if older tokens are in it, and of those
pages of a ring that it will write over. An entry in turn gets a copy of the ring pages that its own
row will write over. All of this is known when a row enters and when an entry is made, because a row
has all its pages from the start. See `pages.sharing_of_entering` and `sharing_of_keeping`.

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
The others wait until the first one has prefilled the common part, and share it.

**Identity.** Entries are found by chained hashes of their pages' tokens, and then their tokens are
compared. A store belongs to one engine, with its models and dtype. Other weights empty it, and rows
that are being prefilled then store nothing. Entries that share a page with a row whose numbers are
not finite are forgotten.

**Invariance.** With `invariant=True` a row goes on only where a pass over its own prompt would have
ended, from an entry that passes of the same widths made. So its numbers are those of a run that
found no prefix, to the last bit. It never rolls back, and its passes are not cut.
"""
