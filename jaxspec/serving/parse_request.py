"""Conversion of a request body to requests of the engine, with all limits and defaults applied.

Read `ServingModel.parse_chat`, for /v1/chat/completions, then `parse_completion`.
`responses.parse_responses` turns a request to /v1/responses into one for `parse_chat`. Refusals
name the protocol's field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec.configs.base import GenerationDefaults
from jaxspec.engine.engine import STOP_IDS
from jaxspec.engine.request import Request, ids_refusal
from jaxspec.options import FieldError, Range, Sampling
from jaxspec.runtime.runtime import cache_length_for
from jaxspec.serving.errors import ApiError, invalid_value
from jaxspec.serving.fetch import fetch
from jaxspec.serving.protocol import (
    NOT_SUPPORTED,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from jaxspec.serving.reply_end import EndRules, reply_end
from jaxspec.serving.settings import Settings
from jaxspec.serving.structured_outputs import (
    StructuredOutput,
    compile_grammar,
    find_structured_output,
)
from jaxspec.state import DecodeSpec
from jaxspec.text import chat
from jaxspec.text.chat import rules
from jaxspec.text.chat.tools import force
from jaxspec.text.grammars import Grammar, GrammarTokens
from jaxspec.text.image_prompts import MessageImage, place_images, read_images, take_images
from jaxspec.text.images import ImagePatches
from jaxspec.tokenizer import Tokenizer, TokenizerError

COMPLETION_TOKENS = 16
"""Default `max_tokens` of /v1/completions; the protocol's own number."""
MAX_STOPS = 16
_OF_CHECKPOINT = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OF_REQUEST = ("presence_penalty", "frequency_penalty")
_PENALTIES = Range("from -2 to 2", lambda x: abs(x) <= 2)
_TOKEN_ID = re.compile(r"-?[0-9]{1,20}")
FETCH_S = 10.0
"""Seconds for all images of a request that are at addresses."""
_WEB = ("http://", "https://")
_DECODING = threading.Lock()
"""Images are decoded one at a time: a large one takes some hundred MB."""
_BIASES = Range("from -100 to 100", lambda x: abs(x) <= 100)


