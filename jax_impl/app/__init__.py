"""The `covey` command: one small module a command, over the two engines' Python interface.

A command module has `arguments(parser)` and `run(args) -> int`, the exit status: 0 good, 1 a
failed run, 2 bad usage or bad input (APP-1). Nothing heavy is imported before it is needed.
"""
