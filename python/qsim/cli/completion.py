"""Print a script that completes commands, options and files in a shell: `eval "$(qsim completion bash)"` in ~/.bashrc."""

from __future__ import annotations

import argparse

HELP = "print a script for completion in a shell"
_SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS)


def run(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(options.parser, shell=options.shell))
    return 0