@dataclass(frozen=True)
class ParsedRequest:
    """A checked request to one of the generating routes.

    Attributes:
      prompts: token ids of each prompt.
      engine_requests: `n` for each prompt, in the prompts' order; none if `max_tokens` is 0.
      stops: stop texts.
      top_logprobs: best tokens to show beside each token; None: no log-probabilities.
      echo: whether replies begin with the prompt.
      prompt_logprobs: best tokens to show beside each prompt token; None: no prompt
        log-probabilities.
      tools: the declared tools, and the choice among them.
      return_steps: whether stream events name the verify step of each token.
    """

    prompts: tuple[tuple[int, ...], ...]
    engine_requests: tuple[Request, ...]
    n: int
    stops: tuple[str, ...]
    top_logprobs: int | None
    echo: bool = False
    prompt_logprobs: int | None = None
    tools: chat.ToolChoice = field(default_factory=chat.ToolChoice)
    return_steps: bool = False

    def prompt_of(self, choice: int) -> tuple[int, ...]:
        """Return the token ids of the prompt that a choice continues."""
        return self.prompts[choice // self.n]

    @property
    def num_choices(self) -> int:
        """Number of choices in the reply."""
        return len(self.prompts) * self.n

    @property
    def needs_prompt_scores(self) -> bool:
        """True if the reply shows log-probabilities of the prompts."""
        return self.prompt_logprobs is not None or (self.echo and self.top_logprobs is not None)


@dataclass(frozen=True)
class ServingModel:
    """The served model, and the limits that requests must keep.

    Attributes:
      names: the names that requests may give; replies have the first.
      num_stop_ids: largest number of stop ids in a request.
      grammars: the tokenizer's side of grammars; None: grammars are refused with the message
        `no_grammars`.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    spec: DecodeSpec
    generation: GenerationDefaults
    cache_length: int
    settings: Settings
    num_stop_ids: int = STOP_IDS
    grammars: GrammarTokens | None = None
    no_grammars: str = "this server was started without grammars"

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens in a prompt and its reply together."""
        spare = cache_length_for(self.spec, 0)
        return min(self.spec.target.config.max_positions, self.cache_length - spare)

    def parse_completion(self, request: CompletionRequest) -> ParsedRequest:
        """Parse a request to /v1/completions.

        Raises:
          ApiError: the server cannot serve it; names the field.
        """
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise ApiError(400, "best_of is not supported beyond n", param="best_of")
        prompts = self._prompts(request)
        max_tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        echo = bool(request.echo)
        top = request.prompt_logprobs
        parsed = self._parse(
            request,
            prompts,
            max_tokens,
            request.logprobs,
            "max_tokens",
            min_tokens=0 if echo or top is not None else 1,
            grammar=self._grammar(find_structured_output(request)),
        )
        if top is not None:
            if request.stream:
                message = "prompt_logprobs is for replies in one piece, without stream"
                raise ApiError(400, message, param="prompt_logprobs")
            self._check_top_logprobs(top, "prompt_logprobs")
        parsed = dataclasses.replace(parsed, echo=echo, prompt_logprobs=top)
        if parsed.needs_prompt_scores or max_tokens == 0:  # else the engine checks them
            self._check_ids(prompts)
        return parsed

    def parse_chat(self, request: ChatCompletionRequest) -> ParsedRequest:
        """Parse a request to /v1/chat/completions.

        Raises:
          ApiError: the server cannot serve it; names the field.
        """
        for name in ("echo", "prompt_logprobs"):
            if getattr(request, name) not in (None, False):
                raise ApiError(400, f"{name} is for /v1/completions", param=name)
        kwargs = request.chat_template_kwargs or {}
        if request.reasoning_effort is not None:
            kwargs = {"enable_thinking": request.reasoning_effort != "none", **kwargs}
        try:
            has_grammars = self.grammars is not None
            tools = chat.choose(request.tools, request.tool_choice, grammars=has_grammars)
            if request.parallel_tool_calls is False:
                tools = dataclasses.replace(tools, parallel=False)
            prompt, images = self.render_chat(
                request.messages,
                tools.tools,
                kwargs,
                request.add_generation_prompt is not False,
            )
            grammar = self._chat_grammar(request, prompt, tools)
            if tools.forced and grammar is None:
                prompt = force(self.tokenizer, prompt, tools.forced)
        except FieldError as error:
            raise invalid_value(error) from None
        limit_field, max_tokens = "max_completion_tokens", request.max_completion_tokens
        if max_tokens is None:
            limit_field, max_tokens = "max_tokens", request.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self.max_model_len - len(prompt))
        top = (request.top_logprobs or 0) if request.logprobs else None
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self._parse(
            request,
            [tuple(prompt)],
            max_tokens,
            top,
            limit_field,
            tools,
            grammar=grammar,
            images=images,
        )

    def _chat_grammar(
        self, request: ChatCompletionRequest, prompt: Sequence[int], tools: chat.ToolChoice
    ) -> Grammar | None:
        """Return the grammar of a chat's reply: its reasoning first, then the requested output.

        Raises:
          ApiError: the grammar cannot be used, or the request has a grammar and tools.
          FieldError: a call is required, and the tokenizer has no markers of calls.
        """
        output = find_structured_output(request)
        if output is not None and tools.tools:
            message = f"{output.field} and tools: the reply would be one of them; leave one out"
            raise ApiError(400, message, param=output.field)
        strict = any(tool["function"].get("strict") is True for tool in tools.tools)
        if (tools.required or strict) and self.grammars is not None:
            one = tools.forced is not None and request.tool_choice != "required"
            callable_tools = tools.callable if tools.required else tools.tools
            rule = rules.calls(
                self.tokenizer, prompt, callable_tools, one=one, required=bool(tools.required)
            )
            if rule is not None:
                kind, source, frame = rule
                calls = StructuredOutput("tools", kind, source)
                return compile_grammar(self.grammars, calls, frame=frame, lenient=not strict)
            if tools.required:
                message = "asks for a call, and this model's tokenizer has no markers of calls"
                raise FieldError("tool_choice", message)
        if output is None:
            return None
        return self._grammar(output, rules.frame(self.tokenizer, prompt))

    def _grammar(self, output: StructuredOutput | None, frame: str | None = None) -> Grammar | None:
        """Return the compiled grammar of a structured output, or None for none.

        Raises:
          ApiError: the server follows no grammars, or the grammar cannot be used.
        """
        if output is None:
            return None
        if self.grammars is None:
            raise ApiError(400, f"{output.field}: {self.no_grammars}", param=output.field)
        return compile_grammar(self.grammars, output, frame=frame)

    def render_chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any],
        kwargs: dict[str, Any] | None,
        add_generation_prompt: bool = True,
    ) -> tuple[list[int], tuple[ImagePatches, ...]]:
        """Return the token ids of a conversation, and its images.

        Args:
          kwargs: values for the chat template; they override the server's.

        Raises:
          ApiError: the template refuses the conversation.
          FieldError: a message, a tool or a value is of a wrong form.
        """
        kwargs = {**(self.settings.chat_template_kwargs or {}), **(kwargs or {})}
        if (name := "add_generation_prompt") in kwargs:
            raise FieldError("chat_template_kwargs", f"has {name}, which is a field of its own")
        messages, sources = take_images(messages)
        vision = None if self.spec.vision is None else self.spec.vision.config
        if len(sources) > (limit := self.settings.max_images):
            raise FieldError(
                "messages",
                f"have {len(sources)} images; this server takes at most {limit} (--max-images)",
            )
        if vision is not None:
            sources = self._fetched(sources)
        with _DECODING if sources else contextlib.nullcontext():
            images = read_images(
                sources, vision, image_tokens=self.settings.image_tokens, only_data=True
            )
        count, limit = sum(image.num_tokens for image in images), self.settings.max_image_tokens
        if limit is not None and count > limit:
            raise FieldError(
                "messages",
                f"have images of {count} tokens together; this server takes at most {limit} "
                '(--max-image-tokens): send fewer, or with "detail": "low"',
            )
        try:
            ids = chat.render(
                self.tokenizer,
                messages,
                list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        except TokenizerError as error:
            raise ApiError(400, str(error), param="messages") from None
        return list(place_images(ids, images, vision)), tuple(images)

    def _fetched(self, images: Sequence[MessageImage]) -> list[MessageImage]:
        """Return images with the bytes of those that are at addresses, if the settings have hosts.

        Raises:
          FieldError: an address is not allowed, or cannot be fetched.
        """
        settings, hosts = self.settings, {host.lower() for host in self.settings.image_host}
        limits: dict[str, Any] = dict(
            max_bytes=settings.max_body_mib << 20, end_s=time.monotonic() + FETCH_S
        )

        def one(image: MessageImage) -> MessageImage:
            field, source, _ = image
            if not hosts or not isinstance(source, str) or not source.startswith(_WEB):
                return image
            return image._replace(source=fetch(field, source, hosts, **limits))

        return [one(image) for image in images]

    def encode(self, text: str, *, special: bool = True, param: str = "prompt") -> tuple[int, ...]:
        """Return the token ids of a text.

        Args:
          special: whether the tokenizer adds BOS, if the model has one.

        Raises:
          ApiError: the text is empty, or cannot be encoded.
        """
        if not text:
            raise ApiError(400, f"{param} is empty; give at least one character", param=param)
        try:
            tokenizer = self.tokenizer
            return tokenizer.encode(text) if special else tokenizer.encode_rendered(text)
        except TokenizerError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None

    def _prompts(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        prompts: Any = request.prompt
        if prompts is None or prompts == []:
            raise ApiError(400, "prompt is missing; give a text or token ids", param="prompt")
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        special = request.add_special_tokens is not False
        return [
            self.encode(p, special=special) if isinstance(p, str) else tuple(p) for p in prompts
        ]

    def _parse(
        self,
        request: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int,
        top_logprobs: int | None,
        limit_field: str,
        tools: chat.ToolChoice | None = None,
        *,
        min_tokens: int = 1,
        grammar: Grammar | None = None,
        images: tuple[ImagePatches, ...] = (),
    ) -> ParsedRequest:
        """Parse the fields that all routes have in common.

        Args:
          max_tokens: largest number of new tokens; at least `min_tokens`.
          limit_field: the field that `max_tokens` comes from.
        """
        _refuse_unsupported(request)
        n = 1 if request.n is None else request.n
        if n < 1 or n * len(prompts) > self.settings.max_n:
            raise ApiError(
                400,
                f"n is {n} for {len(prompts)} prompts; expected at least 1, and at most "
                f"{self.settings.max_n} completions of one request",
                param="n",
            )
        stops, tools = _stops(request.stop), tools or chat.ToolChoice()
        ends = EndRules(
            stops,
            is_chat=isinstance(request, ChatCompletionRequest),
            calls=tools.calls,
            first_call=tools.calls and not tools.parallel,
        )
        seed = secrets.randbits(32) if request.seed is None else request.seed
        eos = () if request.ignore_eos else self.generation.eos_token_ids
        stop_ids = {*eos, *(request.stop_token_ids or ())}
        if len(stop_ids) > self.num_stop_ids:
            raise ApiError(
                400,
                f"stop_token_ids: {len(stop_ids)} ids, the checkpoint's own included; this server "
                f"was started for at most {self.num_stop_ids} (--max-stop-ids)",
                param="stop_token_ids",
            )
        try:
            shared: dict[str, Any] = dict(
                sampling=self._sampling(request, top_logprobs),
                stop_ids=tuple(sorted(stop_ids)),
                # The protocol allows 64 bits with a sign, and clients draw seeds from them all.
                seed=seed % 2**32 if -(2**63) <= seed < 2**64 else seed,
                priority=request.priority or 0,
                grammar=grammar,
                images=images,
            )
            engine_requests = [
                Request(
                    prompt,
                    max_tokens,
                    # Without a seed in the request, equal prompts give different replies.
                    sample=sample + (index * n if request.seed is None else 0),
                    stop_at=reply_end(self.tokenizer, prompt, ends),
                    **shared,
                )
                for index, prompt in enumerate(prompts)
                for sample in range(n)
                if max_tokens
            ]
        except FieldError as error:
            raise invalid_value(error) from None
        for prompt in prompts:
            self._check_length(len(prompt), max_tokens, limit_field, min_tokens)
        return ParsedRequest(
            tuple(prompts),
            tuple(engine_requests),
            n,
            stops,
            top_logprobs,
            tools=tools,
            return_steps=bool(request.return_steps and request.stream),
        )

    def _check_ids(self, prompts: Sequence[tuple[int, ...]]) -> None:
        for prompt in prompts:
            wrong = ids_refusal(prompt, self.spec.target.config.vocab_size)
            if wrong or not prompt:
                message = f"prompt ids {wrong}" if wrong else "the prompt is empty"
                raise ApiError(400, message, param="prompt")

    def _check_top_logprobs(self, top: int, name: str) -> None:
        program_features = self.spec.program_features
        if not program_features.logprobs:
            message = "this server was started without logprobs (--max-logprobs)"
            raise ApiError(400, message, param=name)
        if not 0 <= top <= program_features.top_logprobs:
            raise ApiError(
                400,
                f"{name}: {top} tokens were asked for; this server was started for at most "
                f"{program_features.top_logprobs} (--max-logprobs)",
                param=name,
            )

    def _check_length(
        self, prompt_tokens: int, max_tokens: int, limit_field: str, min_tokens: int
    ) -> None:
        if max_tokens < min_tokens:
            message = f"{limit_field} is {max_tokens}; expected {min_tokens} or more"
            raise ApiError(400, message, param=limit_field)
        if prompt_tokens + max_tokens > self.max_model_len:
            raise ApiError(
                400,
                f"this model has room for {self.max_model_len} tokens, but the prompt has "
                f"{prompt_tokens} and {limit_field} is {max_tokens}; shorten one of them",
                param=limit_field if prompt_tokens < self.max_model_len else "prompt",
                code="context_length_exceeded",
            )

    def _sampling(self, request: GenerationRequest, top_logprobs: int | None) -> Sampling:
        """Return the sampling parameters of a request. Defaults are the checkpoint's.

        Raises:
          ApiError: the server's programs lack a feature.
          FieldError: a value is out of range.
        """
        program_features = self.spec.program_features
        values = {name: getattr(request, name) for name in (*_OF_CHECKPOINT, *_OF_REQUEST)}
        values = {name: value for name, value in values.items() if value is not None}
        for name in _OF_REQUEST:
            if wrong := _PENALTIES.refusal(values.get(name, 0)):
                raise FieldError(name, wrong)
        if values.get("top_k") == -1:  # a common spelling of "off"
            values["top_k"] = 0
        for name in _OF_CHECKPOINT:
            if name != "repetition_penalty" or program_features.penalties:
                values.setdefault(name, getattr(self.generation, name))
        biases = _biases(request.logit_bias or {})
        if len(biases) > program_features.num_biases:
            raise ApiError(
                400,
                f"logit_bias names {len(biases)} tokens; this server was started for "
                f"{program_features.num_biases} (--max-logit-bias)",
                param="logit_bias",
            )
        if top_logprobs is not None:
            name = "top_logprobs" if isinstance(request, ChatCompletionRequest) else "logprobs"
            self._check_top_logprobs(top_logprobs, name)
        sampling = Sampling(
            **values,
            logit_bias=biases,
            logprobs=top_logprobs is not None,
            top_logprobs=top_logprobs or 0,
        )
        if sampling.penalties and not program_features.penalties:
            name = sampling.penalties[0]
            raise ApiError(400, f"{name}: this server was started with --no-penalties", param=name)
        return sampling


def _refuse_unsupported(request: GenerationRequest) -> None:
    """Raise an error for a field that would be served wrongly if it were ignored."""
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    for name, harmless in NOT_SUPPORTED.items():
        if getattr(request, name, None) not in (None, *harmless):
            raise ApiError(400, f"{name} is not supported", param=name)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops or len(stops) > MAX_STOPS:
        raise ApiError(
            400, f"stop: expected at most {MAX_STOPS} texts, none of them empty", param="stop"
        )
    return stops


def _biases(logit_bias: dict[str, float]) -> dict[int, float]:
    if not all(_TOKEN_ID.fullmatch(token) for token in logit_bias):
        raise ApiError(400, "logit_bias: expected token ids as keys", param="logit_bias")
    for token, bias in logit_bias.items():
        if wrong := _BIASES.refusal(bias):
            raise ApiError(400, f"logit_bias of token {token} {wrong}", param="logit_bias")
    biases = {int(token): bias for token, bias in logit_bias.items()}
    if len(biases) < len(logit_bias):
        raise ApiError(400, "logit_bias names a token twice", param="logit_bias")
    return biases
