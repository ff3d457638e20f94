#include "qsim/clip_grad.h"

#include <catch2/catch.hpp>

#include "device.h"
#include "qsim/cuda/clip_grad.h"

using qsim::GradScaling;
using qsim::GradSum;
using qsim::kGradChunk;
using qsim::NonFinitePolicy;
using qsim::cuda::GradTable;

namespace {

const std::int64_t kSizes[] = {1, 7, 1024, 0, kGradChunk, kGradChunk + 1, 2 * kGradChunk + 4099};

// One gradient of every size, all of one type, the odd ones not aligned.
template <class T>
struct Grads {
  explicit Grads(double any) {
    table.grads = 0;
    table.first_chunk[0] = 0;
    for (std::int64_t n : kSizes) {
      const int g = table.grads++;
      host.push_back(sample<T>(n, any, static_cast<unsigned>(g)));
      device.push_back(std::make_unique<DeviceArray<T>>(host.back(), g % 2));
      table.data[g] = device.back()->data();
      table.size[g] = n;
      table.element[g] = static_cast<std::uint8_t>(kElementOf<T>);
      table.first_chunk[g + 1] = table.first_chunk[g] + static_cast<int>((n + kGradChunk - 1) / kGradChunk);
    }
  }

  // f(gradient, begin of the chunk, elements)
  template <class F>
  void for_each_chunk(F f) {
    for (int g = 0; g < table.grads; ++g) {
      const auto n = static_cast<std::int64_t>(host[g].size());
      for (std::int64_t i = 0; i < n; i += kGradChunk) f(g, i, std::min(kGradChunk, n - i));
    }
  }

  std::vector<std::vector<T>> host;
  std::vector<std::unique_ptr<DeviceArray<T>>> device;
  GradTable table;
};

template <class T>
void check_sums(double any, double p) {
  CAPTURE(any, p);
  Grads<T> grads(any);
  std::vector<double> power;
  std::vector<std::int64_t> nonfinite(grads.table.grads);
  std::vector<double> powers(grads.table.grads);
  grads.for_each_chunk([&](int g, std::int64_t i, std::int64_t n) {
    const GradSum sum =
        qsim::cpu::clip_grad_kernels().sum[static_cast<int>(kElementOf<T>)](grads.host[g].data() + i, n, p);
    power.push_back(sum.power);
    nonfinite[g] += sum.nonfinite;
    powers[g] = qsim::join_powers(powers[g], sum.power, p);
  });
  const DeviceArray<double> device_power(power.size()), device_powers(powers.size());
  const DeviceArray<std::int64_t> device_nonfinite(nonfinite.size());
  require(qsim::cuda::sum_grads(grads.table, p, device_power.data(), device_nonfinite.data(), nullptr));
  require(qsim::cuda::join_grad_sums(grads.table, p, device_power.data(), device_powers.data(), nullptr));
  CHECK(device_nonfinite.host() == nonfinite);
  const std::vector<double> got = device_power.host();
  for (std::size_t i = 0; i < power.size(); ++i) CHECK(got[i] == Approx(power[i]).epsilon(1e-13));
  for (std::size_t g = 0; g < powers.size(); ++g) CHECK(device_powers.host()[g] == Approx(powers[g]).epsilon(1e-13));
}

template <class T>
void check_scaling(double any, double max_norm, NonFinitePolicy policy) {
  CAPTURE(any, max_norm, static_cast<int>(policy));
  Grads<T> grads(any);
  const GradSum sum{6.25, any > 0 ? 3 : 0};
  const GradScaling expected = qsim::grad_scaling(sum, 2, max_norm, policy);
  grads.for_each_chunk([&](int g, std::int64_t i, std::int64_t n) {
    T* x = grads.host[g].data() + i;
    if (expected.action == GradScaling::clear) {
      std::memset(static_cast<void*>(x), 0, n * sizeof(T));
    } else if (expected.action != GradScaling::keep) {
      qsim::cpu::clip_grad_kernels().scale[static_cast<int>(kElementOf<T>)](
          x, n, expected.coefficient, expected.action == GradScaling::scale_finite);
    }
  });
  std::vector<std::int64_t> counts(70);
  counts[5] = sum.nonfinite;
  std::vector<double> powers(70);
  powers[69] = sum.power;
  const DeviceArray<double> power(powers);
  const DeviceArray<std::int64_t> device_counts(counts);
  const DeviceArray<GradScaling> plan(1);
  const DeviceArray<float> norm(1);
  require(qsim::cuda::plan_scaling(power.data(), device_counts.data(), 70, 2, max_norm, policy, plan.data(),
                                   norm.data(), false, nullptr));
  require(qsim::cuda::scale_grads(grads.table, plan.data(), nullptr));
  CHECK(plan.host()[0].action == expected.action);
  CHECK(differences(norm.host(), {static_cast<float>(expected.total_norm)}) == 0);
  for (int g = 0; g < grads.table.grads; ++g) CHECK(differences(grads.device[g]->host(), grads.host[g]) == 0);
}

}  // namespace

TEMPLATE_TEST_CASE("sums of finite elements and counts of the others", "", float, double, qsim::Float16,
                   qsim::BFloat16) {
  for (double any : {0.0, 0.01}) {
    for (double p : {2.0, 1.0, static_cast<double>(INFINITY), 0.5}) check_sums<TestType>(any, p);
  }
}

TEMPLATE_TEST_CASE("scaling equals the CPU's", "", float, double, qsim::Float16, qsim::BFloat16) {
  for (auto policy : {NonFinitePolicy::skip, NonFinitePolicy::zero, NonFinitePolicy::raise}) {
    for (double max_norm : {1.0, 100.0}) {
      for (double any : {0.0, 0.01}) check_scaling<TestType>(any, max_norm, policy);
    }
  }
}

TEST_CASE("no gradients with elements, no launch") {
  GradTable table{};
  table.grads = 1;
  CHECK(qsim::cuda::sum_grads(table, 2, nullptr, nullptr, nullptr) == cudaSuccess);
  CHECK(qsim::cuda::scale_grads(table, nullptr, nullptr) == cudaSuccess);
  const DeviceArray<double> total(std::vector<double>{7});
  require(qsim::cuda::join_grad_sums(table, 2, nullptr, total.data(), nullptr));
  CHECK(total.host()[0] == 0);
}
