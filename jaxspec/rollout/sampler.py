"""The sampler: decoding as a function of params and prompts, for programs that train or evaluate.

    pair = jaxspec.load()
    sampler = jaxspec.Sampler(pair, max_new_tokens=64)
    result = sampler(pair.target.params, pair.drafter.params, [[2, 17, 5]], Sampling(temperature=1.0), seeds=0)

A `Sampler` has the static part: model definitions, the number of new tokens, program features.
Weights, prompts, sampling values and seeds are arguments: new values compile nothing. Inside a
jitted function of your own the same call traces the same program. Stop texts and streaming need the
host and are refused there.

Every prompt is prefilled once, up to its last token. Then the state is repeated for each sample,
and each sample prefills the last token and goes its own way. With `batch_size` rows take turns in
fewer slots, all inside the program, see `refill`. `engine.Engine` is for requests of many kinds
that come at any time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jaxspec._deprecated import renamed_keywords
from jaxspec.engine.request import num_kept_tokens
from jaxspec.mesh import partition
from jaxspec.options import (
    Drafting,
    FieldError,
    ProgramFeatures,
    Sampling,
    as_record,
    at_least,
)
from jaxspec.rollout.arguments import is_inside_jit, is_traced, make_inputs, pad_inputs, token_ids
from jaxspec.rollout.batch import GenerateResult, Prompts, sampling_params
from jaxspec.rollout.programs import first_rows, inside, on, programs_of, result_of, retire
from jaxspec.rollout.rollout import RolloutInputs, RolloutPlan, row_keys
from jaxspec.runtime import memory
from jaxspec.runtime.runtime import make_spec
from jaxspec.sampling import SamplingParams
from jaxspec.shapes import Params
from jaxspec.state import DecodeSpec
from jaxspec.text.grammars import Grammar
from jaxspec.text.grammars.automaton import Automaton
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.sharding import fetch, mesh_of, on_decoding_mesh, place, place_rows
from jaxspec.weights.trees import KnownParams, accept_params

T = TypeVar("T")
Models = Iterable[Any]
"""A target and its drafter or None, as a `Pair` unpacks."""

StopAt = Callable[[Sequence[int]], int | None]
"""Function of a row's tokens so far. It returns how many to keep, which ends the row, or None to go on."""


