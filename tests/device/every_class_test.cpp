// Every class with every type of numbers leaves on a device the bits that it leaves on the CPU.

#include "tests/engine/classes.hpp"
#include "tests/engine/cuda/place.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace {

using classes::made;
using torch::Tensor;

/// Beside the small ones: nothing, one above a block, a work unit and a warp's share, matrices that
/// are thin or of many parts, and what does not begin or go on as vectors of 128 bits do.
std::vector<Tensor> parameters(torch::ScalarType type) {
  std::vector<Tensor> all = classes::small_parameters(type);
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{0, 4},
                                                 {257},
                                                 {4097},
                                                 {(1 << 20) + 3},
                                                 {5001, 1},
                                                 {1, 5001},
                                                 {3000, 7},
                                                 {7, 3001},
                                                 {1030, 257},
                                                 {3, 70, 90},
                                                 {2, 1, 300, 65}})
    all.push_back(classes::leaf(made(sizes, type, 10 + all.size())));
  all.push_back(classes::leaf(made({5002}, type, 8).narrow(0, 1, 5000)));
  all.push_back(classes::leaf(made({80, 80}, type, 9).narrow(1, 3, 71)));
  return all;
}

/// The same memory, gaps and beginning included, on the device.
Tensor on_device(const Tensor& t) {
  const at::NoGradGuard no_grad;
  const Tensor all =
      t.detach().as_strided({std::int64_t(t.storage().nbytes() / t.element_size())}, {1}, 0);
  return classes::leaf(
      all.to(place::device()).as_strided(t.sizes(), t.strides(), t.storage_offset()));
}

void expect_same_bits(const classes::subject& subject, torch::ScalarType type) {
  const std::vector<Tensor> here = parameters(type);
  std::vector<Tensor> there;
  for (const Tensor& p : here) there.push_back(on_device(p));
  const auto of_cpu = subject.make(here), of_device = subject.make(there);
  std::uint64_t seed = 1000;
  for (int step = 1; step <= 3; ++step) {
    for (std::size_t i = 0; i < here.size(); ++i) {
      const Tensor g = made(here[i].sizes().vec(), type, ++seed);
      here[i].mutable_grad() = g;
      there[i].mutable_grad() = g.to(place::device());
    }
    of_cpu->step();
    of_device->step();
  }
  for (std::size_t i = 0; i < here.size(); ++i) {
    const auto x = classes::state_of(*of_cpu, here[i]), y = classes::state_of(*of_device, there[i]);
    EXPECT_TRUE(place::same_bits(here[i], there[i])) << "parameter " << i;
    ASSERT_EQ(x.size(), y.size()) << "parameter " << i;
    for (std::size_t k = 0; k < x.size(); ++k)
      EXPECT_TRUE(place::same_bits(x[k].second, y[k].second))
          << x[k].first << " of parameter " << i;
  }
}

TEST(EveryClass, LeavesTheBitsOfTheCpu) {
  for (const auto& subject : classes::all())
    for (const auto type : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
      if (type == torch::kHalf && !subject.takes_float16) continue;
      SCOPED_TRACE(subject.name + ", " + torch::toString(type));
      expect_same_bits(subject, type);
    }
}

}  // namespace
