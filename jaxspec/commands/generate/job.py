"""What a run is to decode: prompts as token ids, and for each what it asks.

Read `make_job`. Options hold for all prompts; a line of a file may say otherwise for itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from jaxspec.commands.generate.identity import models_digest, row_digest
from jaxspec.commands.generate.jsonl import Prompt
from jaxspec.commands.generate.options import DecodingOptions, GenerateOptions
from jaxspec.commands.generate.prompts import encode
from jaxspec.commands.generate.report import PromptResult
from jaxspec.commands.generate.rows import Key
from jaxspec.commands.options import UsageError, as_flag, note
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Completion, Request
from jaxspec.options import DEFAULTS, FieldError, Sampling, in_python
from jaxspec.text.grammars import GrammarTokens
from jaxspec.tokenizer import Tokenizer, TokenizerError, completed_text, stop_at_text
from jaxspec.weights.loading import LoadedModel

FILTERS = ("top_k", "top_p", "min_p")  # what greedy decoding does not look at


@dataclass(frozen=True)
class Job:
    """The prompts, ready to decode. Lists have one entry a prompt.

    Samples of a prompt are requests of their own, one after the other. Each needs a slot when there is one, not
    when there are as many as samples.

    Attributes:
      texts: as the model reads them.
      stops: stop texts.
      requests: by index of the prompt and number of the sample; those of refused prompts are empty.
      errors: of refused prompts, by index.
      sampling: of prompts that say nothing else.
      digests: by which rows are known again; filled by `identify`.
    """

    prompts: Sequence[Prompt]
    texts: list[str | None]
    stops: list[tuple[str, ...]]
    requests: dict[Key, Request]
    errors: dict[int, str]
    tokenizer: Tokenizer | None
    sampling: Sampling
    digests: dict[Key, str]

    def identify(self, engine: Engine) -> dict[Key, str]:
        """Make and return the digest of every row."""
        models = models_digest(engine.spec, engine.target, engine.drafter)
        for (index, sample), request in self.requests.items():
            self.digests[index, sample] = row_digest(
                models, (index, sample), self.prompts[index], request, self.stops[index]
            )
        return self.digests

    def result(self, done: Completion) -> PromptResult:
        """Put a completion together with its prompt."""
        assert isinstance(done.id, tuple)
        index, sample = done.id
        prompt, request = self.prompts[index], self.requests[index, sample]
        text = None
        if self.tokenizer is not None:
            text = completed_text(self.tokenizer, done.token_ids, self.stops[index])
        asked, top = request.sampling, done.top_logprobs
        wants = asked.logprobs or asked.top_logprobs > 0  # a neighbour may, in whose batch it was
        return PromptResult(
            index=index,
            sample=sample,
            digest=self.digests.get((index, sample)),
            id=prompt.id,
            seed=request.seed,
            prompt=self.texts[index],
            prompt_ids=request.prompt_ids,
            token_ids=done.token_ids,
            text=text,
            finish_reason=done.finish_reason,
            acceptance_lengths=done.acceptance_lengths,
            error=self.errors.get(index, done.error),
            logprobs=done.logprobs if wants else None,
            sampled_logprobs=done.sampled_logprobs if wants else None,
            top_logprobs=tuple(best[: asked.top_logprobs] for best in top)
            if top and asked.top_logprobs
            else None,
            extra=prompt.extra,
        )


def make_job(
    prompts: Sequence[Prompt], options: GenerateOptions, target: LoadedModel, console: Console
) -> Job:
    """Encode prompts and settle how to decode them."""
    text, decoding = options.text, options.decoding
    stops = [text.stop if p.stop is None else p.stop for p in prompts]
    tokenizer, asked = None, decoding.grammar
    if any(p.ids is None for p in prompts) or any(stops) or asked:
        tokenizer = Tokenizer.load(target.directory)
    else:  # ids alone need none, but are shown as text where there is one
        with contextlib.suppress(TokenizerError):
            tokenizer = Tokenizer.load(target.directory)
    if text.chat and tokenizer is not None and tokenizer.chat_template is None:
        raise TokenizerError(
            f"--chat: {target.source} has no chat template; use an instruction-tuned checkpoint"
        )
    grammar = None
    if asked and tokenizer is not None:
        grammar = GrammarTokens.of_model(target, tokenizer).compile(*asked)
    sampling, ends = sampling_for(options, target), stop_ids(decoding, target)

    @functools.cache
    def stop_at(texts: tuple[str, ...]) -> Any:
        return stop_at_text(tokenizer, texts) if texts and tokenizer else None

    texts: list[str | None] = []
    requests: dict[Key, Request] = {}
    errors: dict[int, str] = {}
    for index, prompt in enumerate(prompts):
        shown, ids = prompt.text, ()
        try:
            shown, ids = encode(
                prompt, tokenizer, chat=text.chat, chat_template_kwargs=text.chat_template_kwargs
            )
        except TokenizerError as error:
            errors[index] = str(error)
        texts.append(shown)
        request = Request(
            prompt_ids=ids,
            max_new_tokens=prompt.max_new_tokens or decoding.max_new_tokens,
            sampling=sampling_of_line(prompt, sampling, decoding),
            stop_ids=ends,
            seed=decoding.seed if prompt.seed is None else prompt.seed,
            stop_at=stop_at(stops[index]),
            grammar=grammar,
        )
        # The run's seed goes with a row's place among all; a line's own with the sample alone, so that it gives
        # the same wherever the line stands.
        first = index * decoding.num_samples if prompt.seed is None else 0
        for sample in range(decoding.num_samples):
            key = index, sample if decoding.num_samples > 1 else None
            requests[key] = dataclasses.replace(request, id=key, sample=first + sample)
    point_out_idle(options, requests.values(), console)
    return Job(prompts, texts, stops, requests, errors, tokenizer, sampling, {})


def sampling_for(options: GenerateOptions, target: LoadedModel) -> Sampling:
    """Settle what rules sampling: as given, else the checkpoint's if asked for, else greedy and nothing.

    A ban counts more than a bias.
    """
    refuse_outside("--logit-bias", options.biases, target)
    refuse_outside("--ban-token", options.banned, target)
    biases = {**options.biases, **dict.fromkeys(options.banned, -math.inf)}
    own = sampling_of(target) if options.decoding.sampling == "model" else {}
    return dataclasses.replace(options.sampling.over(own), logit_bias=biases)


def sampling_of_line(prompt: Prompt, sampling: Sampling, decoding: DecodingOptions) -> Sampling:
    """Return what rules sampling of a prompt: as its line says, else as for all; bans hold for all."""
    if not prompt.sampling:
        return sampling
    changes = dict(prompt.sampling)
    if "logit_bias" in changes:
        bans = dict.fromkeys(decoding.ban_tokens, -math.inf)
        changes["logit_bias"] = {**changes["logit_bias"], **bans}
    return dataclasses.replace(sampling, **changes)


def point_out_idle(options: GenerateOptions, requests: Iterable[Request], console: Console) -> None:
    """Say which options change nothing, where all rows are greedy."""
    given = options.sampling.values
    idle = [(name,) for name in FILTERS if given.get(name, DEFAULTS[name]) != DEFAULTS[name]]
    idle += [(field,) for field, _ in options.drafting.changes_acceptance]
    if idle and all(request.sampling.temperature == 0 for request in requests):
        flags = ", ".join(as_flag(*shown) for shown in idle)
        note(console, f"{flags}: without effect at temperature 0; add --temperature 1")


def sampling_of(target: LoadedModel) -> dict[str, Any]:
    """Return what the checkpoint itself says of sampling.

    Raises:
      UsageError: it says nothing, or something that cannot be.
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
            "flags "
            "instead"
        ) from None
    return own


