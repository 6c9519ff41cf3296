// The emulator finds the faults that it is there for, and runs correct kernels as a device would.

#include "tests/support/emulator/cuda.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

namespace {

template <class... Parameter, class... Argument>
void launch(int blocks, int threads, void (*kernel)(Parameter...), Argument... arguments) {
  cudaLaunchConfig_t config;
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = sizeof(int) * std::size_t(threads);
  cudaLaunchKernelEx(&config, kernel, arguments...);
}
/// What the launch complains about.
template <class... Argument>
std::string fault_of(Argument... arguments) {
  try {
    launch(arguments...);
  } catch (const emulator::fault& f) {
    return f.what();
  }
  return "";
}
bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

/// Every thread adds what the others of its block wrote; With_barriers: as it should be.
template <bool First, bool Second>
void sum_of_block(int* out, int rounds) {
  int* memory = reinterpret_cast<int*>(dynamic_shared);
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = 0;
  for (int r = 0; r < rounds; ++r) {
    memory[threadIdx.x] = int(i) + r;
    if (First) __syncthreads();
    for (unsigned t = 0; t < blockDim.x; ++t) out[i] += memory[t];
    if (Second) __syncthreads();
  }
}
template <bool First, bool Second>
bool sums_are_right(unsigned seed) {
  emulator::here().seed = seed;
  constexpr int threads = 96, blocks = 3, rounds = 2;
  std::vector<int> sums(threads * blocks);
  launch(blocks, threads, sum_of_block<First, Second>, sums.data(), rounds);
  for (int i = 0; i < threads * blocks; ++i) {
    const int first = i / threads * threads;
    if (sums[std::size_t(i)] != rounds * threads * (2 * first + threads - 1) / 2 + threads)
      return false;
  }
  return true;
}
TEST(Emulator, FindsADeletedBarrierWithEverySeed) {
  for (unsigned seed = 1; seed <= 5; ++seed) {
    EXPECT_TRUE((sums_are_right<true, true>(seed)));
    EXPECT_FALSE((sums_are_right<false, true>(seed)));
    EXPECT_FALSE((sums_are_right<true, false>(seed)));
  }
}

void reductions(unsigned* out) {
  const unsigned lane = threadIdx.x % 32;
  unsigned sum = lane;
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  unsigned* to = out + 6 * threadIdx.x;
  to[0] = sum;
  to[1] = __shfl_sync(~0u, lane, 5);
  to[2] = __shfl_sync(~0u, lane, 5, 16);
  to[3] = __ballot_sync(~0u, lane % 3 == 0);
  to[4] = __reduce_max_sync(~0u, lane ^ 21) * 100 + __reduce_min_sync(~0u, lane + 7);
  to[5] = unsigned(__any_sync(~0u, lane == 9) + 2 * __any_sync(~0u, lane > 31));
}
TEST(Emulator, ExchangesRegistersAsADeviceDoes) {
  std::vector<unsigned> out(64 * 6);
  launch(1, 64, reductions, out.data());
  for (unsigned t = 0; t < 64; ++t) {
    const unsigned* x = &out[6 * t];
    EXPECT_EQ(x[0], 496u);
    EXPECT_EQ(x[1], 5u);
    EXPECT_EQ(x[2], t % 32 < 16 ? 5u : 21u);
    EXPECT_EQ(x[3], 0x49249249u);
    EXPECT_EQ(x[4], 3107u);
    EXPECT_EQ(x[5], 1u);
  }
}

void counts(int* total) { atomicAdd(total, 1); }
TEST(Emulator, RunsEveryThreadOfEveryBlock) {
  int total = 0;
  launch(7, 65, counts, &total);
  EXPECT_EQ(total, 7 * 65);
}

void wrong_mask() { __shfl_sync(threadIdx.x < 16 ? ~0u : 0xffff0000u, 1, 20); }
void mask_without_me() { __syncwarp(0xffff); }
void other_intrinsics() {
  if (threadIdx.x % 2)
    __syncwarp();
  else
    __ballot_sync(~0u, 1);
}
void some_never_come() {
  if (threadIdx.x % 32 < 31) __syncwarp();
}
void shuffle_out_of_the_mask() {
  if (threadIdx.x < 16) __shfl_sync(0xffffu, 1, 20);
}
void exit_before_a_barrier() {
  if (threadIdx.x == 40) return;
  __syncthreads();
}
TEST(Emulator, RefusesDivergence) {
  EXPECT_TRUE(has(fault_of(1, 32, wrong_mask), "different masks"));
  EXPECT_TRUE(has(fault_of(1, 32, mask_without_me), "not in its own mask"));
  EXPECT_TRUE(has(fault_of(1, 32, other_intrinsics), "different intrinsics"));
  EXPECT_TRUE(has(fault_of(1, 64, some_never_come), "never reach"));
  EXPECT_TRUE(has(fault_of(1, 48, some_never_come), "never reach"));
  EXPECT_TRUE(has(fault_of(1, 64, exit_before_a_barrier), "left without"));
  EXPECT_TRUE(has(fault_of(1, 32, shuffle_out_of_the_mask), "outside its mask"));
}

void reads_what_it_never_wrote(int* out) {
  out[threadIdx.x] = reinterpret_cast<int*>(dynamic_shared)[threadIdx.x];
}
TEST(Emulator, FillsSharedMemoryWithGarbage) {
  std::vector<int> out(32);
  launch(1, 32, reads_what_it_never_wrote, out.data());
  for (const int x : out) EXPECT_EQ(x, -1);
}

}  // namespace
