// The forward pass, with or without a mask, and the gradient of x: octets, each followed through its grids, or, where
// one grid is that of all elements, stretches.
#include "fake_quantize_grids.cuh"
#include "stretches.cuh"

namespace qsim::cuda {

namespace {

// Calls take(i, quantized) for the elements i < count of the octet at `at`, each rounded on its grid. By the short cut,
// for rounding `divide`: false where some grid is not regular, and then what was taken is of no use.
template <class I, class T, class Take>
__device__ __forceinline__ bool round_regular(const FakeQuantizeCall& call, std::int64_t at, int count,
                                              const T (&elements)[kOctet], Take take) {
  const RegularSource source{call.grids};
  GridCursor<float, I, RegularSource> cursor(source, call.layout, call.n, at);
  bool regular = true;
  follow(cursor, count, [&](int i) {
    const InvertedGrid grid = cursor.grid();
    regular &= grid.inverse != 0;
    take(i, quantize_regular_steps(widened(elements[i]), grid, grid.inverse));
  });
  return regular;
}

// By the contract.
template <class I, class T, class Take>
__device__ __forceinline__ void round_any(const FakeQuantizeCall& call, std::int64_t at, int count,
                                          const T (&elements)[kOctet], Take take) {
  using A = computed_t<T>;
  GridCursor<A, I> cursor(call, at);
  follow(cursor, count, [&](int i) {
    const Grid<A> grid = cursor.grid();
    const A exact = quotient_of(widened(elements[i]), grid.scale, call.rounding), steps = nearest_steps(exact, grid);
    take(i, Quantized<A>{dequantize(steps, grid.scale), round_half_even(exact), steps});
  });
}

// Elements of an octet become the nearest of their grids, where `rounds`; which of them are in range.
template <class I, bool rounds, class T>
__device__ __forceinline__ unsigned round_octet(const FakeQuantizeCall& call, const T* x, std::int64_t at, int count,
                                                bool packs, T (&elements)[kOctet]) {
  using A = computed_t<T>;
  unsigned bits = 0;
  const auto take = [&](int i, Quantized<A> quantized) {
    bits |= (quantized.before_clamp == quantized.after_clamp ? 1u : 0u) << i;
    if constexpr (rounds) round_quantized(quantized.value, elements[i]);
  };
  if constexpr (std::is_same_v<A, float>) {
    if (call.rounding == Rounding::divide) {
      if (round_regular<I>(call, at, count, elements, take)) return bits;
      bits = 0;
      load_octet(x, at, count, packs, elements);
    }
  }
  round_any<I>(call, at, count, elements, take);
  return bits;
}

template <class T, class I>
__global__ void __launch_bounds__(kThreads)
    forward(const __grid_constant__ FakeQuantizeCall call, const T* x, T* y, std::uint8_t* mask, bool packs) {
  const bool enabled = call.enabled == nullptr || *call.enabled != 0;
  for_each_octet(call.n, [&](std::int64_t at, int count) {
    T elements[kOctet];
    load_octet(x, at, count, packs, elements);
    const unsigned bits = enabled ? round_octet<I, true>(call, x, at, count, packs, elements) : (1u << count) - 1;
    store_octet(elements, at, count, packs, y);
    if (mask != nullptr) mask[at / kOctet] = static_cast<std::uint8_t>(bits);
  });
}

// Octets `step` elements apart. round(elements) rounds eight of them and says which are in range.
template <class T, class Round>
__device__ __forceinline__ void round_octets(const T* x, T* y, std::uint8_t* mask, std::int64_t first, std::int64_t n,
                                             std::int64_t step, Round round) {
  for (std::int64_t at = first; at < n; at += step) {
    const int count = static_cast<int>(min(std::int64_t{kOctet}, n - at));
    T elements[kOctet];
    load_octet(x, at, count, true, elements);
    const unsigned bits = round(elements) & ((1u << count) - 1);
    store_octet(elements, at, count, true, y);
    if (mask != nullptr) mask[at / kOctet] = static_cast<std::uint8_t>(bits);
  }
}

template <class T>
__device__ __forceinline__ unsigned round_by_contract(T (&elements)[kOctet], const Grid<float>& grid) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const float exact = quotient<Rounding::divide>(widened(elements[i]), grid.scale);
    bits |= (in_range(exact, grid) ? 1u : 0u) << i;
    round_quantized(dequantize(nearest_steps(exact, grid), grid.scale), elements[i]);
  }
  return bits;
}

template <int n, class T>
__device__ __forceinline__ unsigned round_regular(T (&elements)[n], const RegularGrid<float>& grid) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const Quantized<float> a = quantize_regular(widened(elements[i]), grid);
    const Quantized<float> b = quantize_regular(widened(elements[i + 1]), grid);
    bits |= (a.before_clamp == a.after_clamp ? 1u << i : 0u) | (b.before_clamp == b.after_clamp ? 2u << i : 0u);
    round_pair(a.value, b.value, elements + i);
  }
  return bits;
}

