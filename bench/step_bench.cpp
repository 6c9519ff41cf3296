// What a step costs: leanopt's optimizers beside LibTorch's class and its fused kernel, over one
// tensor in and out of cache, matrices, the tensors of a language model and many tiny tensors.
//
// Machines are shared and noisy, so absolute times say little. All contestants of a race step the
// same parameters in turn, round by round in one process; each is judged by its fastest round and
// by the ratio of that to the fused kernel's. Google Benchmark runs its entries one after the
// other, so the first entry of a race to be asked runs the race, and every entry reports its
// contestant.

#include <leanopt/leanopt.hpp>

#include "examples/model_sizes.hpp"

#include <benchmark/benchmark.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

using model_sizes::shape;
using torch::Tensor;

constexpr double lr = 1e-4, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;

struct problem {
  std::string name;
  std::vector<shape> shapes;
  /// A sample steps one tensor, the next sample another: so a short sample, which is seldom
  /// interrupted, finds nothing in the cache.
  bool rotating = false;
};

/// What is stepped together in one sample.
struct window {
  std::vector<Tensor> parameters, gradients;
};

double wall_clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
/// What this thread has computed, without the time that other programs took from it.
double thread_clock() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// ---- contestants --------------------------------------------------------------------------------

/// One way to step the windows of a problem, with state of its own.
class contestant {
 public:
  virtual ~contestant() = default;
  virtual void step(std::size_t window) = 0;
  virtual std::int64_t state_bytes() const = 0;
};

/// The kernel behind Python's AdamW(fused=True), with its lists ready made: a step in Python also
/// collects them and counts, so no program does better with it.
class fused_adamw : public contestant {
 public:
  explicit fused_adamw(const std::vector<window>& windows) {
    for (const window& w : windows) {
      auto& l = lists_.emplace_back(lists{w.parameters, w.gradients, {}, {}, {}});
      for (const Tensor& p : w.parameters) {
        l.exp_avgs.push_back(torch::zeros_like(p, p.options().requires_grad(false)));
        l.exp_avg_sqs.push_back(l.exp_avgs.back().clone());
        l.steps.push_back(torch::full({}, 100.0f));
      }
    }
  }
  void step(std::size_t window) override {
    const at::NoGradGuard no_grad;
    lists& l = lists_[window];
    at::_fused_adamw_(l.parameters, l.gradients, l.exp_avgs, l.exp_avg_sqs, {}, l.steps, lr, beta1,
                      beta2, weight_decay, eps, /*amsgrad=*/false, /*maximize=*/false);
  }
  std::int64_t state_bytes() const override {
    std::int64_t bytes = 0;
    for (const lists& l : lists_)
      for (const auto* tensors : {&l.exp_avgs, &l.exp_avg_sqs, &l.steps})
        for (const Tensor& t : *tensors) bytes += std::int64_t(t.nbytes());
    return bytes;
  }

 private:
  struct lists {
    std::vector<Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, steps;
  };
  std::vector<lists> lists_;
};

/// The traffic of a factored step and next to no arithmetic: the gradient is read three times, the
/// parameter read and written, 20 bytes per float32 parameter. Adafactor's floor.
class three_passes : public contestant {
 public:
  explicit three_passes(std::vector<window> windows) : windows_(std::move(windows)) {}
  void step(std::size_t window) override {
    const at::NoGradGuard no_grad;
    const auto& [parameters, gradients] = windows_[window];
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      benchmark::DoNotOptimize(gradients[i].sum());
      benchmark::DoNotOptimize(gradients[i].sum());
      Tensor(parameters[i]).add_(gradients[i], 1e-12);
    }
  }
  std::int64_t state_bytes() const override { return 0; }

 private:
  std::vector<window> windows_;
};

/// An optimizer of ours or LibTorch's. It sees all parameters; only those of the window have
/// gradients when it is asked.
template <class Optimizer>
class any_optimizer : public contestant {
 public:
  any_optimizer(const std::vector<window>& windows, leanopt::options_of<Optimizer> options)
      : optimizer_(all_parameters(windows), std::move(options)) {}
  void step(std::size_t) override { optimizer_.step(); }
  std::int64_t state_bytes() const override {
    return std::int64_t(leanopt::compute_optimizer_size(optimizer_).megabytes * (1 << 20));
  }

 private:
  static std::vector<Tensor> all_parameters(const std::vector<window>& windows) {
    std::vector<Tensor> all;
    for (const window& w : windows) all.insert(all.end(), w.parameters.begin(), w.parameters.end());
    return all;
  }
  Optimizer optimizer_;
};

struct entry {
  std::string name;
  std::function<std::unique_ptr<contestant>(const std::vector<window>&)> enter;
};

