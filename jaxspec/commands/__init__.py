"""The command line, and what only it uses; nothing else imports from here.

Read `cli`, then `options`: a command is a function of a few records, whose fields become its options. Each command has
a folder. In it `command` has the options, `run` does the work, `report` or `tables` shows it.
"""
