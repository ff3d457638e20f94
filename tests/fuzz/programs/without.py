"""A simulation without its guards, one by one: ``python -m tests.fuzz.programs.without`` shows for each a program that needs it.

Each program passes with the guard and fails without it. ``--search`` looks for such programs from ``--seed`` on, for all guards or those
that are named: after a change of the generator, which makes other programs of the seeds that are recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterable, Iterator

import torch

import qsim

from .case import Case, Failure, Raised, Undecided
from .examine import examine
from .generate import generate
from .guards import GUARDS
from .ir import Program
from .loaded import loaded

_TRIES = 20  # threads meet by chance

# guard -> the first seed that was found whose program fails without it, and the oracle that sees that
RECORDED: dict[str, tuple[int, str]] = {
    "call sites": (54, "hand-written"),
    "layers never called": (20, "hand-written"),
    "hooks": (731, "hooks"),
    "a mode for each call": (1, "threads"),
    "losses": (78, "hand-written"),
    "writes": (23, "savings"),
    "put back": (2, "left alone"),
    "kept: values": (4, "savings"),
    "kept: versions": (5, "savings"),
    "kept: memory": (8, "savings"),
    "layers alone": (4, "layers alone"),
    "whole or not at all": (9, "compiled"),
    "references": (13, "savings"),
    "storages": (13, "savings"),
    "paths": (20, "warned"),
    "methods": (21, "methods"),
    "generators": (24, "hand-written"),
    "ends": (26, "warned"),
    "recomputation": (27, "checkpoints"),
    "hidden functions": (29, "compiled"),
    "one memory": (36, "hand-written"),
    "clamped": (52, "savings"),
    "written buffers": (186, "16 bits"),
    "own arguments": (219, "left alone"),
    "liveness": (243, "savings"),
    "either name": (1820666, "hand-written"),
    "recomputation, in place": (561857, "savings"),
    "recomputation, kept": (561879, "hand-written"),
}

# guard -> a test in tests/python/graph or compiled that fails without it, of those for which no program was found in a few hundred seeds
TESTED = {
    "folded pairs": "test_truth_folded_pairs.py::test_a_norm_without_its_layer_normalizes",
    "weights anywhere": "test_truth_weights.py::test_where_no_example_reached_it",
    "layers elsewhere": "test_truth_paths.py::test_a_layer_that_is_called_past_its_container",
    "longer loops": "test_truth_loops.py::test_what_no_mode_meets_has_no_grid_behind_a_call_that_the_examples_did_not_show",
    "chains that began": "test_truth_paths.py::test_an_operation_inside_of_a_chain_compiled",
    "makers that ran": "test_truth_paths.py::test_a_chain_whose_end_no_mode_meets",
    "ends that strayed": "test_truth_paths.py::test_a_chain_whose_end_no_mode_meets",
    "that very memory": "test_truth_older_names.py::test_another_tensor_is_not_put_on_its_grid",
    "unknown origin": "test_truth_unknown.py::test_operands_of_unknown_make",
    "written out in half": "test_truth_half.py::test_simulation_and_doctor_agree_on_the_museum",
    "recomputation above": "test_truth_checkpoint.py::test_a_chain_that_did_not_begin_does_not_when_it_runs_again",
    "the whole tensor": "test_truth_unknown.py::test_what_no_mode_meets_is_quantized_once",
    "compiled parts": "test_graph_breaks.py::test_compiled_as_eager",
    "divisors": "test_architectures.py::test_no_divisor_is_rounded_to_zero",
    "arguments by name": "test_truth_unknown.py::test_arguments_behind_the_asterisk_keep_their_quantizers",
    "every operation rounds": "test_truth_half.py::test_a_layer_rounds_before_its_activation",
    "the recorded weight": "test_truth_weights.py::test_another_weight_at_the_same_place_is_not_on_the_grid_of_the_first",
    "changed again": "test_truth_state.py::test_a_buffer_that_the_forward_writes",
    "plain eager": "test_shortcuts.py::test_compiled_after_eager",
    "padded rows": "test_truth_raises.py::test_nested_tensors_inside",
    "kept: eval": "test_truth_savings.py::test_memory_that_is_written_past_everything_is_read_anew_after_train_and_eval",
    "the graph is the plan": "test_truth_compiled.py::test_a_branch_under_compilation_alone_that_leaves_out_a_quantizer_is_an_error",
    "counted references": "test_truth_savings.py::test_a_list_that_keeps_what_a_rectifier_reads",
}


def program_of(seed: int) -> Program:
    """Without the rarer operations: of most of them the hand-written simulation says nothing."""
    return generate(seed, has_rarer=False)


def failure_without(guard: str, program: Program, oracles: tuple[str, ...]) -> Failure | None:
    """The first failure of a program without a guard that it has not with it."""
    with GUARDS[guard].out():
        failures = examine(program, oracles).failures
    return next((found for found in failures if not examine(program, [found.oracle]).failures), None)


def asked_for(seed: int, guards: list[str]) -> list[str]:
    """Which guards have something to say of a seed's program. Others have not, whatever the oracles."""
    program = program_of(seed)
    guards = [guard for guard in guards if re.search(GUARDS[guard].wants, repr(program))]
    with contextlib.ExitStack() as undo:
        watched = {guard: undo.enter_context(GUARDS[guard].watched()) for guard in guards}
        if not all(watched.values()):
            with contextlib.suppress(Raised, Undecided), loaded(program) as found:
                case = Case(program, found)
                case.check()
                sim = case.simulation(qsim.int8())
                for call in case.calls:
                    for mode in case.modes(call):
                        case.run(sim, call, mode)
    return [guard for guard, answers in watched.items() if answers]


