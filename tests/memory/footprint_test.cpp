// The memory contract: what predict says of shapes and options is what measure finds on an
// optimizer that has stepped, for random shapes, types, groups and options of every storage format
// and of LibTorch's classes; and it is what the allocators have handed out.
#include <leanopt/leanopt.hpp>
#include <leanopt/memory/footprint.hpp>

#include "tests/memory/counting.hpp"
#include "tests/support/patterns.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <iomanip>
#include <limits>
#include <locale>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

namespace formats = leanopt::formats;
namespace weights = leanopt::weights;
namespace stock = torch::optim;
using leanopt::footprint;
using leanopt::measure;
using leanopt::options_of;
using leanopt::parameter_shape;
using leanopt::predict;
using leanopt::shape_group;
using patterns::source;
using torch::Tensor;
using sizes_t = std::vector<std::int64_t>;

// ---- every class with its types and options -----------------------------------------------------

template <class Optimizer>
constexpr bool is_ours = std::is_base_of_v<leanopt::detail::front, Optimizer>;

/// What a class of ours is made of, found by the type of a null pointer to it.
template <class Rule, class Format, class Weights>
struct parts {
  using rule = Rule;
  using format = Format;
  using weight = Weights;
};
template <class Rule, class Format, class Weights>
parts<Rule, Format, Weights> parts_of(const leanopt::optimizer<Rule, Format, Weights>*);
template <class Optimizer>
using parts_t = decltype(parts_of(static_cast<const Optimizer*>(nullptr)));

template <class Optimizer>
std::vector<at::ScalarType> types_of() {
  std::vector<at::ScalarType> types{at::kFloat, at::kBFloat16, at::kDouble};
  bool half = true, complex = false;
  if constexpr (is_ours<Optimizer>) {
    using p = parts_t<Optimizer>;
    half = p::weight::takes_float16;
    complex = p::rule::elementwise && !p::format::compressed;
  }
  if (half) types.push_back(at::kHalf);
  if (complex) types.insert(types.end(), {at::kComplexFloat, at::kComplexDouble});
  return types;
}

/// Options of all that decide what is kept, drawn at random.
template <class Optimizer>
options_of<Optimizer> random_options(source& random) {
  const auto coin = [&] { return random.below(2) == 1; };
  options_of<Optimizer> o(1e-3);
  if constexpr (is_ours<Optimizer>) {
    using p = parts_t<Optimizer>;
    if constexpr (!p::rule::elementwise) {
      if (p::format::compressed || coin()) {
        o = options_of<Optimizer>::hugging_face().lr(1e-3).relative_step(false);
        o.beta1(p::format::compressed || coin() ? std::optional<double>(0.9) : std::nullopt);
      }
    } else if constexpr (!p::format::compressed) {
      o.amsgrad(coin());
    }
    if constexpr (p::format::compressed)
      o.min_compressed_elements(std::vector<std::int64_t>{1, 300, 4096, 5001}[random.below(4)]);
  } else {
    o.weight_decay(coin() ? 0.01 : 0.0);
    if constexpr (std::is_same_v<Optimizer, stock::Adam> || std::is_same_v<Optimizer, stock::AdamW>)
      o.amsgrad(coin());
    if constexpr (std::is_same_v<Optimizer, stock::SGD>) {
      o.momentum(coin() ? 0.9 : 0.0);
      o.nesterov(o.momentum() != 0 && coin());
    }
    if constexpr (std::is_same_v<Optimizer, stock::RMSprop>)
      o.momentum(coin() ? 0.9 : 0.0).centered(coin());
  }
  return o;
}

template <class Optimizer>
using plan = std::vector<shape_group<Optimizer>>;

