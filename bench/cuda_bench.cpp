// What a step costs on a CUDA device: leanopt's classes beside LibTorch's, its fused kernel, and
// copies of as many bytes as each moves, over matrices that do not fit into the device's cache and
// the tensors of a language model.

#include <leanopt/leanopt.hpp>

#include "bench/arguments.hpp"
#include "bench/contestants.hpp"
#include "bench/race.hpp"
#include "examples/model_sizes.hpp"

#include <benchmark/benchmark.h>

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using bench::entry;
using bench::problem;

const std::vector<entry>& all_entries() {
  using namespace bench;
  constexpr auto f32 = at::kFloat, bf16 = at::kBFloat16;
  using split24 = leanopt::basic_adamw<leanopt::formats::log8, leanopt::weights::split24>;
  static const std::vector<entry> all = {
      plain_entry<fused_adamw>("at::_fused_adamw_", f32, {4, 4, {4, 4}}),
      plain_entry<fused_adamw>("at::_fused_adamw_", bf16, {2, 2, {2, 2}}),
      adamw_entry<torch::optim::AdamW>("torch::optim::AdamW", f32, {4, 4, {4, 4}}),
      adamw_entry<leanopt::AdamW>("leanopt::AdamW", f32, {4, 4, {4, 4}}),
      adamw_entry<leanopt::AdamW8bit>("leanopt::AdamW8bit", f32, {4, 4, {1, 1}}),
      adamw_entry<leanopt::AdamW8bit>("leanopt::AdamW8bit", bf16, {2, 2, {1, 1}}),
      adamw_entry<split24>("adamw<log8,split24>", bf16, {2, 2, {1, 1, 1}}),
      optimizer_entry<leanopt::Adafactor>("leanopt::Adafactor", f32, {4, 4, {}, 3},
                                          leanopt::AdafactorOptions())};
  return all;
}
constexpr std::size_t fused = 0;  // in float32

std::vector<problem> problems() {
  const auto square = [](std::int64_t n) {
    return problem{std::to_string(n) + 'x' + std::to_string(n), {{n, n}}};
  };
  return {square(4096),
          square(8192),
          {"distilbert", model_sizes::load_shapes(LEANOPT_BENCH_DATA "/distilbert_shapes.txt")}};
}

void check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

/// How many kernels a step launches that a graph captures.
int launches_of(const entry& e, const problem& what, at::Device device) {
  const auto one = e.enter({bench::make_window(what.shapes, e.type, device)});
  one->step(0);
  torch::cuda::synchronize();
  const c10::impl::VirtualGuardImpl devices(device.type());
  const c10::StreamGuard guard(devices.getStreamFromGlobalPool(device));
  const leanopt::cuda::stream stream = leanopt::cuda::current_stream(device.index());
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  one->step(0);
  cudaGraph_t graph{};
  check(cudaStreamEndCapture(stream, &graph));
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  check(cudaGraphGetNodes(graph, nodes.data(), &count));
  const auto is_kernel = [](cudaGraphNode_t node) {
    cudaGraphNodeType type{};
    check(cudaGraphNodeGetType(node, &type));
    return type == cudaGraphNodeTypeKernel;
  };
  const auto kernels = std::count_if(nodes.begin(), nodes.end(), is_kernel);
  check(cudaGraphDestroy(graph));
  return int(kernels);
}

/// All contestants of a problem, and behind each the copy of what it moves; the first report runs
/// the race.
class field {
 public:
  field(problem what, bench::race_rules rules) : what_(std::move(what)), rules_(rules) {
    for (const entry& e : all_entries()) {
      entries_.push_back(e);
      entries_.push_back(bench::copying_entry(e));
    }
  }
  std::string name_of(std::size_t row) const {
    const entry& e = all_entries()[row];
    return "cuda/" + what_.name + (e.type == at::kFloat ? "/float32/" : "/bfloat16/") + e.name;
  }
  void report(benchmark::State& state, std::size_t row) {
    if (results_.empty()) results_ = bench::run_race(what_, entries_, rules_);
    const entry& e = all_entries()[row];
    const bench::result& mine = results_[2 * row];
    for (auto _ : state) state.SetIterationTime(mine.seconds);
    const double traffic = e.moves.traffic() * what_.elements();
    state.counters["ns/param"] = mine.seconds * 1e9 / what_.elements();
    state.counters["moved_B/param"] = e.moves.traffic();
    state.counters["state_B/param"] = mine.state_bytes;
    state.counters["GB/s"] = traffic / mine.seconds * 1e-9;
    state.counters["of_copy"] = results_[2 * row + 1].seconds / mine.seconds;
    state.counters["vs_fused"] = mine.seconds / results_[2 * fused].seconds;
    state.counters["launches"] = launches_of(e, what_, rules_.device);
  }

 private:
  problem what_;
  bench::race_rules rules_;
  std::vector<entry> entries_;
  std::vector<bench::result> results_;
};

constexpr const char* usage =
    "cuda_bench [--seconds=4] [Google Benchmark's options]\n"
    "  --seconds  how long a race of all contestants lasts; it has 8 rounds at least\n"
    "Rows are cuda/PROBLEM/TYPE/CONTESTANT; --benchmark_filter=REGEX chooses some.\n";

}  // namespace

int main(int argc, char** argv) {
  return bench::main_of("cuda_bench", usage, argc, argv, [](bench::arguments& given) {
    const double seconds = given.number("seconds", 4);
    given.initialize_benchmark();
    if (!torch::cuda::is_available()) {
      constexpr int skipped = 77;
      std::cerr << "cuda_bench: LibTorch sees no CUDA device\n";
      return skipped;
    }
    cudaDeviceProp device{};
    check(cudaGetDeviceProperties(&device, 0));
    benchmark::AddCustomContext("device", device.name);

    bench::race_rules rules{1, seconds};
    rules.device = at::Device(at::kCUDA, 0);
    rules.shortest = 5e-3;  // of steps put behind each other, so that the host runs ahead
    for (const problem& what : problems()) {
      const auto shared = std::make_shared<field>(what, rules);
      for (std::size_t row = 0; row < all_entries().size(); ++row)
        bench::add_row(shared->name_of(row),
                       [shared, row](benchmark::State& state) { shared->report(state, row); });
    }
    return 0;
  });
}
