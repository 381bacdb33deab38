"""Load a pair and generate: the few lines that most programs need.

    pair = jaxspec.load()                                  # the bundled pair
    print(pair.generate("def main():", max_new_tokens=64).text)

Read `Pair`. `engine.Engine` takes requests while others are decoded. `sampler.Sampler` is decoding as a function,
for programs that train, also inside a jitted function of your own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Reason, Request, Update
from jaxspec.options import Drafting, FieldError, Sampling, as_record, at_least, near_names
from jaxspec.rollout.batch import check_ids, is_conversation, is_one, is_sequence
from jaxspec.runtime.jax_settings import check_devices, check_jax_settings
from jaxspec.runtime.prefill import bucket
from jaxspec.runtime.runtime import Programs
from jaxspec.text.grammars import Grammar, GrammarTokens
from jaxspec.text.image_prompts import EncodedPrompt, encode_conversation
from jaxspec.tokenizer import (
    TextStream,
    Tokenizer,
    TokenizerError,
    completed_text,
    refuse_empty,
    stop_at_text,
)
from jaxspec.weights.draft_head import check_borrows, check_differs, with_draft_head
from jaxspec.weights.loading import (
    CheckpointError,
    LoadedModel,
    default_dtype,
    load_drafter,
    load_target,
)

BUNDLED = Path(__file__).parent / "bundled"
BUNDLED_DRAFTERS = ("dflash", "mtp", "ngram")
MOST_SLOTS = 8  # of a batch, unless asked for
STREAMING_STEPS = 4  # decode steps between pieces of text

Messages = Sequence[Mapping[str, Any]]
"""A conversation: {"role": ..., "content": ...} each."""

Prompt = str | Messages | Sequence[int] | np.ndarray | jax.Array
"""One prompt: text, a conversation, or token ids."""


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
      prompt: as the model reads it, chat template included. None where the checkpoint has no tokenizer.
      text: of the new tokens, cut before a stop text. None without a tokenizer.
      finish_reason: "stop" for an end-of-sequence id or a stop text, "length" for the limit, "error" where the
        target's logits were not finite: the tokens are those before, and `error` says where.
      acceptance_lengths: one number a verify step, the tokens it committed; prefill's token belongs to none.
        Empty after an error.
      logprobs, sampled_logprobs, top_logprobs: of each token, where `Sampling` asks, see `engine.request.Completion`.
    """

    prompt: str | None
    prompt_ids: tuple[int, ...]
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: Reason
    acceptance_lengths: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    sampled_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    error: str | None = None

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a verify step; 1 where there was none."""
        lengths = self.acceptance_lengths
        return sum(lengths) / len(lengths) if lengths else 1.0

    @property
    def steps(self) -> list[tuple[int, ...]]:
        """The tokens that came together: prefill's one, then those of each verify step.

        After an error all are one piece.
        """
        if self.error is not None:
            return [self.token_ids]
        ends = np.cumsum([1, *self.acceptance_lengths]).tolist()
        return [self.token_ids[i:j] for i, j in zip([0, *ends], ends, strict=False)]

    def __str__(self) -> str:
        """Return the text, or the ids without a tokenizer."""
        return ",".join(map(str, self.token_ids)) if self.text is None else self.text


@dataclass(frozen=True, repr=False, eq=False)
class Pair:
    """A target and its drafter, or a target alone. It unpacks: `target, drafter = pair`.

    Attributes:
      programs: compiled by its calls, and used again by later ones.
    """

    target: LoadedModel
    drafter: LoadedModel | None = None
    programs: Programs = field(default_factory=Programs)

    def __iter__(self) -> Iterator[Any]:
        """Unpack into target and drafter."""
        return iter((self.target, self.drafter))

    def __repr__(self) -> str:
        """Return one line."""
        return f"Pair({self.target}, {self.drafter or 'no drafter'})"

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer.

        Raises:
          TokenizerError: the checkpoint has none.
        """
        return Tokenizer.load(self.target.directory)

    @functools.cached_property
    def grammar_tokens(self) -> GrammarTokens:
        """The tokenizer as grammars see it.

        Raises:
          FieldError, TokenizerError: llguidance is not installed, or there is no tokenizer or no end-of-sequence id.
        """
        return GrammarTokens.of_model(self.target, self.tokenizer)

    def plain(self) -> Pair:
        """Return the same target without its drafter: what speculation is compared with."""
        return Pair(self.target, None, self.programs)

    def with_params(self, target: Any = None, drafter: Any = None) -> Pair:
        """Return the pair with other weights, such as trained ones; None keeps those it has.

        Args:
          target, drafter: as `trees.flat_params` takes them.

        Raises:
          ValueError: they do not fit; every difference is named.
        """
        changed: dict[str, Any] = {}
        if target is not None:
            changed["target"] = self.target.with_params(target)
        if drafter is not None:
            if self.drafter is None:
                raise ValueError("the pair has no drafter to give weights to")
            changed["drafter"] = self.drafter.with_params(drafter)
        return replace(self, **changed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | Mapping[str, Any] = Sampling(),
        drafting: Drafting | Mapping[str, Any] = Drafting(),
        seed: int = 0,
        num_samples: int = 1,
        chat: bool = False,
        chat_options: Mapping[str, Any] | None = None,
        image_tokens: int | None = None,
        stop_texts: Sequence[str] = (),
        ignore_eos: bool = False,
        grammar: Grammar | None = None,
        batch_size: int | None = None,
        cache_length: int | None = None,
        invariant: bool = False,
        progress: bool | None = None,
        **sampling_values: Any,
    ) -> Any:
        """Continue one prompt, or a list of them.

        Args:
          prompts: text, a conversation, or token ids; or a list of such. A conversation is a list of messages,
            {"role": ..., "content": ...} each, and goes through the checkpoint's chat template. Content is text, or
            a list of parts: {"type": "text", "text": ...}, and in a user's message {"type": "image", "image": ...}.
            An image is a path, a data URL, the bytes of a file, pixels or an image of Pillow's, see
            `text.images.ImageSource`.
          sampling: what each prompt asks, or a mapping of its fields; the default is greedy.
          drafting: how to draft and to verify drafts.
          seed: 0 to 2**32 - 1. With a completion's place in the list it names that completion's random draws.
          num_samples: completions of each prompt, one after the other; each reads the prompt for itself.
            `Sampler` reads it once for all.
          chat: a text is a user's turn, and goes through the chat template.
          chat_options: for the template, such as {"enable_thinking": True}.
          image_tokens: the most tokens of each image: 70, 140, 280, 560 or 1120. None: the checkpoint's own number.
          stop_texts: end before the first of these.
          ignore_eos: go on past the checkpoint's end-of-sequence ids.
          grammar: what each completion may be, such as `pair.grammar_tokens.compile("regex", "[0-9]+")`.
          batch_size: prompts decoded together; None for all, up to 8.
          cache_length: positions of each; None for as many as the longest needs.
          invariant: with `batch_size` and `cache_length` given, the continuation of a prompt at its index in the list
            does not depend on the others, to the last bit. On a CPU that holds in any case.
          progress: whether to show a bar on standard error; None: for several completions, in a terminal and in a
            notebook.
          sampling_values: fields of `Sampling`, such as temperature=0.7, instead of those of `sampling`.

        Returns:
          A `Generation` for one prompt. For a list, or more than one sample, a list in their order.

        Raises:
          ValueError: a prompt or an option cannot be used; nothing was generated.
        """
        if wrong := at_least(1).refusal(num_samples):
            raise FieldError("num_samples", wrong)
        alone = is_one(prompts)
        all_prompts: Sequence[Any] = [prompts] if alone else list(prompts)
        names = ["the prompt"] if alone else [f"prompt {i}" for i in range(len(all_prompts))]
        encoded = [
            self._encode(name, prompt, chat, chat_options, image_tokens)
            for name, prompt in zip(names, all_prompts, strict=True)
        ]
        sampling = _with_values(sampling, sampling_values, self.generate)
        options = self._options(max_new_tokens, sampling, seed, stop_texts, ignore_eos, grammar)
        requests = [
            Request(one.ids, images=one.images, **options)
            for one in encoded
            for _ in range(num_samples)
        ]
        engine = Engine.fitting(
            self.target,
            self.drafter,
            requests,
            drafting=drafting,
            batch_size=batch_size or bucket(min(len(requests), MOST_SLOTS)),
            cache_length=cache_length,
            invariant=invariant,
            programs=self.programs,
        )
        checked: list[Request] = []
        errors: list[str] = []
        for name, request in zip(names, requests[::num_samples], strict=True):
            try:
                checked += [engine.validate(request)] * num_samples
            except FieldError as error:
                if alone:
                    raise
                errors.append(f"{name}: {error}")
        if errors:
            raise ValueError("\n".join(errors))
        done: dict[Any, Completion] = {}
        with _progress_bar(len(checked), progress) as bar:
            for event in engine.run(checked):
                if isinstance(event, Completion):
                    done[event.id] = event
                    bar.update()
        generations = [
            self._generation(encoded[i // num_samples], done[i], stop_texts)
            for i in range(len(checked))
        ]
        return generations[0] if alone and num_samples == 1 else generations

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | Mapping[str, Any] = Sampling(),
        drafting: Drafting | Mapping[str, Any] = Drafting(),
        seed: int = 0,
        chat: bool = False,
        chat_options: Mapping[str, Any] | None = None,
        image_tokens: int | None = None,
        stop_texts: Sequence[str] = (),
        ignore_eos: bool = False,
        grammar: Grammar | None = None,
        cache_length: int | None = None,
        **sampling_values: Any,
    ) -> Generator[str, None, Generation]:
        """Continue one prompt, and yield pieces of its text as they become certain.

        All pieces joined are the text that `generate` returns. The generator itself returns the `Generation`.

        Raises:
          ValueError: the prompt or an option cannot be used; nothing was generated.
        """
        if not is_one(prompt):
            raise ValueError("stream takes one prompt; generate takes several")
        sampling = _with_values(sampling, sampling_values, self.stream)
        encoded = self._encode("the prompt", prompt, chat, chat_options, image_tokens)
        options = self._options(max_new_tokens, sampling, seed, stop_texts, ignore_eos, grammar)
        request = Request(encoded.ids, images=encoded.images, **options)
        engine = Engine.fitting(
            self.target,
            self.drafter,
            [request],
            drafting=drafting,
            cache_length=cache_length,
            steps_per_return=STREAMING_STEPS,
            programs=self.programs,
        )
        request = engine.validate(request)
        text = TextStream(self.tokenizer, stop_texts)

        def pieces() -> Generator[str, None, Generation]:
            done = None
            for event in engine.run([request]):
                if isinstance(event, Update):
                    piece = text.push(event.token_ids)
                else:
                    done, piece = event, text.finish(event.token_ids)
                if piece:
                    yield piece
            assert done is not None
            return self._generation(encoded, done, stop_texts)

        return pieces()

    def encode(
        self,
        prompt: str | Messages,
        *,
        chat: bool = False,
        chat_options: Mapping[str, Any] | None = None,
        image_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Return the ids of a text or a conversation, as `generate` reads it.

        Raises:
          TokenizerError: it is empty, or there is no tokenizer or chat template.
        """
        return self._encode("the prompt", prompt, chat, chat_options, image_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        return self.tokenizer.decode(token_ids)

    def text_by_step(self, generation: Generation) -> list[str]:
        """Split a text by the steps in which it came: prefill's token, then those of each verify step.

        A character whose bytes came in two steps belongs to the later one.
        """
        text, pieces, count = TextStream(self.tokenizer), [], 0
        for tokens in generation.steps:
            count += len(tokens)
            pieces.append(text.push(generation.token_ids[:count]))
        pieces[-1] += text.finish(generation.token_ids)
        return pieces

    def _encode(
        self,
        name: str,
        prompt: Any,
        chat: bool,
        chat_options: Mapping[str, Any] | None,
        image_tokens: int | None,
    ) -> EncodedPrompt:
        """Return a prompt as the model reads it."""
        if isinstance(prompt, str):
            refuse_empty(name, prompt)
        if isinstance(prompt, str) and not chat:
            return EncodedPrompt(prompt, self.tokenizer.encode(prompt))
        if isinstance(prompt, str):
            prompt = ({"role": "user", "content": prompt},)
        if is_conversation(prompt):
            return encode_conversation(
                self.tokenizer,
                prompt,
                self.target.vision and self.target.vision.config,
                image_tokens=image_tokens,
                **(chat_options or {}),
            )
        if not is_sequence(prompt):
            raise ValueError(
                f"{name} is {prompt!r}; expected text, a list of messages, or a list of token ids"
            )
        check_ids(name, prompt)
        if chat:
            raise FieldError("chat", f"is for text, and {name} is token ids; leave it out")
        ids = tuple(int(i) for i in prompt)
        with contextlib.suppress(TokenizerError):  # ids need none, but are shown as text
            return EncodedPrompt(self.tokenizer.decode(ids), ids)
        return EncodedPrompt(None, ids)

    def _options(
        self,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        stop_texts: Sequence[str],
        ignore_eos: bool,
        grammar: Grammar | None,
    ) -> dict[str, Any]:
        """Return what all requests of a call have in common."""
        defaults = self.target.generation
        if isinstance(stop_texts, str) or "" in stop_texts:
            raise FieldError("stop_texts", f"is {stop_texts!r}; expected a list of some texts")
        return dict(
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            stop_ids=() if ignore_eos or defaults is None else defaults.eos_token_ids,
            stop_at=stop_at_text(self.tokenizer, stop_texts) if stop_texts else None,
            grammar=grammar,
        )

    def _generation(
        self,
        encoded: EncodedPrompt,
        done: Completion,
        stop_texts: Sequence[str],
    ) -> Generation:
        text = None
        with contextlib.suppress(TokenizerError):
            text = completed_text(self.tokenizer, done.token_ids, stop_texts)
        return Generation(
            encoded.text,
            encoded.ids,
            text,
            done.token_ids,
            done.finish_reason,
            done.acceptance_lengths,
            done.logprobs,
            done.sampled_logprobs,
            done.top_logprobs,
            done.error,
        )


def _with_values(sampling: Any, values: Mapping[str, Any], method: Callable[..., Any]) -> Sampling:
    """Return the sampling options of a call, with those that it names itself.

    Raises:
      TypeError: the method has no such argument, and `Sampling` no such field.
    """
    fields = [f.name for f in dataclasses.fields(Sampling)]
    for name in values:
        if name not in fields:
            known = [*inspect.signature(method).parameters][:-1] + fields
            raise TypeError(
                f"{method.__name__}() has no argument {name!r}{near_names(name, known)}"
            )
    return replace(as_record(Sampling, "sampling", sampling), **values)


def _progress_bar(total: int, wanted: bool | None) -> Any:
    """Return a bar for so many completions; None as `wanted`: for several, where it is seen."""
    from tqdm.auto import tqdm  # a bar of the notebook where there is one

    if wanted is None:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        is_notebook = "IPKernelApp" in getattr(shell, "config", ())
        wanted = total > 1 and (is_notebook or sys.stderr.isatty())
    return tqdm(total=total, disable=not wanted, unit="completion", leave=False)


generate = Pair.generate
"""`generate(pair, prompts, ...)` is `pair.generate(prompts, ...)`."""


def load(
    target: str | None = None,
    drafter: str | None = None,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    quantize_head: str | None = None,
    quantize_vision: str | None = None,
    quantize_drafter: str | None = None,
    quantize_draft_head: str | None = None,
    kv_dtype: str | None = None,
    revision: str | None = None,
    drafter_revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    mesh: Mesh | None = None,
    vision: bool = True,
    read_weights: bool = True,
) -> Pair:
    """Load a target and a drafter onto the default device, or a mesh.

    Args:
      target: a directory (ours or Hugging Face's) or a hub id; None for the bundled one.
      drafter: likewise, or "dflash" or "mtp" for the bundled ones, "ngram" for look-up in the row's own
        text, which fits every target, or "none". None means the bundled
        DFlash drafter for the bundled target, and no drafter for any other.
      dtype: "float32" or "bfloat16"; None for bfloat16 on GPUs and float32 elsewhere.
      quantize: the format of the target's linears and experts, such as "int8" or "int4"
        (`quantised.names`); None leaves them as they are.
        `quantize_head` is for its embedding and head, `quantize_vision` for the linears of its vision
        part, `quantize_drafter` for all of the drafter.
      quantize_draft_head: the format of a copy of the target's head that drafts are made with. For
        drafters that borrow the head (DFlash). Not that of the head itself.
      kv_dtype: "bfloat16", "float32" or "fp8" for the target's keys and values; None for `dtype`.
      revision, drafter_revision: of hub ids. `token` is for the hub; `offline` uses its cache alone.
      mesh: devices to split both over, from `sharding.make_mesh`; decoding then runs there.
      vision: whether to load the target's vision part, if it has one. Without it prompts are text.
      read_weights: False for shapes in place of weights, to count memory; such a pair cannot decode.
        Of a hub id only the config files are fetched then.

    Raises:
      CheckpointError, ConfigError, FieldError: something is missing or wrong with one of them.
      JaxSettingsError: JAX finds no device, or a setting of JAX forbids what every program does.
    """
    check_jax_settings()
    check_devices()
    source = drafter or ("none" if target else "dflash")
    known = (*BUNDLED_DRAFTERS, "none")
    if source not in known and "/" not in source and not Path(source).exists():
        raise CheckpointError(
            f"drafter {source} is not known; expected a directory, a hub id (owner/name), or one of "
            f"{', '.join(known)}"
        )
    hub: Any = dict(dtype=dtype or default_dtype(), token=token, offline=offline, mesh=mesh)
    hub["read_weights"] = read_weights
    loaded_drafter = None
    if source == "none" and quantize_drafter is not None:
        raise FieldError("quantize_drafter", "was given, but there is no drafter: leave it out")
    if source == "none" and quantize_draft_head is not None:
        check_borrows(None, quantize_draft_head)
    if source != "none":  # first, being the quicker one to be wrong
        at = str(BUNDLED / source) if source in BUNDLED_DRAFTERS else source
        kwargs: Any = dict(quantize=quantize_drafter, revision=drafter_revision, **hub)
        loaded_drafter = load_drafter(at, **kwargs)
        if quantize_draft_head is not None:
            check_borrows(loaded_drafter.model_def, quantize_draft_head)
            check_differs(quantize_draft_head, quantize_head)
    hub |= dict(quantize=quantize, quantize_head=quantize_head, kv_dtype=kv_dtype)
    hub |= dict(drafter=loaded_drafter, vision=vision, quantize_vision=quantize_vision)
    loaded = load_target(target or str(BUNDLED / "target"), revision=revision, **hub)
    if loaded_drafter is not None and quantize_draft_head is not None:
        loaded_drafter = with_draft_head(loaded_drafter, loaded, quantize_draft_head)
    return Pair(loaded, loaded_drafter)
