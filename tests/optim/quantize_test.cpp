// quantize_blockwise and dequantize_blockwise: tensors of any shape, layout and type in every
// compressed format, what is refused, and that the codes are those that an optimizer stores.
#include "tests/conformance/lists.hpp"
#include "tests/optim/support.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace front_test;
using leanopt::dequantize_blockwise;
using leanopt::quantize_blockwise;
using leanopt::quantized;
using leanopt::values;

template <class List>
struct types_of;
template <class... T>
struct types_of<conformance::list<T...>> {
  using type = ::testing::Types<T...>;
};
struct names {
  template <class Format>
  static std::string GetName(int) {
    std::string name = Format::name;
    std::replace(name.begin(), name.end(), '/', '_');
    return name;
  }
};
template <class Format>
class quantize : public ::testing::Test {};
TYPED_TEST_SUITE(quantize, types_of<conformance::compressed_formats>::type, names);

using leanopt::has_headers;
constexpr values ranges[] = {values::any, values::non_negative};

template <class Format>
std::int64_t blocks_of(std::int64_t n) {
  return (n + Format::block - 1) / Format::block;
}
template <class Format>
bool same(const quantized<Format>& a, const quantized<Format>& b) {
  return same_bits(a.codes, b.codes) && same_bits(a.headers, b.headers);
}

/// Of both signs, or of one, and over some octaves.
Tensor numbers(at::IntArrayRef sizes, values range, torch::Dtype type = torch::kFloat32) {
  const Tensor octaves = torch::arange(pattern(sizes).numel()).remainder(3).mul(-2);
  const Tensor x = pattern(sizes, torch::kFloat64) * torch::exp2(octaves).reshape(sizes);
  return (range == values::any ? x : x.abs()).to(type).clone();
}

TYPED_TEST(quantize, keeps_shape_and_values) {
  using sizes = std::vector<std::int64_t>;
  for (const sizes& size : {sizes{}, sizes{1}, sizes{255}, sizes{256}, sizes{257}, sizes{7, 5, 11},
                            sizes{4097}, sizes{0}, sizes{3, 0}, sizes{2, 2, 300}})
    for (const values range : ranges) {
      SCOPED_TRACE(testing::Message() << at::IntArrayRef(size));
      const Tensor x = numbers(size, range);
      const quantized<TypeParam> q = quantize_blockwise(x, TypeParam(), range);
      EXPECT_EQ(q.codes.sizes(), x.sizes());
      EXPECT_EQ(q.codes.itemsize(), sizeof(typename TypeParam::template stored<float>));
      EXPECT_EQ(q.headers.defined(), has_headers<TypeParam>);
      if (q.headers.defined()) {
        EXPECT_EQ(q.headers.numel(), blocks_of<TypeParam>(x.numel()));
      }
      const Tensor back = dequantize_blockwise(q);
      EXPECT_EQ(back.sizes(), x.sizes());
      EXPECT_EQ(back.scalar_type(), torch::kFloat32);
      EXPECT_TRUE(all_of((back - x).abs() <= tolerance::stored_of_largest));  // the largest is 1
      EXPECT_TRUE(all_of(back.sign() == x.sign()));
    }
}

/// The largest value of a block is not its neighbour's business.
TYPED_TEST(quantize, takes_blocks_one_by_one) {
  Tensor x = numbers({10 * 256}, values::any);
  const auto before = quantize_blockwise(x, TypeParam());
  x.slice(0, 256, 512).mul_(1000);
  x[9 * 256] = 0.5f;
  const auto after = quantize_blockwise(x, TypeParam());
  const auto part = [](const quantized<TypeParam>& q, int from, int to) {
    return dequantize_blockwise(q).slice(0, from * 256, to * 256);
  };
  EXPECT_TRUE(same_bits(part(before, 0, 1), part(after, 0, 1)));
  EXPECT_TRUE(same_bits(part(before, 2, 9), part(after, 2, 9)));
  EXPECT_FALSE(same_bits(part(before, 1, 2), part(after, 1, 2)));
}

