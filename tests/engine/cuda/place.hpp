// What tests of the classes need to know of devices: a program that has them defines it.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <functional>

namespace place {

/// The first device, and how many there are.
at::Device device();
int devices();

/// How often `f` allocates memory of a device. @throws where it waits for one.
std::int64_t allocations_of(const std::function<void()>& f);

/// Records the work that `f` puts on the device, which is then not done; the result does it.
std::function<void()> capture(const std::function<void()>& f);

/// A copy on a device, of the same strides.
inline torch::Tensor copy_on(at::Device device, const torch::Tensor& t) {
  const at::NoGradGuard no_grad;
  torch::Tensor x = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
  return x.copy_(t);
}
inline bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  const torch::Tensor x = a.detach().cpu().contiguous(), y = b.detach().cpu().contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         (x.numel() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0);
}

}  // namespace place
