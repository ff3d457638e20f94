"""Which quantizers of a simulation change their bits together, and the config that gives each of them what was chosen."""

from __future__ import annotations

import copy
import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from qsim.config.config import Config
from qsim.graph.execute.attach import detach
from qsim.graph.plan.actions import PlannedQuantizer
from qsim.simulation.range_choice import choose_encodings
from qsim.simulation.simulation import Simulation

Bits = int | str  # a number, or "float"
Sim = TypeVar("Sim", bound=Simulation)


@dataclass(frozen=True)
class Choice:
    """Quantizers that no override can tell apart: they change together.

    Attributes
    ----------
    role : "weight" or "activation"
        As `Config.override` has it: constants of an addition are activations.
    operations : tuple of str
        Names that an override has to match.
    keys : tuple of str
        The quantizers, in the order of the model.
    candidates : tuple of int or "float"
        From the fewest bits on.
    """

    role: str
    operations: tuple[str, ...]
    keys: tuple[str, ...]
    candidates: tuple[Bits, ...]

    @property
    def name(self) -> str:
        return self.keys[0]


def choices_of(sim: Simulation, candidates: Sequence[Bits]) -> list[Choice]:
    """All choices of a simulation, in the order of the model.

    A result is quantized as any operation of its chain says, an operand as its readers say, a weight as all that read it say, tensors with
    one scale as the operation says that takes them together. What shares a scale stays in integers: left in float by that operation, each
    tensor would get its own.
    """
    planned = sim.decisions.quantizers
    order = list(planned)
    groups: list[tuple[str, set[str], list[str]]] = []
    for key, (role, names) in _deciding(sim).items():
        joined = [group for group in groups if group[0] == role and not names.isdisjoint(group[1])]
        groups = [group for group in groups if group not in joined]
        groups.append((role, names.union(*(group[1] for group in joined)), [*(each for group in joined for each in group[2]), key]))
    found = []
    for role, names, keys in groups:
        keys.sort(key=order.index)
        shares = any(planned[key].role == "activation" and key.endswith(".input") for key in keys)
        possible = tuple(bits for bits in candidates if not (shares and bits == "float"))
        found.append(Choice(role, tuple(sorted(names)), tuple(keys), possible))
    return sorted(found, key=lambda choice: order.index(choice.name))


def _deciding(sim: Simulation) -> dict[str, tuple[str, set[str]]]:
    """For each quantizer the role of its spec in a config, and the operations whose overrides decide it."""
    standing: dict[str, set[str]] = {}
    for post in sim.decisions.posts:
        if post.operation != "input":
            standing.setdefault(post.key, set()).add(post.operation)
    found: dict[str, tuple[str, set[str]]] = {}
    reading: dict[str, set[str]] = {}
    for key, decided in sim.decisions.quantizers.items():
        if decided.role == "gate":  # it comes and goes with the bits of its activation
            continue
        names = {decided.operation}
        if decided.role in ("weight", "constant") or ".input[" in key:
            names |= standing.get(key, set())
        if decided.role != "input":
            names |= {member for name in names & sim.decisions.operations.keys() for member in sim.decisions.operations[name].members}
        if decided.role == "weight" and decided.parameter is not None:
            reading.setdefault(decided.parameter, set()).update(names)
        found[key] = "weight" if decided.role == "weight" else "activation", names
    for key, decided in sim.decisions.quantizers.items():
        if decided.role == "weight" and decided.parameter is not None:
            found[key] = "weight", reading[decided.parameter]
    return found


def config_with(sim: Simulation, choices: Iterable[Choice], bits: Sequence[Bits]) -> Config:
    """The simulation's config with overrides by name, one for each operation of which something changes."""
    changes: dict[str, dict[str, Any]] = {}
    planned = sim.decisions.quantizers
    for choice, chosen in zip(choices, bits, strict=True):
        if {planned[key].spec.bits for key in choice.keys} != {chosen}:
            fields = None if chosen == "float" else {"bits": chosen}
            for name in choice.operations:
                changes.setdefault(name, {})[choice.role] = fields
            for table in (planned[key] for key in choice.keys if _hands_on(planned, key)):
                changes[table.operation]["activation"] = fields
    config = sim.config
    for name, change in changes.items():
        config = config.override(glob.escape(name), one_call=True, **change)
    return config


def _hands_on(planned: Mapping[str, PlannedQuantizer], key: str) -> bool:
    """Whether a quantizer is that of a table whose rows keep its grid: both change together, or rows would need one of their own."""
    decided = planned[key]
    return decided.role == "weight" and decided.op == "embedding" and f"{decided.operation}.output" not in planned


def trial(sim: Sim, config: Config, expected: Mapping[str, Bits]) -> Sim:
    """A simulation of a copy of the model with another config, its ranges chosen from what this one observed.

    Parameters
    ----------
    sim : Simulation
    config : Config
        From `config_with`.
    expected : mapping of str to int or "float"
        Bits of each quantizer of `sim`, which the new one is checked to have.
    """
    model = copy.deepcopy(sim.model)
    detach(model)
    made = type(sim)(model, [kwargs or args for args, kwargs in sim.calls], config, inplace=True)
    planned, known = made.decisions.quantizers, sim.quantizers()
    wrong = [key for key, decided in planned.items() if decided.role != "gate" and expected.get(key) != decided.spec.bits]
    # with the same bits, an operand that is quantized where it is read is left to another reader's quantizer
    if not config.profile.kernels:  # else a reader in float takes the grid before it away
        wrong += [key for key, bits in expected.items() if bits != "float" and key not in planned and ".input[" not in key]
    if wrong:
        raise RuntimeError(
            f"QuantSim.search_bits: no override gives these quantizers bits of their own: {', '.join(map(repr, wrong))}. Please report "
            "the model; with their operations left in float by the config they are not searched"
        )
    for key, decided in planned.items():
        if decided.parameter is None and decided.range is None:
            made.quantizers()[key].merge(known[key])
    choose_encodings(made)
    return made
