"""Instructions an element, counted in machine code written by hand: the way round a loop that computes, and none beside it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "sass_budget.py"


@pytest.fixture(scope="module")
def budget():
    spec = importlib.util.spec_from_file_location("sass_budget", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def listing(*lines: str) -> str:
    return "".join(f"        /*{16 * i:04x}*/                   {line} ;  /* 0x0 */\n" for i, line in enumerate(lines))


LOOP = listing(
    "S2R R0, SR_TID.X",
    "LDG.E.128 R4, desc[UR4][R2.64]",  # 0x10: the loop begins
    "@P0 BRA 0x60",
    "FMUL R4, R4, R8",
    "FMUL R5, R5, R8",
    "BRA 0x70",
    "MUFU.RCP R4, R4",  # the way that is rarely taken, shorter
    "STG.E.128 desc[UR4][R2.64], R4",
    "@!P1 BRA 0x10",
    "EXIT",
)


def test_the_way_that_computes_is_counted(budget):
    code = budget.instructions_of(LOOP)
    assert [i.target for i in code] == [None, None, 6, None, None, 7, None, None, 1, None]
    computing = budget.Loop("k", 2, {"LDG.E.128": 1, "FMUL": 2})
    assert budget.cheapest_round(code, 1, 8, computing) == 7
    assert budget.cheapest_round(code, 1, 8, budget.Loop("k", 2, {"LDG.E.128": 1})) == 5
    assert budget.cheapest_round(code, 1, 8, budget.Loop("k", 2, {"LDG.E.128": 1}, never=("MUFU",))) == 7
    assert budget.cheapest_round(code, 1, 8, budget.Loop("k", 2, {"FMUL": 3})) is None


def test_a_kernel_whose_loop_changed_is_named(budget, monkeypatch):
    monkeypatch.setattr(budget, "LOOPS", (budget.Loop("k<*", 4, {"FADD": 4}),))
    with pytest.raises(SystemExit, match="k<float>: no loop with"):
        budget.per_element("k<float>", budget.instructions_of(LOOP))
    assert budget.per_element("other", budget.instructions_of(LOOP)) is None


def test_registers_and_shared_memory_bound_the_warps(budget):
    assert budget.resident_warps("k", 90, 32, 0) == 64
    assert budget.resident_warps("k", 90, 33, 0) == 48  # registers come by 256 to a warp
    assert budget.resident_warps("k", 75, 32, 0) == 32
    assert budget.resident_warps("k", 90, 16, 100 * 1024) == 16  # two blocks of 8


def test_growth_beyond_a_tenth_fails(budget, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(budget, "BUDGETS", tmp_path / "budget.txt")
    cost = budget.Cost
    assert budget.report({"sm_90 f k": cost(10.0, 30, 64)}, update=True) == 0
    assert budget.report({"sm_90 f k": cost(11.0, 33, 48)}, update=False) == 0
    assert budget.report({"sm_90 f k": cost(11.1, 30, 64)}, update=False) == 1
    assert "11.1 instructions an element, its budget is 10.0" in capsys.readouterr().err
    assert budget.report({"sm_90 f k": cost(10.0, 34, 48)}, update=False) == 1
    assert budget.report({"sm_90 f k": cost(10.0, 30, 64), "sm_90 f new": cost(None, 30, 64)}, update=False) == 1
    assert budget.report({"sm_90 f other": cost(10.0, 30, 64)}, update=False) == 1
    assert "has a budget and is gone" in capsys.readouterr().err
    assert budget.report({"sm_90 f k": cost(10.0, 30, 64), "sm_75 f k": cost(99.0, 90, 16)}, update=False) == 0
