"""Text around tokens: conversations, replies, grammars and images.

`chat` turns conversations into prompts, and tokens of a reply into text, reasoning and tool calls. `grammars` tells
which tokens may come next. `images` makes patches of image files. Read `chat.template` first, then `grammars.matcher`.
"""