TYPED_TEST(quantize, reads_any_layout_and_type) {
  const Tensor x = numbers({60, 50}, values::any);
  const Tensor wide = numbers({60, 100}, values::any);
  for (const Tensor& t :
       {x.t(), wide.slice(1, 0, 100, 2), x[3].expand({40, 50}), x.unsqueeze(1).transpose(0, 2),
        x.to(torch::kFloat64), x.to(torch::kBFloat16), x.to(torch::kFloat16).t(), leaf(x),
        x.to(torch::kFloat64).slice(0, 1, 60, 3)}) {
    SCOPED_TRACE(testing::Message() << t.sizes() << ' ' << t.scalar_type());
    const Tensor plain = t.detach().to(torch::kFloat32).contiguous().clone();
    const auto q = quantize_blockwise(t, TypeParam());
    EXPECT_TRUE(same(q, quantize_blockwise(plain, TypeParam())));
    EXPECT_EQ(q.codes.sizes(), t.sizes());
    EXPECT_TRUE(q.codes.is_contiguous());
    EXPECT_FALSE(q.codes.requires_grad());
    EXPECT_FALSE(dequantize_blockwise(q).requires_grad());
  }
}

TYPED_TEST(quantize, follows_no_default_type) {
  const Tensor x = numbers({300}, values::any);
  const auto expected = quantize_blockwise(x, TypeParam());
  const auto before = torch::get_default_dtype();
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat64));
  const auto q = quantize_blockwise(x, TypeParam());
  const Tensor back = dequantize_blockwise(q);
  torch::set_default_dtype(before);
  EXPECT_TRUE(same(q, expected));
  EXPECT_TRUE(same_bits(back, dequantize_blockwise(expected)));
}

TYPED_TEST(quantize, leaves_its_input_alone) {
  const Tensor x = numbers({300}, values::any), copy = x.clone();
  quantize_blockwise(x, TypeParam());
  EXPECT_TRUE(same_bits(x, copy));
}

TYPED_TEST(quantize, keeps_zeros) {
  for (const values range : ranges) {
    EXPECT_EQ(
        largest(dequantize_blockwise(quantize_blockwise(torch::zeros({300}), TypeParam(), range))),
        0);
    Tensor x = numbers({300}, range);
    x.slice(0, 0, 300, 3).zero_();
    x[3] = -0.0f;
    const Tensor back = dequantize_blockwise(quantize_blockwise(x, TypeParam(), range));
    EXPECT_TRUE(all_of((back == 0) == (x == 0)));
  }
}

/// In a format with blocks too an element that is not finite is lost alone.
TYPED_TEST(quantize, keeps_what_is_not_finite_from_its_neighbours) {
  for (const values range : ranges)
    for (const float bad : {INFINITY, std::numeric_limits<float>::quiet_NaN(), -INFINITY}) {
      if (range == values::non_negative && bad == -INFINITY) continue;
      Tensor x = numbers({300}, range);
      const auto clean = dequantize_blockwise(quantize_blockwise(x, TypeParam(), range));
      ASSERT_LT(std::abs(x[7].item<float>()), 0.9f);  // not the block's largest
      x[7] = bad;
      const auto back = dequantize_blockwise(quantize_blockwise(x, TypeParam(), range));
      Tensor expected = clean.clone();
      expected[7] = back[7];
      EXPECT_TRUE(expected.allclose(back, 0, 0, /*equal_nan=*/true));
    }
}

TYPED_TEST(quantize, draws_its_random_bits_from_the_seed) {
  const Tensor x = numbers({1000}, values::any);
  const auto with = [&](std::uint64_t seed) {
    return quantize_blockwise(x, TypeParam(), values::any, seed);
  };
  EXPECT_TRUE(same(with(0), quantize_blockwise(x, TypeParam())));
  EXPECT_TRUE(same(with(1), with(1)));
  EXPECT_EQ(same(with(1), with(2)), !TypeParam::random);
  EXPECT_TRUE(same_bits(with(1).headers, with(2).headers));
}

// What is refused

TYPED_TEST(quantize, refuses_negative_values_in_a_non_negative_range) {
  Tensor x = numbers({300}, values::non_negative);
  x[299] = -1e-30f;
  EXPECT_TRUE(refuses([&] { quantize_blockwise(x, TypeParam(), values::non_negative); },
                      {"negative", "values::any"}));
}

TYPED_TEST(quantize, refuses_what_is_no_tensor_of_numbers) {
  const std::vector<std::string> words = {"quantize_blockwise", "strided", "floating-point", "CPU"};
  for (const Tensor& x : {Tensor(), torch::ones({3}, torch::kLong), torch::ones({3}).to_sparse(),
                          torch::ones({3}, torch::kComplexFloat), torch::ones({3}, torch::kMeta)})
    EXPECT_TRUE(refuses([&] { quantize_blockwise(x, TypeParam()); }, words));
}

