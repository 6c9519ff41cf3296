// A device of LibTorch whose memory is the host's: tensors on it behave as on any device that the
// CPU's code cannot step, and what kernels do to them the emulator does. Operators run on the CPU,
// on the same memory. Include it before leanopt, in one source of a program.
#pragma once

#include "tests/support/emulator/cuda.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/torch.h>

#define LEANOPT_WITH_CUDA
#define LEANOPT_DEVICE_TYPE c10::DeviceType::PrivateUse1

#include <cstdlib>
#include <utility>

namespace emulator {

/// The first of two.
inline const c10::Device device{c10::DeviceType::PrivateUse1, 0};

struct settings_of_backend {
  int current = 0;      ///< the device
  int allocations = 0;  ///< counted
  int transfers = 0;    ///< from a device to the host: each is a wait on a real one
};
inline settings_of_backend& backend() {
  static settings_of_backend all;
  return all;
}

class allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes) ++backend().allocations;
    void* memory = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return {memory,
            memory,
            &std::free,
            {c10::DeviceType::PrivateUse1, c10::DeviceIndex(backend().current)}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
inline allocator memory;

class guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return device.type(); }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device before = getDevice();
    backend().current = d.index();
    return before;
  }
  c10::Device getDevice() const override {
    return {device.type(), c10::DeviceIndex(backend().current)};
  }
  void setDevice(c10::Device d) const override { backend().current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { backend().current = d.index(); }
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
};

/// The same memory as a tensor of the CPU.
inline at::Tensor on_host(const at::Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

inline c10::Device or_current(std::optional<at::Device> d) {
  return d && d->has_index() ? *d : guard().getDevice();
}
inline at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> type,
                        std::optional<at::Layout>, std::optional<at::Device> on,
                        std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard here(or_current(on));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   type.value_or(at::kFloat), format);
}
inline at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                                std::optional<at::ScalarType> type, std::optional<at::Layout>,
                                std::optional<at::Device> on, std::optional<bool>) {
  const c10::DeviceGuard here(or_current(on));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type.value_or(at::kFloat));
}
inline at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef sizes,
                             c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  std::optional<std::int64_t> from;
  if (offset) from = offset->expect_int();
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(sizes),
                                           C10_AS_INTARRAYREF_SLOW(strides), from);
}
inline at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef sizes) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(sizes));
}
inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (to.is_cpu()) ++backend().transfers;
  (to.is_cpu() ? to : on_host(to)).copy_(from.is_cpu() ? from : on_host(from));
  return to;
}
inline const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef sizes,
                                std::optional<at::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(sizes), format);
}
inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
inline at::Scalar local_scalar(const at::Tensor& t) {
  ++backend().transfers;
  return on_host(t).item();
}
inline at::Tensor& set_source(at::Tensor& t, at::Storage source, c10::SymInt offset,
                              c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(sizes, strides, std::optional<c10::SymInt>(offset));
  return t;
}
inline void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

namespace registrations {
static const c10::impl::DeviceGuardImplRegistrar guards(device.type(), new guard);
static const bool allocates = (c10::SetAllocator(device.type(), &memory), true);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("set_.source_Storage_storage_offset", &set_source);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}
}  // namespace registrations

}  // namespace emulator
