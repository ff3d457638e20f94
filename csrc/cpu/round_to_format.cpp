#include <algorithm>
#include <mutex>
#include <vector>

#include "cpu/observe_state.h"
#include "empty_result.h"
#include "fake_quantize_grids.h"
#include "round_to_format_operators.h"

namespace qsim {
namespace {

using at::Tensor;

// The scales of a dense x in memory order.
struct Scales {
  Scales(const Tensor& x, const RoundToFormatOptions& options) {
    if (!options.scale || x.numel() == 0) return;
    layout = layout_of(x, options.granularity);
    scale = in_memory_order(*options.scale, x, options.granularity);
    repeat(x.numel());
  }

  // Where channels alternate every few elements their scales are written out, several rows if they are short, so that
  // a run is long enough for the vector loops.
  void repeat(std::int64_t n) {
    constexpr std::int64_t kLongRun = 32, kLongRow = 256, kWorthIt = 4;
    const std::int64_t period = layout.width * layout.run;
    if (layout.width == 1 || layout.segment != n || layout.run >= kLongRun || n < kWorthIt * period) return;
    const std::int64_t rows = std::max<std::int64_t>(1, std::min(kLongRow / period, n / period));
    scale = scale.reshape({1, layout.width, 1}).expand({rows, layout.width, layout.run}).contiguous();
    layout.width = rows * period;
    layout.run = 1;
  }

  Tensor scale;
  Layout layout = {};
};

// Calls run(element, kernels, scales, format) for the type of x.
template <class Run>
void for_type_of(const Tensor& x, const RoundToFormatOptions& options, Run run) {
  const Scales scales(x, options);
  for_element_type(x.scalar_type(), cpu::round_to_format_kernels(), [&](auto element, const auto& kernels) {
    using T = decltype(element);
    using A = arithmetic_t<T>;
    cpu::FormatScales<A> table;
    if (scales.scale.defined()) table = {data<A>(scales.scale), scales.layout};
    const auto format = table.scale == nullptr ? format_in<T>(options.format, options.saturate)
                                               : format_in<A>(options.format, options.saturate);
    run(element, kernels, table, format);
  });
}

struct Cpu {
  static Tensor empty(const Tensor& x) { return empty_result(x); }
  static Tensor mask(const Tensor& x) { return empty_bits(x); }

  static void round(const Tensor& x, const Tensor& y, const Tensor& mask, const RoundToFormatOptions& options) {
    if (x.numel() == 0) return;
    const KeepSubnormals guard;
    auto* bits = mask.defined() ? mask.mutable_data_ptr<std::uint8_t>() : nullptr;
    for_type_of(x, options, [&](auto element, const auto& kernels, const auto& scales, const auto& format) {
      using T = decltype(element);
      const T* from = data<T>(x);
      T* to = mutable_data<T>(y);
      in_parallel(x.numel(), [&](std::int64_t begin, std::int64_t end) {
        if (bits != nullptr) {
          kernels.with_mask(from, to, bits, begin, end, scales, format);
        } else {
          kernels.plain(from, to, begin, end, scales, format);
        }
      });
    });
  }

  // Sums are taken over chunks of kGrain elements and joined in order: threads change nothing.
  static void count(const Tensor& x, const Tensor& y, const Tensor& counts, const OptionalTensor& squares,
                    const RoundToFormatOptions& options) {
    const KeepSubnormals guard;
    const std::int64_t n = x.numel(), chunks = (n + kGrain - 1) / kGrain;
    FormatCounts total;
    std::vector<SquaredSums> sums(squares ? static_cast<std::size_t>(chunks) : 0);
    std::mutex merging;
    for_type_of(x, options, [&](auto element, const auto& kernels, const auto& scales, const auto& format) {
      using T = decltype(element);
      const T* from = data<T>(x);
      T* to = y.defined() ? mutable_data<T>(y) : nullptr;
      parallel_for(0, chunks, 1, [&](std::int64_t begin, std::int64_t end) {
        FormatCounts found;
        for (std::int64_t chunk = begin; chunk < end; ++chunk) {
          const std::int64_t at = chunk * kGrain;
          kernels.counted(from, to, at, std::min(at + kGrain, n), scales, format, found,
                          squares ? &sums[static_cast<std::size_t>(chunk)] : nullptr);
        }
        const std::lock_guard lock(merging);
        total.merge(found);
      });
    });
    auto* counter = counts.mutable_data_ptr<std::int64_t>();
    for (const std::int64_t found : {n, total.nans, total.infs, total.overflows, total.underflows, total.subnormals}) {
      *counter++ += found;
    }
    if (!squares) return;
    SquaredSums sum;
    for (const SquaredSums& part : sums) sum.merge(part);
    auto* to = squares->mutable_data_ptr<double>();
    to[0] += sum.error;
    to[1] += sum.signal;
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) { RoundToFormatOperators<Cpu>::implement(m); }
}  // namespace qsim