TYPED_TEST(quantize, refuses_codes_that_are_none_of_its) {
  const auto good = quantize_blockwise(numbers({40, 20}, values::any), TypeParam());
  const auto with_codes = [&](const Tensor& codes) {
    auto q = good;
    q.codes = codes;
    return refuses([&] { dequantize_blockwise(q); },
                   {"dequantize_blockwise", "codes", TypeParam::name});
  };
  EXPECT_TRUE(with_codes(Tensor()));
  EXPECT_TRUE(with_codes(good.codes.to(torch::kInt)));
  EXPECT_TRUE(with_codes(good.codes.t()));
  EXPECT_TRUE(with_codes(good.codes.to(torch::kMeta)));
}

TYPED_TEST(quantize, refuses_headers_that_do_not_fit) {
  if constexpr (has_headers<TypeParam>) {
    const auto good = quantize_blockwise(numbers({1000}, values::any), TypeParam());
    const auto with_headers = [&](const Tensor& headers) {
      auto q = good;
      q.headers = headers;
      return refuses([&] { dequantize_blockwise(q); },
                     {"dequantize_blockwise", "headers", TypeParam::name});
    };
    const Tensor& h = good.headers;
    EXPECT_TRUE(with_headers(Tensor()));
    EXPECT_TRUE(with_headers(h.slice(0, 1)));
    EXPECT_TRUE(with_headers(torch::cat({h, h})));
    EXPECT_TRUE(with_headers(h.to(torch::kDouble)));
    EXPECT_TRUE(with_headers(torch::cat({h, h}).slice(0, 0, 2 * h.numel(), 2)));
    EXPECT_TRUE(with_headers(h.to(torch::kMeta)));
    auto shorter = good;
    shorter.codes = good.codes.slice(0, 0, 10);
    EXPECT_TRUE(refuses([&] { dequantize_blockwise(shorter); }, {"10 codes", "1 headers"}));
  } else {
    auto q = quantize_blockwise(numbers({1000}, values::any), TypeParam());
    q.headers = torch::ones({3});
    EXPECT_EQ(dequantize_blockwise(q).numel(), 1000);  // there is nothing to fit
  }
}

// The optimizer's codes

/// The inverse of leanopt::mix.
std::uint64_t unmix(std::uint64_t z) {
  const auto unshift = [&](int by) {
    z ^= z >> by;
    z ^= z >> (2 * by);
  };
  unshift(31);
  z *= 0x319642b2d24d8ec3;
  unshift(27);
  z *= 0x96de1b173f119089;
  unshift(30);
  return z - 0x9E3779B97F4A7C15;
}
/// The seed with which quantize_blockwise draws what an optimizer of seed 0 draws for its first
/// parameter in its first step.
std::uint64_t seed_of_the_first_step() {
  const std::uint64_t seed = unmix(leanopt::mix(0) + 1);
  EXPECT_EQ(leanopt::random_key(seed, 0, 0), leanopt::random_key(0, 1, 0));
  return seed;
}

/// Both moments of a step are known exactly: half a gradient, and half its square.
TYPED_TEST(quantize, gives_what_an_optimizer_stores) {
  const Tensor g = numbers({1000}, values::any, torch::kBFloat16).to(torch::kFloat32);
  const Tensor p = leaf(torch::zeros({1000}));
  using Class = leanopt::basic_adamw<TypeParam>;
  Class optimizer({p}, typename Class::Options(1e-3).betas({0.5, 0.5}).min_compressed_elements(1));
  p.mutable_grad() = g;
  optimizer.step();
  const auto& state = state_at<leanopt::ParamState>(optimizer, p);

  // A block of log8 has the format of its second moment, here the one that a first moment alone
  // has.
  const auto m = quantize_blockwise(g / 2, TypeParam(), values::any, seed_of_the_first_step());
  EXPECT_TRUE(same_bits(m.codes, state.tensor("exp_avg")));
  EXPECT_TRUE(same_bits(m.headers, state.tensor("exp_avg.header")));
  EXPECT_TRUE(same_bits(dequantize_blockwise(m), leanopt::slot(optimizer, p, "exp_avg")));

  const auto v = quantize_blockwise(g * g / 2, TypeParam(), values::non_negative);
  EXPECT_TRUE(same_bits(v.headers, state.tensor("exp_avg_sq.header")));
  quantized<TypeParam> stored = v;
  stored.codes = state.tensor("exp_avg_sq");
  EXPECT_TRUE(same_bits(dequantize_blockwise(stored), leanopt::slot(optimizer, p, "exp_avg_sq")));
  if (TypeParam::random)  // from a stream of their own
    EXPECT_TRUE(all_of((dequantize_blockwise(v) - dequantize_blockwise(stored)).abs() <=
                       tolerance::stored_of_largest));
  else
    EXPECT_TRUE(same_bits(v.codes, stored.codes));
}

}  // namespace
