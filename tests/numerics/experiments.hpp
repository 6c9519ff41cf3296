// Experiments with the moments of Adam, through the classes: gradients under which formats of few
// bits have gone wrong, each as a function template of the format that returns one number. Truth is
// a restatement in double.
#pragma once

#include <leanopt/leanopt.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace numerics {

using torch::Tensor;
namespace formats = leanopt::formats;

/// log8 as it would be without stochastic rounding.
struct log8_nearest : formats::log8 {
  static constexpr const char* name = "log8/nearest";
  template <class>
  static constexpr bool packs = false;

  template <leanopt::values Range, class V>
  LEANOPT_HD static leanopt::ints<V> encode(const scale& s, const V& x, const leanopt::ints<V>&) {
    return formats::log8::encode<Range, V>(s, x, leanopt::ints<V>(0x80000000u));
  }
};

struct settings {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
};

/// Standard normal numbers of a fixed seed (Box and Muller 1958): each step takes its own from a
/// ring of them.
class noise {
 public:
  static const float* at_step(int t) {
    static const noise all;
    return all.numbers_.data() + std::size_t(t) * stride % period;
  }
  static constexpr std::size_t most = 10'000;  ///< numbers of a step

 private:
  static constexpr std::size_t period = 1048573, stride = 40961;  // primes
  noise() : numbers_(period + most) {
    std::uint64_t state = 1;
    const auto uniform = [&] {
      state = leanopt::mix(state);
      return (double(state >> 11) + 0.5) * 0x1p-53;
    };
    for (std::size_t i = 0; i < period; ++i) {
      const double radius = std::sqrt(-2 * std::log(uniform())), angle = 2 * M_PI * uniform();
      numbers_[i] = float(radius * std::cos(angle));
    }
    std::copy_n(numbers_.begin(), most, numbers_.begin() + period);
  }
  std::vector<float> numbers_;
};

/// Adam in double precision.
class reference {
 public:
  std::vector<double> m, v;

  reference(std::size_t n, const settings& s) : m(n), v(n), s_(s) {}
  void step(const std::vector<float>& g) {
    power1_ *= s_.beta1;
    power2_ *= s_.beta2;
    for (std::size_t i = 0; i < m.size(); ++i) {
      const double x = g[i];
      m[i] += (1 - s_.beta1) * (x - m[i]);
      v[i] += (1 - s_.beta2) * (x * x - v[i]);
    }
  }
  /// By how much a rate of 1 has moved element i.
  double move(std::size_t i) const {
    return -m[i] / (1 - power1_) / (std::sqrt(v[i] / (1 - power2_)) + s_.eps);
  }

 private:
  settings s_;
  double power1_ = 1, power2_ = 1;
};

/// AdamW with its moments in a format, on one parameter, at a rate of 1.
template <class Format>
class subject {
  using optimizer = leanopt::basic_adamw<Format>;

 public:
  std::vector<float> g;

  explicit subject(std::int64_t n, const settings& s = {})
      : subject(std::vector<std::int64_t>{n}, s) {}
  subject(const std::vector<std::int64_t>& sizes, const settings& s)
      : p_(torch::zeros(sizes).set_requires_grad(true)), optimizer_({p_}, options(s)) {
    g.resize(std::size_t(p_.numel()));
    p_.mutable_grad() = torch::from_blob(g.data(), p_.sizes());
  }
  /// A step with the gradient g; gives by how much it has moved each element, from 0.
  const float* step() {
    std::fill_n(p_.data_ptr<float>(), p_.numel(), 0.0f);
    optimizer_.step();
    return p_.data_ptr<float>();
  }
  std::vector<float> second_moment() const {
    const Tensor v = leanopt::slot(optimizer_, p_, "exp_avg_sq");
    return {v.data_ptr<float>(), v.data_ptr<float>() + v.numel()};
  }

 private:
  static auto options(const settings& s) {
    auto o = typename optimizer::Options(1);
    o.betas({s.beta1, s.beta2}).eps(s.eps).weight_decay(0);
    if constexpr (Format::compressed) o.min_compressed_elements(1);
    return o;
  }
  Tensor p_;
  optimizer optimizer_;
};

