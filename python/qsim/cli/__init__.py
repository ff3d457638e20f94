"""The command line: a module a command, called as it is (``qsim inspect``, ``convert``, ``quantize`` ...)."""

from qsim.cli.main import main

__all__ = ["main"]
