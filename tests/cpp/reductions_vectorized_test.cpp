// Reductions over whole tensors, and gradient scaling.
#include "qsim/clip_grad.h"
#include "qsim/finite_range.h"
#include "vectorized_loops.h"

using namespace vectorized;
using qsim::Element;

namespace {

template <class T>
void observe_each(int n) {
  const T* x = memory<T>(0);
  qsim::FiniteRange range;
  qsim::NonFinite counts;
  for (int i = 0; i < n; ++i) qsim::observe(static_cast<float>(widened(x[i])), range, counts);
  memory<float>(1)[0] = range.lowest + range.highest;
}

template <class T>
void square_each(int n) {
  const T* x = memory<T>(0);
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += double{widened(x[i])} * widened(x[i]);
  memory<double>(1)[0] = sum;
}

template <class T>
void scale_each(int n) {
  static qsim::arithmetic_t<T> scale = 0.7f;
  T* x = memory<T>(1);
  for (int i = 0; i < n; ++i) round_to(x[i], widened(x[i]) * scale);
}

template <class T>
void add_reductions(std::vector<Loop>& loops, const std::string& type, Element element) {
  const int which = static_cast<int>(element);
  const auto range = [which](Level level, std::int64_t outer, std::int64_t ranges) {
    static float lowest[kMemory], highest[kMemory];
    qsim::NonFinite counts;
    qsim::cpu::observe_range_kernels(level).of[which](memory<T>(0), outer, ranges, 1, lowest, highest, counts);
  };
  loops.push_back({"range, per tensor, " + type, 4, [=](Level level, int n) { range(level, n, 1); }, observe_each<T>});
  loops.push_back({"range, per column, " + type, 4, [=](Level level, int n) { range(level, 16, n / 16); },
                   observe_each<T>, kMemory});
  loops.push_back({"gradient norm, " + type, 2,  // summed in float64
                   [=](Level level, int n) { qsim::cpu::clip_grad_kernels(level).sum[which](memory<T>(0), n, 2); },
                   square_each<T>});
  loops.push_back(
      {"gradient scaling, " + type, kLanes<T>,
       [=](Level level, int n) { qsim::cpu::clip_grad_kernels(level).scale[which](memory<T>(1), n, 0.7, false); },
       scale_each<T>});
}

}  // namespace

TEST_CASE("ranges, norms and gradient scaling are vectorised") {
  std::vector<Loop> loops;
  add_reductions<float>(loops, "float32", Element::f32);
  add_reductions<double>(loops, "float64", Element::f64);
  add_reductions<Float16>(loops, "float16", Element::f16);
  add_reductions<BFloat16>(loops, "bfloat16", Element::bf16);
  check(loops);
}
