// compute_optimizer_size and count_moments, for every optimizer of ours and of LibTorch's, against
// numbers that are counted by hand from the sizes of the parameters.
#include <leanopt/leanopt.hpp>

#include "examples/model_sizes.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

namespace {

using torch::Tensor;
using torch::optim::Optimizer;
namespace formats = leanopt::formats;
namespace weights = leanopt::weights;

// One matrix that is compressed, one that stays in full precision, a vector.
constexpr std::int64_t large = 100 * 50, small = 8 * 6, vector = 10, all = large + small + vector;
constexpr std::int64_t large_factors = 100 + 50, small_factors = 8 + 6, parameters = 3;
constexpr std::int64_t blocks = (large + 255) / 256;

std::vector<Tensor> make_parameters(torch::Dtype type = torch::kFloat32) {
  std::vector<Tensor> result;
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{100, 50}, std::vector<std::int64_t>{8, 6},
        std::vector<std::int64_t>{10}})
    result.push_back(torch::ones(sizes, type).set_requires_grad(true));
  return result;
}

struct expectation {
  std::int64_t elements, bytes, moments;
};

template <class Class>
void expect_size(leanopt::options_of<Class> options, expectation expected,
                 torch::Dtype type = torch::kFloat32) {
  const auto params = make_parameters(type);
  Class optimizer(params, options);
  const auto expect = [&](const expectation& e) {
    const auto [megabytes, elements] = leanopt::compute_optimizer_size(optimizer);
    EXPECT_EQ(elements, e.elements);
    EXPECT_DOUBLE_EQ(megabytes, double(e.bytes) / (1024 * 1024));
    EXPECT_EQ(leanopt::count_moments(optimizer), e.moments);
    const Optimizer& base = optimizer;
    for (const auto& size :
         {leanopt::compute_optimizer_size(base), leanopt::compute_optimizer_size(base.state())}) {
      EXPECT_EQ(size.elements, e.elements);
      EXPECT_DOUBLE_EQ(size.megabytes, double(e.bytes) / (1024 * 1024));
    }
    EXPECT_EQ(leanopt::count_moments(base.state()), e.moments);
  };
  expect({0, 0, 0});
  for (int i = 0; i < 2; ++i) {
    for (const Tensor& p : params) p.mutable_grad() = torch::ones_like(p);
    optimizer.step();
    expect(expected);
  }
}

TEST(size, of_adam_is_two_moments_and_a_step) {
  const expectation two{2 * all + parameters, 4 * (2 * all + parameters), 2 * all + parameters};
  expect_size<leanopt::Adam>(1e-3, two);
  expect_size<leanopt::AdamW>(1e-3, two);
  expect_size<torch::optim::Adam>(1e-3, two);
  expect_size<torch::optim::AdamW>(1e-3, two);
  const expectation three{3 * all + parameters, 4 * (3 * all + parameters), 3 * all + parameters};
  expect_size<leanopt::AdamW>(leanopt::AdamWOptions(1e-3).amsgrad(true), three);
  expect_size<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3).amsgrad(true), three);
}

TEST(size, follows_the_type_of_the_parameters) {
  const std::int64_t moments = 2 * all + parameters;
  expect_size<leanopt::AdamW>(1e-3, {moments, 8 * 2 * all + 4 * parameters, moments},
                              torch::kFloat64);
  expect_size<leanopt::AdamW>(1e-3, {moments, 4 * 2 * all + 4 * parameters, moments},
                              torch::kBFloat16);
  expect_size<torch::optim::AdamW>(1e-3, {moments, 2 * 2 * all + 4 * parameters, moments},
                                   torch::kBFloat16);
}

