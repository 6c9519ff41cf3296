// What compressed state costs in training quality: small nets and a transformer trained with every
// format, each run paired with float32 of the same start values and batches. A second float32 run
// from start values that are off by 1e-4 shows how far apart runs end that nobody would tell apart.

#include "bench/training/contestants.hpp"
#include "bench/training/digits_task.hpp"
#include "bench/training/report.hpp"
#include "bench/training/text_task.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using training::contestant;

constexpr const char* usage =
    "training_bench [--tasks=mlp,cnn,text] [--optimizers=NAME,...] [--seeds=5] [--steps=N]\n"
    "               [--threads=N] [--check]\n"
    "  --optimizers  as named in the tables; what they are paired with is added; default all\n"
    "  --seeds       runs from seeds 1 to N\n"
    "  --steps       default 460 for mlp and cnn, which round up to epochs of 23, 600 for text\n"
    "  --threads     runs at a time, each on one thread: no figure depends on it; default all\n"
    "  --check       50 steps from one seed, unless told otherwise; fails where a run ends too\n"
    "                far from its float32 run\n"
    "A loss that is not finite or did not fall always fails. On processors without bfloat16\n"
    "instructions runs on bfloat16 weights take ten times as long.\n";

struct arguments {
  std::vector<std::string> tasks = {"mlp", "cnn", "text"};
  std::vector<std::string> optimizers;
  std::int64_t seeds = 0;
  std::int64_t steps = 0;  // 0: each task's own
  std::int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  bool check = false;
};

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> all;
  std::istringstream in(list);
  for (std::string one; std::getline(in, one, ',');) all.push_back(one);
  return all;
}

arguments parse(const std::vector<std::string>& words) {
  arguments result;
  for (const std::string& word : words) {
    const std::size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    const auto number = [&] {
      const std::int64_t n = std::stoll(value);
      TORCH_CHECK(n > 0, name, " takes a number of at least 1");
      return n;
    };
    if (name == "--tasks")
      result.tasks = split(value);
    else if (name == "--optimizers")
      result.optimizers = split(value);
    else if (name == "--seeds")
      result.seeds = number();
    else if (name == "--steps")
      result.steps = number();
    else if (name == "--threads")
      result.threads = number();
    else if (word == "--check")
      result.check = true;
    else
      TORCH_CHECK(false, "unknown argument '", word, "'");
  }
  if (result.seeds == 0) result.seeds = result.check ? 1 : 5;
  if (result.steps == 0 && result.check) result.steps = 50;
  return result;
}

std::unique_ptr<training::task> make_task(const std::string& name, std::int64_t steps) {
  const std::string data = LEANOPT_BENCH_DATA;
  if (name == "text")
    return std::make_unique<training::text_task>(data + "/holmes.txt", steps ? steps : 600);
  return std::make_unique<training::digits_task>(name, data + "/digits.txt", steps ? steps : 460);
}

/// Those named, after the references they are paired with.
std::vector<contestant> choose(const std::vector<std::string>& names) {
  std::vector<contestant> all = training::contestants();
  if (names.empty()) return all;
  const auto named = [&](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const std::string& name : names)
    TORCH_CHECK(
        std::any_of(all.begin(), all.end(), [&](const contestant& c) { return c.name == name; }),
        "there is no optimizer '", name, "'");
  std::vector<contestant> chosen;
  for (const contestant& who : all)
    if (named(who.name) || std::any_of(all.begin(), all.end(), [&](const contestant& c) {
          return named(c.name) && c.reference == who.name;
        }))
      chosen.push_back(who);
  return chosen;
}

/// All runs of a task, as many at a time as there are threads. The order in which they end decides
/// nothing.
training::outcomes run_all(const training::task& what, const std::vector<contestant>& field,
                           const arguments& given) {
  training::outcomes results;
  for (const contestant& who : field)
    results[who.name].resize(static_cast<std::size_t>(given.seeds));
  const std::size_t runs = field.size() * static_cast<std::size_t>(given.seeds);
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    torch::set_num_threads(1);
    for (std::size_t i = next++; i < runs; i = next++) try {
        const contestant& who = field[i % field.size()];
        const std::size_t seed = i / field.size();
        const auto begin = std::chrono::steady_clock::now();
        const training::outcome ended = what.run(who, static_cast<std::int64_t>(seed) + 1);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        const std::lock_guard lock(mutex);
        results.at(who.name)[seed] = ended;
        std::cerr << what.name() << ", " << who.name << ", seed " << seed + 1 << ": training loss "
                  << ended.training << ", validation loss " << ended.validation << ", "
                  << text::fixed(took.count(), 1) << " s\n";
      } catch (...) {
        const std::lock_guard lock(mutex);
        error = std::current_exception();
        next = runs;
      }
  };
  std::vector<std::thread> threads;
  for (std::int64_t i = 0; i < given.threads; ++i) threads.emplace_back(work);
  for (std::thread& t : threads) t.join();
  if (error) std::rethrow_exception(error);
  return results;
}

void report(const training::task& what, const std::vector<contestant>& field,
            const training::outcomes& runs, const arguments& given) {
  std::cout << '\n' << what.description() << "; seeds 1 to " << given.seeds << '\n';
  for (const auto& [title, loss] : {std::pair("training", &training::outcome::training),
                                    std::pair("validation", &training::outcome::validation)})
    std::cout << '\n' << title << " loss\n" << compare(runs, field, loss);
  std::cout << std::flush;
}

/// Prints what is wrong and returns whether nothing is.
bool check(const training::task& what, const std::vector<contestant>& field,
           const training::outcomes& runs, double granted) {
  bool right = true;
  for (const contestant& who : field)
    for (std::size_t i = 0; i < runs.at(who.name).size(); ++i) {
      const std::string fault =
          find_fault(who, runs.at(who.name)[i], runs.at(who.reference)[i], granted);
      if (fault.empty()) continue;
      std::cout << "FAULT: " << what.name() << ", " << who.name << ", seed " << i + 1 << ": "
                << fault << '\n';
      right = false;
    }
  return right;
}

int run(const arguments& given) {
  const std::vector<contestant> field = choose(given.optimizers);
  bool right = true;
  for (const std::string& name : given.tasks) {
    const auto what = make_task(name, given.steps);
    const training::outcomes runs = run_all(*what, field, given);
    report(*what, field, runs, given);
    right &= check(*what, field, runs, given.check ? what->short_tolerance() : HUGE_VAL);
  }
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
  return run(parse({argv + 1, argv + argc}));
} catch (const std::exception& e) {
  std::cerr << "training_bench: " << e.what() << '\n' << usage;
  return 2;
}
