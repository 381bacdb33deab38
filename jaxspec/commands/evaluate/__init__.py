"""`jaxspec eval`: the worth of a drafter's drafts on a task. `command` is the command line.

Read `tasks`, whose prompts they are, then `measure`, what is counted.
"""
