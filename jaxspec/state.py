"""The spec that compiled programs are made for, and the state of a batch of slots that they change.

Read `DecodeSpec`, then `DecodeState`. `init_state` makes empty slots, `admit` gives them to
requests, `commit` writes the tokens of a step, and `retire` ends rows. `decode` has the steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxspec.cache import KVCache, Paging, Tables, clear_rows, with_tables
from jaxspec.drafters.base import AnyDrafter, Draft
from jaxspec.drafters.survival import SurvivalState
from jaxspec.mesh import set_rows
from jaxspec.models.target import Caches, ImageTokens, Target, init_caches
from jaxspec.options import Drafting, FieldError, ProgramFeatures, Tree, whole
from jaxspec.sampling import (
    NO_TOKEN,
    Logprobs,
    SamplingParams,
    TokenCounts,
    logprobs_of,
    make_key,
)
from jaxspec.shapes import Array, Bool, Float, Int, Params, UInt32
from jaxspec.verify import AcceptResult
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import state_shardings

NO_GUIDE = -1
"""In place of the number of a guide: the row has no grammar on the host."""

LogitsFn = Callable[[Float[Array, "B T V"], Int[Array, "B T"]], Float[Array, "B T V"]]
"""`logits_fn(logits, positions)` returns changed logits, in prefill and in every step alike.

