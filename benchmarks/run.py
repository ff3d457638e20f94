"""Runs the cases of this folder, prints a line for each and every bar, and writes bench.json with its plot.

    python benchmarks/run.py [--only TEXT] [--quick] [--json bench.json]

An operator's cases run in a process of their own per thread count: what one leaves behind in the allocator does not reach the next.
"""

from __future__ import annotations

import argparse
import importlib
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from case import Case
from machine import cores, describe
from plot import draw
from report import Row, bars_of, line, title
from timing import interleaved

MODULES = ("fake_quantize", "quantize", "round_to_format", "dynamic", "observe", "observe_fake_quantize", "search_range", "clip_grad")


def bar_value(against: str, seconds: float, ratios: dict[str, float]) -> float:
    if against == "us":
        return seconds * 1e6
    if against == "spread":
        times = [1, *(1 / ratio for ratio in ratios.values())]
        return max(times) / min(times)
    return ratios[against]


def measure(case: Case, size: int, threads: int, seconds: float) -> Row:
    calls = case.make(size)
    ours = calls.pop("qsim")
    best, ratios = min(interleaved({"qsim": ours}, seconds=seconds / 4).values()), {}
    for name, theirs in calls.items():
        pair = interleaved({"qsim": ours, name: theirs}, seconds=seconds)
        best = min(best, pair["qsim"])
        ratios[name] = pair["qsim"] / pair[name]
    values = {name: bar_value(name, best / size if case.unit == "tensor" else best, ratios) for name in case.bars_at(size, threads)}
    return {
        "operator": case.operator,
        "case": case.name,
        "dtype": case.dtype,
        "elements": size,
        "unit": case.unit,
        "device": "cpu",
        "threads": threads,
        "seconds": best,
        "ns_per_element": best / size * 1e9,
        "gb_per_s": case.bytes_moved * size / best / 1e9 if case.bytes_moved else None,
        "ratios": ratios,
        "bars": [
            {"against": name, "limit": limit, "value": values[name], "met": values[name] <= limit}
            for name, limit in case.bars_at(size, threads).items()
        ],
    }


def run(module: str, threads: int, only: str, seconds: float) -> list[Row]:
    torch.set_num_threads(threads)
    rows = []
    for case in importlib.import_module(module).CASES:
        for size in case.sizes_at(threads):
            if only not in title(case.operator, case.name, case.dtype):
                continue
            torch.manual_seed(0)
            rows.append(measure(case, size, threads, seconds))
            print(line(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose operator, name and dtype contain this")
    parser.add_argument("--quick", action="store_true", help="a glance: a tenth of the time for each")
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"), help="where to write; the plot of a whole run goes beside it")
    arguments = parser.parse_args()
    machine = describe()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    rows: list[Row] = []
    for threads in sorted({1, cores()}):
        for module in MODULES:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as own_process:
                rows += own_process.submit(run, module, threads, arguments.only, 0.03 if arguments.quick else 0.3).result()
    print(*bars_of(rows), sep="\n")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    if not arguments.only:
        draw(rows, arguments.json.with_suffix(".png"))
    print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
