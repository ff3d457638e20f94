// Which grid an element belongs to, followed from element to element without dividing.
#pragma once

#include <utility>

#include "elements.cuh"
#include "qsim/cuda/fake_quantize.h"
#include "qsim/exact_quotient.h"

namespace qsim::cuda {

// As round_to, but a zero result is +0.0, also where rounding to 16 bits underflows.
__device__ __forceinline__ void round_quantized(float x, float& to) { to = x; }
__device__ __forceinline__ void round_quantized(double x, double& to) { to = x; }
__device__ __forceinline__ void round_quantized(float x, __half& to) {
  to = __hadd(__float2half_rn(x), __half(__half_raw{0}));
}
__device__ __forceinline__ void round_quantized(float x, __nv_bfloat16& to) {
  to = __float2bfloat16_rn(x);
  if (__bfloat16_as_ushort(to) == 0x8000) to = __ushort_as_bfloat16(0);
}

// The same of two neighbours on regular grids, whose scales do not underflow in bfloat16: since sm_80 an instruction
// converts both.
__device__ __forceinline__ void round_pair(float a, float b, float* to) { to[0] = a, to[1] = b; }
__device__ __forceinline__ void round_pair(float a, float b, __half* to) {
  const __half2 pair = __hadd2(__floats2half2_rn(a, b), __floats2half2_rn(0, 0));
  to[0] = __low2half(pair), to[1] = __high2half(pair);
}
__device__ __forceinline__ void round_pair(float a, float b, __nv_bfloat16* to) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  to[0] = __low2bfloat16(pair), to[1] = __high2bfloat16(pair);
}

template <class A>
__device__ __forceinline__ Grid<A> grid_at(const GridSource& source, std::int64_t parameter) {
  const A zero_point = source.learned ? static_cast<const A*>(source.zero_point)[parameter]
                                      : static_cast<A>(static_cast<const std::int32_t*>(source.zero_point)[parameter]);
  return make_grid(static_cast<const A*>(source.scale)[parameter], zero_point, static_cast<A>(source.quant_min),
                   static_cast<A>(source.quant_max));
}

// Grids for quantize_regular_steps; those that are not regular have the inverse 0.
struct RegularSource {
  const GridSource& of;
};
struct InvertedGrid : Grid<float> {
  float inverse;
};
template <class A>
__device__ __forceinline__ InvertedGrid grid_at(const RegularSource& source, std::int64_t parameter) {
  const Grid<A> grid = grid_at<A>(source.of, parameter);
  return {grid, is_regular(grid) ? 1 / grid.scale : 0};
}

template <class A>
__device__ __forceinline__ A quotient_of(A x, A scale, Rounding rounding) {
  return rounding == Rounding::divide ? quotient<Rounding::divide>(x, scale) : quotient<Rounding::reciprocal>(x, scale);
}

// The grid of element `at`, then of each following one. I: unsigned below 2^31 elements, where division is cheap.
// Source: what grid_at reads, which names the type of a grid.
template <class A, class I, class Source = GridSource>
class GridCursor {
 public:
  __device__ GridCursor(const FakeQuantizeCall& call, std::int64_t at)
      : GridCursor(call.grids, call.layout, call.n, at) {}

  __device__ GridCursor(const Source& source, const Layout& layout, std::int64_t n, std::int64_t at)
      : source_(source),
        outer_(static_cast<I>(layout.outer)),
        segment_(static_cast<I>(layout.segment)),
        width_(static_cast<I>(layout.width)),
        run_(static_cast<I>(layout.run)) {
    if (layout.segment == n && layout.width == 1) {  // per tensor: nothing to divide, nothing ends
      left_of_run_ = segment_;
      grid_ = grid_at<A>(source_, 0);
    } else {
      seek(static_cast<I>(at));
    }
  }

  __device__ auto grid() const { return grid_; }

  __device__ void advance() {
    ++at_;
    if (--left_of_run_ != 0) return;
    if (left_of_segment_ == 0) return seek(at_);
    const bool last = ++column_ == width_;
    parameter_ = last ? parameter_ - (width_ - 1) : parameter_ + 1;
    if (last) column_ = 0;
    take_run(run_);
    if (width_ != 1) grid_ = grid_at<A>(source_, parameter_);
  }

 private:
  __device__ void seek(I at) {
    const I outer = at / outer_, inside = at % outer_, segment = inside / segment_, offset = inside % segment_;
    const I segments = (outer_ + segment_ - 1) / segment_, start = segment * segment_;
    const I length = outer_ - start < segment_ ? outer_ - start : segment_;
    at_ = at;
    column_ = offset / run_ % width_;
    parameter_ = (outer * segments + segment) * width_ + column_;
    left_of_segment_ = length - offset;
    take_run(run_ - offset % run_);
    grid_ = grid_at<A>(source_, parameter_);
  }

  // The next run, cut where the segment ends.
  __device__ void take_run(I length) {
    left_of_run_ = length < left_of_segment_ ? length : left_of_segment_;
    left_of_segment_ -= left_of_run_;
  }

  const Source& source_;
  I outer_, segment_, width_, run_;
  I at_ = 0, column_ = 0, parameter_ = 0, left_of_run_ = 0, left_of_segment_ = 0;
  decltype(grid_at<A>(std::declval<const Source&>(), 0)) grid_;
};

}  // namespace qsim::cuda
