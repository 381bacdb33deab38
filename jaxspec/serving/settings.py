"""Settings of a server. The command line makes its options from them, without JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.configs.gemma4_vision import BUDGETS
from jaxspec.options import (
    CACHE_TOKENS_HELP,
    CHOOSE_LENGTH_HELP,
    ChooseLength,
    FieldError,
    ProgramFeatures,
    Range,
    at_least,
    option,
    whole,
)

SECONDS = Range("above 0", lambda x: x > 0)


@dataclass(frozen=True)
class Settings:
    """Limits and settings for clients."""

    served_model_name: tuple[str, ...] = option(
        (),
        "Name of the model. Repeatable; replies use the first. Default: the target as given.",
    )
    api_key: tuple[str, ...] = option(
        (),
        "Refuse requests without this key. Repeatable. Default: JAXSPEC_API_KEY, or no key.",
        secret=True,
    )
    max_waiting: int = option(
        256,
        "Completions that may wait for a slot. Beyond, requests get 429.",
        range=at_least(0),
    )
    max_n: int = option(
        64, "Completions of one request, all its prompts together.", range=at_least(1)
    )
    max_images: int = option(16, "Images of one request.", range=at_least(0))
    max_image_tokens: int | None = option(
        None,
        "Tokens of all images of one request. Default: as many as its cache has positions for.",
        range=at_least(0),
    )
    image_host: tuple[str, ...] = option(
        (),
        "Fetch images of clients from this host, if its addresses are public. Repeatable. Default: "
        "no addresses, data URLs alone.",
        metavar="HOST",
    )
    image_tokens: int | None = option(
        None,
        'The most tokens of each image without "detail" low or high, which are 70 and 1120. Default: '
        "the checkpoint's own number, 280 in released ones.",
        range=BUDGETS,
        metavar="70|140|280|560|1120",
    )
    max_body_mib: int = option(8, "MiB of a request's body.", range=at_least(1))
    timeout: float = option(
        600.0, "Seconds that a request may take, waiting included.", range=SECONDS
    )
    client_timeout: float = option(
        30.0,
        "Seconds that a client may take to send its body, or to read what was written to it.",
        range=SECONDS,
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        'Values for the chat template where a request has none, such as {"enable_thinking": true}.',
        metavar="JSON",
    )
    cors_origin: tuple[str, ...] = option(
        (), "Let pages of this origin call the server; * for all. Repeatable. Default: none."
    )
    no_page: bool = option(False, "No chat page at /.")
    log_prompts: bool = option(False, "Write prompts and replies to the log, too.")

    def __post_init__(self) -> None:
        """Check the keys.

        Raises:
          FieldError: a key is empty.
        """
        if "" in self.api_key:
            raise FieldError("api_key", "is empty: most likely a variable was not set")


@dataclass(frozen=True)
class ProgramOptions:
    """Shapes and features that the engine's programs are compiled for."""

    slots: int = option(8, "Requests decoded together.", range=at_least(1))
    cache_length: int | None = option(
        None,
        "Positions of a slot: prompt, new tokens and one step. Default: 4096, or the model's.",
        range=at_least(1),
    )
    cache_tokens: str | None = option(
        None,
        CACHE_TOKENS_HELP + " Default: auto on a GPU, else --cache-length for every slot.",
        metavar="N|auto",
    )
    steps_per_return: int = option(
        4,
        "Largest number of decode steps between two returns to the host. A new request waits for "
        "them, and streams get text in such pieces.",
        range=at_least(1),
    )
    max_prefill_tokens: int | None = option(
        2048,
        "Prompt tokens, padding included, that are read before the other rows decode on.",
        range=at_least(1),
    )
    choose_length: ChooseLength = option("exact", CHOOSE_LENGTH_HELP)
    invariant: bool = option(
        False,
        "No reply depends on the requests beside it, to the last bit: on a GPU, prompts then share "
        "small passes only.",
    )
    prefix_gib: float | None = option(
        None,
        "GiB of each device for beginnings of prompts, which are then not read again; 0: none. "
        "Default: half of what is left on a GPU, and at most 1 on a CPU.",
        range=Range("0 or more; 0: none", lambda x: (x >= 0) & (x < math.inf)),
    )
    prefix_host_gib: float = option(
        0.0,
        "GiB of host memory for beginnings that no longer fit on the device.",
        range=Range("0 or more; 0: none", lambda x: (x >= 0) & (x < math.inf)),
    )
    no_penalties: bool = option(False, "Refuse penalties, which cost a little in every step.")
    max_logit_bias: int = option(64, "Tokens of a request's logit_bias.", range=at_least(0))
    max_logprobs: int = option(
        5,
        "Best tokens shown beside each, for logprobs and top_logprobs; 0: no log-probabilities.",
        range=whole(0, 20),
    )
    no_grammars: bool = option(
        False,
        "Refuse grammars. No cache keeps their program, so each start compiles it.",
    )
    max_stop_ids: int = option(
        16, "Stop token ids of a request, the checkpoint's own included.", range=at_least(1)
    )

    @property
    def program_features(self) -> ProgramFeatures:
        """Features that the programs have."""
        return ProgramFeatures(
            penalties=not self.no_penalties,
            num_biases=self.max_logit_bias,
            logprobs=self.max_logprobs > 0,
            top_logprobs=self.max_logprobs,
        )