/// Sizes on both sides of blocks, thresholds, chunks of rows and units of work.
sizes_t random_sizes(source& random) {
  static const sizes_t lengths{1,   2,   7,   63,  64,   65,   100,  255,
                               256, 257, 300, 511, 4095, 4096, 4097, 5000};
  const auto length = [&] { return lengths[random.below(std::uint32_t(lengths.size()))]; };
  const auto few = [&] { return std::int64_t(1 + random.below(70)); };
  const std::int64_t a = few(), b = few(), n = length();
  switch (random.below(12)) {
    case 0: return {};
    case 1: return {0};
    case 2: return {0, a};
    case 3: return {a, 0, b};
    case 4: return {1, n};
    case 5: return {n, 1};
    case 6: return {a, b};
    case 7: return {n, 3};
    case 8: return {a % 9 + 1, b, a};
    case 9: return {a, b % 9 + 1, 3, 3};
    default: return {n};
  }
}

template <class Optimizer>
plan<Optimizer> random_plan(source& random) {
  plan<Optimizer> groups;
  // One group of LibTorch's: what becomes of a group's options depends on its version.
  const std::uint32_t count = is_ours<Optimizer> ? 1 + random.below(3) : 1;
  const auto types = types_of<Optimizer>();
  for (std::uint32_t g = 0; g < count; ++g) {
    groups.push_back({{}, random_options<Optimizer>(random)});
    for (std::uint32_t n = random.below(5) + (g == 0); n > 0; --n)
      groups[g].parameters.push_back(
          {random_sizes(random), types[random.below(std::uint32_t(types.size()))]});
    for (parameter_shape& s : groups[g].parameters)
      if (is_ours<Optimizer> && at::elementSize(s.type) == 2 && random.below(3) == 0)
        s.gradient = at::kFloat;
  }
  return groups;
}

/// Parameters of that plan, every other one with its dimensions in reverse order in memory.
template <class Optimizer>
std::vector<std::vector<Tensor>> make_parameters(const plan<Optimizer>& groups) {
  std::vector<std::vector<Tensor>> result;
  int count = 0;
  for (const auto& group : groups) {
    result.emplace_back();
    for (const parameter_shape& s : group.parameters) {
      sizes_t stored = s.sizes, order(s.sizes.size());
      const bool reversed = ++count % 2 == 0;
      if (reversed) std::reverse(stored.begin(), stored.end());
      for (std::size_t d = 0; d < order.size(); ++d)
        order[d] = std::int64_t(reversed ? order.size() - 1 - d : d);
      result.back().push_back(
          torch::full(stored, 0.5, s.type).permute(order).detach().set_requires_grad(true));
    }
  }
  return result;
}

template <class Optimizer>
std::unique_ptr<Optimizer> build(const plan<Optimizer>& groups,
                                 const std::vector<std::vector<Tensor>>& parameters) {
  std::vector<stock::OptimizerParamGroup> list;
  for (std::size_t g = 0; g < groups.size(); ++g)
    list.emplace_back(parameters[g], std::make_unique<options_of<Optimizer>>(groups[g].options));
  if constexpr (is_ours<Optimizer>)
    return std::make_unique<Optimizer>(list);
  else
    return std::make_unique<Optimizer>(list, groups[0].options);
}

/// No number of bytes depends on what the gradients are.
template <class Optimizer>
void set_gradients(const plan<Optimizer>& groups,
                   const std::vector<std::vector<Tensor>>& parameters, source& random) {
  const double values[] = {0, 0.25, -1e4, std::numeric_limits<double>::quiet_NaN()};
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (std::size_t i = 0; i < parameters[g].size(); ++i) {
      const parameter_shape& s = groups[g].parameters[i];
      const auto type = s.gradient == at::ScalarType::Undefined ? s.type : s.gradient;
      parameters[g][i].mutable_grad() = torch::full(s.sizes, values[random.below(4)], type);
    }
}

// ---- comparison ---------------------------------------------------------------------------------

std::string text_of(const footprint::parameter& p) {
  std::ostringstream out;
  out << p.shape.type << ' ' << at::IntArrayRef(p.shape.sizes) << " of group " << p.group << ", "
      << p.numbers << " numbers";
  for (const auto& [name, member] : leanopt::bytes_by_category::members())
    out << ", " << name << ' ' << p.bytes.*member;
  return out.str();
}

