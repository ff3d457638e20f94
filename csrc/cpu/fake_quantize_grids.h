// The grids of a call as the CPU kernels read them, the choice of the kernel by dtype, and the split over threads.
#pragma once

#include <c10/util/SmallVector.h>

#include <numeric>

#include "cpu/subnormals.h"
#include "fake_quantize_layout.h"

namespace qsim {

// Calls run(element, kernels) with a value of the element type and the member of `table` for it.
template <class Table, class Run>
void for_element_type(at::ScalarType type, const Table& table, Run run) {
  switch (type) {
    case at::kFloat:
      return run(float{}, table.f32);
    case at::kDouble:
      return run(double{}, table.f64);
    case at::kHalf:
      return run(Float16{}, table.f16);
    default:
      return run(BFloat16{}, table.bf16);
  }
}

template <class T>
const T* data(const at::Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
T* mutable_data(const at::Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

inline const cpu::PrepareGrids<float>& prepare_kernels(float) { return cpu::fake_quantize_kernels().prepare_f32; }
inline const cpu::PrepareGrids<double>& prepare_kernels(double) { return cpu::fake_quantize_kernels().prepare_f64; }

// A: float or double. Where channels alternate every few elements the table of grids is written out, several rows of it
// if they are short, so that a run is long enough for the vector loops; `run` and `rows` say how it was repeated.
template <class A>
class GridTable {
 public:
  GridTable(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& zero_point,
            const FakeQuantizeOptions& options)
      : GridTable(x, scale, zero_point, options, layout_of(x, options)) {
    prepare_all(x.numel());
  }

  // For values alone, without what is in range: grids of blocks are prepared a few at a time, as for_grids comes to
  // them.
  struct ForValues {};
  GridTable(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& zero_point,
            const FakeQuantizeOptions& options, ForValues)
      : GridTable(x, scale, zero_point, options, layout_of(x, options)) {
    bounds_ = cpu::Bounds::of_values;
    in_turn_ = layout.width == 1 && layout.outer % layout.segment == 0 && scale_.numel() > kInTurn;
    if (!in_turn_) prepare_all(x.numel());
  }

  // Calls run(offset, begin, end, grids) with parts of [begin, end): elements begin + offset .. end + offset, whose
  // grids are those of elements begin .. end under `layout`.
  template <class Run>
  void for_grids(std::int64_t begin, std::int64_t end, Run run) const {
    if (!in_turn_) return run(std::int64_t{0}, begin, end, grids);
    alignas(64) A memory[cpu::Grids<A>::kArrays * kInTurn];
    for (std::int64_t grid = begin / layout.segment; begin < end; grid += kInTurn) {
      const std::int64_t count = std::min(kInTurn, scale_.numel() - grid), offset = grid * layout.segment;
      const std::int64_t stop = std::min(end, offset + count * layout.segment);
      run(offset, begin - offset, stop - offset, prepared(grid, count, arrays(memory, kInTurn)));
      begin = stop;
    }
  }

  cpu::Grids<A> grids;
  Layout layout;
  std::int64_t run = 1, rows = 1;

  const at::Tensor& scale() const { return scale_; }  // in memory order
  std::int64_t width() const { return width_; }       // of the layout before repetition

 private:
  using Storage = c10::SmallVector<A, cpu::Grids<A>::kArrays>;
  static constexpr std::int64_t kInTurn = 256;

  GridTable(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& zero_point,
            const FakeQuantizeOptions& options, Layout of)
      : layout(of),
        quant_min_(static_cast<A>(options.quant_min)),
        quant_max_(static_cast<A>(options.quant_max)),
        scale_(in_memory_order(scale, x, options)),
        zero_point_(in_memory_order(zero_point, x, options)),
        width_(of.width) {}

  cpu::Grids<A> prepared(std::int64_t first, std::int64_t n, cpu::Grids<A> to) const {
    const auto& kernels = prepare_kernels(A{});
    const A* scale = data<A>(scale_) + first;
    to.regular =
        zero_point_.scalar_type() == at::kInt
            ? kernels.integer(scale, data<std::int32_t>(zero_point_) + first, n, quant_min_, quant_max_, bounds_, to)
            : kernels.learned(scale, data<A>(zero_point_) + first, n, quant_min_, quant_max_, bounds_, to);
    return to;
  }

  void prepare_all(std::int64_t elements) {
    const std::int64_t n = scale_.numel();
    grids = prepared(0, n, allocate(storage_, n));
    choose_repetition(elements);
    if (run * rows == 1) return;
    const cpu::Grids<A> once = grids;
    grids = allocate(repeated_, n * run * rows);
    grids.regular = once.regular;
    prepare_kernels(A{}).repeat(once, n, run, rows, grids);
    layout.width = n * run * rows;
    layout.run = 1;
  }

  // Tables that are read vector by vector start at cache lines.
  static cpu::Grids<A> allocate(Storage& storage, std::int64_t n) {
    constexpr std::uintptr_t kLine = 64;
    const std::int64_t line = kLine / sizeof(A), padded = n == 1 ? 1 : (n + line - 1) / line * line;
    storage.resize_for_overwrite(static_cast<std::size_t>(cpu::Grids<A>::kArrays * padded + (n == 1 ? 0 : line)));
    A* first = storage.data();
    if (n > 1) first = reinterpret_cast<A*>((reinterpret_cast<std::uintptr_t>(first) + kLine - 1) / kLine * kLine);
    return arrays(first, padded);
  }

  static cpu::Grids<A> arrays(A* first, std::int64_t n) {
    return {first, first + n, first + 2 * n, first + 3 * n, first + 4 * n, first + 5 * n};
  }

  // A row of the table: at least kLongRow entries, and whole vectors of the kernels (64 or 16 floats) where that keeps
  // it short.
  void choose_repetition(std::int64_t n) {
    constexpr std::int64_t kLongRun = 32, kLongRow = 64, kLongest = 4096, kWorthIt = 4;
    if (layout.width == 1 || layout.segment != n) return;
    const std::int64_t period = layout.width * layout.run;
    if (layout.run >= kLongRun || n < kWorthIt * period) return;
    run = layout.run;
    for (const std::int64_t vectors : {64, 16}) {
      const std::int64_t unit = vectors / std::gcd(vectors, period);
      rows = (kLongRow + unit * period - 1) / (unit * period) * unit;
      if (rows * period <= std::min(kLongest, n / kWorthIt)) return;
    }
    rows = std::max<std::int64_t>(1, std::min(kLongRow / period, n / period));
  }

  Storage storage_, repeated_;
  A quant_min_, quant_max_;
  at::Tensor scale_, zero_point_;
  std::int64_t width_;
  cpu::Bounds bounds_ = cpu::Bounds::of_range;
  bool in_turn_ = false;
};

// Elements [begin, end) for each thread: multiples of 2048, so that no two threads write one cache line of a mask.
template <class Run>
void in_parallel(std::int64_t n, Run run) {
  constexpr std::int64_t kStep = 2048, kGrain = 16;
  parallel_for(0, (n + kStep - 1) / kStep, kGrain,
               [&](std::int64_t begin, std::int64_t end) { run(begin * kStep, std::min(end * kStep, n)); });
}

}  // namespace qsim
