"""What the CUDA kernels cost, counted in the machine code that ptxas made, against the budgets of scripts/sass_budget.txt.

    scripts/sass_budget.py build/dev             # of a build with QSIM_CUDA=CHECK or ON: every architecture in its objects
    scripts/sass_budget.py build/dev --update    # write the budgets anew

For each kernel and architecture: registers of a thread, the warps that fit on a multiprocessor, and for the kernels of `LOOPS`
the instructions an element. A figure 10 % above its budget is an error, and so is a kernel without one. What is counted is the
cheapest way once round the kernel's loop on which as many elements are loaded and computed as `LOOPS` says. Slow paths that a
loop jumps over, and what comes before and after it, are not in it. Wants cuobjdump and nvdisasm; without them nothing is checked.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

BUDGETS = Path(__file__).with_name("sass_budget.txt")
GROWTH = 1.10


@dataclass(frozen=True)
class Loop:
    """A way through the loop of the kernels whose name matches: it passes so many instructions of each kind, for so many elements.

    `through`: how often an opcode that begins so is passed, at least; the loads and stores of all elements, and arithmetic
    that each of them has, so that the way that is taken for whole octets is counted and not one that leaves early. `never`:
    opcodes of the ways that are rarely taken.
    """

    kernel: str
    elements: int
    through: dict[str, int]
    never: tuple[str, ...] = ()


LOOPS = (
    Loop("forward_one_grid<float>", 8, {"LDG.E.128": 2, "FMNMX": 16, "FFMA": 24, "STG.E.128": 2, "STG.E.U8": 1}),
    Loop("forward_one_grid<__*", 16, {"LDG.E.128": 2, "FMNMX": 32, "FFMA": 48, "STG.E.128": 2, "STG.E.U8": 2}),
    Loop("keep<u16>", 8, {"LDG.E.128": 1, "STG.E.128": 1}),
    Loop("keep<u32>", 8, {"LDG.E.128": 2, "STG.E.128": 2}),
    Loop("observe_slices<float>", 16, {"LDG.E.128": 4, "ATOMS": 16}),
    Loop("observe_slices<__*", 32, {"LDG.E.128": 4, "ATOMS": 32}),
    Loop("observe_rows<float,*", 16, {"LDG.E.128": 4}),
    Loop("observe_rows<__*", 32, {"LDG.E.128": 4}),
)
THREADS, DYNAMIC_SHARED = {"observe_slices": 512, "quantize_biases": 64}, {"observe_slices": 65536}  # of a block; others have 256, and none


class Multiprocessor(NamedTuple):
    warps: int
    blocks: int
    shared: int  # bytes


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Each has 65536 registers.
MULTIPROCESSORS = {
    75: Multiprocessor(32, 16, 65536),
    80: Multiprocessor(64, 32, 167936),
    86: Multiprocessor(48, 16, 102400),
    87: Multiprocessor(48, 16, 167936),
    89: Multiprocessor(48, 24, 102400),
    90: Multiprocessor(64, 32, 233472),
    100: Multiprocessor(64, 32, 233472),
    103: Multiprocessor(64, 32, 233472),
    120: Multiprocessor(48, 24, 102400),
}


class Instruction(NamedTuple):
    opcode: str
    target: int | None  # of a jump: the index of an instruction
    always: bool  # not predicated


class Cost(NamedTuple):
    per_element: float | None
    registers: int
    warps: int


def found_tool(name: str) -> str | None:
    """On PATH, or where pip puts NVIDIA's packages."""
    installed = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / name
    return shutil.which(name) or (str(installed) if os.access(installed, os.X_OK) else None)


def output(command: list[str], folder: str) -> str:
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}  # cuobjdump calls nvdisasm
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def short(demangled: str) -> str:
    """`forward<float,u32>` of the whole signature."""
    name = demangled.replace("(anonymous namespace)::", "").removeprefix("void ").split("(")[0]
    name = re.sub(r"qsim::(cuda::)?|_GLOBAL__N__\w+::", "", name)
    for integer, size in (("short", "u16"), ("int", "u32"), ("long", "u64"), ("char", "u8")):
        name = name.replace(f"unsigned {integer}", size)
    return name.replace(" ", "")


def instructions_of(text: str) -> list[Instruction]:
    """The lines of one function of `cuobjdump -sass`."""
    parsed = []
    for address, predicate, opcode, rest in re.findall(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+ )?([\w.]+)([^;]*);", text, re.MULTILINE):
        jump = re.search(r"(?:^|[ ,])0x([0-9a-f]+)\s*$", rest) if opcode.startswith("BRA") else None
        conditional = bool(predicate) or bool(re.match(r"\s+!?U?P\w+\s*,", rest))
        parsed.append((int(address, 16), opcode, int(jump[1], 16) if jump else None, not conditional))
    index = {address: i for i, (address, *_) in enumerate(parsed)}
    return [Instruction(opcode, None if target is None else index.get(target), always) for _, opcode, target, always in parsed]


