// qsim_cpu::descend_, which qsim.restoration calls for weights on the CPU; on other devices it computes the same with
// torch's operators. So it is no operator of namespace qsim, all of which every device has.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "described.h"
#include "memory.h"
#include "qsim/descent.h"

namespace qsim {
namespace {

using at::Tensor;

constexpr const char* kOp = "qsim_cpu::descend_";

void check(const char* name, const Tensor& x, const Tensor& like, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(x.sizes() == shape && x.is_contiguous() && x.scalar_type() == like.scalar_type() && x.is_cpu(), kOp,
                    ": ", name, " is ", described(x), "; expected a contiguous ", described(like.scalar_type()),
                    " of shape ", shape, " on cpu");
}

template <class T>
void descend(const Tensor& rows, const Tensor& pull, const Tensor& moments, const Tensor& step, const Tensor& low,
             const Tensor& high, std::int64_t rounds, void (*kernel)(const cpu::DescentRow<T>&, std::int64_t)) {
  const std::int64_t groups = rows.size(0), count = rows.size(1), columns = rows.size(2), width = step.size(2);
  const Tensor power = moments.diagonal(0, 1, 2).contiguous();
  T *numbers = rows.mutable_data_ptr<T>(), *pulls = pull.mutable_data_ptr<T>();
  const T *steps = step.const_data_ptr<T>(), *lows = low.const_data_ptr<T>(), *highs = high.const_data_ptr<T>();
  const T *matrices = moments.const_data_ptr<T>(), *powers = power.const_data_ptr<T>();
  at::parallel_for(0, groups * count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t group = i / count;
      kernel(
          {columns, numbers + i * columns, pulls + i * columns, steps + i * width, lows + i * width, highs + i * width,
           columns == width ? 1 : 0, matrices + group * columns * columns, powers + group * columns},
          rounds);
    }
  });
}

void descend_(Tensor& rows, Tensor& pull, const Tensor& moments, const Tensor& step, const Tensor& low,
              const Tensor& high, std::int64_t rounds) {
  TORCH_CHECK_VALUE(rows.dim() == 3 && (rows.scalar_type() == at::kFloat || rows.scalar_type() == at::kDouble), kOp,
                    ": rows is ", described(rows), "; expected float32 or float64 of shape [groups, rows, columns]");
  const std::int64_t groups = rows.size(0), count = rows.size(1), columns = rows.size(2);
  const std::int64_t width = step.dim() == 3 && step.size(2) == 1 ? 1 : columns;
  check("rows", rows, rows, rows.sizes());
  check("pull", pull, rows, rows.sizes());
  check("moments", moments, rows, {groups, columns, columns});
  check("step", step, rows, {groups, count, width});
  check("low", low, rows, {groups, count, width});
  check("high", high, rows, {groups, count, width});
  check_memory(kOp, {{"rows", rows}, {"pull", pull}},
               {{"moments", moments}, {"step", step}, {"low", low}, {"high", high}});
  if (rows.numel() == 0) return;
  const auto& kernels = cpu::descent_kernels();
  if (rows.scalar_type() == at::kFloat) {
    descend<float>(rows, pull, moments, step, low, high, rounds, kernels.f32);
  } else {
    descend<double>(rows, pull, moments, step, low, high, rounds, kernels.f64);
  }
}

}  // namespace

TORCH_LIBRARY(qsim_cpu, m) {
  m.def(
      "descend_(Tensor(a!) rows, Tensor(b!) pull, Tensor moments, Tensor step, Tensor low, Tensor high, int rounds) "
      "-> ()");
}
TORCH_LIBRARY_IMPL(qsim_cpu, CPU, m) { m.impl("descend_", descend_); }
}  // namespace qsim
