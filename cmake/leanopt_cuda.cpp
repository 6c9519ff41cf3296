// What the library leanopt::cuda takes from LibTorch's CUDA headers, which nvcc never sees.
#include <leanopt/engine/cuda_api.hpp>

#include <c10/cuda/CUDAStream.h>

#include <type_traits>

namespace leanopt::cuda {

static_assert(std::is_same_v<stream, cudaStream_t>);

stream current_stream(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

}  // namespace leanopt::cuda
