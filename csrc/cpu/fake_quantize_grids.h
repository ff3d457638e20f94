// The grids of a call as the CPU kernels read them, the choice of the kernel by dtype, and the split over threads.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

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
      : layout(layout_of(x, options)), scale_(in_memory_order(scale, x, options)), width_(layout.width) {
    const at::Tensor zero = in_memory_order(zero_point, x, options);
    const std::int64_t n = scale_.numel();
    const auto quant_min = static_cast<A>(options.quant_min), quant_max = static_cast<A>(options.quant_max);
    const auto& kernels = prepare_kernels(A{});
    grids = allocate(storage_, n);
    if (zero.scalar_type() == at::kInt) {
      grids.regular = kernels.integer(data<A>(scale_), data<std::int32_t>(zero), n, quant_min, quant_max, grids);
    } else {
      grids.regular = kernels.learned(data<A>(scale_), data<A>(zero), n, quant_min, quant_max, grids);
    }
    choose_repetition(x.numel());
    if (run * rows == 1) return;
    const cpu::Grids<A> once = grids;
    grids = allocate(repeated_, n * run * rows);
    grids.regular = once.regular;
    kernels.repeat(once, n, run, rows, grids);
    layout.width = n * run * rows;
    layout.run = 1;
  }

  cpu::Grids<A> grids;
  Layout layout;
  std::int64_t run = 1, rows = 1;

  const at::Tensor& scale() const { return scale_; }  // in memory order
  std::int64_t width() const { return width_; }       // of the layout before repetition

 private:
  using Storage = c10::SmallVector<A, cpu::Grids<A>::kArrays>;

  // Tables that are read vector by vector start at cache lines.
  static cpu::Grids<A> allocate(Storage& storage, std::int64_t n) {
    constexpr std::uintptr_t kLine = 64;
    const std::int64_t line = kLine / sizeof(A), padded = n == 1 ? 1 : (n + line - 1) / line * line;
    storage.resize_for_overwrite(static_cast<std::size_t>(cpu::Grids<A>::kArrays * padded + (n == 1 ? 0 : line)));
    A* first = storage.data();
    if (n > 1) first = reinterpret_cast<A*>((reinterpret_cast<std::uintptr_t>(first) + kLine - 1) / kLine * kLine);
    const auto array = [&](int i) { return first + i * padded; };
    return {array(0), array(1), array(2), array(3), array(4), array(5)};
  }

  void choose_repetition(std::int64_t n) {
    constexpr std::int64_t kLongRun = 32, kLongRow = 256, kWorthIt = 4;
    if (layout.width == 1 || layout.segment != n) return;
    const std::int64_t period = layout.width * layout.run;
    if (layout.run >= kLongRun || n < kWorthIt * period) return;
    run = layout.run;
    rows = period >= kLongRow ? 1 : std::min(kLongRow / period, n / period);
  }

  Storage storage_, repeated_;
  at::Tensor scale_;
  std::int64_t width_;
};

// Elements [begin, end) for each thread: multiples of 2048, so that no two threads write one cache line of a mask.
template <class Run>
void in_parallel(std::int64_t n, Run run) {
  constexpr std::int64_t kStep = 2048, kGrain = 16;
  at::parallel_for(0, (n + kStep - 1) / kStep, kGrain,
                   [&](std::int64_t begin, std::int64_t end) { run(begin * kStep, std::min(end * kStep, n)); });
}

}  // namespace qsim
