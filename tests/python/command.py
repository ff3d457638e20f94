"""Running the command line in this process."""

import json

from qsim.cli import main


def run(capsys, *arguments):
    """Exit code, stdout, stderr."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def fine(capsys, *arguments):
    """stdout of a command that succeeds."""
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    return out


def fields(capsys, *arguments):
    """What a command prints with --json."""
    return json.loads(fine(capsys, *arguments, "--json"))


def refused(capsys, *arguments):
    """The line on stderr of a command that cannot do what it is asked for."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("qsim: error: ")
    assert err.count("\n") == 1
    return err
