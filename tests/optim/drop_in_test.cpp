// A program that was written for LibTorch's Adam or AdamW keeps its meaning when the type is
// replaced. Each case is a shape that real training programs have, written once for any class; it
// is run with LibTorch's class and with ours, in float32 and float64, and must end with the same
// numbers.
#include "tests/optim/support.hpp"

#include <c10/util/tempfile.h>

#include <sstream>

namespace {

using namespace front_test;

/// The names that a program spells out, of LibTorch or of leanopt.
template <class Optimizer, class Options, class State>
struct names {
  using optimizer = Optimizer;
  using options = Options;
  using state = State;
};
template <class Stock, class Ours>
struct swap {
  using stock = Stock;
  using ours = Ours;
};
using adam_swap = swap<names<stock::Adam, stock::AdamOptions, stock::AdamParamState>,
                       names<leanopt::Adam, leanopt::AdamOptions, leanopt::AdamParamState>>;
using adamw_swap = swap<names<stock::AdamW, stock::AdamWOptions, stock::AdamWParamState>,
                        names<leanopt::AdamW, leanopt::AdamWOptions, leanopt::AdamWParamState>>;

using outcome = std::vector<Tensor>;

template <class Swap>
class drop_in : public ::testing::Test {
 protected:
  /// `shape(names, type)` gives the numbers with which the program ends.
  template <class Shape>
  void compare(Shape shape) {
    for (const torch::Dtype type : {torch::kFloat32, torch::kFloat64}) {
      const outcome expected = shape(typename Swap::stock{}, type);
      const outcome actual = shape(typename Swap::ours{}, type);
      ASSERT_FALSE(expected.empty());
      ASSERT_EQ(actual.size(), expected.size()) << type;
      for (std::size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(agrees(actual[i], expected[i], adam_tolerance(type)))
            << type << ", result " << i;
    }
  }
};
using swaps = ::testing::Types<adam_swap, adamw_swap>;
struct swap_names {
  template <class Swap>
  static std::string GetName(int) {
    return std::is_same_v<Swap, adam_swap> ? "adam" : "adamw";
  }
};
TYPED_TEST_SUITE(drop_in, swaps, swap_names);

/// A layer whose weights are the fixed pattern.
torch::nn::Linear make_layer(torch::Dtype type) {
  torch::nn::Linear layer(4, 3);
  layer->to(type);
  const torch::NoGradGuard no_grad;
  layer->weight.copy_(pattern({3, 4}, type, 1));
  layer->bias.copy_(pattern({3}, type, 2));
  return layer;
}

/// A loss with its minimum at 3, far from the parameters: its gradient keeps all its digits.
Tensor loss_of(const std::vector<Tensor>& params) {
  Tensor loss = torch::zeros({}, params.at(0).options().requires_grad(false));
  for (const Tensor& p : params) loss = loss + (p - 3).square().sum();
  return loss;
}

void train(Optimizer& optimizer, const std::vector<Tensor>& params, int steps = 3) {
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    loss_of(params).backward();
    optimizer.step();
  }
}

Tensor number(double value) { return torch::tensor(value, torch::kFloat64); }
outcome values_of(const std::vector<Tensor>& params) {
  outcome result;
  for (const Tensor& p : params) result.push_back(p.detach().clone());
  return result;
}

// Construction

TYPED_TEST(drop_in, constructed_from_a_list_of_parameters) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Optimizer = typename N::optimizer;
    using Options = typename N::options;
    outcome result;
    const auto run = [&](auto make) {
      auto layer = make_layer(type);
      auto optimizer = make(layer->parameters());
      train(optimizer, layer->parameters());
      for (const Tensor& t : values_of(layer->parameters())) result.push_back(t);
    };
    run([](std::vector<Tensor> p) { return Optimizer(p); });
    run([](std::vector<Tensor> p) { return Optimizer(p, 1e-2); });
    run([](std::vector<Tensor> p) { return Optimizer(p, 0.01f); });
    run([](std::vector<Tensor> p) { return Optimizer(p, {}); });
    run([](std::vector<Tensor> p) { return Optimizer(p, {1e-2}); });
    run([](std::vector<Tensor> p) { return Optimizer(std::move(p), Options(1e-2)); });
    run([](std::vector<Tensor> p) {
      return Optimizer(p, Options(1e-2).betas({0.8, 0.95}).eps(1e-5));
    });
    return result;
  });
}

