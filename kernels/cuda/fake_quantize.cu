// The forward pass, with or without a mask, and the gradient of x: octets, each followed through its grids.
#include "fake_quantize_grids.cuh"
#include "octets.cuh"

namespace qsim::cuda {

namespace {

template <class T, class I>
__global__ void __launch_bounds__(kThreads)
    forward(const __grid_constant__ FakeQuantizeCall call, const T* x, T* y, std::uint8_t* mask, bool packs) {
  using A = computed_t<T>;
  const bool enabled = call.enabled == nullptr || *call.enabled != 0;
  for_each_octet(call.n, [&](std::int64_t at, int count) {
    T elements[kOctet];
    load_octet(x, at, count, packs, elements);
    GridCursor<A, I> cursor(call, at);
    unsigned bits = enabled ? 0 : (1u << count) - 1;
    const auto round = [&](int i) {
      const Grid<A> grid = cursor.grid();
      const A exact = quotient_of(widened(elements[i]), grid.scale, call.rounding);
      bits |= (in_range(exact, grid) ? 1u : 0u) << i;
      round_quantized(dequantize(nearest_steps(exact, grid), grid.scale), elements[i]);
    };
    if (enabled) follow(cursor, count, round);
    store_octet(elements, at, count, packs, y);
    if (mask != nullptr) mask[at / kOctet] = static_cast<std::uint8_t>(bits);
  });
}

template <class T, class I>
__global__ void __launch_bounds__(kThreads)
    recompute(const __grid_constant__ FakeQuantizeCall call, const T* grad, const T* x, T* dx, bool packs) {
  using A = computed_t<T>;
  for_each_octet(call.n, [&](std::int64_t at, int count) {
    T elements[kOctet], gradients[kOctet];
    load_octet(x, at, count, packs, elements);
    load_octet(grad, at, count, packs, gradients);
    GridCursor<A, I> cursor(call, at);
    follow(cursor, count, [&](int i) {
      const Grid<A> grid = cursor.grid();
      const bool inside = in_range(quotient_of(widened(elements[i]), grid.scale, call.rounding), grid);
      if (!inside) gradients[i] = T{};
    });
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
    const auto kernel = is_small(call.n) ? forward<T, unsigned> : forward<T, std::int64_t>;
    return launch(kernel, shape_for(call.n), stream, call, static_cast<const T*>(x), static_cast<T*>(y), mask,
                  all_aligned(x, y));
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