class Sampler:
    """Generates from a target and at most one drafter.

    Args:
      target: a pair, as `load` returns it. Or a loaded model, or its definition alone, which
        suppresses nothing and has no stop ids of its own.
      drafter: likewise; None decodes without drafts. A pair brings its own.
      max_new_tokens: most tokens of a row; a call may set less for each row.
      num_samples: samples of each prompt.
      batch_size: slots. A call with more rows starts the next ones as others finish, see `refill`.
        None: every row has a slot.
      stop_ids: generation ends with (and keeps) the first of these; None for the checkpoint's own.
      drafting: how to draft and to verify drafts.
      program_features: what rows may ask for, such as penalties and log-probabilities.
      dtype: "float32" or "bfloat16" to decode in. Each call casts the params first, and holds the
        copy while it runs. None: params must have the dtype of the models.

    Raises:
      ConfigError: the drafter does not fit the target.
      FieldError: a number is out of range, or options do not fit each other.
    """

    @renamed_keywords(extras="program_features")
    def __init__(
        self,
        target: Models | LoadedModel | ModelDef,
        drafter: LoadedModel | ModelDef | None = None,
        *,
        max_new_tokens: int = 64,
        num_samples: int = 1,
        batch_size: int | None = None,
        stop_ids: Sequence[int] | None = None,
        drafting: Drafting | Mapping[str, Any] = Drafting(),
        program_features: ProgramFeatures | Mapping[str, Any] = ProgramFeatures(),
        dtype: str | None = None,
    ):
        for name, value in (
            ("max_new_tokens", max_new_tokens),
            ("num_samples", num_samples),
            ("batch_size", batch_size),
        ):
            if value is not None and (wrong := at_least(1).refusal(value)):
                raise FieldError(name, wrong)
        drafting = as_record(Drafting, "drafting", drafting)
        program_features = as_record(ProgramFeatures, "program_features", program_features)
        if program_features.grammars:
            raise FieldError(
                "grammars",
                "need the host in every step, which a sampler's program does without; give a call tables of "
                "jaxspec.text.grammars.tables.automaton as its grammar, or use an Engine",
            )
        if not isinstance(target, LoadedModel | ModelDef):
            if drafter is not None:
                raise ValueError("the pair has its own drafter; give pair.target to use another")
            target, drafter = cast(tuple[LoadedModel, LoadedModel | None], tuple(target))
        spec = make_spec(target, drafter, drafting, program_features).of_dtype(dtype)
        self.plan = RolloutPlan(spec, max_new_tokens, num_samples, batch_size)
        self.dtype = dtype
        if max_new_tokens >= (limit := self.plan.max_positions):
            raise FieldError(
                "max_new_tokens",
                f"is {max_new_tokens}; the model has {limit} positions, prompt included",
            )
        if stop_ids is None:
            generation = target.generation if isinstance(target, LoadedModel) else None
            stop_ids = generation.eos_token_ids if generation else ()
        self.stop_ids = token_ids("stop_ids", stop_ids, spec.target.config.vocab_size)
        self._programs = programs_of(self.plan)
        self._known = KnownParams()
        self._fitting: set[Any] = set()  # shapes of prompts that fit into memory

    def __repr__(self) -> str:
        """Return one line."""
        slots = f", batch_size={self.plan.batch_size}" if self.plan.batch_size else ""
        return (
            f"Sampler({self.spec.title}, max_new_tokens={self.max_new_tokens}, "
            f"num_samples={self.num_samples}{slots})"
        )

    @property
    def spec(self) -> DecodeSpec:
        """The spec of its programs."""
        return self.plan.spec

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of a row."""
        return self.plan.max_new_tokens

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return self.plan.num_samples

    @property
    def num_compilations(self) -> int:
        """Number of programs that calls have compiled, one for each bucket of rows and of prompt widths.

        Samplers of the same models and options share their programs, and this number.
        """
        return self._programs.num_generate

    def sampling(self, rows: int, **values: ArrayLike | Sequence[Any]) -> SamplingParams:
        """Return sampling parameters for `rows` rows: one value for all of them, or one a row.

        Args:
          values: temperature (0: greedy), top_k (0: off), top_p, min_p; with penalties,
            repetition_penalty, presence_penalty and frequency_penalty; with num_biases, bias_ids
            and bias_values, [rows, N] each, padded with id -1. A bias of -inf bans.

        Raises:
          ValueError: a value is out of range, has another number of rows, or needs a feature that
            this sampler lacks.
        """
        return sampling_params(self.spec, rows, values)

    def __call__(
        self,
        target_params: Any,
        drafter_params: Any,
        prompts: Prompts | ArrayLike | Sequence[Sequence[int]],
        sampling: Sampling | SamplingParams | Mapping[str, Any] | None = None,
        seeds: ArrayLike | Sequence[int] = 0,
        *,
        max_new_tokens: ArrayLike | Sequence[int] | None = None,
        stop_ids: ArrayLike | Sequence[Sequence[int]] | None = None,
        stop_at: StopAt | Sequence[StopAt | None] | None = None,
        grammar: Automaton | Grammar | None = None,
    ) -> GenerateResult:
        """Generate R = B * num_samples rows.

        Args:
          target_params, drafter_params: from `load` or a training step, as `trees.flat_params`
            takes them. They are not donated.
          prompts: padded ids and their lengths; an array without padding; or, outside of jit,
            sequences of ids.
          sampling: of all rows, or a mapping of its fields; or parameters of R rows, see `sampling`. None is greedy.
          seeds: one integer from 0 to 2**32 - 1 or typed key, or R of them. With one for all, row i
            has the key `fold_in(key(seed), i)`, as request i of an engine has. A row draws by its
            key alone.
          max_new_tokens: of each row, instead of the sampler's.
          stop_ids: [R, I] instead of the sampler's, padded with -1.
          stop_at: one for all rows or one a row, for stop texts: `tokenizer.stop_at_text` makes
            one. The host calls it every 16 steps.
          grammar: form of the replies, as tables of `grammars.tables.automaton`, one for all
            prompts or one for each. Its stop ids end rows too. A `Grammar` is refused: it needs the
            host.

        Raises:
          ValueError: params, prompts, sampling or seeds do not fit; every difference in params is
            named.
        """
        target_params, drafter_params = self._accept(target_params, drafter_params)
        arguments = (prompts, sampling, seeds, max_new_tokens, stop_ids, grammar)
        if is_traced((target_params, drafter_params, *arguments)) or is_inside_jit():
            if stop_at is not None:
                raise ValueError(
                    "stop_at needs the host; inside jit use stop_ids, or cut the result"
                )
            self._check_drafter(drafter_params)
            inputs = make_inputs(self.plan, *arguments, default_stop_ids=self.stop_ids)
            return inside(self.plan, target_params, drafter_params, inputs)
        if stop_at is not None:
            *_, result = self.stream(
                target_params,
                drafter_params,
                prompts,
                sampling,
                seeds,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                stop_at=stop_at,
                grammar=grammar,
            )
            return result
        mesh, weights, inputs, rows = self._ready(target_params, drafter_params, arguments)
        result = self._run("generate", mesh, weights, inputs)
        with on(mesh):
            return _without_padding(result, rows)

    def stream(
        self,
        target_params: Any,
        drafter_params: Any,
        prompts: Prompts | ArrayLike | Sequence[Sequence[int]],
        sampling: Sampling | SamplingParams | Mapping[str, Any] | None = None,
        seeds: ArrayLike | Sequence[int] = 0,
        *,
        max_new_tokens: ArrayLike | Sequence[int] | None = None,
        stop_ids: ArrayLike | Sequence[Sequence[int]] | None = None,
        stop_at: StopAt | Sequence[StopAt | None] | None = None,
        grammar: Automaton | Grammar | None = None,
        steps_per_return: int = 16,
    ) -> Iterator[GenerateResult]:
        """Yield the result so far every `steps_per_return` verify steps, and the whole result last.

        Raises:
          ValueError: as in a call; or this is inside of jit.
        """
        target_params, drafter_params = self._accept(target_params, drafter_params)
        arguments = (prompts, sampling, seeds, max_new_tokens, stop_ids, grammar)
        if is_traced((target_params, drafter_params, *arguments)) or is_inside_jit():
            raise ValueError("streaming needs the host; inside jit call the sampler itself")
        if steps_per_return < 1:
            raise ValueError(f"steps_per_return is {steps_per_return}; it must be 1 or more")
        mesh, weights, inputs, rows = self._ready(target_params, drafter_params, arguments)
        if inputs.count is not None:
            raise FieldError(
                "batch_size",
                f"is {self.plan.batch_size}, and the call has {rows} rows: a stream, or stop_at, has all of its "
                "rows at a time; leave batch_size out, or use an Engine",
            )
        stops = [stop_at] * rows if stop_at is None or callable(stop_at) else list(stop_at)
        if len(stops) != rows:
            raise ValueError(
                f"stop_at has {len(stops)} entries; expected one for each of {rows} rows"
            )
        stops += [None] * (len(inputs.max_new_tokens) - rows)  # rows of padding
        lengths = np.full(len(stops), self.max_new_tokens, np.int32)  # where the host ended rows
        ended = np.zeros(len(stops), bool)
        state = self._run("prefill", mesh, weights, inputs)
        steps = _placed(np.int32(steps_per_return), mesh)
        while True:
            with on(mesh):
                result = result_of(self.plan, state, inputs.prompts.past)
            active, tokens, counts = fetch((state.active, result.tokens, result.lengths))
            if any(stops):
                for row, stop in enumerate(stops):
                    if stop is None or ended[row]:
                        continue
                    keep = num_kept_tokens(stop(tokens[row, : counts[row]].tolist()))
                    if keep is not None:
                        lengths[row], ended[row] = min(keep, counts[row]), True
                with on(mesh):
                    over = _placed(jnp.asarray(ended), mesh)
                    state = retire(state, over)
                    result = result.cut(_placed(jnp.asarray(lengths), mesh), over)
            with on(mesh):
                result = _without_padding(result, rows)
            yield result
            if not (active & ~ended).any():
                return
            state = self._run("advance", mesh, weights, state, steps, inputs.grammar)

    def _accept(self, target_params: Any, drafter_params: Any) -> tuple[Any, Any]:
        """Return flat weights, in the sampler's dtype if it has one."""
        accept = functools.partial(accept_params, cast=self.dtype is not None)
        return accept(self.spec.target, target_params), accept(self.spec.drafter, drafter_params)

    def _ready(
        self, target_params: Params, drafter_params: Params | None, arguments: tuple[Any, ...]
    ) -> tuple[Mesh, tuple[Params, Params | None], RolloutInputs, int]:
        """Check a call, and return its mesh, the weights and inputs there, and the number of rows.

        The inputs have rows of padding besides.
        """
        inputs = make_inputs(self.plan, *arguments, default_stop_ids=self.stop_ids)
        mesh, weights = self._check(target_params, drafter_params)
        rows = self.plan.rows(inputs.prompts)
        inputs = pad_inputs(self.plan, inputs, mesh)
        b, t = inputs.prompts.tokens.shape
        if (shape := (b, t, mesh)) not in self._fitting:
            slots = self.plan.rows(inputs.prompts)
            if inputs.count is not None:
                slots, _ = self.plan.slots(mesh.shape["data"])
            memory.check_fits(self.spec, slots, self.plan.cache_length(t), mesh)
            self._fitting.add(shape)
        everywhere = _whole_on(inputs.grammar, mesh)
        inputs = _placed(dataclasses.replace(inputs, grammar=None), mesh)
        inputs = dataclasses.replace(inputs, grammar=everywhere)
        with on(mesh):
            keys = row_keys(inputs.seeds, self.plan.rows(inputs.prompts))
            if mesh.size > 1:  # the same sharding for all kinds of seeds
                keys = place(keys, NamedSharding(mesh, partition(("batch",), keys.shape, mesh)))
        return mesh, weights, dataclasses.replace(inputs, seeds=keys), rows

    def _run(
        self, name: str, mesh: Mesh, weights: tuple[Params, Params | None], *inputs: Any
    ) -> Any:
        """Call a program."""
        program = self._programs.get(name, mesh, self._known.placement, weights, *inputs)
        try:
            return program(*weights, *inputs)
        except TypeError:
            # Weights of other shapes than the program's. `_check` looks at shapes only in the first call.
            self.spec.bind(*weights)
            raise

    def _check(
        self, target_params: Params, drafter_params: Params | None
    ) -> tuple[Mesh, tuple[Params, Params | None]]:
        """Refuse params that do not fit; return their mesh, and the params on that mesh."""
        models = dict(target=self._known.check("target", self.spec.target, target_params))
        self._check_drafter(drafter_params)
        if self.spec.drafter is not None:
            models["drafter"] = self._known.check("drafter", self.spec.drafter, drafter_params)
        mesh = mesh_of(**models)
        if any(on_decoding_mesh(params) is not params for params in models.values()):
            target_params = on_decoding_mesh(target_params)
            drafter_params = None if drafter_params is None else on_decoding_mesh(drafter_params)
        return mesh, (target_params, drafter_params)

    def _check_drafter(self, drafter_params: Params | None) -> None:
        if (self.spec.drafter is None) != (drafter_params is None):
            has, were = ("no", "were") if self.spec.drafter is None else ("a", "were not")
            raise ValueError(f"drafter_params {were} given, but this sampler has {has} drafter")


def _without_padding(result: GenerateResult, rows: int) -> GenerateResult:
    return result if len(result.tokens) == rows else first_rows(result, rows)


def _whole_on(grammar: Automaton | None, mesh: Mesh) -> Automaton | None:
    """Replicate tables on all devices of a mesh."""
    if grammar is None or mesh.size == 1:
        return grammar
    return jax.tree.map(lambda x: place(x, NamedSharding(mesh, PartitionSpec())), grammar)


def _placed(tree: T, mesh: Mesh) -> T:
    """Put values of rows onto the mesh. Programs of one device take them as they are."""
    return tree if mesh.size == 1 else place_rows(tree, mesh)
