"""The command line; nothing else imports from here.

Read `cli`, then `options`: a command is a function of records, whose fields become its options.
Each command has a folder: `command` has the options, `run` does the work, `report` or `results`
shows it.
"""
