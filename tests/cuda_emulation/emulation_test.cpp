// What the emulation promises: right results of right kernels, and a complaint about wrong ones.
#include <algorithm>
#include <catch2/catch.hpp>
#include <vector>

#include "cub/block/block_reduce.cuh"
#include "cub/block/block_scan.cuh"
#include "cub/warp/warp_reduce.cuh"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

namespace qsim::cuda {
extern __shared__ __align__(16) unsigned char dynamic_shared[];
}

namespace {

template <class... Parameters, class... Arguments>
cudaError_t run(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, std::size_t shared, Arguments... arguments) {
  cudaLaunchConfig_t config;
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

__global__ void reverse(int* x) {
  __shared__ int shared[64];
  const int t = static_cast<int>(threadIdx.x), first = static_cast<int>(blockIdx.x * blockDim.x);
  shared[t] = x[first + t];
  __syncthreads();
  x[first + t] = shared[blockDim.x - 1 - t];
}

__global__ void lanes(unsigned* to) {
  const unsigned lane = threadIdx.x % 32;
  to[0 * 64 + threadIdx.x] = __shfl_xor_sync(~0u, threadIdx.x, 1);
  to[1 * 64 + threadIdx.x] = __shfl_down_sync(~0u, threadIdx.x, 2);
  to[2 * 64 + threadIdx.x] = __shfl_up_sync(~0u, threadIdx.x, 3, 8);
  to[3 * 64 + threadIdx.x] = __shfl_sync(~0u, threadIdx.x, 5, 16);
  to[4 * 64 + threadIdx.x] = __ballot_sync(~0u, lane % 3 == 0);
  to[5 * 64 + threadIdx.x] = lane < 8 ? __any_sync(0xffu, lane == 7) : __all_sync(~0xffu, lane == 7);
}

__global__ void cub_primitives(const int* x, int* to) {
  using Warp = cub::WarpReduce<int>;
  using Block = cub::BlockReduce<int, 64>;
  using Scan = cub::BlockScan<int, 64>;
  __shared__ Warp::TempStorage warps[2];
  __shared__ Block::TempStorage block;
  __shared__ Scan::TempStorage scan;
  const unsigned t = threadIdx.x;
  const int largest = Warp(warps[t / 32]).Reduce(x[t], [](int a, int b) { return max(a, b); });
  const int sum = Warp(warps[t / 32]).Sum(x[t]);
  if (t % 32 == 0) to[64 + t / 32] = largest, to[66 + t / 32] = sum;
  const int all = Block(block).Reduce(x[t], [](int a, int b) { return a + b; });
  if (t == 0) to[68] = all;
  int scanned;
  Scan(scan).ExclusiveSum(x[t], to[t], scanned);
  to[69 + t] = scanned;
}
__global__ void result_of_another_lane(int* to) {
  __shared__ cub::WarpReduce<int>::TempStorage storage;
  to[threadIdx.x] = cub::WarpReduce<int>(storage).Sum(1);
}

// The last block to arrive adds what all have written.
__global__ void last_block(unsigned* partial, unsigned* arrivals, unsigned* total) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = blockIdx.x;
    __threadfence();
    last = atomicInc(arrivals, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last) atomicAdd(total, partial[threadIdx.x]);
}

__global__ void barrier_for_some() {
  if (threadIdx.x < 8) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void barrier_against_shuffle() {
  if (threadIdx.x < 8) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}
__global__ void gone_lanes() {
  if (threadIdx.x < 8) return;
  __syncwarp();
}
__global__ void foreign_lane() { __shfl_sync(threadIdx.x < 16 ? 0xffffu : 0xffff0000u, 0, 3); }
__global__ void beyond_shared() { qsim::cuda::dynamic_shared[32 + threadIdx.x] = 0; }

}  // namespace

TEST_CASE("barriers and shared memory") {
  std::vector<int> x(640);
  for (int i = 0; i < 640; ++i) x[i] = i;
  REQUIRE(run(reverse, 10, 64, 0, x.data()) == cudaSuccess);
  for (int i = 0; i < 640; ++i) CHECK(x[i] == i / 64 * 64 + 63 - i % 64);
}

TEST_CASE("warp collectives") {
  std::vector<unsigned> got(6 * 64);
  REQUIRE(run(lanes, 1, 64, 0, got.data()) == cudaSuccess);
  for (unsigned i = 0; i < 64; ++i) {
    const unsigned lane = i % 32;
    CHECK(got[i] == (i ^ 1));
    CHECK(got[64 + i] == (lane < 30 ? i + 2 : i));
    CHECK(got[128 + i] == (i % 8 < 3 ? i : i - 3));
    CHECK(got[192 + i] == i / 16 * 16 + 5);
    CHECK(got[256 + i] == 0x49249249u);
    CHECK(got[320 + i] == (lane < 8));
  }
}

TEST_CASE("CUB's reductions and scans") {
  std::vector<int> x(64), to(69 + 64);
  for (int i = 0; i < 64; ++i) x[i] = i * 37 % 64;
  REQUIRE(run(cub_primitives, 1, 64, 0, static_cast<const int*>(x.data()), to.data()) == cudaSuccess);
  int before = 0, sums[2] = {}, largest[2] = {};
  for (int i = 0; i < 64; ++i) {
    CHECK(to[i] == before);
    before += x[i];
    sums[i / 32] += x[i];
    largest[i / 32] = std::max(largest[i / 32], x[i]);
  }
  for (int warp : {0, 1}) CHECK((to[64 + warp] == largest[warp] && to[66 + warp] == sums[warp]));
  for (int i = 68; i < 69 + 64; ++i) CHECK(to[i] == before);

  std::vector<int> each(32);
  REQUIRE(run(result_of_another_lane, 1, 32, 0, each.data()) == cudaSuccess);
  CHECK(each[0] == 32);
  CHECK(each[1] != 32);  // promised to nobody else
}

TEST_CASE("the last block sees all others, and the counter resets itself") {
  std::vector<unsigned> partial(50);
  unsigned arrivals = 0, total = 0;
  for (int launch = 1; launch <= 3; ++launch) {
    REQUIRE(run(last_block, 50, 50, 0, partial.data(), &arrivals, &total) == cudaSuccess);
    CHECK(total == launch * 50u * 49 / 2);
    CHECK(arrivals == 0);
  }
}

TEST_CASE("kernels that would hang or worse are named") {
  CHECK_THROWS_WITH(run(barrier_for_some, 1, 32, 0), Catch::Contains("diverging") && Catch::Contains("emulation_test"));
  CHECK_THROWS_WITH(run(barrier_against_shuffle, 1, 32, 0), Catch::Contains("deadlock"));
  CHECK_THROWS_WITH(run(gone_lanes, 1, 32, 0), Catch::Contains("is gone"));
  CHECK_THROWS_WITH(run(foreign_lane, 1, 32, 0), Catch::Contains("takes no part"));
  CHECK_THROWS_WITH(run(beyond_shared, 1, 1, 32), Catch::Contains("beyond"));
}

TEST_CASE("launches that a device refuses") {
  CHECK(run(reverse, 0, 64, 0, static_cast<int*>(nullptr)) == cudaErrorInvalidConfiguration);
  CHECK(run(reverse, 1, 1025, 0, static_cast<int*>(nullptr)) == cudaErrorInvalidConfiguration);
  CHECK(run(reverse, dim3(1, 65536), 1, 0, static_cast<int*>(nullptr)) == cudaErrorInvalidConfiguration);
  CHECK(run(gone_lanes, 1, 1, 49 * 1024) == cudaErrorInvalidValue);
  REQUIRE(cudaFuncSetAttribute(gone_lanes, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 * 1024) == cudaSuccess);
  CHECK(run(gone_lanes, 1, 1, 64 * 1024) == cudaSuccess);
}

TEST_CASE("16-bit floats round to nearest even") {
  CHECK(__half_as_ushort(__float2half_rn(1 + 0x1p-11f)) == 0x3c00);
  CHECK(__half_as_ushort(__float2half_rn(1 + 3 * 0x1p-11f)) == 0x3c02);
  CHECK(__half_as_ushort(__float2half_rn(65520)) == 0x7c00);
  CHECK(__half2float(__ushort_as_half(1)) == 0x1p-24f);
  CHECK(__bfloat16_as_ushort(__float2bfloat16_rn(1 + 0x1p-8f)) == 0x3f80);
  CHECK(__bfloat16_as_ushort(__float2bfloat16_rn(1 + 3 * 0x1p-8f)) == 0x3f82);
  CHECK(__bfloat162float(__float2bfloat16_rn(3.4e38f)) == INFINITY);
  CHECK(std::isnan(__bfloat162float(__float2bfloat16_rn(NAN))));
}
