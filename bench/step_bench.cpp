// What a step costs: leanopt's optimizers with every format and kind of weights beside LibTorch's
// class, its fused kernel, Adafactor in LibTorch's operators, and loops that only move the same
// bytes; over one tensor in and out of cache, matrices and the tensors of a language model.
//
// Google Benchmark runs its rows one after the other, so the first row of a race to be asked runs
// the race, and every row reports its contestant.

#include <leanopt/leanopt.hpp>

#include "bench/arguments.hpp"
#include "bench/contestants.hpp"
#include "bench/race.hpp"
#include "examples/model_sizes.hpp"
#include "examples/text.hpp"

#include <benchmark/benchmark.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using bench::entry;
using bench::problem;
using bench::result;
using bench::shape;
using bench::streams;
namespace formats = leanopt::formats;
namespace weights = leanopt::weights;

// ---- who takes part -----------------------------------------------------------------------------

/// In which problems an entry takes part besides those of one large or small tensor.
enum class scope { one_tensor, matrices, everywhere };
struct listed {
  entry what;
  scope where = scope::one_tensor;
};

template <class Format, class Weights>
using adamw = leanopt::basic_adamw<Format, Weights>;
template <class Format, class Weights>
using adafactor = leanopt::basic_adafactor<Format, Weights>;

const std::vector<listed>& all_entries() {
  using namespace bench;
  using leanopt::AdafactorOptions;
  using torch_adamw = torch::optim::AdamW;
  constexpr auto f32 = at::kFloat, f64 = at::kDouble, bf16 = at::kBFloat16;
  constexpr scope matrices = scope::matrices, everywhere = scope::everywhere;
  using formats::log8, formats::dynamic8, formats::bfloat16, formats::bfloat16_stochastic;
  using weights::plain, weights::split24, weights::split32, weights::stochastic;
  // Streams are the bytes of a parameter, of its gradient, and of each array of its state.
  static const std::vector<listed> all = {
      {plain_entry<fused_adamw>("at::_fused_adamw_", f32, {4, 4, {4, 4}}), everywhere},
      {plain_entry<fused_adamw>("at::_fused_adamw_", f64, {8, 8, {8, 8}})},
      {plain_entry<fused_adamw>("at::_fused_adamw_", bf16, {2, 2, {2, 2}})},
      {adamw_entry<torch_adamw>("torch::optim::AdamW", f32, {4, 4, {4, 4}}), everywhere},
      {adamw_entry<torch_adamw>("torch::optim::AdamW", f64, {8, 8, {8, 8}})},
      {adamw_entry<torch_adamw>("torch::optim::AdamW", bf16, {2, 2, {2, 2}})},
      {plain_entry<adafactor_of_operators>("Adafactor_of_operators", f32, {4, 4, {}, 3}),
       everywhere},

      {adamw_entry<leanopt::AdamW>("leanopt::AdamW", f32, {4, 4, {4, 4}}), everywhere},
      {adamw_entry<leanopt::AdamW8bit>("leanopt::AdamW8bit", f32, {4, 4, {1, 1}}), everywhere},
      {adamw_entry<leanopt::AdamW, clipping_optimizer>("AdamW(clip)", f32, {4, 4, {4, 4}})},
      {adamw_entry<leanopt::AdamW8bit, clipping_optimizer>("AdamW8bit(clip)", f32, {4, 4, {1, 1}})},
      {adamw_entry<adamw<dynamic8, plain>>("adamw<dynamic8>", f32, {4, 4, {1, 1}})},
      {adamw_entry<adamw<bfloat16, plain>>("adamw<bfloat16>", f32, {4, 4, {2, 2}})},
      {adamw_entry<adamw<bfloat16_stochastic, plain>>("adamw<bfloat16_stochastic>", f32,
                                                      {4, 4, {2, 2}})},
      {optimizer_entry<leanopt::Adafactor>("leanopt::Adafactor", f32, {4, 4, {}, 3},
                                           AdafactorOptions()),
       everywhere},
      {optimizer_entry<leanopt::Adafactor>("leanopt::Adafactor(hugging_face)", f32, {4, 4, {}, 3},
                                           AdafactorOptions::hugging_face()),
       matrices},
      {optimizer_entry<leanopt::Adafactor8bit>("leanopt::Adafactor8bit", f32, {4, 4, {1}, 3}, {}),
       everywhere},

      {adamw_entry<leanopt::AdamW>("leanopt::AdamW", f64, {8, 8, {8, 8}})},
      {adamw_entry<leanopt::AdamW8bit>("leanopt::AdamW8bit", f64, {8, 8, {1, 1}})},
      {optimizer_entry<leanopt::Adafactor>("leanopt::Adafactor", f64, {8, 8, {}, 3},
                                           AdafactorOptions())},

      {adamw_entry<leanopt::AdamW>("leanopt::AdamW", bf16, {2, 2, {4, 4}})},
      {adamw_entry<leanopt::AdamW8bit>("leanopt::AdamW8bit", bf16, {2, 2, {1, 1}})},
      {adamw_entry<leanopt::AdamW8bit, clipping_optimizer>("AdamW8bit(clip)", bf16,
                                                           {2, 2, {1, 1}})},
      {adamw_entry<adamw<bfloat16, plain>>("adamw<bfloat16>", bf16, {2, 2, {2, 2}})},
      {adamw_entry<adamw<log8, stochastic>>("adamw<log8,stochastic>", bf16, {2, 2, {1, 1}})},
      {adamw_entry<adamw<log8, split24>>("adamw<log8,split24>", bf16, {2, 2, {1, 1, 1}}),
       everywhere},
      {adamw_entry<adamw<log8, split32>>("adamw<log8,split32>", bf16, {2, 2, {1, 1, 2}})},
      {optimizer_entry<leanopt::Adafactor>("leanopt::Adafactor", bf16, {2, 2, {}, 3},
                                           AdafactorOptions()),
       matrices},
      {optimizer_entry<adafactor<log8, split24>>("adafactor<log8,split24>", bf16, {2, 2, {1, 1}, 3},
                                                 {}),
       everywhere},
  };
  return all;
}
std::string type_name(at::ScalarType type) {
  return type == at::kFloat ? "float32" : type == at::kDouble ? "float64" : "bfloat16";
}

