"""From what a client asks to what the engine is asked: `Request`s with every limit and default in its place.

Read `ServingModel.requests`. Whatever a server cannot do is refused here, by the name that the protocol has for it.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec.configs.base import GenerationDefaults
from jaxspec.engine.engine import STOP_IDS
from jaxspec.engine.request import Request, ids_refusal
from jaxspec.options import FieldError, Range, Sampling
from jaxspec.runtime.runtime import cache_length_for
from jaxspec.serving.errors import ApiError, wrong_value
from jaxspec.serving.protocol import (
    NOT_SUPPORTED,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from jaxspec.serving.settings import Settings
from jaxspec.serving.structured_outputs import StructuredOutput, compiled, find_structured_output
from jaxspec.state import DecodeSpec
from jaxspec.text import chat
from jaxspec.text.chat import rules
from jaxspec.text.chat.tools import force
from jaxspec.text.grammars import Grammar, GrammarTokens
from jaxspec.tokenizer import Tokenizer, TokenizerError, stop_at_text

COMPLETION_TOKENS = 16
"""New tokens of /v1/completions, where a request says nothing; the protocol's own number."""
MOST_STOPS = 16
StopAt = Callable[[Sequence[int]], int | None]
_OF_CHECKPOINT = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OF_REQUEST = ("presence_penalty", "frequency_penalty")
_PENALTIES = Range("from -2 to 2", lambda x: abs(x) <= 2)
_TOKEN_ID = re.compile(r"-?[0-9]{1,20}")
_BIASES = Range("from -100 to 100", lambda x: abs(x) <= 100)


