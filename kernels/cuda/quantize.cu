// The integers of fake-quantize stored, and read again, by octets.
#include "qsim/cuda/quantize.h"

#include "fake_quantize_grids.cuh"
#include "octets.cuh"

namespace qsim::cuda {

namespace {

template <class T, class Q, class I>
__global__ void __launch_bounds__(kThreads)
    quantize_octets(const __grid_constant__ FakeQuantizeCall call, const T* x, Q* q, bool packs) {
  using A = computed_t<T>;
  for_each_octet(call.n, [&](std::int64_t at, int count) {
    T elements[kOctet];
    Q integers[kOctet];
    load_octet(x, at, count, packs, elements);
    GridCursor<A, I> cursor(call, at);
    follow(cursor, count, [&](int i) {
      const Grid<A> grid = cursor.grid();
      const A exact = quotient_of(widened(elements[i]), grid.scale, call.rounding);
      integers[i] =
          static_cast<Q>(static_cast<int>(nearest_integer(exact, grid, static_cast<A>(call.grids.quant_min))));
    });
    store_octet(integers, at, count, packs, q);
  });
}

// Three blocks to a multiprocessor: with 64 registers, which ptxas takes otherwise, float64 spills.
template <class T, class Q, class I>
__global__ void __launch_bounds__(kThreads, 3)
    dequantize_octets(const __grid_constant__ FakeQuantizeCall call, const Q* q, T* y, bool packs) {
  using A = computed_t<T>;
  for_each_octet(call.n, [&](std::int64_t at, int count) {
    Q integers[kOctet];
    T elements[kOctet] = {};  // g++ does not see that a whole octet is written whole
    load_octet(q, at, count, packs, integers);
    GridCursor<A, I> cursor(call, at);
    follow(cursor, count, [&](int i) {
      const Grid<A> grid = cursor.grid();
      const A steps = steps_of(static_cast<A>(integers[i]), grid, static_cast<A>(call.grids.quant_min));
      round_quantized(qsim::dequantize(steps, grid.scale), elements[i]);
    });
    store_octet(elements, at, count, packs, y);
  });
}

// run(Q{}) with the type that `integer` names.
template <class F>
cudaError_t with_integer(Integer integer, F run) {
  switch (integer) {
    case Integer::i8:
      return run(std::int8_t{});
    case Integer::u8:
      return run(std::uint8_t{});
    case Integer::i16:
      return run(std::int16_t{});
    case Integer::u16:
      return run(std::uint16_t{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t quantize(const FakeQuantizeCall& call, const void* x, void* q, int integer_size, cudaStream_t stream) {
  if (call.n == 0) return cudaSuccess;
  return with_element(call.element, [&](auto element) {
    using T = decltype(element);
    const auto run = [&](auto integer) {
      using Q = decltype(integer);
      const auto kernel = is_small(call.n) ? quantize_octets<T, Q, unsigned> : quantize_octets<T, Q, std::int64_t>;
      return launch(kernel, shape_for(call.n), stream, call, static_cast<const T*>(x), static_cast<Q*>(q),
                    all_aligned(x, q));
    };
    return integer_size == 1 ? run(std::uint8_t{}) : run(std::uint16_t{});
  });
}

cudaError_t dequantize(const FakeQuantizeCall& call, Integer integer, const void* q, void* y, cudaStream_t stream) {
  if (call.n == 0) return cudaSuccess;
  return with_element(call.element, [&](auto element) {
    using T = decltype(element);
    return with_integer(integer, [&](auto stored) {
      using Q = decltype(stored);
      const auto kernel = is_small(call.n) ? dequantize_octets<T, Q, unsigned> : dequantize_octets<T, Q, std::int64_t>;
      return launch(kernel, shape_for(call.n), stream, call, static_cast<const Q*>(q), static_cast<T*>(y),
                    all_aligned(q, y));
    });
  });
}

}  // namespace qsim::cuda