// ---- problems -----------------------------------------------------------------------------------

struct task {
  problem what;
  scope entries;  ///< those of at least this scope take part
};
std::vector<task> tasks() {
  const auto matrix = [](std::int64_t rows, std::int64_t columns) {
    return task{{std::to_string(rows) + 'x' + std::to_string(columns), {{rows, columns}}},
                scope::matrices};
  };
  return {{{"in_cache", {{128, 128}}}, scope::one_tensor},
          {{"memory", {{1024, 1024}}, /*cold=*/true}, scope::one_tensor},
          matrix(4096, 4096),
          matrix(768, 3072),
          matrix(28996, 768),
          {{"distilbert", model_sizes::load_shapes(LEANOPT_BENCH_DATA "/distilbert_shapes.txt")},
           scope::everywhere}};
}

// ---- races --------------------------------------------------------------------------------------

/// A row of the report: an entry, and those whose times it is compared with, as positions in the
/// race's entries.
struct row {
  std::string name;
  std::size_t own, fused, adamw, moving;
};

/// All wanted rows of a problem with a number of threads, with their baselines.
class field {
 public:
  field(task t, int threads, double seconds, double bytes)
      : what_(std::move(t.what)), rules_{threads, seconds, bytes} {
    for (const listed& l : all_entries()) {
      if (l.where < t.entries) continue;
      add(l.what, l.what);
      add(bench::moving_entry(l.what), l.what);
    }
  }
  const std::vector<row>& rows() const { return rows_; }

  /// A row's time is the contestant's fastest step; Google Benchmark's own CPU column only sees the
  /// report being written.
  void report(benchmark::State& state, const row& r, double copy_speed) {
    if (results_.empty()) results_ = bench::run_race(what_, entries_, rules_);
    const result& mine = results_[r.own];
    const double elements = what_.elements(), traffic = entries_[r.own].moves.traffic();
    for (auto _ : state) state.SetIterationTime(mine.seconds);
    const auto beside = [&](std::size_t other) { return mine.seconds / results_[other].seconds; };
    state.counters["ns/param"] = mine.seconds * 1e9 / elements;
    state.counters["moved_B/param"] = traffic;
    state.counters["state_B/param"] = mine.state_bytes;
    state.counters["of_copy"] = traffic * elements / mine.seconds / copy_speed;
    state.counters["vs_fused"] = beside(r.fused);
    state.counters["vs_AdamW"] = beside(r.adamw);
    state.counters["vs_moving"] = beside(r.moving);
  }