testing::AssertionResult same(const footprint& a, const footprint& b) {
  if (a.parameters.size() != b.parameters.size())
    return testing::AssertionFailure()
           << a.parameters.size() << " parameters against " << b.parameters.size();
  for (std::size_t i = 0; i < a.parameters.size(); ++i) {
    const auto one = text_of(a.parameters[i]), other = text_of(b.parameters[i]);
    if (one != other)
      return testing::AssertionFailure()
             << "parameter " << i << ":\n  " << one << "\nagainst\n  " << other;
  }
  for (const auto& [name, member] :
       {std::pair{"code books", &footprint::code_books}, std::pair{"scratch", &footprint::scratch},
        std::pair{"transient", &footprint::transient}})
    if (a.*member != b.*member)
      return testing::AssertionFailure() << name << ' ' << a.*member << " against " << b.*member;
  return testing::AssertionSuccess();
}

// ---- the classes --------------------------------------------------------------------------------

/// Every format and every way to write weights, each with an elementwise rule and with Adafactor.
using our_classes = testing::Types<leanopt::AdamW, leanopt::Adafactor, leanopt::AdamW8bit,
                                   leanopt::basic_adam<formats::full, weights::stochastic>,
                                   leanopt::basic_adam<formats::log8_blocks<64>, weights::split24>,
                                   leanopt::basic_adam<formats::dynamic8>,
                                   leanopt::basic_adamw<formats::bfloat16, weights::split32>,
                                   leanopt::basic_adafactor<formats::log8, weights::split24>,
                                   leanopt::basic_adafactor<formats::bfloat16, weights::stochastic>,
                                   leanopt::basic_adafactor<formats::dynamic8>,
                                   leanopt::basic_adafactor<formats::full, weights::split32>>;
using stock_classes =
    testing::Types<stock::AdamW, stock::Adam, stock::SGD, stock::RMSprop, stock::Adagrad>;
template <class... A, class... B>
testing::Types<A..., B...> join(testing::Types<A...>, testing::Types<B...>);
using all_classes = decltype(join(our_classes{}, stock_classes{}));

struct class_names {
  template <class Optimizer>
  static std::string GetName(int) {
    if constexpr (is_ours<Optimizer>) {
      using p = parts_t<Optimizer>;
      std::string name = std::string(p::rule::name) + '_' + p::format::name + '_' + p::weight::name;
      std::replace(name.begin(), name.end(), '/', '_');
      return name;
    } else {
      std::string name = c10::demangle(typeid(Optimizer).name());
      return "stock_" + name.substr(name.rfind(':') + 1);
    }
  }
};

/// Restores the number of threads.
struct with_threads {
  explicit with_threads(int n) { at::set_num_threads(n); }
  with_threads(const with_threads&) = delete;
  ~with_threads() { at::set_num_threads(before); }
  int before = at::get_num_threads();
};

template <class Optimizer>
class predicted : public testing::Test {};
TYPED_TEST_SUITE(predicted, all_classes, class_names);

constexpr int cases = 40;

TYPED_TEST(predicted, is_what_is_measured_and_stays_so_through_an_archive) {
  for (std::uint64_t seed = 1; seed <= cases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    source random(seed);
    auto groups = random_plan<TypeParam>(random);
    if (seed == cases)  // so large that all threads share it
      groups[0].parameters.push_back({{2049, 2050}, at::kFloat});
    const with_threads threads(1 + int(random.below(2)));
    const footprint expected = predict(groups);

    const auto parameters = make_parameters(groups);
    const auto optimizer = build(groups, parameters);
    for (const auto& group : parameters)
      if (!group.empty()) group[0].mutable_grad() = torch::zeros_like(group[0]);
    optimizer->step();
    set_gradients(groups, parameters, random);
    optimizer->step();
    ASSERT_TRUE(same(measure(*optimizer), expected));
    EXPECT_EQ(expected.numbers(), leanopt::compute_optimizer_size(*optimizer).elements);

    std::stringstream archive;
    torch::save(*optimizer, archive);
    const auto resumed = build(groups, parameters);
    torch::load(*resumed, archive);
    footprint loaded = measure(*resumed);
    EXPECT_EQ(loaded.scratch, 0);
    loaded.scratch = expected.scratch;
    ASSERT_TRUE(same(loaded, expected));
    resumed->step();
    ASSERT_TRUE(same(measure(*resumed), expected));
  }
}

