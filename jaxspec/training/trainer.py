"""Train a drafter: the state of training, and one update as a pure function.

    trainer = Trainer(pair.target, pair.drafter, TrainingOptions(steps=200))
    state = trainer.init(pair.drafter.params)
    state, metrics = trainer.update(state, pair.target.params, batch)
    params = trainer.params(state)                                    # what a sampler takes

`run.train` calls it for a whole run. A program that trains a policy calls it after its own updates, with the
policy's weights of that time. Masters are float32; passes round them to the dtype of the drafter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.mesh import mesh_left_to_xla
from jaxspec.rollout.scoring import Sequences
from jaxspec.sampling import make_key
from jaxspec.shapes import Array, Bool, Float, Int, Params
from jaxspec.training import passes
from jaxspec.training.objectives import LossWeights, Sums, draw_anchors, loss_of, usual_weights
from jaxspec.training.options import TrainingOptions
from jaxspec.weights.loading import LoadedModel
from jaxspec.weights.model_def import ModelDef
from jaxspec.weights.trees import flat_params

try:
    import optax
except ImportError as error:
    raise ImportError(
        "training needs optax, the extra `train`: pip install 'jaxspec-decoding[train]'"
    ) from error

T = TypeVar("T")


class Batch(struct.PyTreeNode):
    """Texts of an update: M parts of B texts each.

    Attributes:
      answers: the tokens that the target wrote. Drafts are learnt for these.
      features: of the target's pass over these texts, from `Trainer.features`. None: the update runs the target.
    """

    tokens: Int[Array, "M B S"]
    lengths: Int[Array, "M B"]
    answers: Bool[Array, "M B S"]
    features: passes.Features | None = None

    @classmethod
    def of(cls, sequences: Sequences) -> Batch:
        """Return a batch of one part, of texts as `jaxspec.score` takes them.

        Raises:
          ValueError: rows have several texts.
        """
        if sequences.packed:
            raise ValueError("training takes a text a row, not packed rows: Sequences.padded or of")
        real = sequences.texts >= 0
        tokens = jnp.where(real, sequences.tokens, 0)
        lengths = jnp.sum(real, axis=1, dtype=jnp.int32)
        return cls(tokens[None], lengths[None], sequences.generated[None])

    @classmethod
    def padded(
        cls, texts: Sequence[tuple[Sequence[int], Sequence[int]]], width: int, parts: int = 1
    ) -> Batch:
        """Return a batch of prompts and answers, each cut to a width."""
        shape = (len(texts), width)
        tokens, answers = np.zeros(shape, np.int32), np.zeros(shape, bool)
        lengths = np.zeros(len(texts), np.int32)
        for row, (prompt, answer) in enumerate(texts):
            text = [*prompt, *answer][:width]
            tokens[row, : len(text)], lengths[row] = text, len(text)
            answers[row, len(prompt) : len(text)] = True
        return jax.tree.map(jnp.asarray, cls.split(tokens, lengths, answers, parts))

    @classmethod
    def split(
        cls,
        tokens: np.ndarray,
        lengths: np.ndarray,
        answers: np.ndarray,
        parts: int,
        features: passes.Features | None = None,
    ) -> Batch:
        """Return a batch of rows, which `parts` divides. Arrays of the host stay there."""
        arrays: Any = (tokens, lengths, answers, features)
        whole = cls(*arrays)
        return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), whole)


class TrainState(struct.PyTreeNode):
    """The state of training.

    Attributes:
      params: float32 masters of what is trained.
      fixed: the drafter's other weights, such as an embedding of its own.
      step: updates that were made.
      failed: the step whose loss or gradient was not finite; -1: none. Nothing changes from there on.
    """

    params: Params
    fixed: Params
    opt_state: Any
    step: Int[Array, ""]
    failed: Int[Array, ""]


class Metrics(struct.PyTreeNode):
    """Numbers of one update, or of each of several.

    Attributes:
      acceptance_length: see `Sums.acceptance_length`.
      grad_norm: before it is clipped.
    """

    loss: Float[Array, "*U"]
    acceptance_length: Float[Array, "*U"]
    grad_norm: Float[Array, "*U"]
    learning_rate: Float[Array, "*U"]


@dataclass(frozen=True)
class Plan:
    """The static part of an update."""

    target: ModelDef
    drafter: ModelDef
    suppress_tokens: tuple[int, ...]
    options: TrainingOptions
    weights: LossWeights

    def rate(self, step: Int[Array, ""], end: Int[Array, ""]) -> Float[Array, ""]:
        """Return the learning rate of a step.

        Args:
          end: the steps of the run. It is no constant of the program, since a clock may set it.
        """
        at, steps = step.astype(jnp.float32), end.astype(jnp.float32)
        warmup = jnp.minimum(jnp.round(self.options.warmup * steps), steps - 1)
        rise = at / jnp.maximum(warmup, 1)
        done = jnp.clip((at - warmup) / jnp.maximum(steps - warmup, 1), 0, 1)
        fall = (1 + jnp.cos(jnp.pi * done)) / 2
        return self.options.learning_rate * jnp.where(at < warmup, rise, fall)

    def optimizer(self) -> optax.GradientTransformation:
        """Return AdamW at a rate of 1. Norms and scales do not decay."""
        o = self.options

        def decays(params: Any) -> Any:
            return {name: x.ndim > 1 for name, x in params.items()}

        return optax.chain(
            optax.clip_by_global_norm(o.clip),
            optax.scale_by_adam(b2=0.98),
            optax.add_decayed_weights(o.weight_decay, decays),
        )


class Trainer:
    """Trains a drafter for a target.

    Args:
      target: with or without quantised weights. It is never changed.
      drafter: a loaded drafter, or the definition of a new one.
      weights: of the loss; None for the usual ones of this kind of drafter.
      mesh: the devices that updates run on, those of the target's weights. Rows are split over `data`, weights
        over `model`. None: one device.

    Raises:
      ConfigError: the drafter does not fit the target.
      ValueError: drafters of this kind are not trained, or it is quantised, or the mesh does not divide the rows.
    """

    def __init__(
        self,
        target: LoadedModel | ModelDef,
        drafter: LoadedModel | ModelDef,
        options: TrainingOptions = TrainingOptions(),  # noqa: B008
        *,
        weights: LossWeights | None = None,
        mesh: Mesh | None = None,
    ):
        if mesh is not None and options.rows % mesh.shape["data"]:
            raise ValueError(
                f"rows is {options.rows}, which {mesh.shape['data']} parts of a mesh do not divide: give a multiple"
            )
        self.mesh = mesh
        self._on_mesh: dict[Any, Any] = {}
        target_def = target.model_def if isinstance(target, LoadedModel) else target
        drafter_def = drafter.model_def if isinstance(drafter, LoadedModel) else drafter
        check_trainable(drafter_def)
        drafter_def.config.check_fits(target_def.config)
        generation = target.generation if isinstance(target, LoadedModel) else None
        suppressed = generation.suppress_tokens if generation else ()
        self.plan = Plan(
            target_def,
            drafter_def,
            tuple(suppressed),
            options,
            weights or usual_weights(drafter_def.module),
        )

    def init(self, params: Any) -> TrainState:
        """Return the state of training before the first step.

        Args:
          params: the drafter's weights, as `trees.flat_params` takes them. They are copied.
        """
        params = flat_params(params, self.plan.drafter)
        fixed = fixed_weights(self.plan.drafter)
        # A copy, since updates donate the state.
        masters = {n: jnp.array(x, jnp.float32) for n, x in params.items() if n not in fixed}
        others = {n: jnp.array(params[n]) for n in fixed}
        masters = self.place(masters)
        opt_state = self.plan.optimizer().init(masters)
        return self.place(TrainState(masters, others, opt_state, jnp.int32(0), jnp.int32(-1)))

    def place(self, tree: T) -> T:
        """Return a state, or weights by name, on the mesh if there is one."""
        return tree if self.mesh is None else jax.device_put(tree, self._shardings(tree, self.mesh))

    def _shardings(self, tree: Any, mesh: Mesh) -> Any:
        """Return where each array lives: weights and what the optimizer keeps of them by their names."""
        of_weights = self.plan.drafter.shardings(mesh)
        everywhere = NamedSharding(mesh, PartitionSpec())

        def of(path: Any, _: Any) -> NamedSharding:
            return of_weights.get(str(getattr(path[-1], "key", "")), everywhere)

        return jax.tree_util.tree_map_with_path(of, tree)

    def update(
        self,
        state: TrainState,
        target_params: Any,
        batch: Batch | Sequences,
        end: int | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Take a step. The state is donated.

        The places of anchors depend on the options' seed and on the number of the step alone.

        Args:
          end: the step at which the rate is 0; None for the options' steps.
        """
        if isinstance(batch, Sequences):
            batch = Batch.of(batch)
        return self._run(_step, state, target_params, batch, PartitionSpec(None, "data"), end)

    def updates(
        self,
        state: TrainState,
        target_params: Any,
        batches: Batch,
        count: int,
        end: int | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Take several steps in one program, as `update` would one after the other. The state is donated.

        Args:
          batches: with one axis more, of which the first `count` are taken. Their number is compiled for,
            `count` is not.
          end: as of `update`.

        Returns:
          The state, and the numbers of each update; those behind `count` are 0.
        """
        rows = PartitionSpec(None, None, "data")
        return self._run(_steps, state, target_params, batches, rows, end, jnp.int32(count))

    def _run(
        self,
        function: Any,
        state: TrainState,
        target_params: Any,
        batch: Batch,
        rows: Any,
        end: int | None,
        *more: Any,
    ) -> tuple[TrainState, Metrics]:
        target_params = flat_params(target_params, self.plan.target)
        last = jnp.int32(self.plan.options.steps if end is None else end)
        if self.mesh is None:
            return _jitted[function](self.plan, state, target_params, batch, last, *more)
        if function not in self._on_mesh:
            there = self._shardings(state, self.mesh), None
            self._on_mesh[function] = jax.jit(
                function, static_argnums=0, donate_argnums=1, out_shardings=there
            )
        batch = jax.device_put(batch, NamedSharding(self.mesh, rows))
        with jax.set_mesh(self.mesh):
            return self._on_mesh[function](self.plan, state, target_params, batch, last, *more)

    def features(
        self, target_params: Any, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]
    ) -> passes.Features:
        """Run the target over texts, and return what updates would read of it."""
        target_params = flat_params(target_params, self.plan.target)
        if self.mesh is None:
            return _features(self.plan, target_params, tokens, lengths)
        texts = jax.device_put((tokens, lengths), NamedSharding(self.mesh, PartitionSpec("data")))
        with jax.set_mesh(self.mesh):
            return _features(self.plan, target_params, *texts)

    def abstract_features(self) -> passes.Features:
        """Return the shapes and dtypes of the features of one text of one token."""
        ids = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        return jax.eval_shape(
            lambda params, *texts: _features_of(self.plan, params, *texts),
            self.plan.target.abstract_params(),
            *ids,
        )

    def params(self, state: TrainState) -> Params:
        """Return the drafter's weights in its dtype."""
        return full_params(self.plan.drafter, state.params, state.fixed)


def check_trainable(drafter: ModelDef) -> None:
    """Refuse drafters that are not trained.

    Raises:
      ValueError: it is of such a kind, or quantised.
    """
    if not passes.can_train(drafter.module) or "WithHead" in drafter.module.__name__:
        raise ValueError(
            f"{drafter.module.__name__} is not trained; DFlash, DFlash2, DSpark and MTP drafters are, "
            "without a copy of the target's head"
        )
    if drafter.formats:
        raise ValueError("a quantised drafter is not trained; load it without quantising it")


def fixed_weights(drafter: ModelDef) -> tuple[str, ...]:
    """Return the weights that are not trained: ids, and a block drafter's own embedding and head."""
    tables = passes.frozen_tables(drafter)
    return tuple(
        name
        for name, x in drafter.abstract_params().items()
        if name in tables or not jnp.issubdtype(x.dtype, jnp.floating)
    )


def full_params(drafter: ModelDef, params: Params, fixed: Params) -> Params:
    """Join masters and fixed weights, in the order and the dtypes of the model."""
    joined = params | fixed
    return {n: joined[n].astype(x.dtype) for n, x in drafter.abstract_params().items()}


def _step(
    plan: Plan, state: TrainState, target_params: Params, batch: Batch, end: Int[Array, ""]
) -> tuple[TrainState, Metrics]:
    parts = batch.tokens.shape[0]
    keys = jax.random.split(jax.random.fold_in(make_key(plan.options.seed), state.step), parts)
    drawn = jax.vmap(functools.partial(draw_anchors, count=plan.options.anchors))(
        keys, batch.answers
    )

    def sums_of(
        params: Params, fixed: Params, target_params: Params, part: Any
    ) -> tuple[Array, Sums]:
        texts, (anchors, real) = part
        drafter = plan.drafter.bind(full_params(plan.drafter, params, fixed))
        target = plan.target.bind(target_params)
        features = texts.features
        if features is None:
            features = _features_of(plan, target_params, texts.tokens, texts.lengths)
        reading = passes.Reading(target, texts.tokens, features, plan.suppress_tokens)
        at_once = plan.options.anchors_at_once
        sums = loss_of(drafter, reading, texts.answers, anchors, real, plan.weights, at_once)
        return sums.loss, sums

    def gradient_of(
        params: Params, fixed: Params, target_params: Params, batch: Batch, drawn: Any
    ) -> tuple[Params, Sums]:
        def add(carry: Any, part: Any) -> Any:
            done = jax.grad(sums_of, has_aux=True)(params, fixed, target_params, part)
            return jax.tree.map(jnp.add, carry, done), None

        nothing = jax.tree.map(jnp.zeros_like, params), Sums.zero()
        return jax.lax.scan(add, nothing, (batch, drawn))[0]

    run = _by_rows(gradient_of)
    gradient, sums = run(state.params, state.fixed, target_params, batch, drawn)
    gradient = jax.tree.map(lambda g: g / jnp.maximum(sums.weight, 1e-6), gradient)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
    # optax mixes dtypes, which programs may have forbidden.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = plan.optimizer().update(gradient, state.opt_state, state.params)
        rate = plan.rate(state.step, end)
        params = optax.apply_updates(state.params, jax.tree.map(lambda x: -rate * x, updates))
    fine = jnp.isfinite(sums.loss) & jnp.isfinite(norm) & (state.failed < 0)
    new = jax.tree.map(
        lambda a, b: jnp.where(fine, a, b), (params, opt_state), (state.params, state.opt_state)
    )
    failed = jnp.where(fine | (state.failed >= 0), state.failed, state.step)
    metrics = Metrics(sums.mean_loss, sums.acceptance_length, norm, rate)
    state = TrainState(new[0], state.fixed, new[1], state.step + fine.astype(jnp.int32), failed)
    return state, metrics


def _steps(
    plan: Plan,
    state: TrainState,
    target_params: Params,
    batches: Batch,
    end: Int[Array, ""],
    count: Int[Array, ""],
) -> tuple[TrainState, Metrics]:
    """Take `count` steps. Their number is no constant, so that one program takes any."""

    def one(i: Array, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
        batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)
        state, metrics = _step(plan, carry[0], target_params, batch, end)
        return state, jax.tree.map(lambda all, x: all.at[i].set(x), carry[1], metrics)

    nothing = jnp.zeros(len(batches.tokens))
    return jax.lax.fori_loop(0, count, one, (state, Metrics(*[nothing] * 4)))


def _features_of(plan: Plan, target_params: Params, tokens: Array, lengths: Array) -> Any:
    target, drafter = plan.target.bind(target_params), plan.drafter.bind_abstract()
    need = plan.weights.need_target
    return passes.features_of(target, drafter, tokens, lengths, need_target=need)


_jitted = {f: jax.jit(f, static_argnums=0, donate_argnums=1) for f in (_step, _steps)}
_features = jax.jit(_features_of, static_argnums=0)


def _by_rows(gradient_of: Callable[..., Any]) -> Callable[..., Any]:
    """Let each device of a mesh run its rows by itself, where weights are whole. Sums are added up once.

    XLA would add up every weight's gradient each time that some anchors are done.
    """
    mesh = mesh_left_to_xla()
    if mesh is None or mesh.size == 1 or mesh.shape["model"] > 1:
        return gradient_of
    whole, rows = PartitionSpec(), PartitionSpec(None, "data")
    return jax.shard_map(
        lambda *args: jax.lax.psum(gradient_of(*args), "data"),
        in_specs=(whole, whole, whole, rows, rows),
        out_specs=whole,
        check_vma=False,
    )
