// inspect: what an optimizer remembers under the keys of Python's classes, with the types and
// shapes that are stored and values as they are decoded, in the order of the parameters.
#include <leanopt/memory/inspect.hpp>

#include "tests/optim/support.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace front_test;
using leanopt::inspect;
using leanopt::slot_view;
using leanopt::state_view;
using sizes_t = std::vector<std::int64_t>;

// One compressed matrix, one in full precision, and vectors.
constexpr std::int64_t inputs = 100, hidden = 50, outputs = 2;
torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(inputs, hidden), torch::nn::Linear(hidden, outputs));
  const torch::NoGradGuard no_grad;
  std::int64_t salt = 7;
  for (Tensor& p : net->parameters()) p.copy_(pattern(p.sizes(), torch::kFloat32, salt++));
  return net;
}

struct slot_shape {
  std::string key;
  at::ScalarType type;
  sizes_t sizes;
  friend bool operator==(const slot_shape& a, const slot_shape& b) {
    return a.key == b.key && a.type == b.type && a.sizes == b.sizes;
  }
  friend std::ostream& operator<<(std::ostream& out, const slot_shape& s) {
    return out << s.key << ' ' << s.type << ' ' << at::IntArrayRef(s.sizes);
  }
};
std::vector<slot_shape> shapes_of(const state_view& view) {
  std::vector<slot_shape> result;
  for (const slot_view& s : view.slots) result.push_back({s.key, s.type, s.sizes});
  return result;
}
const slot_view& find(const state_view& view, const std::string& key) {
  for (const slot_view& s : view.slots)
    if (s.key == key) return s;
  throw std::out_of_range("no slot " + key + " of " + view.parameter);
}

/// Whether the values are the first of `expected`, off by a fraction of its largest at most.
testing::AssertionResult begins(const slot_view& s, const Tensor& expected, double allowed) {
  const Tensor flat = expected.detach().to(torch::kFloat64).flatten();
  if (std::int64_t(s.values.size()) > flat.numel())
    return testing::AssertionFailure() << s.values.size() << " values of " << flat.numel();
  for (std::size_t i = 0; i < s.values.size(); ++i) {
    const double e = flat[std::int64_t(i)].item<double>();
    if (!(std::abs(s.values[i] - e) <= allowed * largest(flat)))
      return testing::AssertionFailure()
             << s.key << '[' << i << "] is " << s.values[i] << ", expected " << e;
  }
  return testing::AssertionSuccess();
}

constexpr std::int64_t blocks = (hidden * inputs + 255) / 256;
constexpr auto f32 = torch::kFloat32;

TEST(inspect, of_adamw_has_the_keys_of_pythons) {
  const auto net = make_net();
  leanopt::AdamW optimizer(net->parameters(), 1e-3);
  EXPECT_TRUE(inspect(optimizer, net.get()).empty()) << "before the first step";
  set_gradients(net->parameters());
  optimizer.step();
  optimizer.step();
  const auto views = inspect(optimizer, net.get());
  ASSERT_EQ(views.size(), 4u);
  const auto params = net->parameters();
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(views[i].parameter, net->named_parameters()[i].key());
    EXPECT_EQ(views[i].step, 2);
    const sizes_t sizes = params[i].sizes().vec();
    EXPECT_EQ(shapes_of(views[i]),
              (std::vector<slot_shape>{{"exp_avg", f32, sizes}, {"exp_avg_sq", f32, sizes}}));
    EXPECT_EQ(views[i].slots[0].values.size(),
              std::size_t(std::min<std::int64_t>(3, params[i].numel())));
    // After two steps with one gradient: (1 - beta^2) of it.
    const Tensor g = params[i].grad().to(torch::kFloat64);
    EXPECT_TRUE(begins(views[i].slots[0], 0.19 * g, tolerance::golden_adam_f32));
    EXPECT_TRUE(begins(views[i].slots[1], 0.001999 * g * g, tolerance::golden_adam_f32));
  }
}

