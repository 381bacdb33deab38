"""The engine: requests in, tokens out, over a fixed batch of slots that are refilled as rows finish.

Read `Engine.run`. Each round admits waiting requests to free slots (prefill), runs the compiled decode
loop for a few steps, and looks at what came. Shapes are buckets: batch rows and prompt lengths round up to
powers of two, so a handful of programs serves every request; `Engine.num_compilations` counts them.

No row depends on its neighbours, to the last bit. Matrix products of other shapes round otherwise, so the
shapes of all passes that a row takes part in follow from its own prompt's length and what the engine was
made with; who shares them, in which order and when a slot becomes free, changes nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec import decode, memory
from jaxspec import state as states
from jaxspec.drafters.tree import check_tree
from jaxspec.loading import LoadedModel
from jaxspec.models.xla import COMPILER_OPTIONS
from jaxspec.params import Graph
from jaxspec.ranges import PENALTIES, refusal
from jaxspec.records import Drafting, Extras, FieldError, Tree
from jaxspec.sampling import Logprobs, SamplingParams
from jaxspec.shapes import Params
from jaxspec.sharding import fetch, mesh_of, place_rows
from jaxspec.state import Admission, DecodeSpec, DecodeState, LogitsFn, PrefillChunk

PREFILL_CHUNK = 512  # longer prompts are fed in pieces of this many tokens
SMALLEST_PREFILL = 16
# Where there are several rows: few widths, since each is a program to compile, and of each as many rows as have so
# many tokens together. A GPU reads the weights about as long as it computes on them then, and a row that comes
# alone pays for all.
SHARED_WIDTHS = (64, 256)
SHARED_PREFILL = 256
VALUES = ("temperature", "top_k", "top_p", "min_p", *PENALTIES)  # of a row, one number each


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
      prompt_ids: token ids, BOS included where the model wants one.
      temperature: 0 for greedy.
      top_k: 0 for off.
      top_p: in (0, 1]; 1 for off.
      min_p: in [0, 1], relative to the likeliest token; 0 for off.
      repetition_penalty: above 0, on tokens of prompt and output; 1 for off.
      presence_penalty: on tokens of the output; 0 for off.
      frequency_penalty: on each time that a token is in the output; 0 for off.
      logit_bias: what to add to the logits of token ids; -inf bans.
      stop_ids: generation ends with (and keeps) the first of these.
      seed: the run's seed; the request's index is folded in, so equal seeds still differ by row.
      stop_at: called with the tokens so far whenever the loop returns to the host; a number n ends the
        row, keeping its first n tokens. For stop texts.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    stop_at: Callable[[Sequence[int]], int | None] | None = None

    @property
    def penalties(self) -> tuple[str, ...]:
        """Name the penalties that are not off."""
        return tuple(n for n in PENALTIES if getattr(self, n) != getattr(Request, n))


@dataclass(frozen=True)
class Update:
    """A request has more tokens; `token_ids` are all it has so far."""

    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """A request is done, or was refused (`error` says why and nothing was generated).

    `acceptance_lengths` has one number a verify step: the tokens it committed, bonus included, before any
    cut by a stop or the limit. Prefill's token belongs to no step. With an engine that keeps them, `logprobs`
    has one number a token, under the target as it is, and `sampled_logprobs` under the distribution that was
    sampled from: after suppressed tokens, penalties, temperature and filters; 0 in greedy rows. `top_logprobs`
    has the target's best tokens in each one's place, as pairs of id and log-probability, best first.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    finish_reason: Literal["stop", "length"] = "length"
    acceptance_lengths: tuple[int, ...] = ()
    error: str | None = None
    logprobs: tuple[float, ...] | None = None
    sampled_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None


