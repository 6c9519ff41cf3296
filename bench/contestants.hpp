// Who takes part in races: any optimizer class, LibTorch's fused kernel, Adafactor written with
// LibTorch's operators, and loops that only move the bytes of a step.
#pragma once

#include <leanopt/leanopt.hpp>

#include "bench/race.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace bench {

/// How AdamW is run here, in all its forms.
struct adamw_settings {
  static constexpr double lr = 1e-4, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;

  template <class Options>
  static Options options() {
    Options o(lr);
    o.betas({beta1, beta2});
    o.eps(eps);
    o.weight_decay(weight_decay);
    return o;
  }
};

/// An optimizer class of ours or LibTorch's, one object per window.
template <class Optimizer>
class any_optimizer : public contestant {
 public:
  any_optimizer(const std::vector<window>& windows, const leanopt::options_of<Optimizer>& options) {
    for (const window& w : windows)
      optimizers_.push_back(std::make_unique<Optimizer>(w.parameters, options));
  }
  void step(std::size_t window) override { optimizers_[window]->step(); }
  std::int64_t state_bytes() const override {
    double megabytes = 0;
    for (const auto& o : optimizers_) megabytes += leanopt::compute_optimizer_size(*o).megabytes;
    return std::llround(megabytes * (1 << 20));
  }

 protected:
  std::vector<std::unique_ptr<Optimizer>> optimizers_;
};
/// The same where each step multiplies the gradients by a scalar, as one that clips them does.
template <class Optimizer>
class clipping_optimizer : public any_optimizer<Optimizer> {
 public:
  using any_optimizer<Optimizer>::any_optimizer;
  void step(std::size_t window) override {
    this->optimizers_[window]->set_step_scalars({{}, {}, clip_});
    any_optimizer<Optimizer>::step(window);
  }

 private:
  const Tensor clip_ = torch::full({}, 0.5f);
};

/// The kernel behind Python's AdamW(fused=True), one call over all tensors of a window. Its lists
/// are ready made: a step in Python also collects them and counts, so no program does better.
class fused_adamw : public contestant {
 public:
  explicit fused_adamw(const std::vector<window>& windows) {
    for (const window& w : windows) {
      auto& l = lists_.emplace_back(lists{w.parameters, w.gradients, {}, {}, {}});
      for (const Tensor& p : w.parameters) {
        l.exp_avgs.push_back(torch::zeros_like(p, p.options().requires_grad(false)));
        l.exp_avg_sqs.push_back(l.exp_avgs.back().clone());
        l.steps.push_back(torch::full({}, 100.0f, at::TensorOptions(p.device())));
      }
    }
  }
  void step(std::size_t window) override {
    using s = adamw_settings;
    const at::NoGradGuard no_grad;
    lists& l = lists_[window];
    at::_fused_adamw_(l.parameters, l.gradients, l.exp_avgs, l.exp_avg_sqs, {}, l.steps, s::lr,
                      s::beta1, s::beta2, s::weight_decay, s::eps, /*amsgrad=*/false,
                      /*maximize=*/false);
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

/// torch.optim.Adafactor's for-loop in LibTorch's operators, operator for operator: what a C++
/// program had to write before.
class adafactor_of_operators : public contestant {
 public:
  explicit adafactor_of_operators(const std::vector<window>& windows) {
    for (const window& w : windows) {
      auto& all = tensors_.emplace_back();
      for (const Tensor& p : w.parameters) all.push_back(make(p.detach(), p.grad()));
    }
  }
  void step(std::size_t window) override {
    const at::NoGradGuard no_grad;
    for (one& t : tensors_[window]) step(t);
  }
  std::int64_t state_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& all : tensors_)
      for (const one& t : all)
        for (const Tensor* x : {&t.row, &t.column, &t.variance})
          if (x->defined()) bytes += std::int64_t(x->nbytes());
    return bytes;
  }