// ---- against the allocators ---------------------------------------------------------------------

/// Parameters of all types: a tensor of several units, one that all threads share, factored ones of
/// many rows, small ones.
template <class Optimizer>
plan<Optimizer> every_type() {
  plan<Optimizer> groups(1, {{}, options_of<Optimizer>(1e-3)});
  auto& o = groups[0].options;
  if constexpr (is_ours<Optimizer>) {
    if constexpr (!parts_t<Optimizer>::rule::elementwise)
      o = options_of<Optimizer>::hugging_face().lr(1e-3).relative_step(false).beta1(0.9);
  } else {
    o.weight_decay(0.01);
    if constexpr (std::is_same_v<Optimizer, stock::SGD>) o.momentum(0.9).nesterov(true);
    if constexpr (std::is_same_v<Optimizer, stock::RMSprop>) o.momentum(0.9).centered(true);
  }
  for (const at::ScalarType type : types_of<Optimizer>())
    if (!c10::isComplexType(type))
      for (const sizes_t& sizes : {sizes_t{1000, 70}, {600, 130}, {5000}, {}, {0, 5}, {8, 4, 3, 3}})
        groups[0].parameters.push_back({sizes, type});
  groups[0].parameters.push_back({{2050, 2050}, at::kFloat});
  return groups;
}

/// LibTorch's classes make tensors of one number each of learning rates and the like.
constexpr std::int64_t stock_numbers = 64;

template <class Optimizer>
class allocated : public testing::Test {
 protected:
  static void SetUpTestSuite() { counting::allocator::install(); }
};
TYPED_TEST_SUITE(allocated, all_classes, class_names);

TYPED_TEST(allocated, for_tensors_is_what_is_predicted) {
  const auto groups = every_type<TypeParam>();
  for (const int n : {1, 2}) {
    SCOPED_TRACE(std::to_string(n) + " threads");
    const with_threads threads(n);
    const footprint expected = predict(groups);
    const auto parameters = make_parameters(groups);
    source random(7);
    set_gradients(groups, parameters, random);

    counting::tensors.start();
    auto optimizer = build(groups, parameters);
    optimizer->step();
    // Step counts are no tensors.
    const bool counts = !std::is_same_v<TypeParam, stock::SGD>;
    const std::int64_t state =
        expected.sum().state() - 8 * std::int64_t(counts ? expected.parameters.size() : 0);
    EXPECT_EQ(counting::tensors.live(), state);
    if (is_ours<TypeParam>) {
      EXPECT_EQ(counting::tensors.peak(), state);
    }
    for (int step = 2; step <= 3; ++step) {
      counting::tensors.start();
      optimizer->step();
      EXPECT_EQ(counting::tensors.live(), 0) << "after step " << step;
      const std::int64_t beside = counting::tensors.peak() - expected.transient;
      EXPECT_GE(beside, 0) << "step " << step;
      EXPECT_LE(beside, is_ours<TypeParam> ? 0 : stock_numbers) << "step " << step;
    }

    std::stringstream archive;
    torch::save(*optimizer, archive);
    counting::tensors.start();
    for (int i = 0; i < 3; ++i) {
      std::istringstream again(archive.str());
      torch::load(*optimizer, again);
      EXPECT_EQ(counting::tensors.live(), 0) << "loaded " << i + 1 << " times";
    }
    counting::tensors.start();
    optimizer.reset();
    EXPECT_EQ(counting::tensors.live(), -state);
  }
}

/// An optimizer of ours keeps on the host, beside scratch memory, at most this per parameter: a
/// state, a plan of 0.8 KiB, entries in lists, and six tensors with names, of which LibTorch's
/// objects take 330 bytes each.
constexpr std::int64_t host_bytes_per_parameter = 4096;

template <class Optimizer>
class on_the_host : public testing::Test {};
TYPED_TEST_SUITE(on_the_host, our_classes, class_names);

