"""Models that ask for the exact class of a module, as in ``type(block) is Block``: each container that is simulated has a class of its own,
which derives from that one, and the answer is another. Layers of torch.nn keep theirs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

from torch import nn

from qsim.graph.record.containers import containers
from qsim.graph.record.subclasses import runs_alike
from qsim.graph.record.tape import Tape
from qsim.graph.record.telling import Telling
from qsim.runs.arguments import Arguments


def lost_classes(model: nn.Module, examples: Sequence[Arguments], tape: Tape) -> list[str]:
    """A sentence if the model computes something else with containers of derived classes, where functions of it ask for classes."""
    if not tape.asking or runs_alike(model, examples, tape, functools.partial(_derived, model)):
        return []
    where = ", ".join(sorted(tape.asking))
    return [
        Telling(
            f"the model asks for the exact class of a module ({where}), and computes something else where that is a "
            "derived one, as those of simulated modules are: the simulation is of another model. Ask with isinstance"
        )
    ]


@contextlib.contextmanager
def _derived(model: nn.Module) -> Iterator[None]:
    before = [(m, type(m)) for _, m in containers(model)]
    try:
        for m, cls in before:
            with contextlib.suppress(TypeError):  # a class that takes no subclass is not swapped either
                m.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
        yield
    finally:
        for m, cls in before:
            m.__class__ = cls  # type: ignore[assignment]  # Module's __hash__
