// Steps of the CUDA engine under the emulator, on the tensors of tests/engine/kernel_runs.hpp, so
// that the CPU engine can take the same.
#pragma once

#include "tests/support/emulator/cuda.hpp"
// The emulator comes before the engine.
#include <leanopt/engine/cuda.cuh>

#include "tests/engine/kernel_runs.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace cuda_runs {

using kernel_runs::tensor;
using leanopt::cuda::weights_kind;

/// The memory of the device with what a launch reads.
class device_list {
 public:
  explicit device_list(const leanopt::cuda::table& t)
      : memory_((t.bytes() + sizeof(uint4) - 1) / sizeof(uint4) + 1), tensors_(t.tensors()) {
    const std::vector<char> image = t.image(memory_.data());
    EXPECT_EQ(leanopt::cuda::send(memory_.data(), image.data(), image.size(), nullptr), 0);
    list_ = t.list_at(memory_.data());
    EXPECT_EQ(leanopt::cuda::set_units(list_, tensors_, nullptr), 0);
  }
  void set_gradients(const std::vector<const void*>& g) {
    gradients_ = g;
    list_.gradients = gradients_.data();
  }
  const leanopt::cuda::work_list& list() const { return list_; }

 private:
  std::vector<uint4> memory_;
  std::size_t tensors_;
  leanopt::cuda::work_list list_;
  std::vector<const void*> gradients_;
};

/// A tensor of a test as the engine's.
inline leanopt::cuda::tensor tensor_of(tensor& x, weights_kind kind, std::uint32_t group) {
  leanopt::cuda::tensor t = leanopt::cuda::tensor_of(kernel_runs::work_of(x, 1));
  t.ordinal = t.elements;
  t.group = group;
  t.weights = kind;
  return t;
}

/// The tables of a format, if it has some.
template <class Format>
const void* tables_of() {
  if constexpr (leanopt::has_tables<Format>)
    return &leanopt::tables_of<Format>::type::shared();
  else
    return nullptr;
}

/// One step of all of them together.
template <class Way, class Format, class T>
void step(const plain_options::of<typename Way::rule>& o, int step_number,
          const std::vector<tensor*>& tensors, const std::vector<weights_kind>& kinds,
          const leanopt::cuda::device_scalars& scalars = {}) {
  using rule = typename Way::rule;
  using formula = typename Way::formula;
  leanopt::cuda::table table;
  std::vector<const void*> gradients;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    table.add(tensor_of(*tensors[i], kinds[i], 1));
    gradients.push_back(tensors[i]->g.data());
  }
  device_list device(table);
  device.set_gradients(gradients);
  const auto group = leanopt::cuda::group_of<rule, T>(o, 1, step_number, 0);
  const leanopt::cuda::group<rule, T> groups[] = {{}, group};
  leanopt::cuda::work_list list = device.list();
  list.tables = tables_of<Format>();
  const int error = leanopt::cuda::step<formula, Format, T>(list, groups, scalars, nullptr);
  EXPECT_EQ(error, 0);
}

/// The options' epsilon is of the first tensor's type.
template <class Way, class Format, class T>
void adafactor_step(const plain_options::of<leanopt::rules::adafactor>& o, int step_number,
                    const std::vector<tensor*>& tensors, const std::vector<weights_kind>& kinds,
                    const leanopt::cuda::device_scalars& scalars = {}) {
  leanopt::cuda::matrix_table<T> table;
  std::vector<const void*> gradients;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensor& x = *tensors[i];
    leanopt::cuda::matrix m = leanopt::cuda::matrix_of(kernel_runs::work_of(x, 1));
    m.group = 1;
    table.add(tensor_of(x, kinds[i], 0), m);
    gradients.push_back(x.g.data());
  }
  std::vector<uint4> memory(table.bytes() / sizeof(uint4) + 1, uint4{~0u, ~0u, ~0u, ~0u});
  char* at = reinterpret_cast<char*>(memory.data());
  const std::vector<char> image = table.image(at);
  EXPECT_EQ(leanopt::cuda::send(at, image.data(), image.size(), nullptr), 0);
  auto list = table.list_at(at);
  list.list.gradients = gradients.data();
  EXPECT_EQ(leanopt::cuda::set_units(list.list, tensors.size(), nullptr), 0);
  const auto group = leanopt::cuda::group_of<leanopt::rules::adafactor, T>(
      o, 1, step_number, kernel_runs::epsilon_of(tensors[0]->type));
  const leanopt::cuda::adafactor_group<T> groups[] = {group, group};
  list.groups = groups;
  const int error =
      leanopt::cuda::adafactor_step<typename Way::formula, Format, T>(list, scalars, nullptr);
  EXPECT_EQ(error, 0);
}

}  // namespace cuda_runs
