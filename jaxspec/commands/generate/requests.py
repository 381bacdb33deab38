"""The requests for the engine. Read `make_requests`, then `check_requests`.

Options hold for all prompts; a line of a file may have settings of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from jaxspec.commands.generate.options import DecodingOptions, GenerateOptions
from jaxspec.commands.generate.prompts import PromptInput, encode
from jaxspec.commands.options import UsageError, as_flag, idle_when_greedy, note
from jaxspec.engine.request import Request
from jaxspec.options import FieldError, Sampling, in_python
from jaxspec.text.grammars import Grammar, GrammarTokens
from jaxspec.text.image_prompts import EncodedPrompt
from jaxspec.tokenizer import Tokenizer, TokenizerError, stop_at_text
from jaxspec.weights.loading import LoadedModel

Key = tuple[int, int | None]
"""A row: the prompt's index, and the number of its sample; None for the only one."""


@dataclass(frozen=True)
class PromptRequest:
    """One sample of a prompt, ready for the engine.

    Samples of a prompt are requests of their own, one after the other: each takes a slot when one
    is free.

    Attributes:
      text: the prompt as the model reads it; None without a tokenizer.
      stop: stop texts.
      request: its `id` is `key`; without prompt ids if the prompt could not be encoded.
      error: the reason why the prompt is refused; None if it is not.
      digest: see `rows.row_digest`; None if no rows are written.
    """

    prompt: PromptInput
    text: str | None
    stop: tuple[str, ...]
    request: Request
    error: str | None = None
    digest: str | None = None

    @property
    def key(self) -> tuple[int, int | None]:
        """The index of the prompt, and the number of the sample; None for the only sample."""
        assert isinstance(self.request.id, tuple)
        return self.request.id


def load_tokenizer(
    prompts: Sequence[PromptInput], options: GenerateOptions, target: LoadedModel
) -> Tokenizer | None:
    """Load the target's tokenizer. Prompts of ids do without one, and are then not shown as text.

    Raises:
      TokenizerError: it is needed and missing, or has no chat template.
    """
    text = options.text
    stops = any(text.stop if p.stop is None else p.stop for p in prompts)
    needed = stops or options.decoding.grammar or any(p.ids is None for p in prompts)
    with contextlib.nullcontext() if needed else contextlib.suppress(TokenizerError):
        tokenizer = Tokenizer.load(target.directory)
        if text.chat and tokenizer.chat_template is None:
            raise TokenizerError(
                f"--chat: {target.source} has no chat template; use an instruction-tuned checkpoint"
            )
        return tokenizer
    return None


def make_requests(
    prompts: Sequence[PromptInput],
    options: GenerateOptions,
    target: LoadedModel,
    tokenizer: Tokenizer | None,
    sampling: Sampling,
) -> list[PromptRequest]:
    """Encode prompts, and make a request of each of their samples.

    Args:
      sampling: of prompts without values of their own, see `sampling_for`.
    """
    text, decoding = options.text, options.decoding
    ends, grammar = stop_ids(decoding, target), _compile_grammar(decoding, target, tokenizer)

    @functools.cache
    def stop_at(texts: tuple[str, ...]) -> Any:
        return stop_at_text(tokenizer, texts) if texts and tokenizer else None

    requests = []
    for index, prompt in enumerate(prompts):
        encoded, error = EncodedPrompt(prompt.text, ()), None
        try:
            vision = target.vision and target.vision.config
            encoded = encode(prompt, tokenizer, options=text, vision=vision)
        except TokenizerError as refused:
            error = str(refused)
        except FieldError as refused:  # of an image
            error = refused.format_message(in_python)
        stop = text.stop if prompt.stop is None else prompt.stop
        request = Request(
            prompt_ids=encoded.ids,
            images=encoded.images,
            max_new_tokens=prompt.max_new_tokens or decoding.max_new_tokens,
            sampling=_sampling_of_line(prompt, sampling, decoding),
            stop_ids=ends,
            seed=decoding.seed if prompt.seed is None else prompt.seed,
            stop_at=stop_at(stop),
            grammar=grammar,
        )
        # The run's seed is combined with a row's index among all rows. A line's own seed is
        # combined with the sample alone, so that the line gives the same rows at every place in the
        # file.
        first = index * decoding.num_samples if prompt.seed is None else 0
        for sample in range(decoding.num_samples):
            key = index, sample if decoding.num_samples > 1 else None
            numbered = dataclasses.replace(request, id=key, sample=first + sample)
            requests.append(PromptRequest(prompt, encoded.text, stop, numbered, error))
    return requests


