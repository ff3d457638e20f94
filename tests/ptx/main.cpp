// Runs the tests; those of kernels fail when a kernel was not launched, unless only some were asked for.
#include <iostream>

#include "../cpp/run_tests.h"
#include "runtime.h"

int main(int argc, char** argv) {
  if (const int failed = run_tests(argc, argv); failed != 0 || argc > 1) return failed;
  const auto missed = ptx::never_launched();
  for (const std::string& name : missed) std::cerr << "never launched: " << name << "\n";
  return missed.empty() ? 0 : 1;
}
