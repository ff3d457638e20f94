"""What all subcommands share: arguments, exit codes, errors of one line."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from qsim.cli import compare, completion, convert, doctor, inspect, quantize, report, verify
from qsim.cli.failure import Failure, one_line
from qsim.version import VERSION

_FAILED = 2
_INTERRUPTED, _NOBODY_READS = 130, 141  # 128 and the signal, as shells have it
_COMMANDS = (inspect, convert, quantize, compare, report, verify, doctor, completion)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failure(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``qsim`` with these arguments; by default with those of the process.

    Parameters
    ----------
    arguments : sequence of str, optional

    Returns
    -------
    int
        0: fine. 1: `verify`, `compare` or `quantize` met differences, `doctor` errors. 2: bad usage or a bad file: one line on stderr.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mktemp(".cache")
    >>> _ = open(path, "w").write("TRT-8501-EntropyCalibration2\\ninput: 3c010204\\n")
    >>> main(["convert", path, f"{path}.encodings", "--format", "aimet-1.0.0"])
    wrote 1 encoding as aimet-1.0.0
    0
    """
    options = argparse.Namespace(traceback=False)
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns about damaged models, which end in an error anyway
    try:
        parser().parse_args(arguments, options)
        code = options.run(options)
        sys.stdout.flush()
        return int(code)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return _NOBODY_READS
    except Exception as error:
        if options.traceback:
            raise
        print(f"qsim: error: {one_line(error)}", file=sys.stderr)
        return _FAILED


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    made = _Parser(
        prog="qsim", description="Quantize ONNX models; look at, convert, compare and check quantized models and their encodings."
    )
    made.add_argument("--version", action="version", version=f"qsim {VERSION}")
    made.add_argument("--traceback", action="store_true", help="raise errors as Python does, in place of one line")
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        name = command.__name__.rpartition(".")[2]
        added = commands.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_arguments(added)
        added.set_defaults(run=command.run, parser=made)
    return made