def check_requests(
    requests: Sequence[PromptRequest],
    check: Callable[[Request], FieldError | None],
    console: Console,
) -> list[PromptRequest]:
    """Return the requests with the errors of those that cannot be decoded, and print these.

    Args:
      check: as `Engine.check`.

    Raises:
      UsageError: all prompts are refused.
    """
    errors: dict[int, str | None] = {}
    for r in requests:
        if r.key[0] not in errors:
            errors[r.key[0]] = r.error or _message(check(r.request), r.prompt)
    checked = [dataclasses.replace(r, error=errors[r.key[0]]) for r in requests]
    refused = [f"{r.prompt.origin}: {r.error}" for r in checked if r.error and not r.key[1]]
    if len(refused) == len(errors):
        raise UsageError("\n".join(refused))
    for message in refused:
        print_error(message, console)
    return checked


def _message(error: FieldError | None, prompt: PromptInput) -> str | None:
    """Return the message of an error. Fields of the prompt's line have JSON names, others flags."""
    if error is None:
        return None
    own = {
        *prompt.sampling,
        *(n for n in ("seed", "max_new_tokens") if getattr(prompt, n) is not None),
    }
    return error.format_message(
        lambda field, value=None: (in_python if field in own else as_flag)(field, value)
    )


def print_error(message: str, console: Console) -> None:
    """Print the error of one prompt; the others go on."""
    console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)


# --- settings ------------------------------------------------------------------------------------


def _compile_grammar(
    decoding: DecodingOptions, target: LoadedModel, tokenizer: Tokenizer | None
) -> Grammar | None:
    grammar = decoding.grammar
    if grammar is None or tokenizer is None:
        return None
    return GrammarTokens.of_model(target, tokenizer).compile(*grammar)


def sampling_for(options: GenerateOptions, target: LoadedModel) -> Sampling:
    """Return the sampling of the run: the options, else the checkpoint's if asked for, else greedy.

    A ban overrides a bias.
    """
    _refuse_outside("--logit-bias", options.biases, target)
    _refuse_outside("--ban-token", options.banned, target)
    biases = {**options.biases, **dict.fromkeys(options.banned, -math.inf)}
    own = _sampling_of_checkpoint(target) if options.decoding.sampling == "model" else {}
    return dataclasses.replace(options.sampling.over(own), logit_bias=biases)


def _sampling_of_line(
    prompt: PromptInput, sampling: Sampling, decoding: DecodingOptions
) -> Sampling:
    """Return the sampling of a prompt: its line's values over the run's; bans hold for all."""
    if not prompt.sampling:
        return sampling
    changes = dict(prompt.sampling)
    if "logit_bias" in changes:
        bans = dict.fromkeys(decoding.ban_tokens, -math.inf)
        changes["logit_bias"] = {**changes["logit_bias"], **bans}
    return dataclasses.replace(sampling, **changes)


def _sampling_of_checkpoint(target: LoadedModel) -> dict[str, Any]:
    """Return the sampling values of the checkpoint's generation config.

    Raises:
      UsageError: it has none, or an impossible value.
    """
    if target.generation is None:
        raise UsageError(f"--sampling model: {target.source} has no generation config of its own")
    names = {f.name for f in dataclasses.fields(Sampling)}
    own = dataclasses.asdict(target.generation)
    own = {name: value for name, value in own.items() if name in names}
    try:
        Sampling(**own)
    except FieldError as error:
        raise UsageError(
            f"--sampling model: in {target.source}'s generation config {error}; give the values as "
            "flags instead"
        ) from None
    return own


def stop_ids(options: DecodingOptions, target: LoadedModel) -> tuple[int, ...]:
    """Return the ids that end a row: the checkpoint's own unless ignored, and the options'."""
    _refuse_outside("--stop-id", options.stop_ids, target)
    own = () if options.ignore_eos or target.generation is None else target.generation.eos_token_ids
    return (*own, *options.stop_ids)


def _refuse_outside(flag: str, ids: Iterable[int], target: LoadedModel) -> None:
    """Refuse ids that are not tokens of the target."""
    size = target.config.vocab_size
    if bad := [i for i in ids if not 0 <= i < size]:
        raise UsageError(f"{flag} {bad[0]} is outside the vocabulary; expected 0 to {size - 1}")


def note_idle_options(
    options: GenerateOptions, requests: Iterable[PromptRequest], console: Console
) -> None:
    """Print the options without effect, if all rows are greedy."""
    idle = ", ".join(idle_when_greedy(options.sampling.values, options.drafting))
    if idle and all(r.request.sampling.temperature == 0 for r in requests):
        note(console, f"{idle}: without effect at temperature 0; add --temperature 1")