// One grid for all elements, rounding `divide`, float32 arithmetic, everything aligned: a warp takes stretches, and the
// one whose turn would be next takes what is left, by octets.
template <class T>
__global__ void __launch_bounds__(kThreads)
    forward_one_grid(const __grid_constant__ FakeQuantizeCall call, const T* x, T* y, std::uint8_t* mask) {
  const bool enabled = call.enabled == nullptr || *call.enabled != 0;
  const Grid<float> grid = grid_at<float>(call.grids, 0);
  if (!enabled || !is_regular(grid)) {
    const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    return round_octets(x, y, mask, thread * kOctet, call.n, std::int64_t{gridDim.x} * kThreads * kOctet,
                        [&](T(&elements)[kOctet]) { return enabled ? round_by_contract(elements, grid) : 0xffu; });
  }
  __shared__ Thresholds ends;  // found once for a block: that takes float64, of which some devices have little
  if (threadIdx.x == 0) ends = thresholds(grid);
  __syncthreads();
  const RegularGrid<float> regular{grid.scale, 1 / grid.scale, ends.lowest, ends.highest};

  const unsigned warps = gridDim.x * kWarps;
  const auto stretches = static_cast<unsigned>(call.n / kStretch<T>);
  unsigned stretch = blockIdx.x * kWarps + threadIdx.x / 32;
  for (; stretch < stretches; stretch += warps) {
    T elements[kLaneElements<T>];
    load_stretch(x, stretch, elements);
    const unsigned bits = round_regular(elements, regular);
    store_stretch(elements, stretch, y);
    if (mask != nullptr) store_stretch_bits<T>(bits, stretch, mask);
  }
  if (stretch % warps != stretches % warps) return;
  round_octets(x, y, mask, std::int64_t{stretches} * kStretch<T> + threadIdx.x % 32 * kOctet, call.n, 32 * kOctet,
               [&](T(&elements)[kOctet]) { return round_regular(elements, regular); });
}

template <class T, class I>
__global__ void __launch_bounds__(kThreads)
    recompute(const __grid_constant__ FakeQuantizeCall call, const T* grad, const T* x, T* dx, bool packs) {
  for_each_octet(call.n, [&](std::int64_t at, int count) {
    T elements[kOctet], gradients[kOctet];
    load_octet(x, at, count, packs, elements);
    load_octet(grad, at, count, packs, gradients);
    const unsigned bits = round_octet<I, false>(call, x, at, count, packs, elements);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) gradients[i] = bits >> i & 1 ? gradients[i] : T{};
    store_octet(gradients, at, count, packs, dx);
  });
}

template <class U>
__global__ void __launch_bounds__(kThreads)
    keep(const U* grad, const std::uint8_t* mask, U* dx, std::int64_t n, bool packs) {
  for_each_octet(n, [&](std::int64_t at, int count) {
    U gradients[kOctet];
    load_octet(grad, at, count, packs, gradients);
    const unsigned bits = mask[at / kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) gradients[i] = bits >> i & 1 ? gradients[i] : U{0};
    store_octet(gradients, at, count, packs, dx);
  });
}

}  // namespace

cudaError_t fake_quantize(const FakeQuantizeCall& call, const void* x, void* y, std::uint8_t* mask,
                          cudaStream_t stream) {
  if (call.n == 0) return cudaSuccess;
  return with_element(call.element, [&](auto element) {
    using T = decltype(element);
    const bool packs = all_aligned(x, y), one_grid = call.layout.segment == call.n && call.layout.width == 1;
    if constexpr (sizeof(T) < sizeof(double)) {
      if (one_grid && packs && call.rounding == Rounding::divide) {
        const LaunchShape shape{blocks_for(call.n, kWarps * kStretch<T>), kThreads};
        return launch(forward_one_grid<T>, shape, stream, call, static_cast<const T*>(x), static_cast<T*>(y), mask);
      }
    }
    const auto kernel = is_small(call.n) ? forward<T, unsigned> : forward<T, std::int64_t>;
    return launch(kernel, shape_for(call.n), stream, call, static_cast<const T*>(x), static_cast<T*>(y), mask, packs);
  });
}

cudaError_t fake_quantize_backward(const FakeQuantizeCall& call, const void* grad, const void* x, void* dx,
                                   cudaStream_t stream) {
  if (call.n == 0) return cudaSuccess;
  return with_element(call.element, [&](auto element) {
    using T = decltype(element);
    const auto kernel = is_small(call.n) ? recompute<T, unsigned> : recompute<T, std::int64_t>;
    return launch(kernel, shape_for(call.n), stream, call, static_cast<const T*>(grad), static_cast<const T*>(x),
                  static_cast<T*>(dx), all_aligned(grad, x, dx));
  });
}

cudaError_t keep_where_set(const void* grad, const std::uint8_t* mask, void* dx, std::int64_t n, int element_size,
                           cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  const auto run = [&](auto zero) {
    using U = decltype(zero);
    return launch(keep<U>, shape_for(n), stream, static_cast<const U*>(grad), mask, static_cast<U*>(dx), n,
                  all_aligned(grad, dx));
  };
  if (element_size == 2) return run(std::uint16_t{});
  if (element_size == 4) return run(std::uint32_t{});
  return run(std::uint64_t{});
}

}  // namespace qsim::cuda
