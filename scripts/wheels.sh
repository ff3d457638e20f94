#!/usr/bin/env bash
# Builds dist/: an sdist, and from it, outside of the checkout, wheels for the Pythons that are here. Each wheel is installed into an
# environment that has nothing but torch, and tried there (scripts/try_install.py).
# PYTHONS="python3.11 python3.12" chooses Pythons, QSIM_TORCH="torch==2.12.0" a torch, QSIM_CUDA=OFF|ON what is compiled for CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$PWD/dist try=$PWD/scripts/try_install.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$dist" && rm -f "$dist"/qsim-*

python3 -m venv "$work/build"
"$work/build/bin/pip" install --quiet build
"$work/build/bin/python" -m build --sdist --outdir "$dist" .

for python in ${PYTHONS:-$(for minor in 10 11 12 13 14; do command -v "python3.$minor" || true; done)}; do
  environment=$work/$(basename "$python")
  # a name on PATH may stand for no installed version
  if ! "$python" -m venv "$environment" 2>/dev/null; then echo "skipped: $python does not run"; continue; fi
  pip=$environment/bin/pip
  "$pip" install --quiet --upgrade "pip>=25.1"
  "$pip" install --quiet "${QSIM_TORCH:-torch==2.13.0}" || { echo "skipped: no torch for $python"; continue; }
  find="--no-index --find-links $dist --only-binary :all: --no-deps"
  # one wheel may serve several Pythons: its tags say so
  "$pip" download --quiet $find --dest "$work/found" qsim 2>/dev/null || "$pip" wheel --no-deps --wheel-dir "$dist" "$dist"/qsim-*.tar.gz
  "$pip" install --quiet $find qsim
  (cd "$work" && "$environment/bin/python" "$try")
done
ls -l "$dist"
