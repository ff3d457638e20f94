"""How a program's model is given its tensors and how it returns its results: dicts and what looks like them, dataclasses, `*args` ..."""

from __future__ import annotations

from dataclasses import dataclass

IMPORTS = """\
from collections import namedtuple
from dataclasses import dataclass
from typing import Any
"""


@dataclass(frozen=True)
class Interface:
    """How arguments come in.

    Attributes
    ----------
    parameters : str
        Of the forward, without flags.
    unpack : str
        Its first line.
    pack : str
        The call's positional arguments (a tuple) or keyword arguments (a dict), from `x`, `z` and `labels`.
    classes : str
        What it needs at the top of the file.
    known : bool
        The tensors are arguments that a simulation can quantize where the model begins; otherwise their readers do.
    labels : bool
        It can hand on labels too.
    """

    parameters: str
    unpack: str
    pack: str
    classes: str = ""
    known: bool = True
    labels: bool = False


_BATCH = '''
class Batch(dict):
    """What tokenizers return: a dict, but not to every function that looks into dicts."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
'''
_INPUTS = """
@dataclass
class Inputs:
    x: Any
    z: Any
"""
_NESTED = """
@dataclass
class Sample:
    inputs: Any
"""
_SLOTS = """
class Slots:
    __slots__ = ("x", "z")

    def __init__(self, x, z):
        self.x, self.z = x, z
"""
_PAIR = '\nPair = namedtuple("Pair", ["x", "z"])\n'

INTERFACES: dict[str, Interface] = {
    "plain": Interface("x, z, labels=None", "", "(x, z, labels) if labels is not None else (x, z)", labels=True),
    "keywords": Interface("x, z, labels=None", "", "dict(x=x, z=z, labels=labels)", labels=True),
    "dict": Interface("batch", 'x, z = batch["x"], batch["z"]', '({"x": x, "z": z},)'),
    "dict subclass": Interface("batch", 'x, z = batch["x"], batch["z"]', "(Batch(x=x, z=z),)", _BATCH, known=False),
    "attributes of a dict": Interface("batch", "x, z = batch.x, batch.z", "(Batch(x=x, z=z),)", _BATCH, known=False),
    "dataclass": Interface("batch", "x, z = batch.x, batch.z", "(Inputs(x, z),)", _INPUTS, known=False),
    "nested dataclass": Interface(
        "batch", "x, z = batch.inputs.x, batch.inputs.z", "(Sample(Inputs(x, z)),)", _INPUTS + _NESTED, known=False
    ),
    "slots": Interface("batch", "x, z = batch.x, batch.z", "(Slots(x, z),)", _SLOTS, known=False),
    "named tuple": Interface("batch", "x, z = batch.x, batch.z", "(Pair(x, z),)", _PAIR),
    "list": Interface("tensors", "x, z = tensors", "([x, z],)"),
    "nested": Interface("batch", 'x, z = batch["x"], batch["more"][0]', '({"x": x, "more": (z, 2)},)'),
    "star": Interface("*tensors", "x, z = tensors", "(x, z)"),
    "star between": Interface("x, *rest, scale=None", "z = rest[1]", "(x, x, z)"),
    "double star": Interface("**inputs", 'x, z = inputs["x"], inputs["z"]', "dict(x=x, z=z)"),
}

_OUTPUT = """
@dataclass
class Output:
    out: Any
    extra: Any = None
"""
_RETURNED = '\nReturned = namedtuple("Returned", ["out", "extra"], defaults=[None])\n'

# name -> (what the forward returns or yields, from a list of results; classes)
RETURNS: dict[str, tuple[str, str]] = {
    "tuple": ("({},)", ""),
    "list": ("[{}]", ""),
    "dict": ('dict(zip(("out", "extra"), ({},)))', ""),
    "dataclass": ("Output({})", _OUTPUT),
    "named tuple": ("Returned({})", _RETURNED),
    "nested": ('{{"out": [{}], "number": 3}}', ""),
    "generator": ("yield from [{}]", ""),
}