def stop_ids(options: DecodingOptions, target: LoadedModel) -> tuple[int, ...]:
    """Return the ids that end a row: the checkpoint's own, unless ignored, and those given."""
    refuse_outside("--stop-id", options.stop_ids, target)
    own = () if options.ignore_eos or target.generation is None else target.generation.eos_token_ids
    return (*own, *options.stop_ids)


def refuse_outside(flag: str, ids: Iterable[int], target: LoadedModel) -> None:
    """Refuse ids that are not tokens of the target."""
    size = target.config.vocab_size
    bad = [i for i in ids if not 0 <= i < size]
    if bad:
        raise UsageError(f"{flag} {bad[0]} is outside the vocabulary; expected 0 to {size - 1}")


def _told(error: FieldError | str, prompt: Prompt) -> str:
    """Return the message of an error. Fields that the prompt's own line has are named as there, others as flags."""
    if not isinstance(error, FieldError):
        return error
    own = {
        *prompt.sampling,
        *(n for n in ("seed", "max_new_tokens") if getattr(prompt, n) is not None),
    }
    return error.format_message(
        lambda field, value=None: (in_python if field in own else as_flag)(field, value)
    )


def refuse(job: Job, engine: Engine, console: Console) -> None:
    """Note and report the prompts that cannot be decoded; when that is all of them, there is no run."""
    for (index, sample), request in job.requests.items():
        if not sample:
            error = job.errors.get(index) or engine.check(request)
            if error is not None:
                job.errors[index] = _told(error, job.prompts[index])
    named = [f"{job.prompts[i].origin}: {error}" for i, error in sorted(job.errors.items())]
    if len(named) == len(job.prompts):
        raise UsageError("\n".join(named))
    for message in named:
        say_error(message, console)


def say_error(message: str, console: Console) -> None:
    """Say what is wrong with a prompt; the others go on."""
    console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
