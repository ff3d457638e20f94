"""The steps of scripts/gpu_check.sh and their report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "gpu"
BUDGET = 570.0  # seconds for all steps together
TAIL = 6000  # characters kept of a step's output


@dataclass
class Step:
    """What became of one step. `rc` is None where it was skipped, 124 where it ran out of time."""

    name: str
    rc: int | None
    seconds: float
    tail: str


def run(name: str, command: list[str], log: Path, limit: float, environment: dict[str, str]) -> Step:
    """Run a command with its output in a file; on timeout end it and everything it started."""
    print(f"{name}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    with log.open("w") as output:
        try:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
            rc = process.wait(timeout=max(limit, 1.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            rc = 124
        except OSError as error:
            output.write(str(error))
            rc = 127
    step = Step(name, rc, round(time.monotonic() - start, 1), log.read_text(errors="replace")[-TAIL:])
    print(f"  rc {step.rc}, {step.seconds} s", flush=True)
    if rc != 0:
        print("  " + "\n  ".join(step.tail.splitlines()[-15:]), flush=True)
    return step


def found_nvcc() -> str | None:
    candidates = [shutil.which("nvcc"), *sorted(map(str, Path("/usr/local").glob("cuda*/bin/nvcc")), reverse=True)]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def has_catch2() -> bool:
    """The CMake package of Catch2 2, which the tests are written for: without it CMake would download it."""
    prefixes = ["/usr", "/usr/local", *filter(None, os.environ.get("CMAKE_PREFIX_PATH", "").split(os.pathsep))]
    folders = ("lib/cmake", "lib64/cmake", "share", "share/cmake")
    files = [Path(prefix, folder, "Catch2/Catch2ConfigVersion.cmake") for prefix in prefixes for folder in folders]
    return any('PACKAGE_VERSION "2.' in file.read_text() for file in files if file.exists())


def device() -> tuple[dict[str, object], str | None]:
    """A description of this machine, and why the check cannot run on it."""
    facts: dict[str, object] = {"python": sys.version.split()[0], "nvcc": found_nvcc(), "cmake": shutil.which("cmake")}
    try:
        import torch
    except ImportError as error:
        return facts, f"no torch: {error}"
    facts |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": round(properties.total_memory / 1e9, 1),
        }
    missing = {
        "a CUDA torch": torch.version.cuda is None,
        "a GPU": not torch.cuda.is_available(),
        "nvcc": facts["nvcc"] is None,
        "cmake": facts["cmake"] is None,
    }
    lacking = [name for name, absent in missing.items() if absent]
    return facts, f"this machine lacks {', '.join(lacking)}" if lacking else None


def plan(facts: dict[str, object], out: Path) -> list[tuple[str, list[str] | str, float]]:
    """Name, command (or why it is left out) and the most seconds of each step, in order."""
    python, catch2 = sys.executable, has_catch2()
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", "-S", ".", "-B", str(BUILD), *generator, "-DQSIM_CUDA=ON", f"-DQSIM_BUILD_TESTS={'ON' if catch2 else 'OFF'}"]
    configure += [f"-DPython_EXECUTABLE={python}", f"-DCMAKE_CUDA_COMPILER={facts['nvcc']}"]
    configure += [f"-DCMAKE_CUDA_ARCHITECTURES={str(facts['capability']).replace('.', '')}"]
    build = ["cmake", "--build", str(BUILD), "--parallel", str(os.cpu_count() or 2), "--target"]
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(Path(str(facts["nvcc"])).parent))
    steps: list[tuple[str, list[str] | str, float]] = [
        ("configure", configure, 60),
        ("build", [*build, "qsim_ops", "qsim_ops_cuda", "qsim_python"], 240),
        ("install", ["cmake", "--install", str(BUILD), "--prefix", "python"], 20),
        ("build: tests of kernels", [*build, "device_tests"] if catch2 else "no Catch2 2", 120),
        ("tests: kernels", ["ctest", "--test-dir", str(BUILD), "--output-on-failure", "-R", "device$"] if catch2 else "no Catch2 2", 60),
        ("tests: operators", [*pytest, "tests/python/ops/test_cuda.py"], 180),
        ("tests: streams and graphs", [*pytest, "tests/python/ops/test_cuda_streams.py"], 90),
    ]
    workers = ["-n", str(min(8, os.cpu_count() or 1))] if find_spec("xdist") else []
    alone = ["env", "OMP_NUM_THREADS=1"]  # threads of several workers wait for each other: twice the time
    steps.append(("tests: simulations", [*alone, *pytest, *workers, "tests/python/simulation/test_on_cuda.py"], 240))
    for tool in ("memcheck", "racecheck"):
        checked = [
            str(sanitizer),
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            *pytest,
            "tests/python/ops/test_cuda_streams.py",
            "-k",
            "waits",
        ]  # one call of every operator
        steps.append((f"compute-sanitizer: {tool}", checked if sanitizer else "no compute-sanitizer", 90))
    steps.append(("benchmarks", [python, "benchmarks/on_cuda.py", "--json", str(out / "benchmarks.json")], 90))
    steps.append(("benchmark: a network", [python, "benchmarks/simulation.py", "--device", "cuda", "--batch", "256", "--seconds", "3"], 60))
    return steps


def main(out: Path) -> int:
    facts, obstacle = device()
    report: dict[str, object] = {"date": time.strftime("%Y-%m-%d"), "machine": facts, "obstacle": obstacle}
    steps: list[Step] = []
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "CI": "1"}
    (out / "benchmarks.json").unlink(missing_ok=True)
    stop = time.monotonic() + BUDGET
    for number, (name, command, limit) in enumerate(plan(facts, out) if obstacle is None else []):
        broken = [step.name for step in steps if step.rc not in (0, None) and step.name in ("configure", "build", "install")]
        if isinstance(command, str) or broken:
            steps.append(Step(name, None, 0, f"skipped: {command if isinstance(command, str) else f'{broken[0]} failed'}"))
            print(f"{name}: {steps[-1].tail}", flush=True)
        else:
            steps.append(run(name, command, out / f"{number}.log", min(limit, stop - time.monotonic()), environment))
    results = out / "benchmarks.json"
    report["steps"] = [asdict(step) for step in steps]
    report["benchmarks"] = json.loads(results.read_text()) if results.exists() else []
    (out / "report.json").write_text(json.dumps(report, indent=1))
    print(f"report: {out / 'report.json'}")
    if obstacle is not None:
        print(f"not run: {obstacle}", file=sys.stderr)
        return 2
    failed = [step.name for step in steps if step.rc not in (0, None)]
    print(f"failed: {', '.join(failed)}" if failed else "all steps passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
