// Races: ways to step tensors take turns in one process, sample by sample, and each is judged by
// its fastest one. Machines are shared and noisy, so absolute times say little: what interrupts a
// race hits all alike, and the ratio of two minima repeats where neither of them does.
//
// Every contestant has tensors of its own. On shared ones whoever comes second finds in the cache
// what the first has brought there, and no order of turns is fair to all.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace bench {

using shape = std::vector<std::int64_t>;
using torch::Tensor;

inline std::int64_t elements_of(const std::vector<shape>& shapes) {
  std::int64_t sum = 0;
  for (const shape& s : shapes) sum += c10::multiply_integers(s);
  return sum;
}

/// What a step has to move, in bytes per parameter: reads and writes the parameter and the state,
/// reads the gradient once or more often.
struct streams {
  int p = 4, g = 4;
  std::vector<int> state;  ///< one number per array
  int reads_of_g = 1;

  int state_bytes() const {
    int sum = 0;
    for (const int bytes : state) sum += bytes;
    return sum;
  }
  int traffic() const { return 2 * p + reads_of_g * g + 2 * state_bytes(); }
  int footprint() const { return p + g + state_bytes(); }
};

/// What is stepped together in one sample.
struct window {
  std::vector<Tensor> parameters, gradients;
};

/// One way to step windows, with state of its own.
class contestant {
 public:
  virtual ~contestant() = default;
  virtual void step(std::size_t window) = 0;
  virtual std::int64_t state_bytes() const = 0;
};

struct entry {
  std::string name;
  at::ScalarType type;
  streams moves;
  std::function<std::unique_ptr<contestant>(const std::vector<window>&)> enter;
};

struct result {
  double seconds = std::numeric_limits<double>::infinity();  ///< the fastest step of one window
  double state_bytes = 0;                                    ///< per parameter
};

struct problem {
  std::string name;
  std::vector<shape> shapes;  ///< of the tensors of a window
  /// Whether samples go through so many windows that each finds nothing of its own in the cache.
  bool cold = false;

  double elements() const { return double(elements_of(shapes)); }
};

namespace detail {

inline double wall_clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
/// What this thread has computed, without the time that other programs took from it.
inline double thread_clock() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

}  // namespace detail

/// Parameters of these shapes with gradients.
inline window make_window(const std::vector<shape>& shapes, at::ScalarType type,
                          at::Device device) {
  window w;
  for (const shape& s : shapes) {
    w.parameters.push_back(torch::randn(s, device).mul_(0.02).to(type).requires_grad_());
    w.gradients.push_back(torch::randn(s, device).mul_(1e-3).to(type));
    w.parameters.back().mutable_grad() = w.gradients.back();
  }
  return w;
}

/// Seconds that `f` takes: this thread's own with one thread, else those of the wall.
template <class F>
double seconds_of(int threads, F f) {
  const auto clock = threads == 1 ? detail::thread_clock : detail::wall_clock;
  const double begin = clock();
  f();
  return clock() - begin;
}

/// Seconds of a device, not the CPU, from where it would begin to work until the work of `f` is
/// done.
template <class F>
double seconds_on(at::Device device, F f) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  c10::Event begin(device.type(), c10::EventFlag::BACKEND_DEFAULT),
      end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  begin.record(stream);
  f();
  end.record(stream);
  end.synchronize();
  return begin.elapsedTime(end) * 1e-3;
}

struct race_rules {
  int threads = 1;
  double seconds = 2;                     ///< how long all take turns
  double bytes = double(1ull << 30) * 4;  ///< what all windows of a cold problem take together
  at::Device device = at::kCPU;
  double shortest = 5e-4;                  ///< seconds of a sample: well above the clock's cost
  static constexpr int fewest_rounds = 8;  ///< however long they take
  static constexpr int most_windows = 64;  ///< of a contestant
};

/// A result per entry. Parameters, gradients and state live as long as the call.
inline std::vector<result> run_race(const problem& what, const std::vector<entry>& entries,
                                    const race_rules& rules) {
  at::set_num_threads(rules.threads);
  torch::manual_seed(1);
  double footprint = 0;
  for (const entry& e : entries) footprint += e.moves.footprint() * what.elements();
  const int windows =
      what.cold
          ? int(std::clamp(std::ceil(rules.bytes / footprint), 2.0, double(rules.most_windows)))
          : 1;

  struct runner {
    std::unique_ptr<contestant> one;
    int repeats = 1;
  };
  std::vector<runner> field;
  std::vector<result> results;
  const auto sample = [&](runner& r, int w, int repeats) {
    const auto steps = [&] {
      for (int i = 0; i < repeats; ++i) r.one->step(std::size_t(w));
    };
    return (rules.device.is_cpu() ? seconds_of(rules.threads, steps)
                                  : seconds_on(rules.device, steps)) /
           repeats;
  };
  for (const entry& e : entries) {
    std::vector<window> own;
    for (int w = 0; w < windows; ++w) own.push_back(make_window(what.shapes, e.type, rules.device));
    runner r{e.enter(own)};
    for (int w = 0; w < windows; ++w) sample(r, w, 1);  // the first step makes the state
    double once = sample(r, 0, 1);
    for (int i = 0; i < 4 && once < rules.shortest; ++i) once = std::min(once, sample(r, 0, 1));
    if (!what.cold) r.repeats = int(std::max(1.0, rules.shortest / once));
    results.emplace_back().state_bytes = double(r.one->state_bytes()) / (what.elements() * windows);
    field.push_back(std::move(r));
  }

  const auto turn = [&](std::size_t i, int round) {
    const int w = round % windows;
    // Its memory into the cache, and its branches too: else who takes two turns in a row, as the
    // first and the last do, would be alone to find them there.
    if (!what.cold) sample(field[i], w, field[i].repeats);
    results[i].seconds = std::min(results[i].seconds, sample(field[i], w, field[i].repeats));
  };
  const double end = detail::wall_clock() + rules.seconds;
  for (int round = 0; round < rules.fewest_rounds || detail::wall_clock() < end; ++round)
    for (std::size_t i = 0; i < field.size(); ++i)  // back and forth, so that none always follows
      turn(round % 2 ? field.size() - 1 - i : i, round);
  return results;
}

}  // namespace bench
