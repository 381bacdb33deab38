"""Grammars: which tokens may come next, at every drafted position at once.

`matcher` is the whole interface: `GrammarTokens`, `Grammar`, `Matcher` and `masks`. It runs on the host
and needs the optional package llguidance. Nothing here imports JAX.
"""

from __future__ import annotations

from jaxspec.grammars.matcher import Grammar, GrammarTokens, Kind, Matcher, masks

__all__ = ["Grammar", "GrammarTokens", "Kind", "Matcher", "masks"]
