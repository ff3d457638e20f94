#include "qsim/observe.h"

#include <catch2/catch.hpp>

#include "device.h"
#include "qsim/cuda/observe.h"

namespace {

template <class T>
void check(const std::vector<std::vector<T>>& batches, std::size_t offset) {
  qsim::FiniteRange range;
  qsim::NonFinite found;
  std::vector<std::int64_t> sketch(qsim::kSketchBins);
  std::int32_t low_bits = 0;
  const DeviceArray<float> lowest(std::vector<float>{INFINITY}), highest(std::vector<float>{-INFINITY});
  const DeviceArray<std::int64_t> counts(4), device_sketch(qsim::kSketchBins);
  const DeviceArray<std::int32_t> device_bits(1);
  std::int64_t elements = 0;
  for (const std::vector<T>& x : batches) {
    const auto n = static_cast<std::int64_t>(x.size());
    elements += n;
    qsim::cpu::observe_kernels().directly[static_cast<int>(kElementOf<T>)](x.data(), n, range, found,
                                                                           {sketch.data(), &low_bits});
    require(qsim::cuda::observe(DeviceArray<T>(x, offset).data(), kElementOf<T>, n, lowest.data(), highest.data(),
                                counts.data(), {device_sketch.data(), device_bits.data()}, nullptr));
  }
  CHECK(differences(lowest.host(), {range.lowest}) == 0);
  CHECK(differences(highest.host(), {range.highest}) == 0);
  CHECK(counts.host() == std::vector<std::int64_t>{elements, found.nans, found.positive_infs, found.negative_infs});
  CHECK(device_sketch.host() == sketch);
  CHECK(device_bits.host() == std::vector<std::int32_t>{low_bits});
}

}  // namespace

TEMPLATE_TEST_CASE("range, counts and sketch equal the CPU's", "", float, double, qsim::Float16, qsim::BFloat16) {
  for (std::size_t offset : {0, 1, 3}) {
    check<TestType>({sample<TestType>(1), sample<TestType>(0), sample<TestType>(7), sample<TestType>(511)}, offset);
    check<TestType>({sample<TestType>(5003, 1.0), sample<TestType>(3 * 32768 + 5)}, offset);
  }
}

TEST_CASE("one value everywhere") {
  for (float value : {0.f, -0.f, 0.3f, -1e-45f, NAN, INFINITY}) {
    CAPTURE(value);
    check<float>({std::vector<float>(70001, value)}, 0);
  }
}