@dataclass
class Timings:
    """Seconds of wall clock, device work waited for; compilation stands apart from the other two."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    compile_s: float = 0.0
    decode_tokens: int = 0  # returned tokens but those of prefill


class Engine:
    """Decodes requests with one target and at most one drafter, on fixed shapes.

    It runs on the mesh that the weights are on.

    Args:
      drafter: None for plain decoding.
      batch_size: slots; rounded up to a power of two, times the mesh's data axis.
      cache_length: positions a slot holds; prompt, new tokens and one step's tokens must fit.
      num_draft_tokens: tokens drafted a step, the anchor not counted; default the drafter's own.
      tree: draft a tree of that many tokens instead of a chain.
      logprobs: keep the log-probability of every token, see `Completion`.
      top_logprobs: and those of so many of the target's best tokens.
      penalties: requests may have penalties.
      num_biases: most tokens that a request's `logit_bias` names.
      steps_per_return: decode steps between returns to the host.
      logits_fn, draft_sampling, verification, synthetic_acceptance: see `DecodeSpec`.

    Raises:
      ConfigError: the drafter does not fit the target.
      ValueError: a number is out of range.
    """

    def __init__(
        self,
        target: LoadedModel,
        drafter: LoadedModel | None,
        *,
        batch_size: int = 1,
        cache_length: int = 1024,
        num_draft_tokens: int | None = None,
        tree: Tree | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
        penalties: bool = False,
        num_biases: int = 0,
        logits_fn: LogitsFn | None = None,
        draft_sampling: bool = False,
        verification: Literal["standard", "block"] = "standard",
        steps_per_return: int = 16,
        synthetic_acceptance: float | None = None,
    ):
        if batch_size < 1 or cache_length < 1 or steps_per_return < 1:
            raise ValueError("batch_size, cache_length and steps_per_return must be 1 or more")
        self.target, self.drafter = target, drafter
        self.spec = make_spec(
            target,
            drafter,
            Drafting(num_draft_tokens, tree, draft_sampling, verification, synthetic_acceptance),
            Extras(penalties, num_biases, logprobs, top_logprobs, logits_fn),
        )
        weights = dict(target=target.params, drafter=drafter.params if drafter else None)
        self.mesh = mesh_of(**weights)
        self.batch_size = self._rows_bucket(batch_size)
        self.cache_length = cache_length
        self.steps_per_return = steps_per_return
        self.target_params: Params = target.params
        self.drafter_params: Params | None = None if drafter is None else drafter.params
        self.timings = Timings()
        self.num_compilations = 0
        self._programs: dict[tuple[Any, ...], Any] = {}

    @classmethod
    def fitting(
        cls,
        target: LoadedModel,
        drafter: LoadedModel | None,
        requests: Sequence[Request],
        *,
        cache_length: int | None = None,
        **options: Any,
    ) -> Engine:
        """Make an engine that just holds these requests, unless `cache_length` says otherwise.

        It has penalties and biases when they do: a program without is quicker. Requests that the model
        itself cannot take have no say in lengths; `check` refuses them later. `options` are those of `Engine`.

        Raises:
          DeviceMemoryError: the devices cannot hold so many rows of that length.
        """
        options.setdefault("penalties", any(r.penalties for r in requests))
        most = max((len(r.logit_bias) for r in requests), default=0)
        options.setdefault("num_biases", bucket(most) if most else 0)
        # The first engine says how many positions a step needs beyond prompt and new tokens.
        engine = cls(target, drafter, cache_length=target.config.max_positions * 2, **options)
        needed = [engine.cache_length_for(r) for r in requests if engine.check(r) is None]
        engine.cache_length = cache_length or _cache_bucket(max(needed, default=1))
        memory.check_fits(engine.spec, engine.batch_size, engine.cache_length, engine.mesh)
        return engine

    def check(self, request: Request) -> FieldError | str | None:
        """Say what is wrong with a request and the way out, or None when it can run."""
        config = self.target.config
        count, most = len(request.prompt_ids), request.max_new_tokens
        if count == 0:
            return "the prompt is empty; give at least one token"
        bad = [i for i in request.prompt_ids if not 0 <= i < config.vocab_size]
        if bad:
            return f"prompt ids {bad[:5]} are outside the vocabulary; expected 0 to {config.vocab_size - 1}"
        if most < 1:
            return FieldError("max_new_tokens", f"is {most}; it must be 1 or more")
        for name in VALUES:
            if wrong := refusal(name, getattr(request, name)):
                return f"{name} {wrong}"
        if request.penalties and not self.spec.extras.penalties:
            name = request.penalties[0]
            value = getattr(request, name)
            return FieldError(name, f"is {value:g}, but the engine was made without penalties=True")
        if error := self._check_biases(request.logit_bias):
            return error
        if count + most > config.max_positions:
            return FieldError(
                "max_new_tokens",
                lambda name: (
                    f"prompt ({count} tokens) + {name('max_new_tokens')} ({most}) needs {count + most} "
                    f"positions; the model has {config.max_positions}"
                ),
            )
        needed = self.cache_length_for(request)
        if needed > self.cache_length:
            return FieldError(
                "cache_length",
                lambda name: (
                    f"cache holds {self.cache_length} positions, but prompt ({count} tokens) + "
                    f"{name('max_new_tokens')} ({most}) + one step ({self.spec.step_tokens}) needs {needed}; "
                    f"pass {name('cache_length', needed)}"
                ),
            )
        return None

    def _check_biases(self, biases: Mapping[int, float]) -> str | None:
        size, most = self.target.config.vocab_size, self.spec.extras.num_biases
        for token, bias in biases.items():
            if not 0 <= token < size:
                return f"logit_bias {token} is outside the vocabulary; expected 0 to {size - 1}"
            if wrong := refusal("bias", bias):
                return f"logit_bias of {token} {wrong}"
        if len(biases) > most:
            return (
                f"logit_bias names {len(biases)} tokens, but the engine was made for {most}; pass "
                f"num_biases={len(biases)}"
            )
        return None

    def cache_length_for(self, request: Request) -> int:
        """Return the positions a request needs in the cache."""
        return len(request.prompt_ids) + request.max_new_tokens + self.spec.step_tokens

    def run(self, requests: Sequence[Request]) -> Iterator[Update | Completion]:
        """Decode all requests, yielding updates as tokens come and one completion for each.

        Completions come as rows finish, not in order. A request that `check` refuses completes at once
        with its error; the others are not touched by it.
        """
        waiting: deque[int] = deque()
        for index, request in enumerate(requests):
            error = self.check(request)
            if error is None:
                waiting.append(index)
            else:
                yield Completion(index, error=str(error))
        num_stop_ids = bucket(max((len(set(r.stop_ids)) for r in requests), default=1), smallest=4)
        slots: list[int | None] = [None] * self.batch_size
        reported = [0] * self.batch_size
        state = self._init_state(num_stop_ids) if waiting else None
        while waiting or any(s is not None for s in slots):
            assert state is not None
            free = [i for i, s in enumerate(slots) if s is None]
            taken = {slot: waiting.popleft() for slot in free[: len(waiting)]}
            if taken:
                for slot, index in taken.items():
                    slots[slot], reported[slot] = index, 0
                new = {slot: requests[index] for slot, index in taken.items()}
                state = self._prefill(self._admit(state, new, taken), new)
            else:
                state = self._decode(state)
            seen = _Seen.fetch(state)
            finished = np.zeros(self.batch_size, bool)
            for slot, index in enumerate(slots):
                if index is None:
                    continue
                tokens = seen.tokens_of(slot)
                stop_at = requests[index].stop_at
                keep = stop_at(tokens) if stop_at and len(tokens) > reported[slot] else None
                if keep is not None:
                    tokens = tokens[:keep]
                done = keep is not None or not seen.active[slot]
                if len(tokens) > reported[slot]:
                    reported[slot] = len(tokens)
                    yield Update(index, tokens)
                if done:
                    stopped = keep is not None or bool(seen.stopped[slot])
                    self.timings.decode_tokens += max(len(tokens) - 1, 0)
                    yield Completion(
                        index,
                        tokens,
                        "stop" if stopped else "length",
                        seen.acceptance_lengths_of(slot),
                        **seen.logprobs_of(slot, len(tokens)),
                    )
                    finished[slot], slots[slot] = True, None
            if (finished & seen.active).any():  # the device still thinks these run
                key = (num_stop_ids,)
                rows = place_rows(finished, self.mesh)
                state = self._call("retire", key, states.retire, state, rows, donate=(0,))

    def _init_state(self, num_stop_ids: int) -> DecodeState:
        return states.init_state(
            self.spec,
            self.batch_size,
            cache_length=self.cache_length,
            num_stop_ids=num_stop_ids,
            cache_dtype=jnp.dtype(self.spec.target.dtype),
            mesh=self.mesh,
        )

    def _rows_bucket(self, count: int) -> int:
        """Round rows up to a power of two for every part of the mesh's data axis."""
        data = self.mesh.shape["data"]
        return data * bucket(-(-count // data))

    def _admit(
        self, state: DecodeState, requests: dict[int, Request], indices: dict[int, int]
    ) -> DecodeState:
        """Give slots to requests, in a program for all slots whoever comes."""
        b = self.batch_size
        nobody = Request((), 0)
        asked = [requests.get(slot, nobody) for slot in range(b)]
        stop_ids = np.full((b, state.stop_ids.shape[1]), -1, np.int32)
        seeds = np.zeros((b, 2), np.uint32)
        for slot, request in requests.items():
            unique = sorted(set(request.stop_ids))
            stop_ids[slot, : len(unique)] = unique
            seeds[slot] = request.seed % 2**32, indices[slot]
        admission = Admission(
            slots=jnp.asarray([slot if slot in requests else b for slot in range(b)], np.int32),
            max_new_tokens=jnp.asarray([r.max_new_tokens for r in asked], np.int32),
            stop_ids=jnp.asarray(stop_ids),
            sampling=self._sampling(asked),
            keys=row_keys(place_rows(seeds, self.mesh)),
        )
        admission = place_rows(admission, self.mesh)
        key = (stop_ids.shape[1],)
        return self._call("admit", key, states.admit, state, admission, donate=(0,))

    def _prefill(self, state: DecodeState, requests: dict[int, Request]) -> DecodeState:
        """Feed the prompts of slots, chunk by chunk; chunks of one shape go together, as many as it has rows."""
        longest = max(len(r.prompt_ids) for r in requests.values())
        for begin in range(0, longest, PREFILL_CHUNK):
            groups: dict[tuple[int, int], list[int]] = {}
            for slot, request in requests.items():
                if left := len(request.prompt_ids[begin:]):
                    groups.setdefault(self._prefill_shape(left), []).append(slot)
            for (rows, width), slots in groups.items():
                for i in range(0, len(slots), rows):
                    prompts = {slot: requests[slot].prompt_ids for slot in slots[i : i + rows]}
                    chunk = place_rows(self._chunk(prompts, begin, rows, width), self.mesh)
                    state = self._model_call("prefill", (rows, width), decode.prefill, state, chunk)
        return state

    def _prefill_shape(self, left: int) -> tuple[int, int]:
        """Return the rows and tokens of the program that reads on where so many tokens of a prompt are left.

        They do not depend on who else is waiting: rows without a prompt are padding.
        """
        if self.batch_size == 1:
            return 1, min(bucket(left, SMALLEST_PREFILL), PREFILL_CHUNK)
        width = min(w for w in (*SHARED_WIDTHS, PREFILL_CHUNK) if w >= min(left, PREFILL_CHUNK))
        return self._rows_bucket(min(self.batch_size, max(1, SHARED_PREFILL // width))), width

    def _chunk(
        self, prompts: Mapping[int, Sequence[int]], begin: int, rows: int, width: int
    ) -> PrefillChunk:
        """Cut a piece out of each slot's prompt; rows that are over point past the last slot."""
        slots = np.full(rows, self.batch_size, np.int32)
        tokens = np.zeros((rows, width), np.int32)
        start, count = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        is_last = np.zeros(rows, bool)
        for row, (slot, prompt) in enumerate(prompts.items()):
            piece = prompt[begin : begin + width]
            slots[row], start[row], count[row] = slot, begin, len(piece)
            tokens[row, : len(piece)] = piece
            is_last[row] = begin + len(piece) == len(prompt)
        return PrefillChunk(
            slots=jnp.asarray(slots),
            tokens=jnp.asarray(tokens),
            start=jnp.asarray(start),
            count=jnp.asarray(count),
            is_last=jnp.asarray(is_last),
        )

    def _sampling(self, requests: Sequence[Request]) -> SamplingParams:
        """Return what requests say of sampling, a row each."""
        values = {name: np.asarray([getattr(r, name) for r in requests]) for name in VALUES}
        values["top_k"] = np.minimum(values["top_k"], self.target.config.vocab_size)
        ids = np.full((len(requests), self.spec.extras.num_biases), -1)
        biases = np.zeros(ids.shape)
        for row, request in enumerate(requests):
            count = len(request.logit_bias)
            ids[row, :count] = list(request.logit_bias)
            biases[row, :count] = list(request.logit_bias.values())
        return self.spec.sampling(len(requests), **values, bias_ids=ids, bias_values=biases)

    def _decode(self, state: DecodeState) -> DecodeState:
        return self._model_call(
            "decode",
            (),
            decode.decode_loop,
            state,
            place_rows(np.int32(self.steps_per_return), self.mesh),
        )

    def _model_call(
        self, phase: Literal["prefill", "decode"], key: tuple[int, ...], function: Any, *args: Any
    ) -> DecodeState:
        """Call a program that takes the spec and both models' weights, and time it."""
        program = self._program(
            phase, key, function, (self.target_params, self.drafter_params, *args), (2,), self.spec
        )
        begin = time.perf_counter()
        state = jax.block_until_ready(program(self.target_params, self.drafter_params, *args))
        seconds = time.perf_counter() - begin
        if phase == "prefill":
            self.timings.prefill_s += seconds
        else:
            self.timings.decode_s += seconds
        return state

    def _call(
        self, name: str, key: tuple[int, ...], function: Any, *args: Any, donate: tuple[int, ...]
    ) -> DecodeState:
        return self._program(name, key, function, args, donate)(*args)

    def _program(
        self,
        name: str,
        key: tuple[int, ...],
        function: Any,
        args: tuple[Any, ...],
        donate: tuple[int, ...],
        spec: DecodeSpec | None = None,
    ) -> Any:
        """Return the compiled program for these shapes; within one engine `key` says which they are."""
        known = (name, *key, args[2].stop_ids.shape[1] if spec else 0)
        if known not in self._programs:
            begin = time.perf_counter()
            self._programs[known] = _compile(function, spec, donate, args, self.mesh)
            self.timings.compile_s += time.perf_counter() - begin
            self.num_compilations += 1
        return self._programs[known]


_compiled: dict[
    Any, Any
] = {}  # programs of all engines of this process, by everything that shapes them


def _compile(
    function: Any,
    spec: DecodeSpec | None,
    donate: tuple[int, ...],
    args: tuple[Any, ...],
    mesh: Mesh,
) -> Any:
    """Compile what takes the arguments, one of them a state to be donated, and returns the next state."""
    leaves, tree = jax.tree.flatten(args)
    shapes = tuple((x.shape, str(x.dtype), x.sharding) for x in leaves)
    key = (function, spec, donate, tree, shapes)
    if key not in _compiled:
        bound = function if spec is None else _with_spec(function, spec)
        (state,) = (args[i] for i in donate)
        jitted = jax.jit(
            bound,
            donate_argnums=donate,
            out_shardings=jax.tree.map(lambda x: x.sharding, state),
            compiler_options=COMPILER_OPTIONS,
        )
        with jax.set_mesh(mesh):
            _compiled[key] = jitted.lower(*args).compile()
    return _compiled[key]


def _with_spec(function: Any, spec: DecodeSpec) -> Any:
    def bound(*args: Any) -> Any:
        return function(spec, *args)

    bound.__name__ = function.__name__
    return bound


@jax.jit
def row_keys(seeds: jax.Array) -> jax.Array:
    """Return a key for each [seed, index] row."""
    return jax.vmap(lambda s: jax.random.fold_in(jax.random.key(s[0]), s[1]))(seeds)


@dataclass(frozen=True)
class _Seen:
    """What the host looks at after each return."""

    active: np.ndarray
    stopped: np.ndarray
    num_tokens: np.ndarray
    tokens: np.ndarray
    num_steps: np.ndarray
    acceptance_lengths: np.ndarray
    logprobs: Logprobs | None

    @classmethod
    def fetch(cls, state: DecodeState) -> _Seen:
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*fetch([getattr(state, name) for name in names]))

    def tokens_of(self, slot: int) -> tuple[int, ...]:
        return tuple(self.tokens[slot, : self.num_tokens[slot]].tolist())

    def acceptance_lengths_of(self, slot: int) -> tuple[int, ...]:
        return tuple(self.acceptance_lengths[slot, : self.num_steps[slot]].tolist())

    def logprobs_of(self, slot: int, count: int) -> dict[str, Any]:
        if self.logprobs is None:
            return {}
        of_slot = jax.tree.map(lambda x: x[slot, :count].tolist(), self.logprobs)
        found = dict(logprobs=tuple(of_slot.target), sampled_logprobs=tuple(of_slot.sampled))
        if of_slot.top_ids is not None:
            best = zip(of_slot.top_ids, of_slot.top_values, strict=True)
            found["top_logprobs"] = tuple(tuple(zip(*row, strict=True)) for row in best)
        return found


def _cache_bucket(length: int) -> int:
    """Round a cache length up to a multiple of 128, or of an eighth of the next power of two.

    Few lengths mean few programs to compile, and at most a quarter of the cache is spare.
    """
    step = max(128, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


def make_spec(
    target: LoadedModel | Graph,
    drafter: LoadedModel | Graph | None,
    drafting: Drafting = Drafting(),
    extras: Extras = Extras(),
) -> DecodeSpec:
    """Return what a pair of models is to do: the checkpoint's suppressed tokens, as many drafts as asked.

    Args:
      drafting: without a number of draft tokens it gets the drafter's own.

    Raises:
      ConfigError: the drafter does not fit the target.
      FieldError: a number is out of range, or options do not fit the models.
    """
    target_graph = target.graph if isinstance(target, LoadedModel) else target
    drafter_graph = drafter.graph if isinstance(drafter, LoadedModel) else drafter
    generation = target.generation if isinstance(target, LoadedModel) else None
    drafts = 0
    if drafter_graph is not None:
        drafter_graph.config.check_fits(target_graph.config)
        drafts = settle_num_draft_tokens(drafter_graph, drafting)
        drafting = dataclasses.replace(drafting, num_draft_tokens=drafts)
    elif drafting.num_draft_tokens or drafting.tree:
        field = "num_draft_tokens" if drafting.num_draft_tokens else "tree"
        raise FieldError(
            field, lambda say: f"{say(field)} was given, but there is no drafter: leave it out"
        )
    tau = drafting.synthetic_acceptance
    if tau is not None and tau > drafts + 1:
        raise FieldError(
            "synthetic_acceptance",
            f"is {tau}; with {drafts} draft tokens it lies between 1 and {drafts + 1}",
        )
    suppress = generation.suppress_tokens if generation else ()
    return DecodeSpec(target_graph, drafter_graph, drafting, suppress, extras)


def settle_num_draft_tokens(drafter: Graph, drafting: Drafting) -> int:
    """Return how many tokens to draft a step: as asked, or the drafter's own number.

    Raises:
      FieldError: the drafter cannot propose so many, or the tree does not allow it.
    """
    model, asked = drafter.bind_abstract(), drafting.num_draft_tokens
    most = model.max_draft_tokens
    if drafting.tree is not None:
        if asked is None:
            raise FieldError(
                "num_draft_tokens",
                lambda say: (
                    f"a tree needs {say('num_draft_tokens')}: how many of its nodes to verify"
                ),
            )
        check_tree(drafting.tree, asked, most)
        return asked
    drafts = model.default_draft_tokens if asked is None else asked
    if not 1 <= drafts <= most:
        raise FieldError(
            "num_draft_tokens", f"is {drafts}; this drafter proposes 1 to {most} tokens a step"
        )
    return drafts


def bucket(n: int, smallest: int = 1) -> int:
    """Round up to a power of two, at least `smallest`."""
    return max(smallest, 1 << (n - 1).bit_length() if n > 1 else 1)
