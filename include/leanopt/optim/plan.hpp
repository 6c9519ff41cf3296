// What a step of one parameter needs, made once and kept as long as nothing changes that it depends
// on. Programs exchange data, shapes, gradients, states and options between steps as they like, so
// each step compares what a plan was made of with what is there.
#pragma once

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

/// The type, layout and shape of a tensor, and where its data are.
class tensor_facts {
 public:
  tensor_facts() = default;
  explicit tensor_facts(const torch::Tensor& t)
      : data_(t.data_ptr()),
        keys_(t.key_set()),
        type_(t.scalar_type()),
        sizes_(t.sizes()),
        strides_(t.strides()) {}

  bool are_of(const torch::Tensor& t) const {
    return t.data_ptr() == data_ && are_but_for_data_of(t);
  }
  /// The keys tell the layout, the device, and lazy conjugation and negation.
  bool are_but_for_data_of(const torch::Tensor& t) const {
    return t.key_set() == keys_ && t.scalar_type() == type_ &&
           t.sizes() == at::IntArrayRef(sizes_) && t.strides() == at::IntArrayRef(strides_);
  }

 private:
  using numbers = c10::SmallVector<std::int64_t, 4>;
  const void* data_ = nullptr;
  c10::DispatchKeySet keys_;
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

 private:
  static constexpr int most = 6;
  struct one {
    const c10::TensorImpl* impl = nullptr;
    const void* data = nullptr;
    std::int64_t elements = 0;
    bool is_contiguous = false;
    one() = default;
    explicit one(const torch::Tensor& t)
        : impl(t.unsafeGetTensorImpl()),
          data(t.data_ptr()),
          elements(t.numel()),
          is_contiguous(t.is_contiguous()) {}
    bool operator==(const one& b) const {
      return impl == b.impl && data == b.data && elements == b.elements &&
             is_contiguous == b.is_contiguous;
    }
  };
  one held_[most];
  int count_ = 0;
  bool fits_ = false;
};

struct plan {
  // What it was made of.
  tensor_facts of_p, of_g;
  const torch::optim::OptimizerOptions* options = nullptr;
  torch::optim::OptimizerParamState* state = nullptr;
  held_tensors held;
  bool is_ready = false;

  // What a step needs.
  engine::tensor_job job;
  engine::operands shapes;  ///< own what the operands of the job point to
  engine::elementwise_work::function function = nullptr;
  std::uint64_t seed = 0;

  // Of the step that runs.
  const torch::Tensor *p = nullptr, *g = nullptr;
  std::size_t coeffs = 0;  ///< an index
};

}  // namespace leanopt::detail
