// The classes on a device of LibTorch's that the emulator is.

#include "tests/support/emulator/backend.hpp"
// The backend comes before the engine.
#include <leanopt/engine/cuda.cuh>

#include "tests/engine/cuda/front_cases.hpp"

#include <memory>

namespace leanopt::cuda {
stream current_stream(int device) {
  EXPECT_EQ(emulator::backend().current, device) << "work without a guard";
  return nullptr;
}
}  // namespace leanopt::cuda

namespace place {

at::Device device() { return emulator::device; }
int devices() { return emulator::guard().deviceCount(); }
std::int64_t allocations_of(const std::function<void()>& f) {
  const emulator::settings_of_backend before = emulator::backend();
  f();
  TORCH_CHECK(emulator::backend().transfers == before.transfers, "the host waited");
  return emulator::backend().allocations - before.allocations;
}
std::function<void()> capture(const std::function<void()>& f) {
  const auto graph = std::make_shared<std::vector<std::function<void()>>>();
  emulator::here().graph = graph.get();
  try {
    f();
  } catch (...) {
    emulator::here().graph = nullptr;
    throw;
  }
  emulator::here().graph = nullptr;
  return [graph] {
    for (const auto& launch : *graph) launch();
  };
}

}  // namespace place

namespace {

TEST(OnTheEmulator, StepsTakeFewLaunches) {
  with_each([](auto kind) {
    using optimizer = typename decltype(kind)::type;
    parameters x(place::device());
    optimizer there(x.there, kind.options);
    x.set_gradients(1);
    there.step();
    const int before = emulator::here().launches;
    there.step();
    // A list each of float32 and float64, and of what is too small to be compressed; what a step
    // sends, and the step: one launch, or four.
    EXPECT_LE(emulator::here().launches - before, 4 * (decltype(kind)::is_elementwise ? 2 : 5));
  });
}

}  // namespace
