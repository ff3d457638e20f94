#include "fake_quantize_grids.cuh"

namespace qsim::cuda {

namespace {

constexpr int kThreads = 256, kColumns = 32, kWarp = 32;

// A block sums one slice for `columns` neighbouring parameters: 32 where elements of one parameter lie apart (a row of
// threads reads a row of elements), else 1. Each thread adds at most a few hundred terms in the arithmetic type; what
// follows is float64, in an order that only sizes decide.
template <class T>
__global__ void __launch_bounds__(kThreads)
    learn(const __grid_constant__ FakeQuantizeCall call, const T* grad, const T* x, T* dx, Slices slices, int columns,
          double* scale_sums, double* zero_point_sums) {
  using A = device_arithmetic_t<T>;
  __shared__ double shared[2][kThreads];
  const Layout& layout = call.layout;
  const std::int64_t tiles = (layout.width + columns - 1) / columns;
  const std::int64_t slice = blockIdx.x / tiles, segment = slice / slices.per_segment;
  const std::int64_t segments = (layout.outer + layout.segment - 1) / layout.segment, outer = segment / segments;
  const std::int64_t start = outer * layout.outer + segment % segments * layout.segment;
  const std::int64_t stop = min(start + layout.segment, (outer + 1) * layout.outer);
  const std::int64_t from = start + slice % slices.per_segment * slices.length;
  const std::int64_t column = blockIdx.x % tiles * columns + threadIdx.x % columns;

  A scale_sum = 0, zero_point_sum = 0;
  if (column < layout.width) {
    const Grid<A> grid = grid_at<A>(call.grids, segment * layout.width + column);
    const std::int64_t first = from + column * layout.run;  // of this parameter in this slice
    const auto length = static_cast<unsigned>(min(slices.length, stop - from));
    const auto run = static_cast<unsigned>(min(layout.run, slices.length));
    const unsigned row = run * static_cast<unsigned>(layout.width);
    const auto offset = static_cast<unsigned>(column) * run;
    const unsigned lanes = blockDim.x / columns;
#pragma unroll 4
    for (unsigned e = threadIdx.x / columns;; e += lanes) {
      const unsigned at = e / run * row + e % run;
      if (at + offset >= length) break;
      const A gradient = widened(grad[first + at]), element = widened(x[first + at]);
      const A exact = quotient_of(element, grid.scale, call.rounding);
      scale_sum += scale_term(gradient, element, exact, grid);
      zero_point_sum += zero_point_term(gradient, element, exact, grid);
      dx[first + at] = in_range(exact, grid) ? grad[first + at] : T{};
    }
  }
  shared[0][threadIdx.x] = scale_sum;
  shared[1][threadIdx.x] = zero_point_sum;
  for (int half = static_cast<int>(blockDim.x) / 2; half >= columns; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) {
      shared[0][threadIdx.x] += shared[0][threadIdx.x + half];
      shared[1][threadIdx.x] += shared[1][threadIdx.x + half];
    }
  }
  if (static_cast<int>(threadIdx.x) < columns && column < layout.width) {
    scale_sums[slice * layout.width + column] = shared[0][threadIdx.x];
    zero_point_sums[slice * layout.width + column] = shared[1][threadIdx.x];
  }
}

// A warp adds the slices of one parameter: lanes stride over them, then a tree.
template <class A>
__global__ void __launch_bounds__(kThreads)
    fold(const double* scale_sums, const double* zero_point_sums, Slices slices, std::int64_t n, std::int64_t width,
         const A* scale, double grad_factor, A* dscale, A* dzero_point) {
  const std::int64_t parameter = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (parameter >= n) return;
  const int lane = threadIdx.x % kWarp;
  double scale_sum = 0, zero_point_sum = 0;
  for (std::int64_t slice = lane; slice < slices.per_segment; slice += kWarp) {
    const std::int64_t at = (parameter / width * slices.per_segment + slice) * width + parameter % width;
    scale_sum += scale_sums[at];
    zero_point_sum += zero_point_sums[at];
  }
  for (int step = kWarp / 2; step >= 1; step /= 2) {
    scale_sum += __shfl_down_sync(0xffffffffu, scale_sum, step);
    zero_point_sum += __shfl_down_sync(0xffffffffu, zero_point_sum, step);
  }
  if (lane != 0) return;
  dscale[parameter] = static_cast<A>(scale_sum * grad_factor);
  dzero_point[parameter] = static_cast<A>(zero_point_sum * -static_cast<double>(scale[parameter]) * grad_factor);
}

}  // namespace

cudaError_t fake_quantize_learnable_backward(const FakeQuantizeCall& call, const void* grad, const void* x, void* dx,
                                             std::int64_t n_parameters, Slices slices, double grad_factor,
                                             double* partial, void* dscale, void* dzero_point, cudaStream_t stream) {
  const Layout& layout = call.layout;
  const int columns = layout.width > 1 && layout.run == 1 ? kColumns : 1;
  const std::int64_t sums = n_parameters * slices.per_segment;
  const std::int64_t tiles = (layout.width + columns - 1) / columns;
  const std::int64_t terms = slices.length / layout.width;  // of one parameter in a slice
  const int threads = columns == 1 && terms <= 4 * kWarp ? kWarp : kThreads;
  double* const zero_point_sums = partial + sums;
  return with_element(call.element, [&](auto element) {
    using T = decltype(element);
    using A = device_arithmetic_t<T>;
    const LaunchShape learning{static_cast<unsigned>(sums / layout.width * tiles), static_cast<unsigned>(threads)};
    const cudaError_t status =
        launch(learn<T>, learning, stream, call, static_cast<const T*>(grad), static_cast<const T*>(x),
               static_cast<T*>(dx), slices, columns, partial, zero_point_sums);
    if (status != cudaSuccess) return status;
    constexpr int kPerBlock = kThreads / kWarp;
    const LaunchShape folding{static_cast<unsigned>((n_parameters + kPerBlock - 1) / kPerBlock), kThreads};
    return launch(fold<A>, folding, stream, partial, zero_point_sums, slices, n_parameters, layout.width,
                  static_cast<const A*>(call.grids.scale), grad_factor, static_cast<A*>(dscale),
                  static_cast<A*>(dzero_point));
  });
}

}  // namespace qsim::cuda