TYPED_TEST(on_the_host, are_scratch_and_bookkeeping) {
  auto groups = every_type<TypeParam>();
  for (const bool many : {false, true}) {
    SCOPED_TRACE(many ? "many small parameters" : "few large ones");
    if (many) {
      groups[0].parameters.assign(1000, {{3, 3}, at::kBFloat16});
      if constexpr (parts_t<TypeParam>::format::compressed)
        groups[0].options.min_compressed_elements(1);
    }
    const with_threads threads(2);
    const footprint expected = predict(groups);
    const auto parameters = make_parameters(groups);
    source random(7);
    set_gradients(groups, parameters, random);
    build(groups, parameters)->step();  // what LibTorch makes once for all

    counting::host.start();
    auto optimizer = build(groups, parameters);
    optimizer->step();
    optimizer->step();
    const std::int64_t kept = counting::host.live() - expected.scratch;
    EXPECT_GE(kept, 0) << "scratch " << expected.scratch;
    EXPECT_LE(kept, host_bytes_per_parameter * std::int64_t(expected.parameters.size()));
    const std::int64_t said = measure(*optimizer).bookkeeping;
    EXPECT_LE(kept, 2 * said);
    EXPECT_GE(2 * kept, said);
    optimizer.reset();
    EXPECT_EQ(counting::host.live(), 0);
  }
}

// ---- by hand ------------------------------------------------------------------------------------

leanopt::bytes_by_category state_of(const footprint& f) {
  auto all = f.sum();
  all.parameters = all.gradients = 0;
  return all;
}
leanopt::bytes_by_category state_bytes(std::int64_t moments, std::int64_t codes,
                                       std::int64_t headers, std::int64_t factors,
                                       std::int64_t counters) {
  leanopt::bytes_by_category b;
  b.moments = moments;
  b.codes = codes;
  b.headers = headers;
  b.factors = factors;
  b.counters = counters;
  return b;
}

TEST(prediction, of_odd_shapes_is_what_a_hand_counts) {
  using shapes = std::vector<parameter_shape>;
  using leanopt::AdamW, leanopt::AdamW8bit, leanopt::Adafactor;
  // A number, nothing, one row in 20 blocks, a convolution of 9408 elements in 37 blocks.
  const sizes_t number{}, none{0, 5}, row{1, 5000}, convolution{64, 3, 7, 7};
  const auto log8 = [](const shapes& s) { return state_of(predict<AdamW8bit>(s)); };
  EXPECT_EQ(log8({{number}}), state_bytes(2 * 4, 0, 0, 0, 8));
  EXPECT_EQ(log8({{none}}), state_bytes(0, 0, 0, 0, 8));
  EXPECT_EQ(log8({{row}}), state_bytes(0, 2 * 5000, 2 * 20 * 2, 0, 8));
  EXPECT_EQ(log8({{convolution, at::kHalf}}), state_bytes(0, 2 * 9408, 2 * 37 * 2, 0, 8));
  EXPECT_EQ(log8({{{4095}}, {{4096}, at::kDouble}}),
            state_bytes(2 * 4 * 4095, 2 * 4096, 2 * 16 * 2, 0, 16));

  const auto full = [](const parameter_shape& s, bool amsgrad) {
    return state_of(predict<AdamW>(shapes{s}, leanopt::AdamWOptions(1e-3).amsgrad(amsgrad)));
  };
  EXPECT_EQ(full({{4}, at::kComplexFloat}, false), state_bytes(2 * 8 * 4, 0, 0, 0, 8));
  EXPECT_EQ(full({{4}, at::kComplexDouble}, true), state_bytes(3 * 16 * 4, 0, 0, 0, 8));
  EXPECT_EQ(full({{3}, at::kHalf}, true), state_bytes(3 * 4 * 3, 0, 0, 0, 8));

  // Rows and columns of the last two dimensions; Hugging Face's form has an RMS of 4 bytes.
  const auto hugging_face = leanopt::AdafactorOptions::hugging_face();
  EXPECT_EQ(state_of(predict<Adafactor>(shapes{{convolution}}, hugging_face)),
            state_bytes(0, 0, 0, 4 * (64 * 3 * 7 + 64 * 3 * 7), 8 + 4));
  EXPECT_EQ(state_of(predict<Adafactor>(shapes{{row}, {number}})),
            state_bytes(4, 0, 0, 4 * (1 + 5000), 16));

  const auto threshold = [](std::int64_t n) {
    return leanopt::AdamW8bitOptions(1e-3).min_compressed_elements(n);
  };
  const footprint two =
      predict(plan<AdamW8bit>{{{{{300}}}, threshold(300)}, {{{{300}}}, threshold(301)}});
  EXPECT_EQ(two.sum(0).codes, 2 * 300);
  EXPECT_EQ(two.sum(0).moments, 0);
  EXPECT_EQ(two.sum(1).codes, 0);
  EXPECT_EQ(two.sum(1).moments, 2 * 4 * 300);
}