/// Of two ratios the one that is farther from 1; whatever is no ratio is farther than any other.
inline double farther(double a, double b) {
  const auto distance = [](double x) { return x > 0 ? std::abs(std::log(x)) : HUGE_VAL; };
  return distance(b) > distance(a) ? b : a;
}

constexpr int block = 256;

/// One block: the first gradient is 1 and -1 by turns, the others are `small`.
inline void fill_beside_large(std::vector<float>& g, int step, float small) {
  std::fill(g.begin(), g.end(), small);
  g[0] = step % 2 ? 1.0f : -1.0f;
}

// The gradient changes beside one that stays large: how far the second moment has followed after
// 5000 steps, on average over the block, relative to the truth.
template <class Format>
double tracking(float before, float after) {
  const int steps = 5000;
  subject<Format> format(block);
  reference truth(block, {});
  for (int t = 1; t <= 2 * steps; ++t) {
    fill_beside_large(format.g, t, t <= steps ? before : after);
    format.step();
    truth.step(format.g);
  }
  const auto v = format.second_moment();
  double sum = 0;
  for (int i = 1; i < block; ++i) sum += v[i];
  return sum / (block - 1) / truth.v[1];
}
template <class Format>
double shrinking() {
  return tracking<Format>(0.5f, 0.1f);
}
template <class Format>
double growing() {
  return tracking<Format>(0.1f, 0.2f);
}

// A small constant gradient beside a large one: the step after 2000 of them and the next one, whose
// gradient is 0, of the worst element, relative to the truth.
template <class Format>
double beside_large(float small) {
  subject<Format> format(block);
  reference truth(block, {});
  double worst = 1;
  for (int t = 1; t <= 2001; ++t) {
    fill_beside_large(format.g, t, t <= 2000 ? small : 0.0f);
    const float* move = format.step();
    truth.step(format.g);
    if (t < 2000) continue;
    for (int i = 1; i < block; ++i) worst = farther(worst, move[i] / truth.move(i));
  }
  return worst;
}
template <class Format>
double medium_beside_large() {
  return beside_large<Format>(1e-3f);
}
template <class Format>
double small_beside_large() {
  return beside_large<Format>(2e-4f);
}

/// What scales element i where a block spans four decades.
inline float decade_of(std::size_t i) {
  static constexpr float scales[] = {1, 1e-1f, 1e-2f, 1e-3f, 1e-4f};
  return scales[i % 5];
}

// Noise over four decades in each block: the root mean square of the steps, relative to the truth,
// of the worst decade.
template <class Format>
double noise_over_decades() {
  const std::size_t n = 16 * block;
  subject<Format> format(n);
  reference truth(n, {});
  double squares[5] = {}, true_squares[5] = {};
  for (int t = 1; t <= 3000; ++t) {
    const float* z = noise::at_step(t);
    for (std::size_t i = 0; i < n; ++i) format.g[i] = z[i] * decade_of(i);
    const float* move = format.step();
    truth.step(format.g);
    if (t <= 1000) continue;
    for (std::size_t i = 0; i < n; ++i) {
      squares[i % 5] += std::pow(move[i], 2);
      true_squares[i % 5] += std::pow(truth.move(i), 2);
    }
  }
  double worst = 1;
  for (int k = 0; k < 5; ++k) worst = farther(worst, std::sqrt(squares[k] / true_squares[k]));
  return worst;
}

// A small gradient beside a large one, once, and then none: the second step of the small one.
template <class Format>
double step_after_a_spike() {
  subject<Format> format(4096);
  format.g[0] = 1;
  format.g[1] = 3e-4f;
  format.step();
  std::fill(format.g.begin(), format.g.end(), 0.0f);
  return std::abs(double(format.step()[1]));
}