 private:
  struct one {
    Tensor p, g, row, column, variance;
    std::int64_t step = 0;
  };
  static one make(const Tensor& p, const Tensor& g) {
    one t{p, g, {}, {}, {}};
    if (p.dim() < 2) {
      t.variance = torch::zeros_like(g);
      return t;
    }
    auto rows = p.sizes().vec(), columns = rows;
    rows[rows.size() - 1] = columns[columns.size() - 2] = 1;
    t.row = torch::zeros(rows, g.options());
    t.column = torch::zeros(columns, g.options());
    return t;
  }
  static void step(one& t) {
    constexpr double lr = 1e-2, eps2 = 1e-3, d = 1;
    const double eps1 = t.p.scalar_type() == at::kDouble ? 0x1p-52 : 0x1p-23;
    const auto root = std::sqrt(double(t.p.numel()));
    const double weight = std::pow(double(++t.step), -0.8);
    const double rho = std::min(lr, 1 / std::sqrt(double(t.step)));
    const double alpha = std::max(eps2, t.p.norm(2).item<double>() / root) * rho;
    Tensor update;
    if (t.row.defined()) {
      const auto mean_of_squares = [&](std::int64_t dim) {
        return at::norm(t.g, 2, {dim}, /*keepdim=*/true).square_().div_(t.g.size(dim));
      };
      t.row.lerp_(mean_of_squares(-1), weight);
      t.column.lerp_(mean_of_squares(-2), weight);
      update = t.row.matmul(t.column).div_(t.row.mean({-2}, /*keepdim=*/true).clamp_(eps1));
    } else {
      t.variance.lerp_(t.g * t.g, weight);
      update = t.variance.clone();
    }
    update.clamp_(eps1 * eps1).rsqrt_().mul_(t.g);
    const double denominator = std::max(1.0, update.norm(2).item<double>() / (root * d));
    t.p.add_(update, -alpha / denominator);
  }
  std::vector<std::vector<one>> tensors_;
};

namespace detail {

/// 32 bytes of anything: wider ones g++ takes apart into words where no register is as wide.
using line = std::uint64_t __attribute__((vector_size(32), aligned(1), may_alias));

/// One array of a moving loop: so many lines for each block of 256 parameters.
struct moved {
  line* data;
  std::size_t lines;
  bool written;
};
struct move_blocks {
  template <int Width>
  LEANOPT_INLINE static std::uint64_t run(const std::vector<moved>& arrays, std::size_t first,
                                          std::size_t last) {
    line all = {};
    for (std::size_t block = first; block < last; ++block)
      for (const moved& x : arrays) {
        line* const at = x.data + block * x.lines;
        if (x.written) {
#pragma GCC unroll 4
          for (std::size_t i = 0; i < x.lines; ++i) at[i] ^= all;
        } else {
#pragma GCC unroll 4
          for (std::size_t i = 0; i < x.lines; ++i) all ^= at[i];
        }
      }
    return all[0];
  }
};

}  // namespace detail

/// Moves the bytes of a step, in blocks and by threads as leanopt's engine does, and computes next
/// to nothing: the step's floor. A last block that is short is left out.
class moving_loop : public contestant {
 public:
  moving_loop(const std::vector<window>& windows, const streams& s) {
    for (const window& w : windows) {
      auto& all = tensors_.emplace_back();
      for (const Tensor& p : w.parameters) {
        one t{p.numel(), {{p, s.p}, {p.grad(), s.g}}};
        for (const int bytes : s.state)
          t.arrays.emplace_back(torch::zeros({p.numel() * bytes}, at::kByte), bytes);
        all.push_back(std::move(t));
      }
    }
    reads_of_g_ = s.reads_of_g;
  }
  void step(std::size_t window) override {
    for (const one& t : tensors_[window]) {
      const auto array = [&](std::size_t k) {
        const auto& [tensor, bytes] = t.arrays[k];
        return detail::moved{static_cast<detail::line*>(tensor.data_ptr()), std::size_t(8 * bytes),
                             k != 1};
      };
      const std::vector<detail::moved> gradient = {array(1)};
      for (int i = 1; i < reads_of_g_; ++i) move(t.elements, gradient);
      std::vector<detail::moved> all = {array(1), array(0)};
      for (std::size_t k = 2; k < t.arrays.size(); ++k) all.push_back(array(k));
      move(t.elements, all);
    }
  }
  std::int64_t state_bytes() const override { return 0; }