The logits are float32, after suppressed tokens, biases and penalties, and before temperature.
`positions` has the position in the text, counted from the prompt's start, of the token that each
row of logits chooses. Logits of one position must not depend on those of another, and rows must not
depend on each other, because most drafts are guesses. At least one token must stay possible and no
logit may be NaN, or the row ends with an error. The function is part of the compiled program:
another one compiles anew.
"""


@dataclass(frozen=True)
class DecodeSpec:
    """The static part of programs: models and options. Without a drafter, decoding is plain.

    Attributes:
      verify_length: the number of drafts that a step verifies, from the first one on; None: all.
        0 is plain decoding that keeps the drafter's state up to date. The shapes of a state do not
        depend on it.
      widths: the numbers of drafts that a step may choose to verify, by `survival`, where
        `verify_length` is None; (): it verifies all. A state for them has counts.
      guided: whether each step asks the host for the tokens that grammars allow. If not, no active
        row may have a grammar on the host. The shapes of a state do not depend on it either.
      vision: the target's vision part; None: prompts have no images.
    """

    target: ModelDef
    drafter: ModelDef | None
    drafting: Drafting = Drafting()
    suppress_tokens: tuple[int, ...] = ()
    program_features: ProgramFeatures = ProgramFeatures()
    verify_length: int | None = None
    widths: tuple[int, ...] = ()
    guided: bool = False
    vision: ModelDef | None = None

    def __post_init__(self) -> None:
        """Refuse options that the models cannot serve.

        Raises:
          FieldError: naming the field.
        """
        vocab_size = self.target.config.vocab_size
        if self.program_features.top_logprobs > vocab_size:
            raise FieldError(
                "top_logprobs",
                f"is {self.program_features.top_logprobs}; the vocabulary has {vocab_size} tokens",
            )
        if self.drafter is None:
            for name, shown in self.drafting.changes_acceptance:
                raise FieldError(
                    name,
                    lambda format_field, shown=shown: (
                        f"{format_field(*shown)} was given, but there is no drafter: leave it out"
                    ),
                )
        elif self.drafting.num_draft_tokens is None:
            raise FieldError("num_draft_tokens", "is not settled; make the spec with make_spec")
        if self.verify_length is not None:
            if self.tree is not None:
                raise FieldError("verify_length", "is for chains; leave the tree out")
            allowed = whole(0, self.num_draft_tokens)
            if wrong := allowed.refusal(self.verify_length):
                raise FieldError("verify_length", wrong)
        if self.widths:
            if self.tree is not None:
                raise FieldError("widths", "are for chains; leave the tree out")
            ascending = tuple(sorted({*self.widths})) == self.widths
            if self.widths[0] < 1 or not ascending or self.widths[-1] != self.num_draft_tokens:
                raise FieldError(
                    "widths",
                    f"are {self.widths}; they must ascend from 1 or more to num_draft_tokens="
                    f"{self.num_draft_tokens}",
                )
        if self.program_features.grammars:
            if self.tree is not None:
                raise FieldError("grammar", "needs drafts that are a chain; leave the tree out")
            if self.drafting.synthetic_acceptance is not None:
                raise FieldError(
                    "grammar",
                    lambda format_field: (
                        f"{format_field('grammar')} says which tokens may follow, and "
                        f"{format_field('synthetic_acceptance')} takes any; leave one out"
                    ),
                )

    @property
    def title(self) -> str:
        """The models in one line."""
        target = f"{self.target.module.__name__} {self.target.dtypes}"
        if self.drafter is None:
            return f"{target}, no drafter"
        return f"{target} + {self.drafter.module.__name__}, {self.num_draft_tokens} draft tokens"

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted in a step, the anchor not counted; 0 without a drafter."""
        return 0 if self.drafter is None else self.drafting.num_draft_tokens or 0

    @property
    def tree(self) -> Tree | None:
        """The shape of drafts; None for a chain."""
        return self.drafting.tree

    @property
    def depth(self) -> int:
        """The most drafts that one step can accept."""
        return self.num_draft_tokens if self.tree is None else self.tree.depth

    @property
    def num_verified(self) -> int:
        """Drafts that one step verifies."""
        return self.num_draft_tokens if self.verify_length is None else self.verify_length

    def verifying(self, length: int | None) -> DecodeSpec:
        """Return a copy with another verify length. Only the program of the loop differs."""
        if length == self.num_draft_tokens and not self.widths:
            length = None  # one name for one program
        return dataclasses.replace(self, verify_length=length)

    def asking(self, guided: bool) -> DecodeSpec:
        """Return a copy that asks guides in every step, or not. Only the loop's program differs."""
        return dataclasses.replace(self, guided=guided)

    @property
    def step_tokens(self) -> int:
        """The most tokens that a step's target pass writes for a row: anchor and drafts."""
        return self.num_draft_tokens + 1

    def of_dtype(self, dtype: str | None) -> DecodeSpec:
        """Return a copy for models with weights of another dtype; None: the dtype they have.

        Raises:
          ValueError: the dtype is neither "float32" nor "bfloat16".
        """
        if dtype is None:
            return self
        drafter = None if self.drafter is None else self.drafter.of_dtype(dtype)
        return dataclasses.replace(self, target=self.target.of_dtype(dtype), drafter=drafter)

    def bind(
        self, target_params: Params, drafter_params: Params | None
    ) -> tuple[Target, AnyDrafter | None]:
        """Return both modules with their weights; None for the drafter if decoding is plain."""
        target = self.target.bind(target_params)
        if self.drafter is None:
            return target, None
        assert drafter_params is not None
        return target, self.drafter.bind(drafter_params)

    def check_slack(self, state: DecodeState) -> None:
        """Refuse a state with too small rings: the rejected tokens of a step would hide live keys.

        Raises:
          ValueError: naming the largest number of draft tokens that this state allows.
        """
        slack = [c.ring_slack for c in state.caches if c is not None and c.ring_slack is not None]
        if self.tree is None and slack and self.step_tokens > min(slack):
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}, a step of {self.step_tokens} "
                f"tokens, but the sliding caches were made for {min(slack)}: pass at most "
                f"num_draft_tokens={min(slack) - 1}, or make the state with this spec"
            )

    def sampling(self, batch: int, **values: ArrayLike) -> SamplingParams:
        """Return `SamplingParams.make` of these values, with the features of this spec."""
        features = self.program_features
        return SamplingParams.make(
            batch, penalties=features.penalties, num_biases=features.num_biases, **values
        )


