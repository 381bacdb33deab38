"""A tokenizer of few tokens, for grammars over the vocabularies of tiny models."""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxspec.text.grammars import GrammarTokens
from jaxspec.tokenizer import Tokenizer

EOS = 1
"""The id of the token that ends a text, unless another is asked for."""
_LONGER = ['":', '",', '": ', "true", "false", "null", "name", "size", "[]", "{}", "12", "ab", "  "]


def tokenizer(texts: Sequence[str], eos: int) -> Tokenizer:
    """Return a tokenizer of these texts, with a special token put in at id `eos`."""
    tokens = [t.replace(" ", "Ġ").replace("\n", "Ċ") for t in texts]
    tokens.insert(eos, "<eos>")
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend)


@functools.cache
def ascii_tokenizer() -> Tokenizer:
    """Return a tokenizer of the printable characters and some longer texts."""
    return tokenizer([*string.printable[:95], "\n", *_LONGER], EOS)


@functools.cache
def ascii_tokens(vocab_size: int) -> GrammarTokens:
    """Return it as grammars see it, for a model of so many tokens."""
    return GrammarTokens(ascii_tokenizer(), vocab_size, [EOS])
