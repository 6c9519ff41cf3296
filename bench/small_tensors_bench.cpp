// What a step costs where tensors are small and many, so that what is done per tensor counts more
// than what is done per number: leanopt's classes, LibTorch's, and one call of the fused kernel
// over all tensors.

#include <leanopt/leanopt.hpp>

#include "bench/arguments.hpp"
#include "bench/contestants.hpp"
#include "bench/race.hpp"
#include "examples/model_sizes.hpp"

#include <benchmark/benchmark.h>

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

namespace {

using bench::entry;
using bench::problem;

const std::vector<entry>& all_entries() {
  using namespace bench;
  constexpr auto f32 = at::kFloat;
  static const std::vector<entry> all = {
      plain_entry<fused_adamw>("at::_fused_adamw_", f32, {4, 4, {4, 4}}),
      adamw_entry<torch::optim::AdamW>("torch::optim::AdamW", f32, {4, 4, {4, 4}}),
      adamw_entry<leanopt::AdamW>("leanopt::AdamW", f32, {4, 4, {4, 4}}),
      adamw_entry<leanopt::AdamW8bit>("leanopt::AdamW8bit", f32, {4, 4, {1, 1}}),
      plain_entry<adafactor_of_operators>("Adafactor_of_operators", f32, {4, 4, {}, 3}),
      optimizer_entry<leanopt::Adafactor>("leanopt::Adafactor", f32, {4, 4, {}, 3},
                                          leanopt::AdafactorOptions())};
  return all;
}
constexpr std::size_t fused = 0;

std::vector<problem> problems() {
  return {{"1000_of_10", std::vector<bench::shape>(1000, {10})},
          {"10000_of_1000", std::vector<bench::shape>(10000, {1000})},
          {"distilbert", model_sizes::load_shapes(LEANOPT_BENCH_DATA "/distilbert_shapes.txt")}};
}

/// All contestants of a problem with a number of threads; the first report runs the race.
class field {
 public:
  field(problem what, bench::race_rules rules) : what_(std::move(what)), rules_(rules) {}
  std::string name_of(std::size_t row) const {
    return "small/" + what_.name + '/' + std::to_string(rules_.threads) +
           (rules_.threads == 1 ? "_thread/" : "_threads/") + all_entries()[row].name;
  }
  void report(benchmark::State& state, std::size_t row) {
    if (results_.empty()) results_ = bench::run_race(what_, all_entries(), rules_);
    const double seconds = results_[row].seconds;
    for (auto _ : state) state.SetIterationTime(seconds);
    state.counters["ns/tensor"] = seconds * 1e9 / double(what_.shapes.size());
    state.counters["ns/param"] = seconds * 1e9 / what_.elements();
    state.counters["vs_fused"] = seconds / results_[fused].seconds;
  }

 private:
  problem what_;
  bench::race_rules rules_;
  std::vector<bench::result> results_;
};

constexpr const char* usage =
    "small_tensors_bench [--threads=1,2] [--seconds=4] [Google Benchmark's options]\n"
    "  --threads  numbers of threads to try\n"
    "  --seconds  how long a race of all contestants lasts; it has 8 rounds at least\n"
    "Rows are small/PROBLEM/THREADS/CONTESTANT; --benchmark_filter=REGEX chooses some.\n";

}  // namespace

int main(int argc, char** argv) {
  return bench::main_of("small_tensors_bench", usage, argc, argv, [](bench::arguments& given) {
    const std::vector<int> threads = given.counts("threads", "1,2");
    const double seconds = given.number("seconds", 4);
    given.initialize_benchmark();
    for (const problem& what : problems())
      for (const int n : threads) {
        const auto shared = std::make_shared<field>(what, bench::race_rules{n, seconds});
        for (std::size_t row = 0; row < all_entries().size(); ++row)
          bench::add_row(shared->name_of(row),
                         [shared, row](benchmark::State& state) { shared->report(state, row); });
      }
    return 0;
  });
}
