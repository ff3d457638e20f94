// One pass over grad and x for dx and the terms of the parameters' gradients, then one over the partial sums. A sum is
// cut, and added up, in an order that sizes alone decide: threads add at most a few dozen terms in the arithmetic type,
// the rest is float64.
#include <algorithm>

#include "fake_quantize_grids.cuh"

namespace qsim::cuda {

namespace {

constexpr int kMostColumns = 32;
constexpr std::int64_t kPart = 8192;  // elements that a block sums: small enough to fill a device with 2^20 of them

// A segment is a matrix whose rows are runs of `run` elements of one parameter, or `width` elements of as many
// parameters. A group of threads sums a part of it: some rows, a piece of each run.
struct Cut {
  std::int64_t run, row_parts, pieces, tiles;
  int rows, piece;     // of a part
  int columns, group;  // neighbouring parameters, and threads, of a part

  QSIM_HD std::int64_t parts() const { return row_parts * pieces; }
};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

Cut cut_of(const Layout& layout, int pack) {
  Cut cut;
  cut.run = layout.width == 1 ? layout.segment : layout.run;
  const bool table = layout.width > 1 && layout.run == 1;  // threads side by side read elements side by side
  cut.columns = static_cast<int>(table ? std::min<std::int64_t>(layout.width, kMostColumns) : 1);
  const std::int64_t rows = layout.segment / (layout.width * cut.run);
  cut.piece = static_cast<int>(std::min(cut.run, kPart));
  cut.rows = static_cast<int>(std::min(rows, std::max<std::int64_t>(1, kPart / cut.piece / cut.columns)));
  cut.row_parts = ceil_div(rows, cut.rows);
  cut.pieces = ceil_div(cut.run, cut.piece);
  cut.tiles = ceil_div(layout.width, cut.columns);
  const std::int64_t packs = cut.rows * ceil_div(cut.piece, pack);
  cut.group = 1;
  while (cut.group < kThreads && (table || cut.group < packs)) cut.group *= 2;
  return cut;
}

// Up to a pack of elements, in one load where all exist and the address allows.
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* x, int count) {
  if (count == Pack<T>::kSize && aligned(x)) return *reinterpret_cast<const Pack<T>*>(x);
  Pack<T> pack{};
  for (int j = 0; j < count; ++j) pack.of[j] = x[j];
  return pack;
}

template <class T>
__device__ __forceinline__ void store_pack(const Pack<T>& pack, int count, T* to) {
  if (count == Pack<T>::kSize && aligned(to)) {
    *reinterpret_cast<Pack<T>*>(to) = pack;
  } else {
    for (int j = 0; j < count; ++j) to[j] = pack.of[j];
  }
}

// Adds what `rows` threads hold, `stride` apart, to the first of them: groups of any size up to a block, decided at run
// time, for which CUB has nothing. Called by all threads of a block.
__device__ __forceinline__ void sum_rows(double (&sums)[2][kThreads], int row, int rows, int stride) {
  while (rows > 1) {
    const int half = (rows + 1) / 2;
    __syncthreads();
    if (row + half < rows) {
      sums[0][threadIdx.x] += sums[0][threadIdx.x + half * stride];
      sums[1][threadIdx.x] += sums[1][threadIdx.x + half * stride];
    }
    rows = half;
  }
}

// kWidth: elements of a run that a thread takes at a time.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    learn(const __grid_constant__ FakeQuantizeCall call, const __grid_constant__ Cut cut, std::int64_t groups,
          const T* grad, const T* x, T* dx, double* scale_sums, double* zero_point_sums) {
  using A = computed_t<T>;
  __shared__ double sums[2][kThreads];
  const Layout& layout = call.layout;
  const int rank = static_cast<int>(threadIdx.x) % cut.group, lanes = cut.group / cut.columns;
  const int lane = rank / cut.columns;
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / cut.group) + static_cast<int>(threadIdx.x) / cut.group;
  const std::int64_t column = group % cut.tiles * cut.columns + rank % cut.columns;
  const std::int64_t part = group / cut.tiles % cut.parts(), segment = group / cut.tiles / cut.parts();
  const bool works = group < groups && lane < lanes && column < layout.width;

  A scale_sum = 0, zero_point_sum = 0;
  if (works) {
    const std::int64_t segments = (layout.outer + layout.segment - 1) / layout.segment;
    const std::int64_t start = segment / segments * layout.outer + segment % segments * layout.segment;
    const std::int64_t stop = min(start + layout.segment, (segment / segments + 1) * layout.outer);
    const std::int64_t run = layout.width == 1 ? stop - start : layout.run, row = layout.width * run;
    const std::int64_t first_row = part / cut.pieces * cut.rows, first = part % cut.pieces * cut.piece;
    const auto rows = static_cast<int>(min(static_cast<std::int64_t>(cut.rows), (stop - start) / row - first_row));
    const auto piece = static_cast<int>(min(static_cast<std::int64_t>(cut.piece), run - first));
    const std::int64_t from = start + first_row * row + column * run + first;
    const Grid<A> grid = grid_at<A>(call.grids, segment * layout.width + column);
    const int packs = (piece + kWidth - 1) / kWidth;
#pragma unroll 2
    for (int p = lane; p < rows * packs; p += lanes) {
      const int line = rows == 1 ? 0 : p / packs, inside = (p - line * packs) * kWidth;
      const std::int64_t at = from + line * row + inside;
      const int count = kWidth == 1 ? 1 : min(kWidth, piece - inside);
      Pack<T> gradients, elements;
      if constexpr (kWidth == 1) {
        gradients.of[0] = grad[at];
        elements.of[0] = x[at];
      } else {
        gradients = load_pack(grad + at, count);
        elements = load_pack(x + at, count);
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (j >= count) break;
        const A gradient = widened(gradients.of[j]), element = widened(elements.of[j]);
        const A exact = quotient_of(element, grid.scale, call.rounding);
        scale_sum += scale_term(gradient, element, exact, grid);
        zero_point_sum += zero_point_term(gradient, element, exact, grid);
        if (!in_range(exact, grid)) gradients.of[j] = T{};
      }
      if constexpr (kWidth == 1) {
        dx[at] = gradients.of[0];
      } else {
        store_pack(gradients, count, dx + at);
      }
    }
  }
  sums[0][threadIdx.x] = scale_sum;
  sums[1][threadIdx.x] = zero_point_sum;
  sum_rows(sums, lane, lanes, cut.columns);
  if (works && lane == 0) {
    const std::int64_t at = (segment * cut.parts() + part) * layout.width + column;
    scale_sums[at] = sums[0][threadIdx.x];
    zero_point_sums[at] = sums[1][threadIdx.x];
  }
}