template <class Optimizer>
entry optimizer_entry(const std::string& name, leanopt::options_of<Optimizer> options) {
  return {name, [options](const std::vector<window>& windows) {
            return std::make_unique<any_optimizer<Optimizer>>(windows, options);
          }};
}
template <class Contestant>
entry plain_entry(const std::string& name) {
  return {name, [](const std::vector<window>& w) { return std::make_unique<Contestant>(w); }};
}

constexpr std::size_t fused = 0, passes = 1;  // the baselines, as positions in entries()

const std::vector<entry>& entries() {
  const auto adamw = [](auto options) {
    options.betas({beta1, beta2}).eps(eps).weight_decay(weight_decay);
    return options;
  };
  static const std::vector<entry> all = {
      plain_entry<fused_adamw>("at::_fused_adamw_"),
      plain_entry<three_passes>("three_passes"),
      optimizer_entry<torch::optim::AdamW>("torch::optim::AdamW",
                                           adamw(torch::optim::AdamWOptions(lr))),
      optimizer_entry<leanopt::AdamW>("leanopt::AdamW", adamw(leanopt::AdamWOptions(lr))),
      optimizer_entry<leanopt::AdamW8bit>("leanopt::AdamW8bit",
                                          adamw(leanopt::AdamW8bitOptions(lr))),
      optimizer_entry<leanopt::Adafactor>("leanopt::Adafactor", leanopt::AdafactorOptions(lr))};
  return all;
}

// ---- races --------------------------------------------------------------------------------------

struct result {
  double seconds = std::numeric_limits<double>::infinity();  ///< the fastest step of one window
  double elements = 0;                                       ///< parameters in a window
  double state_bytes = 0;                                    ///< per parameter
};

class race {
 public:
  race(problem what, at::ScalarType type, int threads, double seconds)
      : problem_(std::move(what)), type_(type), threads_(threads), seconds_(seconds) {}

  const std::vector<result>& results() {
    if (results_.empty()) run();
    return results_;
  }

 private:
  static constexpr double shortest_sample = 1e-4;  // well above the clock's own cost
  static constexpr std::size_t fewest_rounds = 8;

  void run() {
    at::set_num_threads(threads_);
    const std::vector<window> windows = make_windows();
    std::vector<std::unique_ptr<contestant>> field;
    for (const entry& e : entries()) field.push_back(e.enter(windows));
    results_.resize(field.size());

    double elements = 0;
    for (const Tensor& p : windows[0].parameters) elements += double(p.numel());
    for (std::size_t c = 0; c < field.size(); ++c) {  // the first step makes the state
      for (std::size_t w = 0; w < windows.size(); ++w) sample(windows[w], *field[c], w, 1);
      results_[c].elements = elements;
      results_[c].state_bytes =
          double(field[c]->state_bytes()) / (elements * double(windows.size()));
    }

    double once = sample(windows[0], *field[fused], 0, 1);
    for (int i = 0; i < 4; ++i) once = std::min(once, sample(windows[0], *field[fused], 0, 1));
    const int repeats = problem_.rotating ? 1 : int(std::max(1.0, shortest_sample / once));
    // No contestant takes a window that the one before it has just brought into the cache.
    const std::size_t apart = windows.size() / field.size() + 1;
    const double end = wall_clock() + seconds_;
    for (std::size_t round = 0; round < fewest_rounds || wall_clock() < end; ++round)
      for (std::size_t c = 0; c < field.size(); ++c) {
        const std::size_t w = (round + c * apart) % windows.size();
        if (repeats > 1) sample(windows[w], *field[c], w, 1);  // its own state into the cache
        const double seconds = sample(windows[w], *field[c], w, repeats);
        results_[c].seconds = std::min(results_[c].seconds, seconds);
      }
  }

  double sample(const window& w, contestant& one, std::size_t index, int repeats) const {
    for (std::size_t i = 0; i < w.parameters.size(); ++i)
      Tensor(w.parameters[i]).mutable_grad() = w.gradients[i];
    const auto clock = threads_ == 1 ? thread_clock : wall_clock;
    const double begin = clock();
    for (int i = 0; i < repeats; ++i) one.step(index);
    const double seconds = clock() - begin;
    for (const Tensor& p : w.parameters) Tensor(p).mutable_grad() = Tensor();
    return seconds / repeats;
  }

  std::vector<window> make_windows() const {
    torch::manual_seed(1);
    std::vector<window> windows(problem_.rotating ? problem_.shapes.size() : 1);
    for (std::size_t i = 0; i < problem_.shapes.size(); ++i) {
      window& w = windows[problem_.rotating ? i : 0];
      const Tensor p = torch::randn(problem_.shapes[i]).mul_(0.02).to(type_);
      w.parameters.push_back(p.requires_grad_());
      w.gradients.push_back(torch::randn(problem_.shapes[i]).mul_(1e-3).to(type_));
    }
    return windows;
  }