class DecodeState(struct.PyTreeNode):
    """Everything that changes while decoding, one row a slot; donated from call to call.

    Attributes:
      drafter: the drafter's own state; None without one.
      lengths: positions committed to the caches.
      anchors: the newest token, at position `lengths`.
      stopped: finished by a stop id.
      failed: ended by logits of the target that are not finite, see `sampling.choose`.
      non_finite: the caches may hold numbers that are not finite. `clear` must run before another
        row gets the slot: a key that no query sees has weight 0, and 0 times NaN is NaN.
      tokens: the generated tokens, prefill's first.
      num_steps: verify steps; -1 before the prompt's end, whose step is number 0.
      acceptance_lengths: tokens committed in each verify step, before any cut by a stop or limit.
        Step n is in column n modulo M.
      logprobs: of `tokens`; None if the spec has none.
      counts: of prompt and `tokens`; None if the spec has no penalties.
      stop_ids: padded with -1.
      keys: a typed PRNG key a row.
      guides: the number of each row's `text.grammars.guides.Guide`, or `NO_GUIDE`; None if the spec
        has no grammars.
      automaton: each row's state in an automaton; None without an automaton.
      slots: each row's row in the caches and in the drafter's state, numbered in its part of the batch
        (`mesh.on_each_part`); None: row i has row i.
      survival: past drafts and widths; None if steps do not choose what they verify.
    """

    caches: Caches
    drafter: Any
    lengths: Int[Array, " B"]
    anchors: Int[Array, " B"]
    active: Bool[Array, " B"]
    stopped: Bool[Array, " B"]
    failed: Bool[Array, " B"]
    non_finite: Bool[Array, " B"]
    tokens: Int[Array, "B M"]
    num_tokens: Int[Array, " B"]
    num_steps: Int[Array, " B"]
    acceptance_lengths: Int[Array, "B M"]
    logprobs: Logprobs | None
    counts: TokenCounts | None
    max_new_tokens: Int[Array, " B"]
    stop_ids: Int[Array, "B I"]
    sampling: SamplingParams
    keys: Array
    guides: Int[Array, " B"] | None = None
    automaton: Int[Array, " B"] | None = None
    slots: Int[Array, " B"] | None = None
    survival: SurvivalState | None = None

    @property
    def active_lengths(self) -> Int[Array, " B"]:
        """The positions that a step of each row sees; 0 where the row is not active."""
        return jnp.where(self.active, self.lengths, 0)

    @property
    def small(self) -> DecodeState:
        """The state without caches and the drafter's state, which are most of its arrays."""
        return dataclasses.replace(self, caches=(), drafter=None)

    def with_small(self, small: DecodeState) -> DecodeState:
        """Return `small` with the caches and the drafter's state of this state."""
        return dataclasses.replace(small, caches=self.caches, drafter=self.drafter)

    def with_tables(self, tables: Tables | None) -> DecodeState:
        """Return the state of a pass over rows with these pages, see `cache.with_tables`."""
        if tables is None:
            return self
        caches, drafter = with_tables((self.caches, self.drafter), tables)
        return dataclasses.replace(self, caches=caches, drafter=drafter)

    def without_tables(self) -> DecodeState:
        """Return the state with no pages in its caches, as it is between programs."""
        caches, drafter = with_tables((self.caches, self.drafter), None)
        return dataclasses.replace(self, caches=caches, drafter=drafter)


class PrefillChunk(struct.PyTreeNode):
    """Prompt tokens for some slots. A row past its end has count 0, and slot B is none."""

    slots: Int[Array, " b"]  # of the row's part of the batch, see `mesh.on_each_part`
    tokens: Int[Array, "b T"]
    start: Int[Array, " b"]
    count: Int[Array, " b"]
    is_last: Bool[Array, " b"]  # the prompt ends in this chunk
    masks: UInt32[Array, "b words"] | None = None  # of the first token, with guides
    images: ImageTokens | None = None


class Admission(struct.PyTreeNode):
    """The requests that take over some slots, before their prefill.

    Attributes:
      slots: numbered in the part of the batch that has the row of the request, see `mesh.on_each_part`.
      seeds: a seed and a sample number for each row, see `row_keys`.
    """

    slots: Int[Array, " b"]
    max_new_tokens: Int[Array, " b"]
    stop_ids: Int[Array, "b I"]
    sampling: SamplingParams
    seeds: UInt32[Array, "b 2"]
    guides: Int[Array, " b"] | None = None


def row_keys(seeds: UInt32[Array, "b 2"]) -> Array:
    """Return the key of each row, from its seed and its sample number."""
    return jax.vmap(lambda s: jax.random.fold_in(make_key(s[0]), s[1]))(seeds)


def init_state(
    spec: DecodeSpec,
    batch: int,
    *,
    cache_length: int,
    num_stop_ids: int,
    cache_dtype: jnp.dtype,
    mesh: Mesh | None = None,
    paging: Paging | None = None,
) -> DecodeState:
    """Make a state of empty, inactive slots. Each array has its own buffer, which can be donated.

    Args:
      cache_length: positions a slot can hold: prompt, new tokens and one step's tokens.
      cache_dtype: of the target's keys and values. The drafter's have the drafter's dtype.
      mesh: the devices, see `sharding.state_shardings`; None: the default device.
      paging: the pages of the caches; None: one a slot. Programs then take tables, see
        `cache.with_tables`.
    """
    sizes = (spec, batch, cache_length, num_stop_ids, cache_dtype)
    if mesh is None:
        return _empty_state(*sizes, paging)
    return state_maker(*sizes, mesh, paging)()