TEST(size, of_8_bit_adam_is_codes_headers_and_small_tensors) {
  const std::int64_t rest = small + vector, moments = 2 * all + parameters;
  const expectation expected{moments + 2 * blocks,
                             2 * (large + 2 * blocks) + 4 * 2 * rest + 8 * parameters, moments};
  expect_size<leanopt::Adam8bit>(1e-3, expected);
  expect_size<leanopt::AdamW8bit>(1e-3, expected);
  expect_size<leanopt::AdamW8bit>(
      leanopt::AdamW8bitOptions(1e-3).min_compressed_elements(large + 1),
      {moments, 4 * 2 * all + 8 * parameters, moments});
  const std::int64_t every_block = blocks + 1 + 1;
  expect_size<leanopt::AdamW8bit>(
      leanopt::AdamW8bitOptions(1e-3).min_compressed_elements(1),
      {moments + 2 * every_block, 2 * (all + 2 * every_block) + 8 * parameters, moments});
}

TEST(size, of_adafactor_is_its_factors) {
  const std::int64_t factors = large_factors + small_factors + vector;
  expect_size<leanopt::Adafactor>(
      1e-2, {factors + parameters, 4 * (factors + parameters), factors + parameters});
  using O = leanopt::AdafactorOptions;
  // Hugging Face's form has an RMS for each parameter and counts in 8 bytes.
  expect_size<leanopt::Adafactor>(
      O::hugging_face(),
      {factors + 2 * parameters, 4 * factors + 12 * parameters, factors + parameters});
  expect_size<leanopt::Adafactor>(
      O::hugging_face().beta1(0.9),
      {factors + all + 2 * parameters, 4 * (factors + all) + 12 * parameters,
       factors + all + parameters});
  const std::int64_t rest = small + vector;
  expect_size<leanopt::Adafactor8bit>(
      {},
      {factors + all + blocks + 2 * parameters,
       4 * (factors + rest) + large + 2 * blocks + 12 * parameters, factors + all + parameters});
}

TEST(size, of_dynamic8_has_wider_headers_and_code_books_once) {
  using formats::dynamic8;
  const std::int64_t rest = small + vector, moments = 2 * all + parameters;
  constexpr std::int64_t books = 2 * 256;
  expect_size<leanopt::basic_adamw<dynamic8>>(
      1e-3, {moments + 2 * blocks + books,
             2 * (large + 4 * blocks) + 4 * (2 * rest + books) + 8 * parameters, moments});
  const std::int64_t every_block = blocks + 1 + 1;
  using O = leanopt::options_of<leanopt::basic_adamw<dynamic8>>;
  expect_size<leanopt::basic_adamw<dynamic8>>(
      O(1e-3).min_compressed_elements(1),
      {moments + 2 * every_block + books, 2 * (all + 4 * every_block) + 4 * books + 8 * parameters,
       moments});
  expect_size<leanopt::basic_adamw<dynamic8>>(O(1e-3).min_compressed_elements(large + 1),
                                              {moments, 4 * 2 * all + 8 * parameters, moments});
}

TEST(size, of_bfloat16_state_is_two_bytes_a_moment) {
  const std::int64_t moments = 2 * all + parameters;
  using optimizer = leanopt::basic_adamw<formats::bfloat16_stochastic>;
  expect_size<optimizer>(leanopt::options_of<optimizer>(1e-3).min_compressed_elements(1),
                         {moments, 2 * 2 * all + 8 * parameters, moments});
}

/// Residual bits are numbers of the state, and no moments.
TEST(size, of_split_weights_has_their_residual) {
  const std::int64_t moments = 2 * all + parameters;
  using split24 = leanopt::basic_adamw<formats::full, weights::split24>;
  using split32 = leanopt::basic_adamw<formats::full, weights::split32>;
  using stochastic = leanopt::basic_adamw<formats::full, weights::stochastic>;
  const std::int64_t bytes = 4 * 2 * all + 4 * parameters;
  expect_size<split24>(1e-3, {moments + all, bytes + all, moments}, torch::kBFloat16);
  expect_size<split32>(1e-3, {moments + all, bytes + 2 * all, moments}, torch::kBFloat16);
  expect_size<stochastic>(1e-3, {moments, bytes, moments}, torch::kBFloat16);
  expect_size<split24>(1e-3, {moments, bytes, moments}, torch::kFloat32);
}