  problem problem_;
  at::ScalarType type_;
  int threads_;
  double seconds_;
  std::vector<result> results_;
};

/// A row of the report. Its time is the contestant's fastest step; Google Benchmark's own CPU
/// column only sees the report being written.
void report(benchmark::State& state, race& of, std::size_t contestant) {
  const std::vector<result>& all = of.results();
  const result& mine = all[contestant];
  for (auto _ : state) state.SetIterationTime(mine.seconds);
  state.counters["ns/param"] = mine.seconds * 1e9 / mine.elements;
  state.counters["state_B/param"] = mine.state_bytes;
  state.counters["vs_fused"] = mine.seconds / all[fused].seconds;
  state.counters["vs_passes"] = mine.seconds / all[passes].seconds;
}

// ---- the program --------------------------------------------------------------------------------

struct arguments {
  std::vector<int> threads = {1, 2};
  double seconds = 2;
  std::int64_t mebi = 64;
};

/// `value` of an argument `--name=value`, which is then removed from the list.
bool take(std::vector<char*>& words, const std::string& name, std::string& value) {
  const std::string start = "--" + name + "=";
  const auto it = std::find_if(words.begin(), words.end(), [&](const char* word) {
    return std::string(word).compare(0, start.size(), start) == 0;
  });
  if (it == words.end()) return false;
  value = std::string(*it).substr(start.size());
  words.erase(it);
  return true;
}

arguments take_arguments(std::vector<char*>& words) {
  arguments result;
  std::string value;
  if (take(words, "threads", value)) {
    result.threads.clear();
    std::istringstream list(value);
    for (std::string one; std::getline(list, one, ',');) result.threads.push_back(std::stoi(one));
  }
  if (take(words, "seconds", value)) result.seconds = std::stod(value);
  if (take(words, "mebi", value)) result.mebi = std::stoll(value);
  TORCH_CHECK(!result.threads.empty() &&
                  *std::min_element(result.threads.begin(), result.threads.end()) > 0,
              "--threads takes counts of at least 1");
  TORCH_CHECK(result.mebi > 0, "--mebi takes a number of at least 1");
  return result;
}

std::vector<problem> problems(std::int64_t mebi) {
  return {{"in_cache", {{128, 128}}},
          {"memory", std::vector<shape>(std::size_t(mebi), {1024, 1024}), /*rotating=*/true},
          {"4096x4096", {{4096, 4096}}},
          {"768x3072", {{768, 3072}}},
          {"28996x768", {{28996, 768}}},
          {"distilbert", model_sizes::load_shapes(LEANOPT_BENCH_DATA "/distilbert_shapes.txt")},
          {"1000_of_10", std::vector<shape>(1000, {10})}};
}

void register_races(const arguments& given) {
  for (const problem& what : problems(given.mebi))
    for (const auto& [type, type_name] :
         {std::pair(at::kFloat, "float32"), std::pair(at::kBFloat16, "bfloat16")})
      for (const int threads : given.threads) {
        const auto shared = std::make_shared<race>(what, type, threads, given.seconds);
        for (std::size_t c = 0; c < entries().size(); ++c)
          benchmark::RegisterBenchmark(
              ("step/" + what.name + '/' + type_name + '/' + std::to_string(threads) +
               (threads == 1 ? "_thread/" : "_threads/") + entries()[c].name)
                  .c_str(),
              [shared, c](benchmark::State& state) { report(state, *shared, c); })
              ->Iterations(1)
              ->UseManualTime()
              ->Unit(benchmark::kMicrosecond);
      }
}

constexpr const char* usage =
    "step_bench [--threads=1,2] [--seconds=2] [--mebi=64] [Google Benchmark's options]\n"
    "  --threads  numbers of threads to try\n"
    "  --seconds  how long a race of all contestants lasts; a race has 8 rounds at least\n"
    "  --mebi     parameters of `memory`, in units of 2^20; 32 bytes of memory each\n"
    "Entries are step/PROBLEM/TYPE/THREADS/CONTESTANT; --benchmark_filter=REGEX chooses some.\n";

}  // namespace

int main(int argc, char** argv) try {
#if !defined(__OPTIMIZE__)
  std::cerr << "step_bench: built without optimisation, so its figures would mean nothing; "
               "configure with -DCMAKE_BUILD_TYPE=Release\n";
  return 1;
#endif
  std::vector<char*> words(argv, argv + argc);
  const arguments given = take_arguments(words);
  int left = int(words.size());
  words.push_back(nullptr);
  benchmark::Initialize(&left, words.data());
  if (benchmark::ReportUnrecognizedArguments(left, words.data())) {
    std::cerr << usage;
    return 1;
  }
  register_races(given);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
} catch (const std::exception& e) {
  std::cerr << "step_bench: " << e.what() << '\n' << usage;
  return 1;
}