TYPED_TEST(drop_in, constructed_from_braces) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Optimizer = typename N::optimizer;
    using Options = typename N::options;
    Tensor w = leaf({2, 3}, type), b = leaf({3}, type, 5);
    {
      Optimizer optimizer({w}, 1e-2);
      train(optimizer, {w});
    }
    {
      Optimizer optimizer({w, b}, Options(1e-2));
      train(optimizer, {w, b});
    }
    {
      Optimizer optimizer({{w}, {b}}, Options(1e-2));  // two groups
      train(optimizer, {w, b});
      w.mutable_grad() = Tensor();
    }
    return values_of({w, b});
  });
}

TYPED_TEST(drop_in, held_by_pointers) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Optimizer = typename N::optimizer;
    using Options = typename N::options;
    auto layer = make_layer(type);
    const auto params = layer->parameters();
    std::unique_ptr<stock::Optimizer> by_base(new Optimizer(std::vector<Tensor>(), Options(1e-2)));
    by_base->add_param_group(params);
    train(*by_base, params);
    auto copied = Optimizer(params, Options(1e-2));
    train(copied, params);
    auto shared = std::make_shared<Optimizer>(Optimizer(params, Options(1e-2)));
    train(*shared, params);
    const auto make = [](auto list, auto options) {
      return std::make_shared<Optimizer>(list, options);
    };
    train(*make(params, Options(1e-2)), params);
    return values_of(params);
  });
}

template <class N>
class agent {
 public:
  explicit agent(torch::Dtype type)
      : layer_(make_layer(type)),
        optimizer_(layer_->parameters(), typename N::options(1e-2).eps(1e-5)) {}
  outcome learn() {
    train(optimizer_, layer_->parameters());
    return values_of(layer_->parameters());
  }

 private:
  torch::nn::Linear layer_;
  typename N::optimizer optimizer_;
};

TYPED_TEST(drop_in, a_member_of_a_class) {
  this->compare([](auto n, torch::Dtype type) { return agent<decltype(n)>(type).learn(); });
}

TYPED_TEST(drop_in, constructed_from_groups) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Options = typename N::options;
    outcome result;
    for (const bool moved : {false, true}) {
      auto layer = make_layer(type);
      std::vector<OptimizerParamGroup> list;
      list.emplace_back(std::vector<Tensor>{layer->weight},
                        std::make_unique<Options>(Options(2e-2).weight_decay(0.1)));
      list.push_back(OptimizerParamGroup({layer->bias}));
      typename N::optimizer optimizer = moved
                                            ? typename N::optimizer(std::move(list), Options(3e-2))
                                            : typename N::optimizer(list, Options(3e-2));
      train(optimizer, layer->parameters());
      for (const Tensor& t : values_of(layer->parameters())) result.push_back(t);
    }
    return result;
  });
}

// Options

TYPED_TEST(drop_in, options_set_in_every_way) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Options = typename N::options;
    auto chained = Options(1e-2).betas(std::make_tuple(0.8, 0.9)).eps(1e-6).weight_decay(0.1);
    Options named;
    named.lr(2e-2);
    named.betas() = {0.7, 0.95};
    named.amsgrad(true);
    named.weight_decay() = 0.2;
    const Options copy = named;
    outcome result;
    for (const Options& o : {chained, named, copy}) {
      Tensor w = leaf({5}, type);
      typename N::optimizer optimizer({w}, o);
      train(optimizer, {w});
      result.push_back(w.detach());
      result.push_back(number(o.lr() + o.eps() + o.weight_decay() + std::get<1>(o.betas())));
    }
    return result;
  });
}