def state_maker(
    spec: DecodeSpec,
    batch: int,
    cache_length: int,
    num_stop_ids: int,
    cache_dtype: jnp.dtype,
    mesh: Mesh,
    paging: Paging | None = None,
) -> Callable[[], DecodeState]:
    """Return a program that makes an empty state on a mesh. Arguments are as in `init_state`."""

    def make() -> DecodeState:
        return _empty_state(spec, batch, cache_length, num_stop_ids, cache_dtype, paging)

    return jax.jit(make, out_shardings=state_shardings(jax.eval_shape(make), mesh))


@functools.partial(jax.jit, static_argnums=range(6))
def _empty_state(
    spec: DecodeSpec,
    batch: int,
    cache_length: int,
    num_stop_ids: int,
    cache_dtype: jnp.dtype,
    paging: Paging | None,
) -> DecodeState:
    zeros = jnp.zeros(batch, jnp.int32)
    drafter_state = logprobs = counts = None
    if spec.program_features.logprobs:
        none = jnp.zeros((batch, cache_length), jnp.float32)
        logprobs = Logprobs(none, none)
        if k := spec.program_features.top_logprobs:
            values = jnp.zeros((batch, cache_length, k), jnp.float32)
            logprobs = Logprobs(none, none, values.astype(jnp.int32), values)
    if spec.program_features.penalties:
        output = jnp.zeros((batch, spec.target.config.vocab_size), jnp.int32)
        counts = TokenCounts(output.astype(bool), output)
    if spec.drafter is not None:
        drafter = spec.drafter.bind_abstract()
        options: dict[str, Any] = {} if paging is None else dict(paging=paging)
        drafter_state = drafter.init_state(
            batch, cache_length=cache_length, dtype=spec.drafter.dtype, **options
        )
    return DecodeState(
        caches=init_caches(
            spec.target.config,
            batch,
            cache_length=cache_length,
            slack=spec.step_tokens,
            dtype=cache_dtype,
            paging=paging,
        ),
        drafter=drafter_state,
        lengths=zeros,
        anchors=zeros,
        active=zeros.astype(bool),
        stopped=zeros.astype(bool),
        failed=zeros.astype(bool),
        non_finite=zeros.astype(bool),
        tokens=jnp.zeros((batch, cache_length), jnp.int32),
        num_tokens=zeros,
        num_steps=zeros - 1,
        acceptance_lengths=jnp.zeros((batch, cache_length), jnp.int32),
        logprobs=logprobs,
        counts=counts,
        max_new_tokens=zeros,
        stop_ids=jnp.full((batch, num_stop_ids), -1, jnp.int32),
        sampling=spec.sampling(batch),
        keys=jax.random.split(make_key(0), batch),
        guides=zeros + NO_GUIDE if spec.program_features.grammars else None,
        survival=(
            SurvivalState.empty(batch, spec.num_draft_tokens, cache_length, spec.widths)
            if spec.widths
            else None
        ),
    )


def admit(state: DecodeState, new: Admission) -> DecodeState:
    """Put new requests into slots. Keys and values of earlier requests are never read again."""
    b = new.slots.shape[0]
    zeros, no = jnp.zeros(b, jnp.int32), jnp.zeros(b, bool)
    rows = dict(
        lengths=zeros,
        anchors=zeros,
        num_tokens=zeros,
        num_steps=zeros - 1,
        active=no,
        stopped=no,
        failed=no,
        max_new_tokens=new.max_new_tokens,
        stop_ids=new.stop_ids,
        keys=row_keys(new.seeds),
        guides=new.guides,
        counts=jax.tree.map(lambda x: jnp.zeros((b, *x.shape[1:]), x.dtype), state.counts),
        sampling=new.sampling,
    )
    before = {name: getattr(state, name) for name in rows}
    return dataclasses.replace(state, **set_rows(before, new.slots, rows))