TEST(prediction, of_what_cannot_be_is_refused) {
  const auto refused = [](const std::function<void()>& f, const std::string& what) {
    try {
      f();
      ADD_FAILURE() << "no error about " << what;
    } catch (const c10::Error& e) {
      const std::string message = e.what_without_backtrace();
      EXPECT_EQ(message.rfind("leanopt: ", 0), 0u) << message;
      EXPECT_NE(message.find(what), std::string::npos) << message;
    }
  };
  constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  for (const sizes_t& sizes : {sizes_t{-1}, {3, -4}, {-3, -4}, {huge}, {huge, huge}, {0, huge, 9}})
    refused(
        [&] {
          predict<leanopt::AdamW>(std::vector<parameter_shape>{{{2}}, {sizes}});
        },
        "parameter 1 of group 0");
  refused([&] { predict<stock::SGD>({{{std::int64_t(1) << 54}}, {{1}}}, {0.1}); }, "2^54");
  refused(
      [&] { predict<leanopt::AdamW8bit>({{{5}}}, leanopt::AdamW8bitOptions(1e-3).amsgrad(true)); },
      "amsgrad");
  refused([&] { predict<leanopt::AdamW>({{{5}}}, {-1.0}); }, "lr");
}

TEST(footprint, of_sparse_gradients_is_their_indices_and_values) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(100, 8).sparse(true));
  stock::SGD optimizer(table->parameters(), 0.1);
  table(torch::tensor({3, 5, 7})).sum().backward();
  EXPECT_EQ(measure(optimizer).sum().gradients, 3 * 8 + 3 * 8 * 4);
}

// ---- large tensors ------------------------------------------------------------------------------

TEST(prediction, of_tensors_above_2_to_the_31_is_exact) {
  const std::int64_t rows = 70'001, columns = 65'537, n = rows * columns;
  ASSERT_GT(n, std::int64_t(1) << 32);
  const std::vector<Tensor> tensors{
      torch::empty({rows, columns}, torch::dtype(torch::kBFloat16).device(torch::kMeta))};
  const auto bytes = [&](auto* type) {
    using Optimizer = std::remove_pointer_t<decltype(type)>;
    const options_of<Optimizer> o;
    const footprint f = predict<Optimizer>(tensors, o);
    const parameter_shape shape{{rows, columns}, at::kBFloat16};
    EXPECT_TRUE(same(predict<Optimizer>(std::vector<parameter_shape>{shape}, o), f));
    EXPECT_EQ(f.elements(), n);
    EXPECT_EQ(f.sum().parameters, 2 * n);
    EXPECT_EQ(f.sum().gradients, 2 * n);
    EXPECT_EQ(f.total(), 4 * n + f.state() + f.scratch);
    return f;
  };
  const std::int64_t blocks = (n + 255) / 256, blocks_64 = (n + 63) / 64;
  const footprint full = bytes(static_cast<leanopt::AdamW*>(nullptr));
  EXPECT_EQ(full.state(), 8 * n + 8);
  EXPECT_EQ(full.numbers(), 2 * n + 1);
  EXPECT_EQ(full.total(), 12 * n + 8);
  const footprint log8 = bytes(static_cast<leanopt::AdamW8bit*>(nullptr));
  EXPECT_EQ(log8.sum().codes, 2 * n);
  EXPECT_EQ(log8.sum().headers, 2 * 2 * blocks);
  const footprint split =
      bytes(static_cast<leanopt::basic_adam<formats::log8_blocks<64>, weights::split24>*>(nullptr));
  EXPECT_EQ(split.sum().residual, n);
  EXPECT_EQ(split.sum().headers, 2 * 2 * blocks_64);
  EXPECT_EQ(split.numbers(), 3 * n + 2 * blocks_64 + 1);
  const footprint dynamic = bytes(static_cast<leanopt::basic_adam<formats::dynamic8>*>(nullptr));
  EXPECT_EQ(dynamic.sum().headers, 2 * 4 * blocks);
  const footprint adafactor = bytes(static_cast<leanopt::Adafactor*>(nullptr));
  EXPECT_EQ(adafactor.sum().factors, 4 * (rows + columns));
  // Two sums per 4096 elements, roots of both factors, column sums per 64 rows.
  EXPECT_EQ(
      adafactor.scratch,
      (16 * ((n + 4095) / 4096) + 4 * (rows + columns + (rows + 63) / 64 * columns) + 7) / 8 * 8);
}

