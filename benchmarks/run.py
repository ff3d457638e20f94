"""Runs every benchmark of this folder, one after the other in processes of their own: `python benchmarks/run.py [NAME ...]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(names: list[str]) -> int:
    folder = Path(__file__).parent
    found = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    unknown = [name for name in names if name not in found]
    if unknown:
        print(f"no benchmark named {', '.join(unknown)}; there are: {', '.join(found)}", file=sys.stderr)
        return 2
    codes = [subprocess.run([sys.executable, found[name]], check=False).returncode for name in names or found]
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