 private:
  /// Adds the row of `e`, if it is wanted; its bytes are those of `of`.
  void add(const entry& e, const entry& of) {
    const std::string name = "step/" + what_.name + '/' + type_name(e.type) + '/' +
                             std::to_string(rules_.threads) +
                             (rules_.threads == 1 ? "_thread/" : "_threads/") + e.name;
    if (!bench::is_wanted(name) ||
        std::any_of(rows_.begin(), rows_.end(), [&](const row& r) { return r.name == name; }))
      return;
    rows_.push_back({name, position(e), position(named("at::_fused_adamw_", e.type)),
                     position(named("leanopt::AdamW", at::kFloat)),
                     position(bench::moving_entry(of))});
  }
  static const entry& named(const std::string& name, at::ScalarType type) {
    const auto& all = all_entries();
    return std::find_if(all.begin(), all.end(),
                        [&](const listed& l) { return l.what.name == name && l.what.type == type; })
        ->what;
  }
  /// Of an entry in the race, which it enters if it is not there yet.
  std::size_t position(const entry& e) {
    const auto it = std::find_if(entries_.begin(), entries_.end(), [&](const entry& known) {
      return known.name == e.name && known.type == e.type;
    });
    if (it != entries_.end()) return std::size_t(it - entries_.begin());
    entries_.push_back(e);
    return entries_.size() - 1;
  }

  problem what_;
  bench::race_rules rules_;
  std::vector<entry> entries_;
  std::vector<row> rows_;
  std::vector<result> results_;
};

// ---- the program --------------------------------------------------------------------------------

/// Measures a copy with each number of threads, and says what limits a step here: where a core gets
/// little of the memory's bandwidth, by experience at most 25 GB/s, fewer bytes mean less time;
/// where it gets more the arithmetic decides.
std::map<int, double> measure_copies(const std::vector<int>& threads) {
  constexpr double limit = 25e9;
  std::map<int, double> speeds;
  for (const int n : threads) {
    const double speed = speeds[n] = bench::copy_speed(n), per_core = speed / n;
    benchmark::AddCustomContext(
        "copy, " + std::to_string(n) + (n == 1 ? " thread" : " threads"),
        text::fixed(per_core / 1e9, 1) + " GB/s per core: " +
            (per_core <= limit ? "at most 25, memory decides" : "above 25, arithmetic decides"));
  }
  return speeds;
}

constexpr const char* usage =
    "step_bench [--threads=1,2] [--seconds=4] [--gibi=4] [Google Benchmark's options]\n"
    "  --threads  numbers of threads to try\n"
    "  --seconds  how long a race lasts; it has 8 rounds at least\n"
    "  --gibi     what all contestants' tensors in `memory` take together, in units of 2^30 "
    "bytes:\n"
    "             several times the last cache\n"
    "Rows are step/PROBLEM/TYPE/THREADS/CONTESTANT; --benchmark_filter=REGEX chooses some, and\n"
    "only those run, with the baselines that they are compared with: the fused kernel of the same\n"
    "type, leanopt::AdamW in float32, a loop that moves as many bytes, a copy.\n";

}  // namespace

int main(int argc, char** argv) {
  return bench::main_of("step_bench", usage, argc, argv, [](bench::arguments& given) {
    const std::vector<int> threads = given.counts("threads", "1,2");
    const double seconds = given.number("seconds", 4), gibi = given.number("gibi", 4);
    given.initialize_benchmark();

    const std::map<int, double> copies = measure_copies(threads);
    for (const task& t : tasks())
      for (const int n : threads) {
        const auto shared = std::make_shared<field>(t, n, seconds, gibi * double(1 << 30));
        for (const row& r : shared->rows())
          bench::add_row(r.name, [shared, r, speed = copies.at(n)](benchmark::State& state) {
            shared->report(state, r, speed);
          });
      }
    return 0;
  });
}