// `group` threads add the parts of one parameter.
template <class A>
__global__ void __launch_bounds__(kThreads)
    fold(const double* scale_sums, const double* zero_point_sums, std::int64_t parts, std::int64_t n,
         std::int64_t width, int group, const A* scale, double grad_factor, A* dscale, A* dzero_point) {
  __shared__ double sums[2][kThreads];
  const int lane = static_cast<int>(threadIdx.x) % group;
  const std::int64_t parameter =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / group) + static_cast<int>(threadIdx.x) / group;
  double scale_sum = 0, zero_point_sum = 0;
  if (parameter < n) {
    const std::int64_t first = parameter / width * parts * width + parameter % width;
#pragma unroll 4
    for (std::int64_t part = lane; part < parts; part += group) {
      scale_sum += scale_sums[first + part * width];
      zero_point_sum += zero_point_sums[first + part * width];
    }
  }
  sums[0][threadIdx.x] = scale_sum;
  sums[1][threadIdx.x] = zero_point_sum;
  sum_rows(sums, lane, group, 1);
  if (parameter >= n || lane != 0) return;
  scale_sum = sums[0][threadIdx.x];
  zero_point_sum = sums[1][threadIdx.x];
  dscale[parameter] = static_cast<A>(scale_sum * grad_factor);
  dzero_point[parameter] = static_cast<A>(zero_point_sum * -static_cast<double>(scale[parameter]) * grad_factor);
}

int pack_of(const FakeQuantizeCall& call) {
  if (call.layout.width > 1 && call.layout.run == 1) return 1;
  return call.element == Element::f64 ? 2 : call.element == Element::f32 ? 4 : 8;
}

int lanes_for(std::int64_t parts) {
  int lanes = 1;
  while (lanes < kThreads && lanes < parts) lanes *= 2;
  return lanes;
}

}  // namespace

std::int64_t learnable_partial_sums(const FakeQuantizeCall& call, std::int64_t n_parameters) {
  return 2 * n_parameters * cut_of(call.layout, pack_of(call)).parts();
}

cudaError_t fake_quantize_learnable_backward(const FakeQuantizeCall& call, const void* grad, const void* x, void* dx,
                                             std::int64_t n_parameters, double grad_factor, double* partial,
                                             void* dscale, void* dzero_point, cudaStream_t stream) {
  const Layout& layout = call.layout;
  const int pack = pack_of(call);
  const Cut cut = cut_of(layout, pack);
  const std::int64_t groups = n_parameters / layout.width * cut.parts() * cut.tiles;
  double* const zero_point_sums = partial + n_parameters * cut.parts();
  return with_element(call.element, [&](auto element) {
    using T = decltype(element);
    using A = computed_t<T>;
    const LaunchShape learning{static_cast<unsigned>(ceil_div(groups, kThreads / cut.group)), kThreads};
    const cudaError_t status =
        launch(pack == 1 ? learn<T, 1> : learn<T, Pack<T>::kSize>, learning, stream, call, cut, groups,
               static_cast<const T*>(grad), static_cast<const T*>(x), static_cast<T*>(dx), partial, zero_point_sums);
    if (status != cudaSuccess) return status;
    const int group = lanes_for(cut.parts());
    const LaunchShape folding{static_cast<unsigned>(ceil_div(n_parameters, kThreads / group)), kThreads};
    return launch(fold<A>, folding, stream, partial, zero_point_sums, cut.parts(), n_parameters, layout.width, group,
                  static_cast<const A*>(call.grids.scale), grad_factor, static_cast<A*>(dscale),
                  static_cast<A*>(dzero_point));
  });
}

}  // namespace qsim::cuda