TYPED_TEST(drop_in, options_changed_while_training) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Options = typename N::options;
    Tensor w = leaf({5}, type);
    typename N::optimizer optimizer({w}, Options(1e-2));
    outcome result;
    const auto record = [&] {
      train(optimizer, {w}, 2);
      result.push_back(w.detach().clone());
      result.push_back(number(optimizer.param_groups()[0].options().get_lr()));
      result.push_back(number(optimizer.defaults().get_lr()));
    };
    for (auto& g : optimizer.param_groups()) static_cast<Options&>(g.options()).lr(2e-2);
    record();
    for (auto& g : optimizer.param_groups())
      if (auto* o = dynamic_cast<Options*>(&g.options())) o->weight_decay(0.3).betas({0.8, 0.99});
    record();
    for (auto& g : optimizer.param_groups()) g.options().set_lr(g.options().get_lr() * 0.5);
    record();
    static_cast<Options&>(optimizer.defaults()).lr(0.9);  // later groups only
    record();
    dynamic_cast<Options&>(optimizer.defaults()).betas({0.5, 0.6});
    record();
    return result;
  });
}

TYPED_TEST(drop_in, options_owned_by_groups) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Options = typename N::options;
    Tensor w = leaf({5}, type), b = leaf({2}, type, 3);
    OptimizerParamGroup with({w}, std::make_unique<Options>(2e-2)), without({b});
    outcome result{number(with.has_options()), number(without.has_options())};
    without.set_options(std::make_unique<Options>(3e-2));
    typename N::optimizer optimizer({with, without}, Options(4e-2));
    train(optimizer, {w, b});
    result.push_back(number(optimizer.param_groups()[1].has_options()));
    for (const Tensor& t : values_of({w, b})) result.push_back(t);
    return result;
  });
}

// Groups

TYPED_TEST(drop_in, groups_added_while_training) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Options = typename N::options;
    Tensor a = leaf({5}, type), b = leaf({2}, type, 3), c = leaf({4}, type, 4);
    typename N::optimizer optimizer({a}, Options(1e-2));
    train(optimizer, {a});
    optimizer.add_param_group(std::vector<Tensor>{b});
    train(optimizer, {a, b});
    optimizer.add_param_group(OptimizerParamGroup({c}, std::make_unique<Options>(3e-2)));
    train(optimizer, {a, b, c});
    outcome result = values_of({a, b, c});
    result.push_back(number(double(optimizer.param_groups().size())));
    return result;
  });
}

TYPED_TEST(drop_in, parameters_replaced_and_appended) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Options = typename N::options;
    Tensor a = leaf({5}, type), b = leaf({2}, type, 3), c = leaf({4}, type, 4),
           d = leaf({1}, type, 5);
    typename N::optimizer optimizer({a}, Options(1e-2));
    train(optimizer, {a});
    auto& params = optimizer.param_groups()[0].params();
    params[0] = b;
    train(optimizer, {b});
    optimizer.param_groups()[0].params() = std::vector<Tensor>{c};
    train(optimizer, {c});
    params.push_back(d);
    train(optimizer, {c, d});
    return values_of({a, b, c, d});
  });
}

TYPED_TEST(drop_in, built_empty_and_filled_by_hand) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Options = typename N::options;
    typename N::optimizer optimizer(std::vector<Tensor>(), Options(1e-2).weight_decay(0.1));
    optimizer.step();
    Tensor a = leaf({5}, type), b = leaf({2}, type, 3), c = leaf({4}, type, 4);
    optimizer.param_groups()[0].params().push_back(a);
    optimizer.param_groups().push_back(OptimizerParamGroup({}, optimizer.defaults().clone()));
    optimizer.param_groups().back().params().push_back(b);
    train(optimizer, {a, b});
    std::vector<OptimizerParamGroup> copies = optimizer.param_groups();
    copies[1].params().push_back(c);
    copies[1].options().set_lr(5e-2);
    typename N::optimizer second(copies, Options(1e-2));
    train(second, {a, b, c});
    return values_of({a, b, c});
  });
}

TYPED_TEST(drop_in, frozen_and_unused_parameters) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Options = typename N::options;
    Tensor trained = leaf({5}, type), unused = leaf({2}, type, 3), frozen = pattern({4}, type, 4);
    typename N::optimizer optimizer({frozen, trained, unused}, Options(1e-2).weight_decay(0.5));
    train(optimizer, {trained});
    train(optimizer, {trained, unused});
    trained.set_requires_grad(false);
    train(optimizer, {unused});
    outcome result = values_of({trained, unused, frozen});
    result.push_back(number(double(optimizer.state().size())));
    return result;
  });
}

// The loop

