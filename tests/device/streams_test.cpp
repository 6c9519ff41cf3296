// What only a real device can show: streams that run at the same time, and tensors of more elements
// than 32 bits count.

#include "tests/engine/classes.hpp"
#include "tests/engine/cuda/place.hpp"

#include <gtest/gtest.h>

#include <ATen/cuda/Sleep.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <cuda_runtime_api.h>
#include <memory>
#include <string>
#include <vector>

namespace {

using torch::Tensor;

c10::Stream new_stream() {
  return c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(place::device());
}
classes::subject named(const std::string& name) {
  const auto all = classes::all();
  return *std::find_if(all.begin(), all.end(), [&](const auto& s) { return s.name == name; });
}

/// The same steps on the CPU and on a device, where every gradient comes late: whatever does not
/// wait for it on the right stream finds the one before.
class late_run {
 public:
  explicit late_run(const classes::subject& subject)
      : here_(classes::small_parameters(torch::kFloat)) {
    for (const Tensor& p : here_) {
      there_.push_back(classes::leaf(place::copy_on(place::device(), p)));
      there_.back().mutable_grad() = torch::zeros_like(there_.back());
    }
    of_cpu_ = subject.make(here_);
    of_device_ = subject.make(there_);
    for (int step = 0; step < steps; ++step)
      for (const Tensor& p : here_) {
        gradients_.push_back(classes::made(p.sizes().vec(), torch::kFloat, 50 + gradients_.size()));
        staged_.push_back(gradients_.back().to(place::device()));
      }
  }
  /// Puts a step on the current stream.
  void step_on_device(int step) {
    constexpr std::int64_t cycles = 20'000'000;  // about 10 ms
    at::cuda::sleep(cycles);
    for (std::size_t i = 0; i < there_.size(); ++i)
      there_[i].mutable_grad().copy_(staged_[std::size_t(step) * there_.size() + i],
                                     /*non_blocking=*/true);
    of_device_->step();
  }
  void step_on_cpu(int step) {
    for (std::size_t i = 0; i < here_.size(); ++i)
      here_[i].mutable_grad() = gradients_[std::size_t(step) * here_.size() + i];
    of_cpu_->step();
  }
  void expect_same_bits() const {
    torch::cuda::synchronize();
    for (std::size_t i = 0; i < here_.size(); ++i)
      EXPECT_TRUE(place::same_bits(here_[i], there_[i])) << "parameter " << i;
  }
  static constexpr int steps = 6;

 private:
  std::vector<Tensor> here_, there_, gradients_, staged_;
  std::unique_ptr<torch::optim::Optimizer> of_cpu_, of_device_;
};

TEST(Streams, AStepIsWorkOfTheStreamThatIsCurrent) {
  for (const char* name : {"AdamW8bit", "Adafactor"}) {
    SCOPED_TRACE(name);
    late_run run(named(name));
    torch::cuda::synchronize();
    const c10::Stream streams[] = {new_stream(), new_stream()};
    c10::Event done(at::kCUDA);
    for (int step = 0; step < late_run::steps; ++step) {
      const c10::StreamGuard guard(streams[step % 2]);
      if (step) done.block(streams[step % 2]);
      run.step_on_device(step);
      done.record(streams[step % 2]);
      run.step_on_cpu(step);
    }
    run.expect_same_bits();
  }
}

TEST(Streams, OptimizersStepSideBySide) {
  late_run runs[] = {late_run(named("AdamW8bit")), late_run(named("Adafactor")),
                     late_run(named("AdamW8bit"))};
  torch::cuda::synchronize();
  const c10::Stream streams[] = {new_stream(), new_stream(), new_stream()};
  for (int step = 0; step < late_run::steps; ++step)
    for (int i = 0; i < 3; ++i) {
      const c10::StreamGuard guard(streams[i]);
      runs[i].step_on_device(step);
    }
  for (late_run& run : runs) {
    for (int step = 0; step < late_run::steps; ++step) run.step_on_cpu(step);
    run.expect_same_bits();
  }
}

TEST(Sizes, MoreElementsThan32BitsCount) {
  constexpr std::int64_t row = 4096, rows = (std::int64_t(1) << 32) / row + 2, rest = 5;
  constexpr std::size_t needed = std::size_t(10 * row * rows);  // 8 bytes per element, and some
  std::size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < needed) GTEST_SKIP() << needed << " bytes of the device's memory, " << free << " free";
  const auto repeated = [&](std::uint64_t seed) {
    const Tensor one = classes::made({row}, torch::kBFloat16, seed).to(place::device());
    Tensor all = torch::empty({rows * row + rest}, one.options());
    all.narrow(0, 0, rows * row).view({rows, row}).copy_(one.expand({rows, row}));
    all.narrow(0, rows * row, rest).copy_(one.narrow(0, 0, rest));
    return all;
  };
  const Tensor p = classes::leaf(repeated(1));
  const auto optimizer = named("AdamWBfloat16").make({p});
  p.mutable_grad() = repeated(2);
  for (int step = 0; step < 2; ++step) optimizer->step();

  const Tensor few = classes::leaf(classes::made({row}, torch::kBFloat16, 1));
  const auto of_cpu = named("AdamWBfloat16").make({few});
  few.mutable_grad() = classes::made({row}, torch::kBFloat16, 2);
  for (int step = 0; step < 2; ++step) of_cpu->step();

  const Tensor x = p.detach();
  p.mutable_grad() = Tensor();
  const Tensor expected = few.detach().to(place::device());
  for (std::int64_t r = 0; r < rows; r += rows / 16)
    EXPECT_TRUE(torch::equal(
        x.narrow(0, 0, rows * row).view({rows, row}).narrow(0, r, std::min(rows / 16, rows - r)),
        expected.expand({std::min(rows / 16, rows - r), row})))
        << "from row " << r;
  EXPECT_TRUE(torch::equal(x.narrow(0, rows * row, rest), expected.narrow(0, 0, rest)));
}

}  // namespace
