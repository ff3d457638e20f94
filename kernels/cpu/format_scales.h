// Elements by runs whose scales a vector loop can follow: none, one for all, or one each.
#pragma once

#include <algorithm>

#include "fake_quantize_runs.h"
#include "float_registers.h"

namespace qsim::cpu {
namespace {

// at(i, n): the scales of elements i .. i + n of a run, n <= kLanes, in a register.
struct NoScale {
  QSIM_INLINE Unscaled at(std::int64_t, std::int64_t) const { return {}; }
};

template <class T>
struct OneScale {
  register_t<T> scale;
  QSIM_INLINE register_t<T> at(std::int64_t, std::int64_t) const { return scale; }
  QSIM_INLINE OneScale after(std::int64_t) const { return *this; }
};

template <class T>
struct ScalePerElement {
  const arithmetic_t<T>* scales;
  QSIM_INLINE register_t<T> at(std::int64_t i, std::int64_t n) const {
    if (n >= kLanes<T>) return load_register(scales + i);
    arithmetic_t<T> padded[kLanes<T>];
    std::fill_n(padded, kLanes<T>, arithmetic_t<T>(1));
    std::copy_n(scales + i, std::max<std::int64_t>(n, 0), padded);
    return load_register(padded);
  }
  QSIM_INLINE ScalePerElement after(std::int64_t n) const { return {scales + n}; }
};

// The table that for_each_run walks.
template <class T>
struct ScaleTable {
  const arithmetic_t<T>* scale;
};
template <class T>
QSIM_INLINE OneScale<T> one(const ScaleTable<T>& table, std::int64_t parameter) {
  return {register_t<T>{} + table.scale[parameter]};
}
template <class T>
QSIM_INLINE ScalePerElement<T> from(const ScaleTable<T>& table, std::int64_t parameter) {
  return {table.scale + parameter};
}

// Both call run(first element, elements, scales) for the runs of [begin, end).
struct OneRun {
  template <class Run>
  QSIM_INLINE void operator()(std::int64_t begin, std::int64_t end, Run run) const {
    run(begin, end - begin, NoScale());
  }
};

template <class T>
struct ScaledRuns {
  FormatScales<arithmetic_t<T>> scales;
  template <class Run>
  QSIM_INLINE void operator()(std::int64_t begin, std::int64_t end, Run run) const {
    for_each_run(scales.layout, ScaleTable<T>{scales.scale}, begin, end, INT64_MAX, run);
  }
};

}  // namespace
}  // namespace qsim::cpu