// ---- as text ------------------------------------------------------------------------------------

/// A JSON text (RFC 8259): its numbers and strings by path, as in "parameters.0.bytes.codes".
class json {
 public:
  static std::map<std::string, std::string> read(const std::string& text) {
    json j(text);
    j.value("");
    j.demand(j.at_ == text.size());
    return j.found_;
  }

 private:
  explicit json(const std::string& text) : text_(text) {}
  void demand(bool good) const {
    if (!good) throw std::runtime_error("no JSON from " + std::to_string(at_) + " on: " + text_);
  }
  char next() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool take(char c) { return next() == c && ++at_; }
  void list(char end, const std::function<void()>& item) {
    if (take(end)) return;
    do item();
    while (take(','));
    demand(take(end));
  }
  void value(const std::string& path) {
    const auto below = [&](const std::string& key) {
      value(path.empty() ? key : path + '.' + key);
    };
    int index = 0;
    if (take('{'))
      list('}', [&] {
        const std::string key = string();
        demand(take(':'));
        below(key);
      });
    else if (take('['))
      list(']', [&] { below(std::to_string(index++)); });
    else
      demand(found_.emplace(path, next() == '"' ? string() : integer()).second);
  }
  std::string integer() {
    const std::size_t begin = at_;
    take('-');
    demand(next() != '0' || !std::isdigit(text_[at_ + 1]));
    while (std::isdigit(static_cast<unsigned char>(next()))) ++at_;
    demand(at_ > begin);
    return text_.substr(begin, at_ - begin);
  }
  std::string string() {
    std::string result;
    demand(take('"'));
    while (!take('"')) {
      demand(static_cast<unsigned char>(next()) >= 0x20);
      if (take('\\')) {
        const char c = next();
        demand(c == '"' || c == '\\' || c == 'u');
        if (take('u')) {
          result += char(std::stoi(text_.substr(at_, 4), nullptr, 16));
          at_ += 4;
          continue;
        }
      }
      result += text_[at_++];
    }
    return result;
  }

  const std::string& text_;
  std::size_t at_ = 0;
  std::map<std::string, std::string> found_;
};

/// Groups digits, as the locales of many programs do.
struct grouping : std::numpunct<char> {
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};
struct with_grouping {
  std::locale before = std::locale::global(std::locale(std::locale::classic(), new grouping));
  ~with_grouping() { std::locale::global(before); }
};

/// One of everything: codes, headers, code books, factors, scratch, a name that needs escapes.
footprint example() {
  using Optimizer = leanopt::basic_adafactor<formats::dynamic8>;
  return predict<Optimizer>({{{300, 500}, at::kFloat, "layer.\"0\"\\weight\n\x01é"},
                             {{0, 2}, at::kBFloat16, ""},
                             {{}, at::kDouble, "scale"}},
                            options_of<Optimizer>(1e-3).relative_step(false));
}