def search(guards: list[str], seeds: Iterable[int]) -> Iterator[tuple[str, int, Failure]]:
    """For each guard the first seed whose program needs it, with what fails without it, as they are found."""
    left = list(guards)
    for seed in seeds:
        for guard in asked_for(seed, left) if left else ():
            if (failure := failure_without(guard, program_of(seed), GUARDS[guard].oracles)) is not None:
                left.remove(guard)
                yield guard, seed, failure


def recorded(guards: list[str]) -> Iterator[tuple[str, int, Failure]]:
    """What fails without each guard, as it is recorded."""
    for guard in guards:
        seed, oracle = RECORDED.get(guard, (None, ""))
        for _ in range(0 if seed is None else _TRIES if oracle == "threads" else 1):
            if (failure := failure_without(guard, program_of(seed), (oracle,))) is not None:
                yield guard, seed, failure
                break


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.programs.without", description=__doc__)
    parser.add_argument("guards", nargs="*", help="; ".join(GUARDS))
    parser.add_argument("--search", action="store_true", help="look for seeds instead of showing those that are recorded")
    parser.add_argument("--seed", type=int, default=1, help="the first to look at")
    parser.add_argument("--count", type=int, default=2000, help="how many to look at for each guard")
    options = parser.parse_args()
    torch.set_num_threads(1)
    guards = options.guards or list(GUARDS)
    found = search(guards, range(options.seed, options.seed + options.count)) if options.search else recorded(guards)
    left = set(guards)
    print("| guard | what it asks | seed | oracle | what that sees without it |\n|---|---|---|---|---|", flush=True)
    for guard, seed, failure in found:
        left.discard(guard)
        print(f"| {guard} | {GUARDS[guard].premise} | {seed} | {failure.oracle} | {failure.call}: {failure.detail} |", flush=True)
    for guard in guards:
        if guard in left:
            known = TESTED.get(guard, "no test of those that were tried fails")
            print(f"{guard}: {'its program fails no more' if guard in RECORDED else f'no program is known; {known}'}")
    return 1 if (options.search and left) or RECORDED.keys() & left else 0


if __name__ == "__main__":
    sys.exit(main())
