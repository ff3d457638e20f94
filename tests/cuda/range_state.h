// Ranges and counts as the CPU kernels find them.
#pragma once

#include "device.h"
#include "qsim/finite_range.h"

struct RangeState {
  explicit RangeState(std::int64_t ranges) : lowest(ranges, INFINITY), highest(ranges, -INFINITY), counts(4) {}
  std::vector<float> lowest, highest;
  std::vector<std::int64_t> counts;
};

inline void add_counts(RangeState& state, std::int64_t n, qsim::NonFinite found) {
  const std::int64_t counts[] = {n, found.nans, found.positive_infs, found.negative_infs};
  for (int i = 0; i < 4; ++i) state.counts[i] += counts[i];
}

template <class T>
void observe(const std::vector<T>& x, std::int64_t outer, std::int64_t ranges, std::int64_t inner, RangeState& state) {
  qsim::NonFinite found;
  qsim::cpu::observe_range_kernels().of[static_cast<int>(kElementOf<T>)](
      x.data(), outer, ranges, inner, state.lowest.data(), state.highest.data(), found);
  add_counts(state, outer * ranges * inner, found);
}

// Element (o, s, i) of [outer, size, inner] belongs to range (o, s / block, i).
template <class T>
void observe_blocks(const std::vector<T>& x, std::int64_t outer, std::int64_t size, std::int64_t inner,
                    std::int64_t block, RangeState& state) {
  const std::int64_t blocks = (size + block - 1) / block;
  qsim::NonFinite found;
  for (std::int64_t e = 0; e < outer * size * inner; ++e) {
    const std::int64_t o = e / (size * inner), s = e / inner % size, i = e % inner;
    const std::int64_t range = (o * blocks + s / block) * inner + i;
    qsim::cpu::observe_range_kernels().of[static_cast<int>(kElementOf<T>)](
        x.data() + e, 1, 1, 1, state.lowest.data() + range, state.highest.data() + range, found);
  }
  add_counts(state, outer * size * inner, found);
}
