// The refined roots and quotients are those of sqrt.rn and div.rn on the device: all mantissas of
// roots, all of reciprocals, and quotients of each divisor by many dividends, the one of all ones
// by all. Exit status 77 where there is no device.
#include <leanopt/engine/cuda/pack.cuh>

#include <cstdio>

namespace {

using leanopt::bits;
using leanopt::real;
using leanopt::cuda::refined_quotient;
using leanopt::cuda::refined_root;

constexpr std::uint32_t one = 0x3f800000, mantissas = 1u << 23;

struct counts {
  unsigned long long roots, quotients;
};

/// Thread k takes the divisor and the dividends of mantissa k.
__global__ void compare(counts* wrong) {
  const std::uint32_t k = blockIdx.x * blockDim.x + threadIdx.x;
  int roots = 0, quotients = 0;
  for (const std::uint32_t x : {one + k, one + mantissas + k}) {
    const float number = real(x);
    roots += bits(refined_root::of(number)) != bits(__fsqrt_rn(number));
  }
  const auto divide = [&](float a, float b) {
    quotients += bits(refined_quotient::of(a, b)) != bits(__fdiv_rn(a, b));
  };
  const float x = real(one + k);
  divide(x, real(one + mantissas - 1));
  divide(1, x);
  std::uint32_t random = k;
  for (int i = 0; i < 1000; ++i) {
    random = random * 1664525u + 1013904223u;
    divide(real(one + (random >> 9)), x);
  }
  if (roots) atomicAdd(&wrong->roots, (unsigned long long)roots);
  if (quotients) atomicAdd(&wrong->quotients, (unsigned long long)quotients);
}

bool succeeds(cudaError_t error) {
  if (error != cudaSuccess) std::printf("%s\n", cudaGetErrorString(error));
  return error == cudaSuccess;
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no CUDA device to try roots and quotients on\n");
    return 77;
  }
  counts *on_device = nullptr, wrong{};
  if (!succeeds(cudaMalloc(&on_device, sizeof wrong)) ||
      !succeeds(cudaMemset(on_device, 0, sizeof wrong)))
    return 1;
  compare<<<mantissas / 256, 256>>>(on_device);
  if (!succeeds(cudaGetLastError()) ||
      !succeeds(cudaMemcpy(&wrong, on_device, sizeof wrong, cudaMemcpyDeviceToHost)))
    return 1;
  std::printf("%llu roots and %llu quotients differ from sqrt.rn and div.rn\n", wrong.roots,
              wrong.quotients);
  return wrong.roots || wrong.quotients;
}