TEST(inspect, of_stock_adamw_is_the_same) {
  const auto net = make_net(), other = make_net();
  const auto options = stock::AdamWOptions(1e-3).amsgrad(true);
  leanopt::AdamW ours(net->parameters(), options);
  stock::AdamW theirs(other->parameters(), options);
  for (int round = 0; round < 3; ++round) {
    set_gradients(net->parameters(), round);
    set_gradients(other->parameters(), round);
    ours.step();
    theirs.step();
  }
  const auto a = inspect(ours, net.get(), 10), b = inspect(theirs, other.get(), 10);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].parameter, b[i].parameter);
    EXPECT_EQ(a[i].step, 3);
    EXPECT_EQ(b[i].step, 3);
    EXPECT_EQ(shapes_of(a[i]), shapes_of(b[i]));
    ASSERT_EQ(a[i].slots.size(), 3u);
    EXPECT_EQ(a[i].slots[2].key, "max_exp_avg_sq");
    for (std::size_t k = 0; k < 3; ++k)
      EXPECT_TRUE(begins(a[i].slots[k], torch::tensor(b[i].slots[k].values, torch::kFloat64),
                         tolerance::golden_adam_f32));
  }
}

/// Codes are decoded: the moments of the first step are known.
template <class Class>
void expect_decoded(at::ScalarType header) {
  const auto net = make_net();
  Class optimizer(net->parameters(), typename Class::Options(1e-3));
  set_gradients(net->parameters());
  optimizer.step();
  const auto views = inspect(optimizer, net.get(), std::size_t(hidden * inputs));
  ASSERT_EQ(views.size(), 4u);
  const sizes_t matrix{hidden, inputs}, vector{hidden};
  const std::vector<slot_shape> codes{{"exp_avg", torch::kUInt8, matrix},
                                      {"exp_avg.header", header, {blocks}},
                                      {"exp_avg_sq", torch::kUInt8, matrix},
                                      {"exp_avg_sq.header", header, {blocks}}};
  EXPECT_EQ(shapes_of(views[0]), codes);
  EXPECT_EQ(shapes_of(views[1]),
            (std::vector<slot_shape>{{"exp_avg", f32, vector}, {"exp_avg_sq", f32, vector}}));
  const Tensor p = net->parameters()[0], g = p.grad().to(torch::kFloat64);
  for (const auto& [key, expected] :
       {std::pair{"exp_avg", 0.1 * g}, std::pair{"exp_avg_sq", 0.001 * g * g}}) {
    const slot_view& s = find(views[0], key);
    EXPECT_EQ(s.values.size(), std::size_t(hidden * inputs));
    EXPECT_TRUE(begins(s, expected, tolerance::stored_of_largest));
    EXPECT_TRUE(begins(s, leanopt::slot(optimizer, p, key), 0));
  }
}
TEST(inspect, of_log8_decodes) { expect_decoded<leanopt::AdamW8bit>(torch::kInt16); }
TEST(inspect, of_dynamic8_decodes) {
  expect_decoded<leanopt::basic_adamw<leanopt::formats::dynamic8>>(torch::kFloat32);
}

TEST(inspect, of_split_weights_has_the_residual) {
  const Tensor p = leaf({3, 4}, torch::kBFloat16);
  using optimizer_t = leanopt::basic_adamw<leanopt::formats::full, leanopt::weights::split24>;
  optimizer_t optimizer({p}, optimizer_t::Options(1e-3));
  set_gradients({p});
  optimizer.step();
  const auto views = inspect(optimizer, nullptr, 12);
  ASSERT_EQ(views.size(), 1u);
  EXPECT_EQ(shapes_of(views[0]), (std::vector<slot_shape>{{"exp_avg", f32, {3, 4}},
                                                          {"exp_avg_sq", f32, {3, 4}},
                                                          {"residual", torch::kInt8, {3, 4}}}));
  // What the magnitude of the weight is above its bfloat16 part, in units of the last of 16 bits.
  const auto units = find(views[0], "residual").values;
  const Tensor weight = leanopt::master_weight(optimizer, p).abs().flatten();
  const Tensor rest = weight - p.detach().to(f32).abs().flatten();
  ASSERT_GT(largest(rest), 0);
  for (std::int64_t i = 0; i < 12; ++i)
    EXPECT_EQ(std::ldexp(units[std::size_t(i)], std::ilogb(weight[i].item<float>()) - 15),
              rest[i].item<double>());
}