/// The setting of programs that train splats: rows of tiny numbers over four decades, of which one
/// in twenty has a gradient in a step and some never have, and an eps that guards nothing.
struct sparse_rows {
  double largest = 0;    ///< the largest move, relative to the largest true one
  double untouched = 0;  ///< the largest move of a row that never had a gradient
};
template <class Format>
sparse_rows splats() {
  const std::size_t rows = 1000, width = 10, n = rows * width;
  const settings s{0.9, 0.999, 1e-15};
  subject<Format> format({std::int64_t(rows), std::int64_t(width)}, s);
  reference truth(n, s);
  const auto is_touched = [](std::size_t row) { return row % 4 != 3; };
  sparse_rows result;
  double largest = 0;
  for (int t = 1; t <= 1000; ++t) {
    const float* z = noise::at_step(t);
    for (std::size_t r = 0; r < rows; ++r) {
      const bool seen = is_touched(r) && leanopt::mix(std::uint64_t(t) * rows + r) % 15 == 0;
      for (std::size_t i = r * width; i < (r + 1) * width; ++i)
        format.g[i] = seen ? 1e-6f * z[i] * decade_of(i) : 0.0f;
    }
    const float* move = format.step();
    truth.step(format.g);
    for (std::size_t i = 0; i < n; ++i) {
      const double moved = std::isfinite(move[i]) ? std::abs(move[i]) : HUGE_VAL;
      double& most = is_touched(i / width) ? result.largest : result.untouched;
      most = std::max(most, moved);
      if (truth.v[i] > 0) largest = std::max(largest, std::abs(truth.move(i)));
    }
  }
  result.largest /= largest;
  return result;
}

// Runs of 100,000 steps with gradients over three decades in each block.

constexpr int long_run = 100'000;
inline std::vector<float> three_decades(std::size_t n) {
  std::vector<float> result(n);
  for (std::size_t i = 0; i < n; ++i)
    result[i] = float(std::pow(10.0, -3.0 * double(i % block) / (block - 1)));
  return result;
}

/// Sums of an element's second moment, of ours and of the true one.
class second_moments {
 public:
  explicit second_moments(std::size_t n) : ours_(n), true_(n) {}
  void add(const std::vector<float>& ours, const std::vector<double>& truth) {
    for (std::size_t i = 0; i < ours_.size(); ++i) {
      ours_[i] += ours[i];
      true_[i] += truth[i];
    }
  }
  /// By what part of itself ours is too large, on average over the elements.
  double bias() const {
    double sum = 0;
    for (std::size_t i = 0; i < ours_.size(); ++i) sum += ours_[i] / true_[i] - 1;
    return sum / double(ours_.size());
  }

 private:
  std::vector<double> ours_, true_;
};

struct drift {
  double of_moment;     ///< mean bias of the second moment
  double of_parameter;  ///< difference from the truth, as a part of it
};

/// Constant gradients: how far each parameter has come in the end, of the worst element.
template <class Format>
drift under_constant_gradients(double beta2, std::size_t n) {
  const settings s{0.9, beta2, 1e-8};
  subject<Format> format(std::int64_t(n), s);
  reference truth(n, s);
  second_moments moments(n);
  std::vector<double> moved(n);
  const auto size = three_decades(n);
  for (std::size_t i = 0; i < n; ++i) format.g[i] = i % 2 ? size[i] : -size[i];
  for (int t = 1; t <= long_run; ++t) {
    const float* move = format.step();
    truth.step(format.g);
    for (std::size_t i = 0; i < n; ++i) moved[i] += move[i];
    if (t > long_run / 10 && t % 100 == 0) moments.add(format.second_moment(), truth.v);
  }
  double worst = 0;
  for (std::size_t i = 0; i < n; ++i)  // each true move is 1, from the first step on
    worst = std::max(worst, std::abs(std::abs(moved[i]) / long_run - 1));
  return {moments.bias(), worst};
}

/// Gaussian gradients: the slope of all moves over the true ones, less 1.
template <class Format>
drift under_noise(double beta2, std::size_t n) {
  const settings s{0.9, beta2, 1e-8};
  subject<Format> format(std::int64_t(n), s);
  reference truth(n, s);
  second_moments moments(n);
  const auto sigma = three_decades(n);
  double products = 0, squares = 0;
  for (int t = 1; t <= long_run; ++t) {
    const float* z = noise::at_step(t);
    for (std::size_t i = 0; i < n; ++i) format.g[i] = sigma[i] * z[i];
    const float* move = format.step();
    truth.step(format.g);
    if (t <= long_run / 10 || t % 100) continue;
    moments.add(format.second_moment(), truth.v);
    for (std::size_t i = 0; i < n; ++i) {
      products += move[i] * truth.move(i);
      squares += std::pow(truth.move(i), 2);
    }
  }
  return {moments.bias(), products / squares - 1};
}

}  // namespace numerics