TEST(footprint, as_json_has_the_same_figures) {
  const with_grouping locale;
  const footprint f = example();
  const auto read = json::read(leanopt::to_json(f));
  const auto figure = [&](const std::string& path) {
    const auto it = read.find(path);
    return it == read.end() ? -1 : std::stoll(it->second);
  };
  std::size_t figures = 0;
  const auto expect = [&](const std::string& path, std::int64_t n) {
    EXPECT_EQ(figure(path), n) << path;
    ++figures;
  };
  for (std::size_t i = 0; i < f.parameters.size(); ++i) {
    const footprint::parameter& p = f.parameters[i];
    const std::string path = "parameters." + std::to_string(i) + '.';
    EXPECT_EQ(read.at(path + "name"), p.shape.name);
    EXPECT_EQ(read.at(path + "type"), c10::toString(p.shape.type));
    figures += 2;
    expect(path + "group", std::int64_t(p.group));
    expect(path + "numbers", p.numbers);
    for (std::size_t d = 0; d < p.shape.sizes.size(); ++d)
      expect(path + "sizes." + std::to_string(d), p.shape.sizes[d]);
    for (const auto& [name, member] : leanopt::bytes_by_category::members())
      expect(path + "bytes." + name, p.bytes.*member);
  }
  for (const auto& [name, member] : leanopt::bytes_by_category::members())
    expect(std::string("bytes.") + name, f.sum().*member);
  expect("code_books", f.code_books);
  expect("scratch", f.scratch);
  expect("transient", f.transient);
  expect("bookkeeping", f.bookkeeping);
  expect("elements", f.elements());
  expect("numbers", f.numbers());
  expect("state", f.state());
  expect("total", f.total());
  EXPECT_EQ(read.size(), figures);
}

std::string with_four_digits(double x) {
  char text[64];
  std::snprintf(text, sizeof text, "%.4f", x);
  return text;
}

void expect_table(const footprint& f) {
  std::ostringstream out;
  out << std::hex << std::setfill('*') << f;
  std::istringstream lines(out.str());
  std::string line;
  std::map<std::string, std::int64_t> bytes;
  std::int64_t sum = 0;
  std::getline(lines, line);
  EXPECT_EQ(line, "what                     bytes              MB     B/param");
  const std::size_t width = line.size();
  while (std::getline(lines, line) && line.find(" tensors, ") == std::string::npos) {
    ASSERT_EQ(line.size(), width) << out.str();
    // Right-aligned columns, of which each has a space before its longest figure.
    const std::string name = line.substr(0, line.find("  "));
    std::vector<std::string> figures;
    std::size_t at = 12;
    for (const std::size_t column : {18, 16, 12}) {
      const std::string cell = line.substr(at, column);
      figures.push_back(cell.substr(cell.find_first_not_of(' ')));
      EXPECT_LT(figures.back().size(), column) << line;
      EXPECT_EQ(figures.back().find(' '), std::string::npos) << line;
      at += column;
    }
    const std::int64_t n = std::stoll(figures[0]);
    EXPECT_EQ(figures[0], std::to_string(n)) << line;
    EXPECT_EQ(figures[1], with_four_digits(double(n) / 1048576)) << line;
    EXPECT_EQ(figures[2], with_four_digits(double(n) / double(f.elements()))) << line;
    bytes[name] = n;
    if (name != "total" && name != "bookkeeping") sum += n;
  }
  EXPECT_EQ(sum, f.total()) << out.str();
  EXPECT_EQ(bytes["total"], f.total());
  EXPECT_EQ(bytes["bookkeeping"], f.bookkeeping);
  EXPECT_EQ(bytes["codes"], f.sum().codes);
  EXPECT_EQ(bytes.count("residual"), 0u) << "an empty category: " << out.str();
  EXPECT_EQ(line, std::to_string(f.elements()) + " parameters in " +
                      std::to_string(f.parameters.size()) + " tensors, state " +
                      std::to_string(f.numbers()) + " numbers");
}

TEST(footprint, is_printed_as_a_table_whose_lines_add_up) {
  const with_grouping locale;
  footprint small = example();
  small.bookkeeping = 1234;
  expect_table(small);
  expect_table(predict<leanopt::AdamW8bit>({{{700'001, 65'537}}, {{5}}}));
}

}  // namespace