// ---- Adafactor ----------------------------------------------------------------------------------

/// After the first step the averages are the means of that step's squares.
void expect_factors(const state_view& view, const Tensor& g, const std::string& row,
                    const std::string& column, const std::string& variance) {
  const Tensor squares = g.detach().to(torch::kFloat64).square();
  if (g.dim() < 2) {
    EXPECT_TRUE(begins(find(view, variance), squares, tolerance::golden_torch_adafactor_f32));
    return;
  }
  EXPECT_TRUE(
      begins(find(view, row), squares.mean(1, true), tolerance::golden_torch_adafactor_f32));
  EXPECT_TRUE(
      begins(find(view, column), squares.mean(0, true), tolerance::golden_torch_adafactor_f32));
}

TEST(inspect, of_adafactor_has_the_keys_of_torch_optims) {
  const auto net = make_net();
  leanopt::Adafactor optimizer(net->parameters());
  set_gradients(net->parameters());
  optimizer.step();
  const auto views = inspect(optimizer, net.get());
  ASSERT_EQ(views.size(), 4u);
  EXPECT_EQ(shapes_of(views[0]), (std::vector<slot_shape>{{"row_var", f32, {hidden, 1}},
                                                          {"col_var", f32, {1, inputs}}}));
  EXPECT_EQ(shapes_of(views[1]), (std::vector<slot_shape>{{"variance", f32, {hidden}}}));
  const auto params = net->parameters();
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(views[i].step, 1);
    expect_factors(views[i], params[i].grad(), "row_var", "col_var", "variance");
  }
}

TEST(inspect, of_hugging_faces_form_has_the_keys_of_hugging_face) {
  const auto net = make_net();
  const auto params = net->parameters();
  // Each group has the keys of its own form.
  const auto form = leanopt::AdafactorOptions::hugging_face();
  leanopt::Adafactor optimizer(
      {group({params[0], params[1]}, leanopt::AdafactorOptions(form).beta1(0.9)),
       group({params[2]}, form), group({params[3]})});
  std::vector<double> rms;
  for (const Tensor& p : params)
    rms.push_back(p.detach().to(torch::kFloat64).square().mean().sqrt().item<double>());
  set_gradients(params);
  optimizer.step();
  const auto views = inspect(optimizer, net.get());
  ASSERT_EQ(views.size(), 4u);
  const auto has = [&](std::size_t i, const std::vector<slot_shape>& expected) {
    auto shapes = shapes_of(views[i]);
    const auto by_key = [](const slot_shape& a, const slot_shape& b) { return a.key < b.key; };
    std::sort(shapes.begin(), shapes.end(), by_key);
    EXPECT_EQ(shapes, expected) << views[i].parameter;
  };
  has(0, {{"RMS", f32, {}},
          {"exp_avg", f32, {hidden, inputs}},
          {"exp_avg_sq_col", f32, {1, inputs}},
          {"exp_avg_sq_row", f32, {hidden, 1}}});
  has(1, {{"RMS", f32, {}}, {"exp_avg", f32, {hidden}}, {"exp_avg_sq", f32, {hidden}}});
  has(2, {{"RMS", f32, {}},
          {"exp_avg_sq_col", f32, {1, hidden}},
          {"exp_avg_sq_row", f32, {outputs, 1}}});
  has(3, {{"variance", f32, {outputs}}});
  for (std::size_t i = 0; i < 3; ++i) {
    expect_factors(views[i], params[i].grad(), "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq");
    EXPECT_TRUE(begins(find(views[i], "RMS"), torch::tensor(rms[i], torch::kFloat64),
                       tolerance::golden_hf_adafactor_f32));
  }
}

// ---- which parameters, in which order -----------------------------------------------------------

