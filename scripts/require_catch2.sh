#!/usr/bin/env bash
# The C++ tests want Catch2 2: the system's package, or (without root) CMake fetches it from its repository.
set -euo pipefail
if ls /usr/include/catch2/catch.hpp /usr/local/include/catch2/catch.hpp >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  (apt-get update -qq && apt-get install -y -qq catch2) >/dev/null 2>&1 && exit 0
fi
echo "Catch2 2 is not installed (Debian, Ubuntu: sudo apt-get install catch2); CMake will try to download it" >&2
