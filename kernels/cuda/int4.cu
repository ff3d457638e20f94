// Packing of 4-bit integers, by octets.
#include "qsim/int4.h"

#include "octets.cuh"
#include "qsim/cuda/int4.h"

namespace qsim::cuda {

namespace {

__global__ void __launch_bounds__(kThreads)
    pack(const std::uint8_t* q, std::int64_t n, std::uint8_t* packed, bool packs) {
  for_each_octet(n, [&](std::int64_t at, int count) {
    std::uint8_t integers[kOctet];
    load_octet(q, at, count, packs, integers);  // 0 beyond n
#pragma unroll
    for (int i = 0; i < kOctet; i += 2) {
      if (i < count) packed[(at + i) / 2] = qsim::pack_int4(integers[i], integers[i + 1]);
    }
  });
}

__global__ void __launch_bounds__(kThreads)
    unpack(const std::uint8_t* packed, std::int64_t n, bool is_signed, std::uint8_t* q, bool packs) {
  for_each_octet(n, [&](std::int64_t at, int count) {
    std::uint8_t integers[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const unsigned half = i < count ? packed[(at + i) / 2] >> i % 2 * 4 & 15u : 0u;
      integers[i] = is_signed ? sign_extended(half) : static_cast<std::uint8_t>(half);
    }
    store_octet(integers, at, count, packs, q);
  });
}

}  // namespace

cudaError_t pack_int4(const std::uint8_t* q, std::int64_t n, std::uint8_t* packed, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  return launch(pack, shape_for(n), stream, q, n, packed, all_aligned(q));
}

cudaError_t unpack_int4(const std::uint8_t* packed, std::int64_t n, bool is_signed, std::uint8_t* q,
                        cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  return launch(unpack, shape_for(n), stream, packed, n, is_signed, q, all_aligned(q));
}

}  // namespace qsim::cuda