TEST(inspect, follows_the_order_of_the_parameters_and_leaves_out_what_has_no_state) {
  const auto net = make_net();
  const auto params = net->parameters();
  const Tensor foreign = leaf(sizes_t{5});
  leanopt::AdamW8bit optimizer(
      {group({params[3], foreign}), group({params[1], params[0]}), group({params[2]})});
  for (const Tensor& p : {params[3], foreign, params[0], params[2]})
    p.mutable_grad() = torch::ones_like(p);
  optimizer.step();
  params[0].mutable_grad() = Tensor();
  optimizer.step();
  const auto names = [&](const torch::nn::Module* module) {
    std::string all;
    for (const state_view& v : inspect(optimizer, module))
      all += v.parameter + ':' + std::to_string(v.step) + ' ';
    return all;
  };
  EXPECT_EQ(names(net.get()), "1.bias:2 0.1:2 0.weight:1 1.weight:2 ");
  EXPECT_EQ(names(nullptr), "0.0:2 0.1:2 1.1:1 2.0:2 ");
}

TEST(inspect, changes_nothing) {
  const auto net = make_net();
  leanopt::AdamW8bit optimizer(net->parameters(), 1e-3);
  set_gradients(net->parameters());
  optimizer.step();
  const snapshot before(optimizer, net->parameters());
  inspect(optimizer, net.get(), 5000);
  EXPECT_TRUE(snapshot(optimizer, net->parameters()) == before);
}

TEST(inspect, of_an_optimizer_whose_state_it_does_not_know_is_an_error) {
  const Tensor p = leaf(sizes_t{5});
  stock::SGD optimizer({p}, stock::SGDOptions(0.1).momentum(0.9));
  EXPECT_TRUE(inspect(optimizer).empty());
  set_gradients({p});
  optimizer.step();
  EXPECT_TRUE(refuses([&] { inspect(optimizer); }, {"SGD", "unknown"}));
}

// ---- as text ------------------------------------------------------------------------------------

std::string text_of(const std::vector<state_view>& views) {
  std::ostringstream out;
  for (const state_view& v : views) out << v;
  return out.str();
}

TEST(inspect, is_printed_with_a_few_values) {
  const Tensor p = leaf(sizes_t{2}), q = leaf(sizes_t{2, 3}), empty = leaf(sizes_t{0});
  leanopt::AdamW optimizer({p, q, empty}, 1e-3);
  p.mutable_grad() = torch::tensor({1.0f, -2.0f});
  q.mutable_grad() = torch::tensor({{5.0f, 4.0f, 3.0f}, {2.0f, 1.0f, 0.0f}});
  empty.mutable_grad() = torch::ones({0});
  optimizer.step();
  EXPECT_EQ(text_of(inspect(optimizer)),
            "0.0\n  step 1\n  exp_avg Float [2]: 0.1 -0.2\n  exp_avg_sq Float [2]: 0.001 0.004\n"
            "0.1\n  step 1\n  exp_avg Float [2, 3]: 0.5 0.4 0.3 ...\n"
            "  exp_avg_sq Float [2, 3]: 0.025 0.016 0.009 ...\n"
            "0.2\n  step 1\n  exp_avg Float [0]:\n  exp_avg_sq Float [0]:\n");
  const auto all = inspect(optimizer, nullptr, std::numeric_limits<std::size_t>::max());
  EXPECT_EQ(all.at(1).slots.at(0).values.size(), 6u);
}

TEST(inspect, of_complex_parameters_shows_both_parts) {
  const Tensor p = leaf({4}, torch::kComplexFloat);
  leanopt::AdamW optimizer({p}, 1e-3);
  p.mutable_grad() = torch::complex(torch::full({4}, 1.0f), torch::full({4}, -2.0f));
  optimizer.step();
  // The second moments of both parts are kept apart.
  EXPECT_EQ(text_of(inspect(optimizer, nullptr, 2)),
            "0.0\n  step 1\n  exp_avg ComplexFloat [4]: 0.1 -0.2 0.1 -0.2 ...\n"
            "  exp_avg_sq ComplexFloat [4]: 0.001 0.004 0.001 0.004 ...\n");
  EXPECT_EQ(text_of(inspect(optimizer, nullptr, 4)).find("..."), std::string::npos);
}

}  // namespace