@dataclass(frozen=True)
class ParsedRequest:
    """A request, understood.

    Attributes:
      prompts: token ids; each has `n` requests, one after the other.
      requests: for the engine.
      stops: stop texts.
      top_logprobs: best tokens to show beside each; None: no log-probabilities.
      echo: whether replies begin with the prompt.
      prompt_logprobs: best tokens to show beside each of the prompt's; None: none of them.
      tools: what the request says of tools.
      steps: whether a stream says which tokens came in one step.
    """

    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[Request, ...]
    n: int
    stops: tuple[str, ...]
    top_logprobs: int | None
    echo: bool = False
    prompt_logprobs: int | None = None
    tools: chat.ToolChoice = field(default_factory=chat.ToolChoice)
    steps: bool = False

    def prompt_of(self, choice: int) -> tuple[int, ...]:
        """Return the prompt that a choice continues."""
        return self.prompts[choice // self.n]

    @property
    def num_choices(self) -> int:
        """Choices of the reply."""
        return len(self.prompts) * self.n

    @property
    def needs_scores(self) -> bool:
        """Whether the prompts' own log-probabilities are shown."""
        return self.prompt_logprobs is not None or (self.echo and self.top_logprobs is not None)


@dataclass(frozen=True)
class ServingModel:
    """The model that is served, as far as requests have to fit it.

    Attributes:
      num_stop_ids: most stop ids of a request.
      grammars: the tokenizer as grammars see it; None where requests may have none, for the reason `no_grammars`.
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
        """Most tokens of a prompt and its reply together."""
        spare = cache_length_for(self.spec, 0)
        return min(self.spec.target.config.max_positions, self.cache_length - spare)

    def completion(self, asked: CompletionRequest) -> ParsedRequest:
        """Understand a request to /v1/completions.

        Raises:
          ApiError: it cannot be served; says which field is wrong.
        """
        if asked.best_of is not None and asked.best_of != (asked.n or 1):
            raise ApiError(400, "best_of is not supported beyond n", param="best_of")
        prompts = self._prompts(asked)
        most = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        echo = bool(asked.echo)
        wish = self._wish(
            asked,
            prompts,
            [most] * len(prompts),
            asked.logprobs,
            "max_tokens",
            least=0 if echo or asked.prompt_logprobs is not None else 1,
            grammar=self._grammar(find_structured_output(asked)),
        )
        if (top := asked.prompt_logprobs) is not None:
            if asked.stream:
                said = "prompt_logprobs is for replies in one piece, without stream"
                raise ApiError(400, said, param="prompt_logprobs")
            self._check_top(top, "prompt_logprobs")
        if wish.needs_scores or most == 0:  # no engine looks at these prompts before
            self._check_ids(prompts)
        return dataclasses.replace(wish, echo=echo, prompt_logprobs=top)

    def chat(self, asked: ChatCompletionRequest) -> ParsedRequest:
        """Understand a request to /v1/chat/completions.

        Raises:
          ApiError: it cannot be served; says which field is wrong.
        """
        for name in ("echo", "prompt_logprobs"):
            if getattr(asked, name) not in (None, False):
                raise ApiError(400, f"{name} is for /v1/completions", param=name)
        kwargs = asked.chat_template_kwargs or {}
        if asked.reasoning_effort is not None:
            kwargs = {"enable_thinking": asked.reasoning_effort != "none", **kwargs}
        try:
            can = self.grammars is not None
            tools = chat.choose(asked.tools, asked.tool_choice, grammars=can)
            if asked.parallel_tool_calls is False:
                tools = dataclasses.replace(tools, parallel=False)
            prompt = self.conversation(
                asked.messages,
                tools.tools,
                kwargs,
                asked.add_generation_prompt is not False,
            )
            grammar = self._grammar_of_chat(asked, prompt, tools)
            if tools.forced and grammar is None:
                prompt = force(self.tokenizer, prompt, tools.forced)
        except FieldError as error:
            raise wrong_value(error) from None
        name = "max_completion_tokens"
        most = asked.max_completion_tokens
        if most is None:
            name, most = "max_tokens", asked.max_tokens
        if most is None:
            most = max(1, self.max_model_len - len(prompt))
        top = (asked.top_logprobs or 0) if asked.logprobs else None
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self._wish(asked, [tuple(prompt)], [most], top, name, tools, grammar=grammar)

    def _grammar_of_chat(
        self, asked: ChatCompletionRequest, prompt: Sequence[int], tools: chat.ToolChoice
    ) -> Grammar | None:
        """Return what a reply of a chat may be: its reasoning first, then what is asked for.

        Raises:
          ApiError: there is no such grammar, or tools are to be called besides.
        """
        wanted = find_structured_output(asked)
        if wanted is not None and tools.tools:
            said = f"{wanted.field} and tools: the reply would be one of them; leave one out"
            raise ApiError(400, said, param=wanted.field)
        strict = any(tool["function"].get("strict") is True for tool in tools.tools)
        if (tools.required or strict) and self.grammars is not None:
            one = tools.forced is not None and asked.tool_choice != "required"
            may = tools.callable if tools.required else tools.tools
            rule = rules.calls(self.tokenizer, prompt, may, one=one, required=bool(tools.required))
            if rule is not None:
                kind, source, frame = rule
                of_calls = StructuredOutput("tools", kind, source)
                return compiled(self.grammars, of_calls, frame=frame, lenient=not strict)
            if tools.required:
                said = "this model's tokenizer has no markers of calls"
                raise FieldError("tool_choice", f"asks for a call, and {said}")
        if wanted is None:
            return None
        return self._grammar(wanted, rules.frame(self.tokenizer, prompt))

    def _grammar(self, wanted: StructuredOutput | None, frame: str | None = None) -> Grammar | None:
        """Return a grammar as the engine takes it.

        Raises:
          ApiError: the server follows none, or it cannot be used.
        """
        if wanted is None:
            return None
        if self.grammars is None:
            raise ApiError(400, f"{wanted.field}: {self.no_grammars}", param=wanted.field)
        return compiled(self.grammars, wanted, frame=frame)

    def conversation(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any],
        kwargs: dict[str, Any] | None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation.

        Raises:
          ApiError, FieldError: it cannot be read, or the template refuses it.
        """
        given = {**(self.settings.chat_template_kwargs or {}), **(kwargs or {})}
        if (name := "add_generation_prompt") in given:
            raise FieldError("chat_template_kwargs", f"has {name}, which is a field of its own")
        try:
            return chat.render(
                self.tokenizer,
                messages,
                list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except TokenizerError as error:
            raise ApiError(400, str(error), param="messages") from None

    def encode(self, text: str, *, special: bool = True, param: str = "prompt") -> tuple[int, ...]:
        """Return the token ids of a text.

        Raises:
          ApiError: it is empty, or no text.
        """
        if not text:
            raise ApiError(400, f"{param} is empty; give at least one character", param=param)
        try:
            tokenizer = self.tokenizer
            return tokenizer.encode(text) if special else tokenizer.encode_rendered(text)
        except TokenizerError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None

    def _prompts(self, asked: CompletionRequest) -> list[tuple[int, ...]]:
        given: Any = asked.prompt
        if given is None or given == []:
            raise ApiError(400, "prompt is missing; give a text or token ids", param="prompt")
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        special = asked.add_special_tokens is not False
        return [self.encode(p, special=special) if isinstance(p, str) else tuple(p) for p in given]

    def _wish(
        self,
        asked: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        most: Sequence[int],
        top_logprobs: int | None,
        limit: str,
        tools: chat.ToolChoice | None = None,
        *,
        least: int = 1,
        grammar: Grammar | None = None,
    ) -> ParsedRequest:
        """Put together what all requests have in common.

        Args:
          most: new tokens of each prompt, and `least` the least that may be asked for.
          limit: what the request calls them.
        """
        _refuse_unsupported(asked)
        n = 1 if asked.n is None else asked.n
        if n < 1 or n * len(prompts) > self.settings.max_n:
            raise ApiError(
                400,
                f"n is {n} for {len(prompts)} prompts; expected at least 1, and at most "
                f"{self.settings.max_n} completions of one request",
                param="n",
            )
        stops = _stops(asked.stop)
        tools = tools or chat.ToolChoice()
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        eos = () if asked.ignore_eos else self.generation.eos_token_ids
        stop_ids = {*eos, *(asked.stop_token_ids or ())}
        if len(stop_ids) > self.num_stop_ids:
            raise ApiError(
                400,
                f"stop_token_ids: {len(stop_ids)} ids, the checkpoint's own included; this server was started "
                f"for at most {self.num_stop_ids} (--max-stop-ids)",
                param="stop_token_ids",
            )
        try:
            shared: dict[str, Any] = dict(
                sampling=self._sampling(asked, top_logprobs),
                stop_ids=tuple(sorted(stop_ids)),
                # The protocol allows 64 bits with a sign, and clients draw seeds from them all.
                seed=seed % 2**32 if -(2**63) <= seed < 2**64 else seed,
                priority=asked.priority or 0,
                grammar=grammar,
            )
            requests = [
                Request(
                    prompt,
                    count,
                    # Without a seed of the request's own, the same prompt twice gives two replies, too.
                    sample=sample + (place * n if asked.seed is None else 0),
                    stop_at=self._stop_at(prompt, stops, tools),
                    **shared,
                )
                for place, (prompt, count) in enumerate(zip(prompts, most, strict=True))
                for sample in range(n)
                if count
            ]
        except FieldError as error:
            raise wrong_value(error) from None
        for prompt, count in zip(prompts, most, strict=True):
            self._check_room(len(prompt), count, limit, least)
        return ParsedRequest(
            tuple(prompts),
            tuple(requests),
            n,
            stops,
            top_logprobs,
            tools=tools,
            steps=bool(asked.return_steps and asked.stream),
        )

    def _stop_at(
        self, prompt: tuple[int, ...], stops: tuple[str, ...], tools: chat.ToolChoice
    ) -> StopAt | None:
        """Return what ends a reply beside stop ids: a stop text, or its first call if it may have one only."""
        found: list[StopAt] = []
        if stops:
            found.append(stop_at_text(self.tokenizer, stops))
        if tools.calls and not tools.parallel:
            found.append(chat.FirstCall(self.tokenizer, prompt))
        if len(found) < 2:
            return found[0] if found else None
        return lambda ids: min((n for f in found if (n := f(ids)) is not None), default=None)

    def _check_ids(self, prompts: Sequence[tuple[int, ...]]) -> None:
        for prompt in prompts:
            wrong = ids_refusal(prompt, self.spec.target.config.vocab_size)
            if wrong or not prompt:
                said = f"prompt ids {wrong}" if wrong else "the prompt is empty"
                raise ApiError(400, said, param="prompt")

    def _check_top(self, top: int, name: str) -> None:
        program_features = self.spec.program_features
        if not program_features.logprobs:
            said = "this server was started without logprobs (--max-logprobs)"
            raise ApiError(400, said, param=name)
        if not 0 <= top <= program_features.top_logprobs:
            raise ApiError(
                400,
                f"{name}: {top} tokens were asked for; this server was started for at most "
                f"{program_features.top_logprobs} (--max-logprobs)",
                param=name,
            )

    def _check_room(self, prompt: int, new: int, limit: str, least: int) -> None:
        if new < least:
            raise ApiError(400, f"{limit} is {new}; expected {least} or more", param=limit)
        if prompt + new > self.max_model_len:
            raise ApiError(
                400,
                f"this model has room for {self.max_model_len} tokens, but the prompt has {prompt} and "
                f"{limit} is {new}; shorten one of them",
                param=limit if prompt < self.max_model_len else "prompt",
                code="context_length_exceeded",
            )

    def _sampling(self, asked: GenerationRequest, top_logprobs: int | None) -> Sampling:
        """Return what a request asks of sampling; where it says nothing, what the checkpoint says.

        Raises:
          ApiError: the server's programs cannot do it.
          FieldError: a value is out of range.
        """
        program_features = self.spec.program_features
        values = {name: getattr(asked, name) for name in (*_OF_CHECKPOINT, *_OF_REQUEST)}
        values = {name: value for name, value in values.items() if value is not None}
        for name in _OF_REQUEST:
            if wrong := _PENALTIES.refusal(values.get(name, 0)):
                raise FieldError(name, wrong)
        if values.get("top_k") == -1:  # a common way to say "off"
            values["top_k"] = 0
        for name in _OF_CHECKPOINT:
            if name != "repetition_penalty" or program_features.penalties:
                values.setdefault(name, getattr(self.generation, name))
        biases = _biases(asked.logit_bias or {})
        if len(biases) > program_features.num_biases:
            raise ApiError(
                400,
                f"logit_bias names {len(biases)} tokens; this server was started for {program_features.num_biases} "
                "(--max-logit-bias)",
                param="logit_bias",
            )
        if top_logprobs is not None:
            name = "top_logprobs" if isinstance(asked, ChatCompletionRequest) else "logprobs"
            self._check_top(top_logprobs, name)
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


def _refuse_unsupported(asked: GenerationRequest) -> None:
    """Refuse what would be served wrongly if it were ignored."""
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    for name, harmless in NOT_SUPPORTED.items():
        if getattr(asked, name, None) not in (None, *harmless):
            raise ApiError(400, f"{name} is not supported", param=name)


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if "" in stops or len(stops) > MOST_STOPS:
        raise ApiError(
            400, f"stop: expected at most {MOST_STOPS} texts, none of them empty", param="stop"
        )
    return stops


def _biases(given: dict[str, float]) -> dict[int, float]:
    if not all(_TOKEN_ID.fullmatch(token) for token in given):
        raise ApiError(400, "logit_bias: expected token ids as keys", param="logit_bias")
    for token, bias in given.items():
        if wrong := _BIASES.refusal(bias):
            raise ApiError(400, f"logit_bias of token {token} {wrong}", param="logit_bias")
    biases = {int(token): bias for token, bias in given.items()}
    if len(biases) < len(given):
        raise ApiError(400, "logit_bias names a token twice", param="logit_bias")
    return biases
