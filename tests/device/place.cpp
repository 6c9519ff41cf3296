// CUDA devices as tests need to know them.

#include "tests/engine/cuda/place.hpp"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include <memory>

namespace place {
namespace {

std::int64_t allocations() {
  std::int64_t sum = 0;
  for (int i = 0; i < devices(); ++i)
    sum += c10::cuda::CUDACachingAllocator::getDeviceStats(c10::DeviceIndex(i))
               .allocation[0]  // of all sizes
               .allocated;
  return sum;
}
/// While it lives, LibTorch throws where it waits for a device.
class no_waiting {
 public:
  no_waiting() { set(c10::cuda::SyncDebugMode::L_ERROR); }
  ~no_waiting() { set(c10::cuda::SyncDebugMode::L_DISABLED); }
  no_waiting(const no_waiting&) = delete;
  no_waiting& operator=(const no_waiting&) = delete;

 private:
  static void set(c10::cuda::SyncDebugMode mode) {
    c10::cuda::warning_state().set_sync_debug_mode(mode);
  }
};

}  // namespace

at::Device device() { return {at::kCUDA, 0}; }
int devices() { return int(c10::cuda::device_count()); }

std::int64_t allocations_of(const std::function<void()>& f) {
  const std::int64_t before = allocations();
  const no_waiting during_f;
  f();
  return allocations() - before;
}

std::function<void()> capture(const std::function<void()>& f) {
  const auto graph = std::make_shared<at::cuda::CUDAGraph>();
  torch::cuda::synchronize();
  const c10::cuda::CUDAStreamGuard side(c10::cuda::getStreamFromPool());
  graph->capture_begin();
  try {
    f();
  } catch (...) {
    graph->capture_end();
    throw;
  }
  graph->capture_end();
  return [graph] { graph->replay(); };
}

}  // namespace place
