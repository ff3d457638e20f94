"""Recorded again, copied, pickled, or loaded from a state dict: a simulation gives the same bits."""

from __future__ import annotations

import copy
import pickle

import qsim

from ..case import Case, Failure, Raised
from ..results import by_name, same_bits
from .savings import any_config


def copies_are_equal(case: Case) -> Failure | None:
    config = any_config(case.program.seed)
    sim = case.simulation(config)
    copies = {"recorded again": case.simulation(config), **_copied(case, sim)}
    loaded = case.simulation(config, calibrated=False)
    try:
        loaded.load_state_dict(sim.state_dict())
    except Exception as error:
        raise Raised("load_state_dict", error) from error
    copies["state dict"] = loaded
    for call in case.calls:
        for mode in case.modes(call, train=False):
            expected = case.run(sim, call, mode)
            for name, other in copies.items():
                found = case.run(other, call, mode)
                if problem := same_bits(found.results, expected.results):
                    return Failure("copies", f"{name}, {mode}", f"{call.name}: {problem}")
                if problem := same_bits(*by_name(found.gradients, expected.gradients)):
                    return Failure("copies", f"gradients, {name}, {mode}", f"{call.name}: {problem}")
    return None


def _copied(case: Case, sim: qsim.QuantSim) -> dict[str, qsim.QuantSim]:
    """Copies of the kinds that the float model allows."""
    model, found = case.float_model(), {}
    for name, copied in (("copy", copy.deepcopy), ("pickle", lambda value: pickle.loads(pickle.dumps(value)))):
        try:
            copied(model)
        except Exception:
            continue
        try:
            found[name] = copied(sim)
        except Exception as error:
            raise Raised(name, error) from error
    return found
