// Rounding to float formats by octets: alone, with a mask, or with counts and squared sums.
#include "qsim/cuda/round_to_format.h"

#include "fake_quantize_grids.cuh"
#include "octets.cuh"
#include "range_state.cuh"

namespace qsim::cuda {

// The scale of each element: what GridCursor follows.
struct ScaleSource {
  const void* scale;
};
template <class A>
__device__ __forceinline__ A grid_at(const ScaleSource& source, std::int64_t parameter) {
  return static_cast<const A*>(source.scale)[parameter];
}

namespace {

struct Scales {
  ScaleSource source;
  Layout layout;
};

// What gives the elements of an octet their scales.
struct NoScale {
  __device__ NoScale(const Scales&, std::int64_t, std::int64_t) {}
  __device__ Unscaled scale() const { return {}; }
  __device__ void advance() {}
};
template <class A, class I>
struct ScaleCursor {
  GridCursor<A, I, ScaleSource> at;
  __device__ ScaleCursor(const Scales& scales, std::int64_t n, std::int64_t first)
      : at(scales.source, scales.layout, n, first) {}
  __device__ A scale() const { return at.grid(); }
  __device__ void advance() { at.advance(); }
};

template <bool upper_half, class Cursor, class T>
__global__ void __launch_bounds__(kThreads)
    round_all(const __grid_constant__ FormatIn<computed_t<T>> format, const __grid_constant__ Scales scales, const T* x,
              T* y, std::uint8_t* mask, std::int64_t n, bool packs) {
  for_each_octet(n, [&](std::int64_t at, int count) {
    T elements[kOctet];
    load_octet(x, at, count, packs, elements);
    Cursor cursor(scales, n, at);
    unsigned bits = 0;
    follow(cursor, count, [&](int i) {
      const auto scale = cursor.scale();
      const auto quotient = divided(widened(elements[i]), scale);
      bits |= (in_format(quotient, format) ? 1u : 0u) << i;
      round_to(multiplied(round_to_format<upper_half>(quotient, format), scale), elements[i]);
    });
    store_octet(elements, at, count, packs, y);
    if (mask != nullptr) mask[at / kOctet] = static_cast<std::uint8_t>(bits);
  });
}

// Of all threads of a block; valid in thread 0.
__device__ SquaredSums sum_of_block(SquaredSums sums) {
  return reduce_block(sums, [](SquaredSums a, SquaredSums b) {
    a.merge(b);
    return a;
  });
}

__device__ __forceinline__ void add_of_warp(std::int64_t* to, std::int64_t of_thread) {
  const unsigned sum = sum_of_warp(static_cast<unsigned>(of_thread));
  if (threadIdx.x % 32 == 0) add(to, sum);
}

template <bool upper_half, class Cursor, class T>
__global__ void __launch_bounds__(kThreads)
    count_all(const __grid_constant__ FormatIn<computed_t<T>> format, const __grid_constant__ Scales scales, const T* x,
              T* y, std::int64_t n, bool packs, std::int64_t* counts, SquaredSums* partial) {
  FormatCounts found;
  SquaredSums sums;
  for_each_octet(n, [&](std::int64_t at, int count) {
    T elements[kOctet];
    load_octet(x, at, count, packs, elements);
    Cursor cursor(scales, n, at);
    follow(cursor, count, [&](int i) {
      const auto scale = cursor.scale();
      const auto e = widened(elements[i]), quotient = divided(e, scale);
      const auto nearest = multiplied(round_to_format<upper_half>(quotient, format), scale), error = e - nearest;
      qsim::count(e, quotient, format, found);
      if (partial != nullptr && error - error == 0) {
        sums.merge({static_cast<double>(error) * error, static_cast<double>(e) * e});
      }
      round_to(nearest, elements[i]);
    });
    if (y != nullptr) store_octet(elements, at, count, packs, y);
  });
  if (blockIdx.x == 0 && threadIdx.x == 0) add(counts, n);
  add_of_warp(counts + 1, found.nans);
  add_of_warp(counts + 2, found.infs);
  add_of_warp(counts + 3, found.overflows);
  add_of_warp(counts + 4, found.underflows);
  add_of_warp(counts + 5, found.subnormals);
  if (partial == nullptr) return;
  sums = sum_of_block(sums);
  if (threadIdx.x == 0) partial[blockIdx.x] = sums;
}

__global__ void __launch_bounds__(kThreads) join_squares(const SquaredSums* partial, int n, double* squares) {
  SquaredSums sums;
  for (int i = threadIdx.x; i < n; i += kThreads) sums.merge(partial[i]);
  sums = sum_of_block(sums);
  if (threadIdx.x != 0) return;
  squares[0] += sums.error;
  squares[1] += sums.signal;
}

// run(T{}, format, whether it is the upper half of T's arithmetic type, a pointer to the cursor's type).
template <class F>
cudaError_t with_format(const RoundToFormatCall& call, F run) {
  return with_element(call.element, [&](auto type) {
    using T = decltype(type);
    using A = computed_t<T>;
    const auto with_cursor = [&](const auto& format, auto upper_half) {
      if (call.scale == nullptr) return run(type, format, upper_half, static_cast<NoScale*>(nullptr));
      if (is_small(call.n)) return run(type, format, upper_half, static_cast<ScaleCursor<A, unsigned>*>(nullptr));
      return run(type, format, upper_half, static_cast<ScaleCursor<A, std::int64_t>*>(nullptr));
    };
    const auto format = call.scale == nullptr ? format_in<named_t<T>>(call.format, call.saturate)
                                              : format_in<A>(call.format, call.saturate);
    if constexpr (sizeof(A) == 4) {
      if (format.upper_half) return with_cursor(format, std::true_type{});
    }
    return with_cursor(format, std::false_type{});
  });
}

}  // namespace

cudaError_t round_to_format(const RoundToFormatCall& call, const void* x, void* y, std::uint8_t* mask,
                            cudaStream_t stream) {
  if (call.n == 0) return cudaSuccess;
  return with_format(call, [&](auto type, const auto& format, auto upper_half, auto* cursor) {
    using T = decltype(type);
    using Cursor = std::remove_pointer_t<decltype(cursor)>;
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(y);
    return launch(round_all<decltype(upper_half)::value, Cursor, T>, shape_for(call.n), stream, format,
                  Scales{{call.scale}, call.layout}, from, to, mask, call.n, all_aligned(from, to));
  });
}

// A partial sum per block: as many on every device, so that all of them add in one order.
int format_partials(std::int64_t n) {
  return static_cast<int>(std::min<std::int64_t>(2048, (n + kOctetsPerBlock - 1) / kOctetsPerBlock));
}

cudaError_t count_format(const RoundToFormatCall& call, const void* x, void* y, std::int64_t* counts, double* squares,
                         SquaredSums* partial, cudaStream_t stream) {
  if (call.n == 0) return cudaSuccess;
  const cudaError_t status = with_format(call, [&](auto type, const auto& format, auto upper_half, auto* cursor) {
    using T = decltype(type);
    using Cursor = std::remove_pointer_t<decltype(cursor)>;
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(y);
    const LaunchShape shape{static_cast<unsigned>(format_partials(call.n)), kThreads};
    return launch(count_all<decltype(upper_half)::value, Cursor, T>, shape, stream, format,
                  Scales{{call.scale}, call.layout}, from, to, call.n, all_aligned(from, to), counts,
                  squares == nullptr ? nullptr : partial);
  });
  if (squares == nullptr || status != cudaSuccess) return status;
  return launch(join_squares, {1, kThreads}, stream, partial, format_partials(call.n), squares);
}

}  // namespace qsim::cuda