TYPED_TEST(drop_in, steps_with_closures_and_both_ways_to_zero) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    Tensor a = leaf({5}, type);
    typename N::optimizer optimizer({a}, 1e-2);
    stock::Optimizer& base = optimizer;
    outcome result;
    const auto closure = [&] {
      optimizer.zero_grad();
      Tensor loss = loss_of({a});
      loss.backward();
      return loss;
    };
    result.push_back(optimizer.step(closure).detach());
    result.push_back(base.step(closure).detach());
    result.push_back(number(optimizer.step().defined()));
    base.zero_grad(false);
    result.push_back(a.grad().clone());
    optimizer.step();  // gradients of zero: moments decay, parameters move
    optimizer.zero_grad(true);
    result.push_back(number(a.grad().defined()));
    optimizer.step();  // no gradients: nothing happens
    result.push_back(a.detach());
    return result;
  });
}

TYPED_TEST(drop_in, clipping_and_accumulation) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    auto layer = make_layer(type);
    typename N::optimizer optimizer(layer->parameters(), 1e-2);
    outcome result;
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      for (int part = 0; part < 4; ++part) (loss_of(layer->parameters()) / 4).backward();
      result.push_back(number(torch::nn::utils::clip_grad_norm_(layer->parameters(), 1.0)));
      optimizer.step();
    }
    for (const Tensor& t : values_of(layer->parameters())) result.push_back(t);
    return result;
  });
}

/// A program's own schedule: a quarter less each time.
class own_schedule : public stock::LRScheduler {
 public:
  using LRScheduler::LRScheduler;

 private:
  std::vector<double> get_lrs() override {
    std::vector<double> rates = get_current_lrs();
    for (double& r : rates) r *= 0.75;
    return rates;
  }
};

TYPED_TEST(drop_in, schedules) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Options = typename N::options;
    Tensor a = leaf({5}, type), b = leaf({2}, type, 3);
    typename N::optimizer optimizer({a}, Options(1e-2));
    stock::StepLR steps(optimizer, 2, 0.5);
    stock::ReduceLROnPlateauScheduler plateau(optimizer, stock::ReduceLROnPlateauScheduler::min,
                                              0.1f, 1);
    own_schedule own(optimizer);
    outcome result;
    const auto record = [&] {
      train(optimizer, {a}, 1);
      for (const auto& g : optimizer.param_groups()) result.push_back(number(g.options().get_lr()));
    };
    for (int i = 0; i < 4; ++i) steps.step(), record();
    for (int i = 0; i < 4; ++i) plateau.step(1.0f), record();
    optimizer.add_param_group(OptimizerParamGroup({b}, std::make_unique<Options>(5e-2)));
    for (int i = 0; i < 2; ++i) steps.step(), own.step(), record();
    result.push_back(a.detach());
    return result;
  });
}

// State

TYPED_TEST(drop_in, state_that_is_read) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Options = typename N::options;
    using State = typename N::state;
    Tensor a = leaf({5}, type), b = leaf({2}, type, 3);
    typename N::optimizer optimizer({a, b}, Options(1e-2).amsgrad(true));
    auto& state = optimizer.state();
    auto* key = a.unsafeGetTensorImpl();
    outcome result{number(double(state.size())), number(double(state.count(key)))};
    train(optimizer, {a});
    result.push_back(number(double(state.count(key))));
    result.push_back(number(state.find(b.unsafeGetTensorImpl()) == state.end()));
    const auto& by_cast = static_cast<State&>(*state[key]);
    const auto* by_check = dynamic_cast<State*>(state.find(key)->second.get());
    const auto& by_at = static_cast<const State&>(*state.at(key));
    result.push_back(number(by_check == &by_cast && &by_at == by_check));
    result.push_back(number(double(by_cast.step())));
    result.push_back(by_cast.exp_avg());
    result.push_back(by_cast.exp_avg_sq());
    result.push_back(by_cast.max_exp_avg_sq());
    return result;
  });
}

