// What a step of one parameter needs, made once and kept as long as nothing changes that it depends
// on. Programs exchange data, shapes, gradients, states and options between steps as they like, so
// each step compares what a plan was made of with what is there.
#pragma once

#include <leanopt/engine/device.hpp>
#include <leanopt/engine/dispatch.hpp>
#include <leanopt/optim/state.hpp>

#include <c10/util/SmallVector.h>

#include <cstdint>

namespace leanopt::detail {

/// Where a parameter stands in the groups, for messages.
struct place {
  std::size_t group = 0, index = 0;
  friend std::ostream& operator<<(std::ostream& out, const place& p) {
    return out << "parameter " << p.index << " of group " << p.group;
  }
};

/// Where the numbers of a tensor are; null where it has no memory of its own.
inline const void* address_of(const torch::Tensor& t) {
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (!storage) return nullptr;
  return static_cast<const char*>(storage->data()) +
         std::size_t(impl->storage_offset()) * impl->itemsize();
}

/// A tensor and its memory, which set_data() changes.
struct identity {
  const void *impl = nullptr, *data = nullptr;
  std::int64_t elements = 0;

  identity() = default;
  explicit identity(const torch::Tensor& t)
      : impl(t.unsafeGetTensorImpl()), data(address_of(t)), elements(t.defined() ? t.numel() : 0) {}
  bool operator==(const identity& b) const {
    return impl == b.impl && data == b.data && elements == b.elements;
  }
};

/// The lines of a TensorImpl that tell its shape and its memory.
inline void prefetch_object(const void* impl) {
  for (std::size_t at = 0; at < sizeof(c10::TensorImpl); at += 64)
    __builtin_prefetch(static_cast<const char*>(impl) + at);
}

/// The device, type, layout and shape of a tensor.
class tensor_facts {
 public:
  tensor_facts() = default;
  explicit tensor_facts(const torch::Tensor& t)
      : keys_(t.key_set()),
        device_(t.device()),
        type_(t.scalar_type()),
        sizes_(t.sizes()),
        strides_(t.strides()) {}

  /// The keys tell the layout, and lazy conjugation and negation.
  bool are_of(const torch::Tensor& t) const {
    return t.key_set() == keys_ && t.device() == device_ && t.scalar_type() == type_ &&
           are(sizes_, t.sizes()) && are(strides_, t.strides());
  }

 private:
  using numbers = c10::SmallVector<std::int64_t, 4>;
  /// Of so few numbers a loop is faster than the call that == makes.
  static bool are(const numbers& known, at::IntArrayRef now) {
    bool same = known.size() == now.size();
    for (std::size_t i = 0; same && i < now.size(); ++i) same = known[i] == now[i];
    return same;
  }
  c10::DispatchKeySet keys_;
  at::Device device_ = at::kCPU;
  at::ScalarType type_ = at::ScalarType::Undefined;
  numbers sizes_, strides_;
};

/// The tensors that a state held when a plan was made; none where it had too many.
class held_tensors {
 public:
  template <class State>
  void remember(const State& s) {
    count_ = 0;
    fits_ = true;
    each_tensor_of(s, [&](const torch::Tensor& t) {
      if (count_ < most)
        held_[count_++] = one(t);
      else
        fits_ = false;
    });
  }
  template <class State>
  bool are_of(const State& s) const {
    int k = 0;
    bool same = fits_;
    each_tensor_of(s, [&](const torch::Tensor& t) {
      same = same && k < count_ && held_[k] == one(t);
      ++k;
    });
    return same && k == count_;
  }

  /// Brings the tensors' own objects into the cache, not their data.
  void prefetch() const {
    for (int k = 0; k < count_; ++k) prefetch_object(held_[k].impl);
  }

 private:
  static constexpr int most = 6;
  struct one : identity {
    bool is_contiguous = false;
    one() = default;
    explicit one(const torch::Tensor& t) : identity(t), is_contiguous(t.is_contiguous()) {}
    bool operator==(const one& b) const {
      return identity::operator==(b) && is_contiguous == b.is_contiguous;
    }
  };
  one held_[most];
  int count_ = 0;
  bool fits_ = false;
};

struct plan {
  identity parameter;  ///< which was checked

  // What it was made of.
  tensor_facts of_p, of_g;
  const torch::optim::OptimizerOptions* options = nullptr;
  torch::optim::OptimizerParamState* state = nullptr;
  held_tensors held;
  bool is_ready = false;

  // What a step needs.
  engine::tensor_job job;
  engine::operands shapes;  ///< own what the operands of the job point to
  engine::elementwise_work::function function = nullptr;  ///< on the CPU
  const engine::device_kernel* kernel = nullptr;          ///< on a device
  std::uint64_t seed = 0;
  bool skips_elements = false;  ///< whose gradient is not finite
  std::uint64_t number = 0;     ///< of all plans that were ever made

  // Of the step that runs.
  const torch::Tensor *p = nullptr, *g = nullptr;
  std::size_t group = 0, part = 0;  ///< indices
  std::uint64_t list = 0;           ///< that it is in, or was at last, in a device's memory; or 0

  /// Brings what the next step looks at into the cache.
  void prefetch() const {
    prefetch_object(parameter.impl);
    held.prefetch();
  }
};

}  // namespace leanopt::detail
