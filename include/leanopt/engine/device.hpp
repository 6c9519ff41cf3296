// What the front knows of steps on devices: nothing of CUDA, and nothing that a program without
// leanopt::cuda would have to link.
#pragma once

#include <leanopt/engine/cuda_api.hpp>
#include <leanopt/engine/dispatch.hpp>

#include <c10/core/DeviceGuard.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

// The type of the devices that are stepped; tests on machines that have none name another.
#ifndef LEANOPT_DEVICE_TYPE
#define LEANOPT_DEVICE_TYPE at::kCUDA
#endif

namespace leanopt::engine {

/// Whether this program can step tensors on a device: the target leanopt::cuda defines
/// LEANOPT_WITH_CUDA.
inline bool can_step_on(at::Device d) {
#ifdef LEANOPT_WITH_CUDA
  if (d.type() == LEANOPT_DEVICE_TYPE) return true;
#endif
  return d.is_cpu();
}
/// @throws where CUDA reported an error.
inline void check_cuda([[maybe_unused]] int error) {
#ifdef LEANOPT_WITH_CUDA
  TORCH_CHECK(error == 0, "leanopt: CUDA error ", error, ": ", cuda::text_of<>(error));
#endif
}
/// Whether what is put on a device now is recorded in a graph.
inline bool is_capturing([[maybe_unused]] at::Device d) {
  bool result = false;
#ifdef LEANOPT_WITH_CUDA
  const c10::DeviceGuard guard(d);
  if (!d.is_cpu()) check_cuda(cuda::is_capturing<>(cuda::current_stream(d.index()), &result));
#endif
  return result;
}

/// Scalars of a step as tensors of one element; undefined where there is none.
struct scalar_tensors {
  at::Tensor inv_scale, clip, found_inf;
};

/// The tensors that one kernel steps together on one device: see device_list.
class device_work {
 public:
  /// A tensor of a step.
  struct item {
    const tensor_job* job;
    const void* options;  ///< of the rule's own class
    const double* lr;     ///< in the device's memory, instead of that of the options; or null
    std::uint64_t seed, ordinal;
    std::int64_t step;   ///< the number of this step, as far as the host knows
    std::uint64_t made;  ///< which plan this is, of all that were ever made
    bool skips_elements;
    const void *parameter, *state;  ///< for settle()
  };
  using maker = std::unique_ptr<device_work> (*)(at::Device);
  using settler = std::function<void(const item&, std::int64_t known, std::int64_t now)>;

  explicit device_work(at::Device d) : device_(d) {}
  device_work(const device_work&) = delete;
  device_work& operator=(const device_work&) = delete;
  virtual ~device_work() = default;

  at::Device device() const { return device_; }

  // Of each step, in this order.
  virtual void clear() = 0;
  virtual void add(const item& x) = 0;
  virtual bool is_empty() const = 0;
  /// Whether the device's memory has the list that was added, and the number of steps where it will
  /// be the device that counts.
  virtual bool is_current(bool by_device) const = 0;
  /// Brings both there. @pre no graph is being captured, and settle() was called.
  virtual void rebuild() = 0;
  /// Puts the step on the device's stream. With `by_device` it is the device that counts it.
  virtual void run(const scalar_tensors& scalars, bool by_device, bool is_captured) = 0;

  /// Whether the device may have counted steps that the host does not know.
  virtual bool counts_steps() const = 0;
  /// If so, f for the tensors of the last step, with the steps that the host knew of and all there
  /// were. Waits for the device.
  virtual void settle(const settler& f) = 0;
  /// How many elements nonfinite::skip_element left out. Waits for the device.
  virtual std::int64_t skipped_elements() const = 0;
  /// Memory of the device.
  virtual std::int64_t bytes() const = 0;

 private:
  at::Device device_;
};

}  // namespace leanopt::engine