 private:
  struct one {
    std::int64_t elements;
    std::vector<std::pair<Tensor, int>> arrays;  ///< parameter, gradient, state: bytes per element
  };
  void move(std::int64_t elements, const std::vector<detail::moved>& arrays) {
    constexpr std::size_t block = 256, together = 16;
    const std::size_t blocks = std::size_t(elements) / block;
    leanopt::engine::for_units(
        (blocks + together - 1) / together, 4, [&](std::size_t begin, std::size_t end) {
          const std::uint64_t sum =
              leanopt::cpu::detail::launch<detail::move_blocks, leanopt::cpu::level::avx512>(
                  leanopt::engine::level_from_environment(), arrays, begin * together,
                  std::min(blocks, end * together));
          asm volatile("" : : "r"(sum));  // or else passes that only read were left out
        });
  }
  std::vector<std::vector<one>> tensors_;
  int reads_of_g_ = 1;
};

template <class Optimizer, template <class> class Contestant = any_optimizer>
entry optimizer_entry(std::string name, at::ScalarType type, streams moves,
                      leanopt::options_of<Optimizer> options) {
  return {std::move(name), type, std::move(moves), [options](const std::vector<window>& windows) {
            return std::make_unique<Contestant<Optimizer>>(windows, options);
          }};
}
template <class Optimizer, template <class> class Contestant = any_optimizer>
entry adamw_entry(std::string name, at::ScalarType type, streams moves) {
  return optimizer_entry<Optimizer, Contestant>(
      std::move(name), type, std::move(moves),
      adamw_settings::options<leanopt::options_of<Optimizer>>());
}
template <class Contestant>
entry plain_entry(std::string name, at::ScalarType type, streams moves) {
  return {std::move(name), type, std::move(moves),
          [](const std::vector<window>& windows) { return std::make_unique<Contestant>(windows); }};
}
/// The loop that moves what `e` has to move.
inline entry moving_entry(const entry& e) {
  const streams& m = e.moves;
  std::string name = "moving_" + std::to_string(m.traffic()) + "_bytes_" +
                     std::to_string(2 + m.state.size()) + "_arrays";
  if (m.reads_of_g > 1) name += "_" + std::to_string(m.reads_of_g) + "_passes";
  return {std::move(name), e.type, m, [m](const std::vector<window>& windows) {
            return std::make_unique<moving_loop>(windows, m);
          }};
}

/// Copies as many bytes as a step reads and writes, by the operator of the tensors' device.
class copying : public contestant {
 public:
  copying(const std::vector<window>& windows, const streams& s) {
    for (const window& w : windows) {
      std::int64_t elements = 0;
      for (const Tensor& p : w.parameters) elements += p.numel();
      const auto options = w.parameters.front().options().dtype(at::kByte).requires_grad(false);
      const Tensor from = torch::zeros({elements * s.traffic() / 2}, options);
      arrays_.emplace_back(from, torch::zeros_like(from));
    }
  }
  void step(std::size_t window) override { arrays_[window].second.copy_(arrays_[window].first); }
  std::int64_t state_bytes() const override { return 0; }

 private:
  std::vector<std::pair<Tensor, Tensor>> arrays_;
};
/// The copy of what `e` has to move.
inline entry copying_entry(const entry& e) {
  const streams& m = e.moves;
  return {
      "copying_" + std::to_string(m.traffic()) + "_bytes", e.type, m,
      [m](const std::vector<window>& windows) { return std::make_unique<copying>(windows, m); }};
}

/// Bytes per second that memcpy moves between arrays far larger than any cache, read and written
/// bytes added. A step may move more of them: it writes where it has read, while most processors
/// also read what a copy is going to overwrite.
inline double copy_speed(int threads) {
  constexpr std::size_t total = std::size_t(512) << 20, piece = std::size_t(4) << 20,
                        unit = std::size_t(16) << 10;
  at::set_num_threads(threads);
  const Tensor from = torch::ones({std::int64_t(total)}, at::kByte), to = torch::zeros_like(from);
  const char* const source = static_cast<const char*>(from.data_ptr());
  char* const target = static_cast<char*>(to.data_ptr());
  double best = std::numeric_limits<double>::infinity();
  for (int round = 0; round < 3; ++round)
    for (std::size_t at = 0; at < total; at += piece)
      best = std::min(best, seconds_of(threads, [&] {
                        leanopt::engine::for_units(
                            piece / unit, 4, [&](std::size_t begin, std::size_t end) {
                              for (std::size_t u = begin; u < end; ++u)
                                std::memcpy(target + at + u * unit, source + at + u * unit, unit);
                            });
                      }));
  return 2 * double(piece) / best;
}

}  // namespace bench
