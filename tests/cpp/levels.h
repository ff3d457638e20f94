// The instruction-set levels that this machine can run, for tests that visit each.
#pragma once

#include <catch2/catch.hpp>
#include <vector>

#include "qsim/level.h"

inline std::vector<qsim::cpu::Level> runnable_levels() {
  using qsim::cpu::Level;
  std::vector<Level> found;
  for (Level level : {Level::baseline, Level::avx2, Level::avx512}) {
    if (qsim::cpu::supported(level)) {
      found.push_back(level);
    } else {
      WARN("skipped: this machine cannot run level " << qsim::cpu::name_of(level));
    }
  }
  return found;
}