TEST(size, of_the_stock_classes) {
  using namespace torch::optim;
  expect_size<SGD>(SGDOptions(0.1), {0, 0, 0});
  expect_size<SGD>(SGDOptions(0.1).momentum(0.9), {all, 4 * all, all});
  expect_size<RMSprop>(RMSpropOptions(0.1),
                       {all + parameters, 4 * (all + parameters), all + parameters});
  const std::int64_t three = 3 * all + parameters;
  expect_size<RMSprop>(RMSpropOptions(0.1).centered(true).momentum(0.9), {three, 4 * three, three});
}

/// LibTorch's Adagrad makes its state when it is built.
TEST(size, of_stock_adagrad_is_there_before_the_first_step) {
  torch::optim::Adagrad optimizer(make_parameters());
  EXPECT_EQ(leanopt::compute_optimizer_size(optimizer).elements, all + parameters);
  EXPECT_EQ(leanopt::count_moments(optimizer), all + parameters);
}

TEST(size, of_stock_lbfgs_grows_with_its_history) {
  const std::int64_t n = 6;
  Tensor p = torch::ones({n}, torch::requires_grad());
  torch::optim::LBFGS optimizer({p}, torch::optim::LBFGSOptions(0.1).max_iter(1).history_size(5));
  const auto closure = [&] {
    optimizer.zero_grad();
    Tensor loss = (p - torch::arange(n)).square().sum();
    loss.backward();
    return loss;
  };
  EXPECT_EQ(leanopt::compute_optimizer_size(optimizer).elements, 0);
  optimizer.step(closure);
  // Four counters, the direction, the gradient before, and the scale of the inverse Hessian, which
  // LibTorch begins as an integer.
  const std::int64_t first = 4 + 2 * n + 1;
  EXPECT_EQ(leanopt::compute_optimizer_size(optimizer).elements, first);
  EXPECT_DOUBLE_EQ(leanopt::compute_optimizer_size(optimizer).megabytes,
                   double(2 * 8 + 2 * 4 + 4 * 2 * n + 8) / (1024 * 1024));
  optimizer.step(closure);
  // One pair of vectors more, with its two coefficients.
  EXPECT_EQ(leanopt::compute_optimizer_size(optimizer).elements, first + 2 * n + 2);
}

TEST(size, of_parameters_that_never_had_a_gradient_is_zero) {
  const auto params = make_parameters();
  leanopt::AdamW optimizer(params, 1e-3);
  params[2].mutable_grad() = torch::ones({vector});
  optimizer.step();
  EXPECT_EQ(leanopt::compute_optimizer_size(optimizer).elements, 2 * vector + 1);
}

TEST(size, of_an_unknown_state_is_an_error) {
  struct foreign : torch::optim::OptimizerCloneableParamState<foreign> {};
  const auto params = make_parameters();
  torch::optim::SGD optimizer(params, torch::optim::SGDOptions(0.1));
  optimizer.state()[params[0].unsafeGetTensorImpl()] = std::make_unique<foreign>();
  EXPECT_THROW(leanopt::compute_optimizer_size(optimizer), c10::Error);
}

TEST(size, per_parameter_is_known_to_the_compiler) {
  using namespace leanopt;
  static_assert(bytes_per_parameter<torch::optim::AdamW> == 8);
  static_assert(bytes_per_parameter<AdamW> == 8);
  static_assert(bytes_per_parameter<Adafactor> == 0);
  static_assert(bytes_per_parameter<AdamW8bit> == 2 + 4.0 / 256);
  static_assert(bytes_per_parameter<basic_adamw<formats::log8_blocks<64>>> == 2 + 4.0 / 64);
  static_assert(bytes_per_parameter<basic_adamw<formats::dynamic8>> == 2 + 8.0 / 256);
  static_assert(bytes_per_parameter<basic_adamw<formats::bfloat16>> == 4);
  static_assert(bytes_per_parameter<basic_adamw<formats::log8, weights::split24>> == 3 + 4.0 / 256);
  static_assert(bytes_per_parameter<basic_adamw<formats::full, weights::split32>> == 10);
  static_assert(bytes_per_parameter<basic_adafactor<formats::log8, weights::split24>> ==
                2 + 2.0 / 256);
}