TYPED_TEST(drop_in, state_that_is_edited) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Options = typename N::options;
    using State = typename N::state;
    Tensor a = leaf({6, 2}, type);
    typename N::optimizer optimizer({a}, Options(1e-2).eps(1e-5));
    train(optimizer, {a});
    // A splat trainer: rows of the moments are reset in place ...
    auto& held = static_cast<State&>(*optimizer.state().at(a.unsafeGetTensorImpl()));
    const Tensor rows = torch::tensor({1, 4});
    held.exp_avg().index_put_({rows}, torch::zeros({}, a.options().requires_grad(false)));
    held.exp_avg_sq().index_put_({rows}, torch::zeros({}, a.options().requires_grad(false)));
    train(optimizer, {a});
    outcome result = values_of({a});
    // ... and a parameter of fewer rows takes over the state of those it keeps.
    const Tensor keep = torch::tensor({0, 1, 5});
    auto moved = std::make_unique<State>(
        static_cast<State&>(*optimizer.state().at(a.unsafeGetTensorImpl())));
    moved->exp_avg(moved->exp_avg().index_select(0, keep));
    moved->exp_avg_sq(moved->exp_avg_sq().index_select(0, keep));
    moved->step(moved->step() - 1);
    Tensor fewer = leaf(a.detach().index_select(0, keep));
    optimizer.state().erase(a.unsafeGetTensorImpl());
    optimizer.param_groups()[0].params()[0] = fewer;
    optimizer.state()[fewer.unsafeGetTensorImpl()] = std::move(moved);
    train(optimizer, {fewer});
    result.push_back(fewer.detach());
    result.push_back(number(
        double(static_cast<State&>(*optimizer.state().at(fewer.unsafeGetTensorImpl())).step())));
    return result;
  });
}

// Checkpoints

TYPED_TEST(drop_in, checkpoints_in_every_way) {
  this->compare([](auto n, torch::Dtype type) {
    using N = decltype(n);
    using Optimizer = typename N::optimizer;
    using Options = typename N::options;
    Tensor a = leaf({5}, type);
    const auto written =
        std::make_shared<Optimizer>(std::vector<Tensor>{a}, Options(1e-2).betas({0.8, 0.9}));
    train(*written, {a});
    const c10::TempFile file = c10::make_tempfile("leanopt-drop-in-");
    outcome result;
    const auto resume = [&](auto load) {
      Tensor b = leaf(a);
      auto read = std::make_shared<Optimizer>(std::vector<Tensor>{b}, Options(0.5));
      load(read);
      train(*read, {b});
      result.push_back(b.detach());
      result.push_back(number(read->param_groups()[0].options().get_lr()));
    };
    torch::save(*written, file.name);
    resume([&](auto& read) { torch::load(*read, file.name); });
    resume([&](auto& read) { torch::load(*read, file.name, torch::Device(torch::kCPU)); });
    resume([&](auto& read) {
      std::stringstream stream;
      torch::save(*written, stream);
      torch::load(*read, stream);
    });
    resume([&](auto& read) {
      torch::serialize::OutputArchive out;
      written->save(out);
      std::stringstream stream;
      out.save_to(stream);
      torch::serialize::InputArchive in;
      in.load_from(stream);
      read->load(in);
    });
    resume([&](auto& read) {  // pointed at another tensor of the same sizes first
      Tensor other = leaf({5}, a.scalar_type(), 9);
      read->param_groups()[0].params()[0] = other;
      std::stringstream stream;
      torch::save(*written, stream);
      torch::load(*read, stream);
      train(*read, {other});
      result.push_back(other.detach());
    });
    return result;
  });
}

TEST(infinite_parameter, keeps_to_itself_as_with_the_stock_class) {
  const float inf = std::numeric_limits<float>::infinity();
  const auto start = [&] { return torch::tensor({-inf, 1.0f, inf}).set_requires_grad(true); };
  const torch::Tensor ours = start(), theirs = start();
  leanopt::AdamW a({ours}, leanopt::AdamWOptions(1e-2));
  torch::optim::AdamW b({theirs}, torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    ours.mutable_grad() = torch::full({3}, float(step));
    theirs.mutable_grad() = torch::full({3}, float(step));
    a.step();
    b.step();
  }
  EXPECT_TRUE(torch::allclose(ours, theirs, 1e-6, 0)) << ours;
  for (const char* name : {"exp_avg", "exp_avg_sq"})
    EXPECT_TRUE(torch::isfinite(leanopt::slot(a, ours, name)).all().item<bool>()) << name;
}

}  // namespace
