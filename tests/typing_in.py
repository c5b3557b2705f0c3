"""A command line typed in this process, for the tests of the commands."""

from collections.abc import Callable

Type = Callable[..., tuple[int, str, str]]  # words to (exit code, standard output, standard error)