TEST(size, before_training_is_estimated_from_the_number_of_parameters) {
  constexpr std::int64_t n = 65'783'042;
  EXPECT_DOUBLE_EQ(leanopt::estimate_optimizer_size<leanopt::AdamW>(n), 8.0 * n / (1024 * 1024));
  EXPECT_DOUBLE_EQ(leanopt::estimate_optimizer_size<torch::optim::Adam>(n),
                   8.0 * n / (1024 * 1024));
  EXPECT_DOUBLE_EQ(leanopt::estimate_optimizer_size<leanopt::AdamW8bit>(n),
                   2.0 * n / (1024 * 1024));
}

// The figures that the README shows, exactly: those of Python's classes for the same model, but for
// the 8-bit headers.
std::vector<Tensor> distilbert(torch::Dtype type) {
  std::vector<Tensor> params;
  for (const auto& sizes : model_sizes::load_shapes(LEANOPT_TEST_DATA "/distilbert_shapes.txt"))
    params.push_back(torch::zeros(sizes, type).set_requires_grad(true));
  EXPECT_EQ(params.size(), 104u);
  return params;
}
template <class Class>
void expect_distilbert(leanopt::options_of<Class> options, expectation expected) {
  const auto params = distilbert(torch::kFloat32);
  Class optimizer(params, options);
  for (const Tensor& p : params) p.mutable_grad() = torch::ones_like(p);
  optimizer.step();
  const auto [megabytes, elements] = leanopt::compute_optimizer_size(optimizer);
  EXPECT_EQ(elements, expected.elements);
  EXPECT_EQ(megabytes * (1024 * 1024), double(expected.bytes));
  EXPECT_EQ(leanopt::count_moments(optimizer), expected.moments);
}
TEST(size, of_distilbert_is_that_of_the_python_classes) {
  expect_distilbert<torch::optim::AdamW>(1e-3, {131'566'188, 526'264'752, 131'566'188});
  expect_distilbert<leanopt::AdamW>(1e-3, {131'566'188, 526'264'752, 131'566'188});
  expect_distilbert<leanopt::AdamW8bit>(1e-3, {132'079'620, 132'976'256, 131'566'188});
  expect_distilbert<leanopt::basic_adamw<formats::dynamic8>>(
      1e-3, {132'080'132, 134'005'168, 131'566'188});
  expect_distilbert<leanopt::Adafactor>(1e-2, {178'608, 714'432, 178'608});
  expect_distilbert<leanopt::Adafactor>(leanopt::AdafactorOptions::hugging_face(),
                                        {178'712, 715'264, 178'608});
}

/// Bytes per parameter of all that training holds of bfloat16 parameters: themselves, their
/// gradients and the state.
template <class Class>
double of_training(const std::vector<Tensor>& params) {
  Class optimizer(params);
  double bytes = 0, count = 0;
  for (const Tensor& p : params) {
    p.mutable_grad() = torch::zeros_like(p).detach();
    bytes += double(p.nbytes() + p.grad().nbytes());
    count += double(p.numel());
  }
  optimizer.step();
  return (bytes + leanopt::compute_optimizer_size(optimizer).megabytes * (1 << 20)) / count;
}
TEST(size, of_training_is_six_or_seven_bytes_with_24_bit_weights) {
  using adafactor = leanopt::basic_adafactor<formats::log8, weights::split24>;
  using adamw = leanopt::basic_adamw<formats::log8, weights::split24>;
  const std::vector<Tensor> matrix = {
      torch::zeros({4096, 4096}, torch::kBFloat16).set_requires_grad(true)};
  const auto rounded = [](double x) { return std::round(100 * x) / 100; };
  EXPECT_EQ(rounded(of_training<adafactor>(matrix)), 6.01);
  EXPECT_EQ(rounded(of_training<adamw>(matrix)), 7.02);
  EXPECT_EQ(rounded(of_training<adafactor>(distilbert(torch::kBFloat16))), 6.02);
  EXPECT_EQ(rounded(of_training<adamw>(distilbert(torch::kBFloat16))), 7.02);
}

}  // namespace
