"""The oracles: each takes a case and returns a failure, or None; `Undecided` where it has nothing to say."""

from __future__ import annotations

from collections.abc import Callable

from ..case import Case, Failure
from .checkpoints import without_checkpoints
from .compiled import compiled_is_eager
from .compiled_parts import compiled_parts_are_eager
from .copies import copies_are_equal
from .exported import files_are_the_simulation
from .fallback import fallback_is_near
from .half import half_precision_loses_the_same
from .hand_written import as_written_by_hand
from .hooks import hooks_change_nothing
from .layers_alone import layers_by_themselves
from .left_alone import making_changes_nothing
from .methods import methods_by_themselves
from .savings import savings_change_nothing
from .simulation_off import off_is_float, without_quantizers_is_float
from .sixteen_bits import sixteen_bits_are_near
from .threads import threads_do_not_meet
from .warned import other_ways_are_told
from .wrapped import wrappers_stay

Oracle = Callable[[Case], Failure | None]

# name -> (oracle, share of the programs that it looks at)
ORACLES: dict[str, tuple[Oracle, float]] = {
    "off": (off_is_float, 0.35),
    "hand-written": (as_written_by_hand, 1.0),
    "savings": (savings_change_nothing, 0.35),
    "16 bits": (sixteen_bits_are_near, 0.5),
    "fallback": (fallback_is_near, 0.2),
    "half": (half_precision_loses_the_same, 0.15),
    "hooks": (hooks_change_nothing, 1.0),
    "checkpoints": (without_checkpoints, 1.0),
    "copies": (copies_are_equal, 0.1),
    "threads": (threads_do_not_meet, 0.1),
    "compiled": (compiled_is_eager, 0.05),
    "compiled parts": (compiled_parts_are_eager, 0.05),
    "exported": (files_are_the_simulation, 0.05),
    "left alone": (making_changes_nothing, 0.2),
    "layers alone": (layers_by_themselves, 0.2),
    "methods": (methods_by_themselves, 0.5),
    "warned": (other_ways_are_told, 0.3),
    "quantizers off": (without_quantizers_is_float, 0.1),
    "wrapped": (wrappers_stay, 0.15),
}
