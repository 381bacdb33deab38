"""Text around tokens: conversations, replies and grammars.

`chat` turns conversations into prompts, and tokens of a reply into text, reasoning and tool calls. `grammars` tells
which tokens may come next. Read `chat.template` first, then `grammars.matcher`.
"""
