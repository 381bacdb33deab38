"""Grammars: the tokens that may come next, at every drafted position at once.

`matcher` follows any grammar on the host, by llguidance. `automaton` follows small regular
expressions on the device.
"""

from __future__ import annotations

from jaxspec.text.grammars.matcher import Grammar, GrammarTokens, Kind, Matcher, masks, num_allowed

__all__ = ["Grammar", "GrammarTokens", "Kind", "Matcher", "masks", "num_allowed"]