def cheapest_round(code: list[Instruction], first: int, last: int, loop: Loop) -> int | None:
    """Instructions from `first` to the jump back at `last`, by the cheapest way that the loop allows."""
    kinds = tuple(loop.through)
    need = tuple(loop.through.values())
    if any(sum(i.opcode.startswith(kind) for i in code[first : last + 1]) < n for kind, n in loop.through.items()):
        return None
    ways: list[dict[tuple[int, ...], int]] = [{} for _ in range(first, last + 1)]  # of each kind so far: instructions before
    ways[0][(0,) * len(kinds)] = 0
    for at in range(first, last + 1):
        here = code[at]
        if loop.never and here.opcode.startswith(loop.never):
            continue
        ends = here.always and (here.target is not None or here.opcode in ("EXIT", "RET"))
        following = ([] if ends else [at + 1]) + ([] if here.target is None else [here.target])
        for passed, count in ways[at - first].items():
            now = tuple(min(n, p + here.opcode.startswith(kind)) for n, p, kind in zip(need, passed, kinds, strict=True))
            for place in following:
                if at < place <= last and count + 1 < ways[place - first].get(now, 1 << 30):
                    ways[place - first][now] = count + 1
    done = ways[last - first].get(need)
    return None if done is None else done + 1


def per_element(name: str, code: list[Instruction]) -> float | None:
    """Of the loop that is cheapest for each element; None for kernels that LOOPS does not know."""
    loop = next((loop for loop in LOOPS if fnmatch(name, loop.kernel)), None)
    if loop is None:
        return None
    backward = [(i.target, at) for at, i in enumerate(code) if i.target is not None and i.target <= at]
    rounds = [count for first, last in backward if (count := cheapest_round(code, first, last, loop)) is not None]
    if not rounds:
        raise SystemExit(f"{name}: no loop with {loop.through}. Say in LOOPS of {Path(__file__).name} what it is made of now.")
    return round(min(rounds) / loop.elements, 2)


def resident_warps(name: str, architecture: int, registers: int, shared: int) -> int:
    """Warps of whole blocks that fit on a multiprocessor: registers go to a warp by 256, shared memory to a block by 1024 and some."""
    of = MULTIPROCESSORS[architecture]
    kernel = name.split("<")[0]
    warps = THREADS.get(kernel, 256) // 32
    by_registers = 65536 // ((registers * 32 + 255) // 256 * 256) // warps
    shared += DYNAMIC_SHARED.get(kernel, 0) + (1024 if architecture >= 80 else 0)
    return min(of.blocks, of.warps // warps, by_registers, of.shared // max(shared, 1)) * warps


def costs(file: Path, cuobjdump: str) -> Iterator[tuple[int, str, Cost]]:
    """Of each kernel and architecture in an object."""
    folder = str(Path(cuobjdump).parent)
    usage = output([cuobjdump, "-res-usage", str(file)], folder)
    used: dict[tuple[int, str], tuple[int, int]] = {}
    architecture = 0
    for found in re.finditer(r"arch = sm_(\d+)|Function (\S+):\s+REG:(\d+) .*?SHARED:(\d+)", usage):
        if found[1]:
            architecture = int(found[1])
        else:
            used[architecture, found[2]] = (int(found[3]), int(found[4]))
    names = sorted({mangled for _, mangled in used})
    demangled = dict(zip(names, output(["c++filt", *names], folder).splitlines(), strict=True)) if names else {}
    for part in re.split(r"^\s*arch = sm_", output([cuobjdump, "-sass", str(file)], folder), flags=re.MULTILINE)[1:]:
        architecture = int(re.match(r"\d+", part)[0])  # type: ignore[index]
        for function in part.split("Function : ")[1:]:
            mangled = function.split(maxsplit=1)[0]
            registers, shared = used[architecture, mangled]
            name = short(demangled[mangled])
            yield (
                architecture,
                name,
                Cost(per_element(name, instructions_of(function)), registers, resident_warps(name, architecture, registers, shared)),
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    cuobjdump = found_tool("cuobjdump")
    if cuobjdump is None or found_tool("nvdisasm") is None:
        print("skipped: no cuobjdump and nvdisasm (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)")
        return 0
    files = sorted(arguments.build.glob("**/qsim_kernels_cuda.dir/**/*.o"))
    if not files:
        raise SystemExit(f"{arguments.build} has no objects of CUDA kernels: configure it with QSIM_CUDA=CHECK and build it")
    measured = {
        f"sm_{architecture} {file.name.split('.')[0]} {name}": cost for file in files for architecture, name, cost in costs(file, cuobjdump)
    }
    return report(measured, update=arguments.update)


def report(measured: dict[str, Cost], *, update: bool) -> int:
    lines = [f"{key} {cost.per_element or '-'} {cost.registers} {cost.warps}" for key, cost in sorted(measured.items())]
    print("\n".join(["architecture file kernel, instructions an element, registers, warps on a multiprocessor", *lines]))
    if update:
        BUDGETS.write_text("\n".join(lines) + "\n")
        return 0
    budgets = {}
    for line in BUDGETS.read_text().splitlines():
        architecture, file, kernel, *figures = line.split()
        budgets[f"{architecture} {file} {kernel}"] = figures
    held = {key.split()[0] for key in budgets}  # other architectures are shown and no more
    built = {key.split()[0] for key in measured}
    wrong = [f"{key} has a budget and is gone" for key in budgets if key not in measured and key.split()[0] in built]
    for key, cost in measured.items():
        if key not in budgets:
            wrong += [f"{key} has no budget"] if key.split()[0] in held else []
            continue
        for what, is_now, was in zip(("instructions an element", "registers"), cost[:2], budgets[key][:2], strict=True):
            if is_now is not None and (was == "-" or is_now > GROWTH * float(was)):
                wrong.append(f"{key}: {is_now} {what}, its budget is {was}")
    if wrong:
        print(
            "\n".join(wrong),
            "Mend the kernel, or say why it may cost that and run this script again with --update",
            sep="\n",
            file=sys.stderr,
        )
        return 1
    print(f"CUDA kernels: {len(measured)} within 10 % of their budgets")
    return 0


if __name__ == "__main__":
    sys.exit(main())