def commit(
    spec: DecodeSpec,
    state: DecodeState,
    draft: Draft,
    logits: Float[Array, "B T V"],
    adjusted: Float[Array, "B T V"],
    result: AcceptResult,
) -> DecodeState:
    """Write accepted drafts and bonus token of active rows, up to a stop id or the row's limit.

    Statistics count the whole step, cut or not. Prefill's step, number 0, is not counted. A row
    that stops or is full becomes inactive. Its length is then past its emitted tokens, and nothing
    reads it. A row whose target logits are not finite fails: it gets no bonus token and becomes
    inactive, as in plain decoding.

    Args:
      logits: the target's, a row for each token that may be emitted. Row t decided on draft t.
      adjusted: the same logits after `adjust` and masks.
    """
    tokens = draft.along(result.path)
    if result.path is not None:
        rows = result.path[:, :, None]
        logits, adjusted = (jnp.take_along_axis(x, rows, axis=1) for x in (logits, adjusted))
    b, t = tokens.shape[0], tokens.shape[1] + 1
    nowhere = state.tokens.shape[1]  # a column past the last, where writes are dropped
    offset = jnp.arange(t, dtype=jnp.int32)[None, :]
    padded = jnp.concatenate([tokens, jnp.zeros((b, 1), tokens.dtype)], axis=1)
    new = jnp.where(offset < result.accepted[:, None], padded, result.bonus[:, None])
    fails = result.bonus == NO_TOKEN
    num_new = result.accepted + (~fails).astype(jnp.int32)
    valid = (offset < num_new[:, None]) & state.active[:, None]
    is_stop = jnp.any(new[:, :, None] == state.stop_ids[:, None, :], axis=-1) & valid
    stops_before = jnp.cumsum(is_stop, axis=1, dtype=jnp.int32) - is_stop.astype(jnp.int32)
    left = (state.max_new_tokens - state.num_tokens)[:, None]
    kept = valid & (stops_before == 0) & (offset < left)
    columns = jnp.where(kept, state.num_tokens[:, None] + offset, nowhere)
    # The steps of a continued rollout count from its first call on, so the number has no bound.
    counted = state.active & (state.num_steps >= 0)
    step_column = jnp.where(counted, state.num_steps % nowhere, nowhere)
    num_tokens = state.num_tokens + jnp.sum(kept, axis=1, dtype=jnp.int32)
    logprobs, counts = state.logprobs, state.counts
    if logprobs is not None:
        sampling = state.sampling.only(state.active)
        of_new = logprobs_of(
            new, logits, adjusted, sampling, top=spec.program_features.top_logprobs
        )
        logprobs = jax.tree.map(lambda old, x: _set_columns(old, columns, x), logprobs, of_new)
    if counts is not None:
        counts = counts.with_output(new, kept)
    survival = state.survival
    if survival is not None:
        drafts = jnp.full((b, 1), t - 1, jnp.int32) if draft.limit is None else draft.limit[:, None]
        verified = _set_columns(survival.verified, step_column[:, None], drafts)
        survival = survival.replace(verified=verified)
    stopped = state.stopped | jnp.any(is_stop & kept, axis=1)
    assert result.finite is not None
    goes_on = state.active & ~stopped & (num_tokens < state.max_new_tokens)
    return dataclasses.replace(
        state,
        lengths=state.lengths + jnp.where(state.active, result.accepted + 1, 0),
        anchors=jnp.where(state.active & ~fails, result.bonus, state.anchors),
        tokens=_set_columns(state.tokens, columns, new),
        logprobs=logprobs,
        counts=counts,
        num_tokens=num_tokens,
        num_steps=state.num_steps + state.active.astype(jnp.int32),
        acceptance_lengths=_set_columns(
            state.acceptance_lengths, step_column[:, None], num_new[:, None]
        ),
        stopped=stopped,
        failed=state.failed | (goes_on & fails),
        non_finite=state.non_finite | (state.active & ~result.finite),
        survival=survival,
        active=goes_on & ~fails,
    )


def _set_columns(old: Array, columns: Int[Array, "B T"], values: Array) -> Array:
    """Write columns row by row, so that rows stay on their devices. Drop columns past the end."""
    return jax.vmap(lambda row, at, value: row.at[at].set(value, mode="drop"))(old, columns, values)


def retire(state: DecodeState, finished: Bool[Array, " B"]) -> DecodeState:
    """Deactivate rows that the host has finished, for example at a stop text."""
    return dataclasses.replace(state, active=state.active & ~finished)


def clear(
    state: DecodeState, slots: Bool[Array, " B"], tables: Tables | None = None
) -> DecodeState:
    """Zero the caches and the drafter's state of slots with `non_finite`.

    Args:
      tables: the pages of all slots, where a slot has several.
    """

    def zeros(x: KVCache | Array) -> KVCache | Array:
        if isinstance(x, KVCache):
            return clear_rows(x, slots, tables)
        return jnp.where(slots.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros((), x.dtype), x)

    arrays = (state.caches, state.drafter)
    caches, drafter = jax.tree.map(zeros, arrays, is_leaf=lambda x: isinstance(x, KVCache))
    return dataclasses.replace(
        state, caches=caches, drafter=drafter, non_finite=state.non_finite & ~slots
    )
