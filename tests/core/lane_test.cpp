// Every operation of lane values, at every width, against plain arithmetic of one number; and the
// conversions of 16-bit numbers against their definition in integers. The plain arithmetic is
// IEEE's because this program is compiled without flags that relax it.

#include <leanopt/core/lane.hpp>
#include <leanopt/core/number.hpp>
#include <leanopt/engine/cpu.hpp>

#include "tests/support/levels.hpp"
#include "tests/support/patterns.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

// Lanes are passed inside always-inlined kernels only, so the ABI that g++ warns about never
// exists.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace {

using leanopt::lane_traits;
using leanopt::cpu::level;
using leanopt::cpu::detail::lanes_of;
using patterns::comparable;

/// Runs a kernel at every width there is, those that the engine leaves out for a type too.
template <class Kernel, class... A>
auto launch(level l, const A&... arguments) {
  return leanopt::cpu::detail::launch<Kernel, level::avx512>(l, arguments...);
}

std::string at(level l) { return std::string(" at ") + leanopt::cpu::name_of(l); }

/// Special values and random patterns; a multiple of 16, offset by one so that loads are unaligned.
template <class T>
std::vector<T> operands(std::uint64_t seed) {
  using limits = std::numeric_limits<T>;
  const T special[] = {T(0),
                       T(1),
                       T(1.5),
                       T(3),
                       limits::epsilon(),
                       limits::denorm_min(),
                       limits::min(),
                       std::nextafter(limits::min(), T(0)),
                       std::nextafter(T(1), T(2)),
                       limits::max(),
                       limits::infinity(),
                       limits::quiet_NaN()};
  std::vector<T> values;
  for (const T x : special) {
    values.push_back(x);
    values.push_back(-x);
  }
  patterns::source random(seed);
  while (values.size() < 48)
    values.push_back(random.number<T>(patterns::all_kinds[values.size() % 4]));
  return values;
}

struct plus {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V& b, const V&) {
    return a + b;
  }
  template <class T>
  static T plain(T a, T b, T) {
    return a + b;
  }
};
struct minus {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V& b, const V&) {
    return a - b;
  }
  template <class T>
  static T plain(T a, T b, T) {
    return a - b;
  }
};
struct times {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V& b, const V&) {
    return a * b;
  }
  template <class T>
  static T plain(T a, T b, T) {
    return a * b;
  }
};
struct negative {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V&, const V&) {
    return -a;
  }
  template <class T>
  static T plain(T a, T, T) {
    return -a;
  }
};
struct quotient {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V& b, const V&) {
    return divide(a, b);
  }
  template <class T>
  static T plain(T a, T b, T) {
    return a / b;
  }
};
struct root {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V&, const V&) {
    return sqrt(a);
  }
  template <class T>
  static T plain(T a, T, T) {
    return std::sqrt(a);
  }
};
struct fused {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V& b, const V& c) {
    return fma(a, b, c);
  }
  template <class T>
  static T plain(T a, T b, T c) {
    return std::fma(a, b, c);
  }
};
struct largest {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V& b, const V&) {
    return max(a, b);
  }
  template <class T>
  static T plain(T a, T b, T) {
    return a > b ? a : b;
  }
};
struct smallest {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V& b, const V&) {
    return min(a, b);
  }
  template <class T>
  static T plain(T a, T b, T) {
    return a < b ? a : b;
  }
};
struct replaced_nan {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V& b, const V& c) {
    return if_nan(a, b, c);
  }
  template <class T>
  static T plain(T a, T b, T c) {
    return std::isnan(a) ? b : c;
  }
};
struct magnitude {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V&, const V&) {
    return abs(a);
  }
  template <class T>
  static T plain(T a, T, T) {
    return std::abs(a);
  }
};
/// A product and a sum stay two operations, wherever the product stands.
struct product_then_sum {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V& b, const V& c) {
    return a * b + c;
  }
  template <class T>
  static T plain(T a, T b, T c) {
    volatile T product = a * b;
    return product + c;
  }
};
struct product_then_difference {
  template <class V>
  LEANOPT_HD static V run(const V& a, const V& b, const V& c) {
    return c - a * b;
  }
  template <class T>
  static T plain(T a, T b, T c) {
    volatile T product = a * b;
    return c - product;
  }
};
struct broadcast {
  template <class V>
  LEANOPT_HD static V run(const V&, const V&, const V&) {
    return V(typename lane_traits<V>::number(0.375));
  }
  template <class T>
  static T plain(T, T, T) {
    return T(0.375);
  }
};

template <class T, class Op>
struct real_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const T* a, const T* b, const T* c, T* out, std::size_t n) {
    using V = lanes_of<Width, T>;
    using L = lane_traits<V>;
    for (std::size_t i = 0; i < n; i += L::count)
      L::store(out + i, Op::run(L::load(a + i), L::load(b + i), L::load(c + i)));
  }
};

template <class Op>
class RealOperation : public testing::Test {};
using real_operations =
    testing::Types<plus, minus, times, negative, quotient, root, fused, largest, smallest,
                   replaced_nan, product_then_sum, product_then_difference, broadcast>;
TYPED_TEST_SUITE(RealOperation, real_operations);

template <class T, class Op>
void check_real() {
  const std::vector<T> values = operands<T>(1);
  std::vector<T> a(1), b(1), c(1);  // one in front: no operand is aligned to a register
  for (const T x : values)
    for (const T y : values)
      for (const T z : values) {
        a.push_back(x);
        b.push_back(y);
        c.push_back(z);
      }
  const std::size_t n = a.size() - 1;
  ASSERT_EQ(n % 16, 0u);
  for (const level l : levels::all_here()) {
    std::vector<T> out(n + 2, T(-77));
    launch<real_kernel<T, Op>>(l, a.data() + 1, b.data() + 1, c.data() + 1, out.data() + 1, n);
    for (std::size_t i = 1; i <= n; ++i)
      ASSERT_EQ(comparable(out[i]), comparable(Op::plain(a[i], b[i], c[i])))
          << a[i] << ", " << b[i] << ", " << c[i] << at(l);
    EXPECT_EQ(out[0], T(-77)) << at(l);
    EXPECT_EQ(out[n + 1], T(-77)) << at(l);
  }
}
TYPED_TEST(RealOperation, IsOneCorrectlyRoundedOperation) {
  check_real<float, TypeParam>();
  check_real<double, TypeParam>();
}

TEST(Lane, MagnitudesOfFloatsHaveNoSign) { check_real<float, magnitude>(); }

// ---- integers -----------------------------------------------------------------------------------

struct int_plus {
  template <class I>
  LEANOPT_HD static I run(const I& a, const I& b) {
    return a + b;
  }
  static std::uint32_t plain(std::uint32_t a, std::uint32_t b) { return a + b; }
};
struct int_minus {
  template <class I>
  LEANOPT_HD static I run(const I& a, const I& b) {
    return a - b;
  }
  static std::uint32_t plain(std::uint32_t a, std::uint32_t b) { return a - b; }
};
struct int_times {
  template <class I>
  LEANOPT_HD static I run(const I& a, const I& b) {
    return a * b;
  }
  static std::uint32_t plain(std::uint32_t a, std::uint32_t b) { return a * b; }
};
struct int_and {
  template <class I>
  LEANOPT_HD static I run(const I& a, const I& b) {
    return a & b;
  }
  static std::uint32_t plain(std::uint32_t a, std::uint32_t b) { return a & b; }
};
struct int_or {
  template <class I>
  LEANOPT_HD static I run(const I& a, const I& b) {
    return a | b;
  }
  static std::uint32_t plain(std::uint32_t a, std::uint32_t b) { return a | b; }
};
struct int_max {
  template <class I>
  LEANOPT_HD static I run(const I& a, const I& b) {
    using leanopt::max;
    return max(a, b);
  }
  static std::uint32_t plain(std::uint32_t a, std::uint32_t b) { return std::max(a, b); }
};
struct int_min {
  template <class I>
  LEANOPT_HD static I run(const I& a, const I& b) {
    using leanopt::min;
    return min(a, b);
  }
  static std::uint32_t plain(std::uint32_t a, std::uint32_t b) { return std::min(a, b); }
};
struct int_if_above {
  template <class I>
  LEANOPT_HD static I run(const I& a, const I& b) {
    using leanopt::if_above;
    return if_above(a, b, I(7u), b);
  }
  static std::uint32_t plain(std::uint32_t a, std::uint32_t b) { return a > b ? 7u : b; }
};
template <int Shift>
struct int_left {
  template <class I>
  LEANOPT_HD static I run(const I& a, const I&) {
    return a << Shift;
  }
  static std::uint32_t plain(std::uint32_t a, std::uint32_t) { return a << Shift; }
};
template <int Shift>
struct int_right {
  template <class I>
  LEANOPT_HD static I run(const I& a, const I&) {
    return a >> Shift;
  }
  static std::uint32_t plain(std::uint32_t a, std::uint32_t) { return a >> Shift; }
};

/// Integers pass as bits of floats, whose lanes load and store without arithmetic.
template <class Op>
struct int_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const float* a, const float* b, float* out, std::size_t n) {
    using leanopt::bits;
    using leanopt::real;
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    for (std::size_t i = 0; i < n; i += L::count)
      L::store(out + i, V(real(Op::run(bits(L::load(a + i)), bits(L::load(b + i))))));
  }
};

template <class Op>
class IntOperation : public testing::Test {};
using int_operations = testing::Types<int_plus, int_minus, int_times, int_and, int_or, int_max,
                                      int_min, int_if_above, int_left<1>, int_left<20>,
                                      int_left<31>, int_right<1>, int_right<12>, int_right<31>>;
TYPED_TEST_SUITE(IntOperation, int_operations);

TYPED_TEST(IntOperation, IsThatOfUnsignedNumbers) {
  std::vector<std::uint32_t> values = {0,           1,           2,           0x7fu,
                                       0x80u,       0xffu,       0xffffu,     0x10000u,
                                       0x7fffffffu, 0x80000000u, 0x80000001u, 0xffffffffu};
  patterns::source random(2);
  while (values.size() < 64) values.push_back(std::uint32_t(random.word()));
  std::vector<float> a, b;
  for (const std::uint32_t x : values)
    for (const std::uint32_t y : values) {
      a.push_back(patterns::cast<float>(x));
      b.push_back(patterns::cast<float>(y));
    }
  for (const level l : levels::all_here()) {
    std::vector<float> out(a.size());
    launch<int_kernel<TypeParam>>(l, static_cast<const float*>(a.data()),
                                  static_cast<const float*>(b.data()), out.data(), a.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      const auto x = patterns::cast<std::uint32_t>(a[i]), y = patterns::cast<std::uint32_t>(b[i]);
      ASSERT_EQ(patterns::cast<std::uint32_t>(out[i]), TypeParam::plain(x, y))
          << std::hex << x << ", " << y << at(l);
    }
  }
}

struct reduce_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const float* x, std::uint32_t* largest, std::uint32_t* smallest,
                                 int* count) {
    using leanopt::bits;
    using V = lanes_of<Width, float>;
    const auto b = bits(lane_traits<V>::load(x));
    *largest = leanopt::reduce_max(b);
    *smallest = leanopt::reduce_min(b);
    *count = lane_traits<V>::count;
  }
};
TEST(Lane, ReductionsFindTheExtremeInEveryLane) {
  for (const level l : levels::all_here())
    for (int lane = 0; lane < 16; ++lane)
      for (const std::uint32_t extreme : {0u, 0xffffffffu}) {
        std::vector<float> x;
        for (int i = 0; i < 16; ++i)
          x.push_back(
              patterns::cast<float>(i == lane ? extreme : 0x40000000u + 977u * std::uint32_t(i)));
        std::uint32_t largest, smallest;
        int count;
        launch<reduce_kernel>(l, static_cast<const float*>(x.data()), &largest, &smallest, &count);
        std::vector<std::uint32_t> seen;
        for (int i = 0; i < count; ++i) seen.push_back(patterns::cast<std::uint32_t>(x[i]));
        EXPECT_EQ(largest, *std::max_element(seen.begin(), seen.end())) << lane << at(l);
        EXPECT_EQ(smallest, *std::min_element(seen.begin(), seen.end())) << lane << at(l);
      }
}

struct iota_kernel {
  template <int Width>
  LEANOPT_INLINE static int run(float* out) {
    using leanopt::real;
    using V = lanes_of<Width, float>;
    lane_traits<V>::store(out, V(real(lane_traits<V>::iota())));
    return lane_traits<V>::count;
  }
};
TEST(Lane, IotaCountsTheLanes) {
  for (const level l : levels::all_here()) {
    float out[16];
    const int count = launch<iota_kernel>(l, static_cast<float*>(out));
    EXPECT_EQ(count, l >= level::avx512 ? 16 : l == level::avx2 ? 8 : 1);
    for (int i = 0; i < count; ++i)
      EXPECT_EQ(patterns::cast<std::uint32_t>(out[i]), std::uint32_t(i)) << at(l);
  }
}

// ---- memory -------------------------------------------------------------------------------------

template <class Byte>
struct load_bytes_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const Byte* from, float* out, std::size_t n) {
    using leanopt::real;
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    for (std::size_t i = 0; i < n; i += L::count)
      L::store(out + i, V(real(L::load_bytes(from + i))));
  }
};
template <class Byte>
void check_load_bytes() {
  std::vector<Byte> bytes(257);
  for (int i = 0; i < 257; ++i) bytes[i] = Byte(i * 3);  // 3 is odd: all 256 values
  for (const level l : levels::all_here()) {
    std::vector<float> out(256);
    launch<load_bytes_kernel<Byte>>(l, static_cast<const Byte*>(bytes.data() + 1), out.data(),
                                    out.size());
    for (int i = 0; i < 256; ++i)
      ASSERT_EQ(patterns::cast<std::uint32_t>(out[i]), std::uint32_t(std::int32_t(bytes[i + 1])))
          << at(l);
  }
}
TEST(Lane, BytesAreExtendedByTheirSign) {
  check_load_bytes<std::uint8_t>();
  check_load_bytes<std::int8_t>();
}

struct store_bytes_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const float* from, std::uint8_t* out, std::size_t n) {
    using leanopt::bits;
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    for (std::size_t i = 0; i < n; i += std::size_t(L::count) * L::group) {
      leanopt::ints<V> x[L::group];
      for (int g = 0; g < L::group; ++g) x[g] = bits(L::load(from + i + g * L::count));
      L::store_bytes(out + i, x);
    }
  }
};
TEST(Lane, BytesAreStoredInOrder) {
  std::vector<float> values;
  for (std::uint32_t i = 0; i < 512; ++i)
    values.push_back(patterns::cast<float>((i * 7 + 5) % 256));
  for (const level l : levels::all_here()) {
    std::vector<std::uint8_t> out(514, 99);
    launch<store_bytes_kernel>(l, static_cast<const float*>(values.data()), out.data() + 1,
                               values.size());
    for (std::uint32_t i = 0; i < 512; ++i) ASSERT_EQ(out[i + 1], (i * 7 + 5) % 256) << at(l);
    EXPECT_EQ(out.front(), 99) << at(l);
    EXPECT_EQ(out.back(), 99) << at(l);
  }
}

struct words_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const std::uint16_t* from, float* wide, std::uint16_t* back,
                                 std::size_t n) {
    using leanopt::bits;
    using leanopt::real;
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    for (std::size_t i = 0; i < n; i += L::count) {
      const auto x = L::load_words(from + i);
      L::store(wide + i, V(real(x)));
      L::store_words(back + i, x);
    }
  }
};
TEST(Lane, EveryWordOf16BitsIsLoadedAndStored) {
  std::vector<std::uint16_t> words(65537);
  for (std::uint32_t i = 0; i < words.size(); ++i) words[i] = std::uint16_t(i * 40503u);
  for (const level l : levels::all_here()) {
    std::vector<float> wide(65536);
    std::vector<std::uint16_t> back(65537);
    launch<words_kernel>(l, static_cast<const std::uint16_t*>(words.data() + 1), wide.data(),
                         back.data() + 1, std::size_t(65536));
    for (std::size_t i = 1; i <= 65536; ++i) {
      ASSERT_EQ(patterns::cast<std::uint32_t>(wide[i - 1]), words[i]) << at(l);
      ASSERT_EQ(back[i], words[i]) << at(l);
    }
  }
}

struct look_up_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const std::uint32_t* table, const std::uint16_t* at, float* out,
                                 std::size_t n) {
    using leanopt::real;
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    for (std::size_t i = 0; i < n; i += L::count)
      L::store(out + i, V(real(L::look_up(table, L::load_words(at + i)))));
  }
};
TEST(Lane, LooksUpOneNumberPerLane) {
  patterns::source random(6);
  for (const std::uint32_t size : {1u, 2u, 256u, 0xc01u, 0x10000u}) {
    std::vector<std::uint32_t> table(size + 2, 0xdeadbeefu);  // what is around it is not read
    for (std::uint32_t i = 1; i <= size; ++i) table[i] = std::uint32_t(random.word());
    std::vector<std::uint16_t> places(4096);
    for (auto& one : places) one = std::uint16_t(random.below(size));
    places[5] = 0;
    places[77] = std::uint16_t(size - 1);
    for (const level l : levels::all_here()) {
      std::vector<float> out(places.size());
      launch<look_up_kernel>(l, static_cast<const std::uint32_t*>(table.data() + 1),
                             static_cast<const std::uint16_t*>(places.data()), out.data(),
                             places.size());
      for (std::size_t i = 0; i < places.size(); ++i)
        ASSERT_EQ(patterns::cast<std::uint32_t>(out[i]), table[1 + places[i]])
            << places[i] << at(l);
    }
  }
}

struct mixed_width_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const float* from, const double* wide_from, double* wide,
                                 float* narrow, std::size_t n) {
    using L = lane_traits<lanes_of<Width, double>>;
    for (std::size_t i = 0; i < n; i += L::count) {
      L::store(wide + i, L::load(from + i));
      L::store(narrow + i, L::load(wide_from + i));
    }
  }
};
TEST(Lane, DoublesReadAndWriteFloats) {
  std::vector<float> from = operands<float>(3);
  std::vector<double> wide_from = operands<double>(4);
  for (const double x :
       {0x1.000001p0, 0x1.000003p0, 0x1.0000011p0, 0x1.fffffefp127, 0x1.fffffffp127, 0x1p-149,
        0x1p-150, 0x1.8p-149, 0x1.8p-150, -0x1p-127, -0x1.000001p-126, 1e-60, -1e60, 0.1, 0.2, 0.3})
    wide_from.push_back(x);
  from.resize(wide_from.size(), 0.1f);
  for (const level l : levels::all_here()) {
    const std::size_t n = from.size();
    ASSERT_EQ(n % 16, 0u);
    std::vector<double> wide(n);
    std::vector<float> narrow(n);
    launch<mixed_width_kernel>(l, static_cast<const float*>(from.data()),
                               static_cast<const double*>(wide_from.data()), wide.data(),
                               narrow.data(), n);
    for (std::size_t i = 0; i < n; ++i) {
      EXPECT_EQ(comparable(wide[i]), comparable(double(from[i]))) << from[i] << at(l);
      EXPECT_EQ(comparable(narrow[i]), comparable(float(wide_from[i]))) << wide_from[i] << at(l);
    }
  }
}

// ---- sums ---------------------------------------------------------------------------------------

template <class T>
struct sums_kernel {
  template <int Width>
  LEANOPT_INLINE static T run(const T* x, std::size_t n) {
    using V = lanes_of<Width, T>;
    leanopt::sixteen_sums<V> sums;
    for (std::size_t i = 0; i < n; i += 16)
      sums.add([&](int k) LEANOPT_LAMBDA { return lane_traits<V>::load(x + i + k); });
    return sums.total();
  }
};
/// Element i goes to partial sum i % 16; then the upper half is added to the lower until one is
/// left.
template <class T>
T sum_by_definition(const std::vector<T>& x) {
  T part[16] = {};
  for (std::size_t i = 0; i < x.size(); ++i) part[i % 16] += x[i];
  for (int half : {8, 4, 2, 1})
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  return part[0];
}
template <class T>
void check_sums() {
  for (const std::size_t n : {0u, 16u, 32u, 256u}) {
    const auto x = patterns::source(n).numbers<T>(n, patterns::kind::octaves);
    for (const level l : levels::all_here())
      EXPECT_EQ(comparable(launch<sums_kernel<T>>(l, x.data(), n)),
                comparable(sum_by_definition(x)))
          << n << at(l);
  }
}
TEST(Lane, SumsHaveOneOrder) {
  check_sums<float>();
  check_sums<double>();
}

// ---- numbers of 16 bits -------------------------------------------------------------------------

/// A small float format by its definition: sign, exponent bits with the usual bias, mantissa bits.
struct small_float {
  int exponent_bits, mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  std::uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  bool is_nan(std::uint32_t b) const { return (b & 0x7fffu) > infinity(); }

  double value(std::uint32_t b) const {
    const std::uint32_t magnitude = b & 0x7fffu;
    const int exponent = int(magnitude >> mantissa_bits);
    const std::uint32_t mantissa = magnitude & ((1u << mantissa_bits) - 1);
    const double x = magnitude == infinity() ? std::numeric_limits<double>::infinity()
                     : exponent == 0         ? std::ldexp(mantissa, 1 - bias() - mantissa_bits)
                                             : std::ldexp(mantissa + (1u << mantissa_bits),
                                                          exponent - bias() - mantissa_bits);
    return b & 0x8000u ? -x : x;
  }

  /// To the nearest, ties to even, in integers: the mantissa with its hidden bit is cut where the
  /// target's last bit stands, and what was cut decides. @pre x is no NaN
  std::uint32_t nearest(std::uint32_t x) const {
    const std::uint32_t sign = x >> 16 & 0x8000u, magnitude = x & 0x7fffffffu;
    if (magnitude == 0x7f800000u) return sign | infinity();
    const int field = int(magnitude >> 23);
    const int exponent = (field ? field : 1) - 127;  // of the hidden bit
    const std::uint64_t mantissa = (magnitude & 0x7fffffu) | (field ? 0x800000u : 0);
    const int lowest = 1 - bias();
    const int last = (exponent < lowest ? lowest : exponent) - mantissa_bits;  // of the last bit
    const int cut = last - (exponent - 23);
    if (cut > 40) return sign;
    const std::uint64_t kept = mantissa >> cut, rest = mantissa - (kept << cut);
    const std::uint64_t half = std::uint64_t(1) << (cut - 1);
    const std::uint64_t rounded = kept + (rest > half || (rest == half && (kept & 1)) ? 1 : 0);
    // A carry out of the mantissa runs into the exponent, which is what it means.
    const std::uint64_t field_below =
        exponent < lowest ? 0 : std::uint64_t(exponent + bias() - 1) << mantissa_bits;
    const std::uint64_t result = field_below + rounded;
    return sign | std::uint32_t(result >= infinity() ? infinity() : result);
  }
};
constexpr small_float bfloat16{8, 7}, float16{5, 10};

template <class Bits>
struct widen_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const std::uint16_t* from, float* out, std::size_t n) {
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    for (std::size_t i = 0; i < n; i += L::count)
      L::store(out + i, Bits::template widen<V>(L::load_words(from + i)));
  }
};
template <class Bits>
struct narrow_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const float* from, std::uint16_t* out, std::size_t n) {
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    for (std::size_t i = 0; i < n; i += L::count)
      L::store_words(out + i, Bits::template narrow<V>(L::load(from + i)));
  }
};

template <class Bits>
void check_every_pattern(const small_float& format) {
  std::vector<std::uint16_t> all(65536), back(65536);
  for (std::uint32_t b = 0; b < 65536; ++b) all[b] = std::uint16_t(b);
  std::vector<float> wide(65536);
  for (const level l : levels::all_here()) {
    launch<widen_kernel<Bits>>(l, static_cast<const std::uint16_t*>(all.data()), wide.data(),
                               all.size());
    launch<narrow_kernel<Bits>>(l, static_cast<const float*>(wide.data()), back.data(), all.size());
    for (std::uint32_t b = 0; b < 65536; ++b) {
      if (format.is_nan(b)) {
        ASSERT_TRUE(std::isnan(wide[b])) << std::hex << b << at(l);
        ASSERT_TRUE(format.is_nan(back[b])) << std::hex << b << at(l);
      } else {
        ASSERT_EQ(comparable(double(wide[b])), comparable(format.value(b)))
            << std::hex << b << at(l);
        ASSERT_EQ(back[b], b) << std::hex << b << at(l);
      }
    }
  }
}
TEST(Number, EveryBfloat16IsWidenedExactlyAndComesBack) {
  check_every_pattern<leanopt::bfloat16_bits>(bfloat16);
}
TEST(Number, EveryFloat16IsWidenedExactlyAndComesBack) {
  check_every_pattern<leanopt::float16_bits>(float16);
}

/// Every sign, exponent and upper mantissa, each with lower halves at, just below and just above
/// the ties of both formats, and with random ones.
std::vector<float> patterns_to_narrow() {
  const std::uint32_t lower[] = {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x1fff,
                                 0x2000, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000,
                                 0x8001, 0x9000, 0xb000, 0xf000, 0xffff};
  patterns::source random(5);
  std::vector<float> x;
  for (std::uint32_t upper = 0; upper < 65536; ++upper) {
    for (const std::uint32_t low : lower) x.push_back(patterns::cast<float>(upper << 16 | low));
    for (int i = 0; i < 15; ++i)
      x.push_back(patterns::cast<float>(upper << 16 | (std::uint32_t(random.word()) & 0xffffu)));
  }
  return x;
}
template <class Bits>
void check_narrow(const small_float& format) {
  const std::vector<float> from = patterns_to_narrow();
  std::vector<std::uint16_t> out(from.size());
  for (const level l : levels::all_here()) {
    launch<narrow_kernel<Bits>>(l, from.data(), out.data(), from.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
      const auto b = patterns::cast<std::uint32_t>(from[i]);
      if (std::isnan(from[i]))
        ASSERT_TRUE(format.is_nan(out[i])) << std::hex << b << at(l);
      else
        ASSERT_EQ(out[i], format.nearest(b)) << std::hex << b << at(l);
    }
  }
}
TEST(Number, FloatsAreRoundedToTheNearestBfloat16) {
  check_narrow<leanopt::bfloat16_bits>(bfloat16);
}
TEST(Number, FloatsAreRoundedToTheNearestFloat16) { check_narrow<leanopt::float16_bits>(float16); }

/// What is kept of x after the lowest `dropped` bits were rounded by random ones of their number:
/// up if those reach what x lacks of the next number, which has to be finite.
std::uint32_t rounded(std::uint32_t x, std::uint32_t random, int dropped) {
  const std::uint32_t sign = x & 0x80000000u, magnitude = x & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (sign | 0x7fc00000u) >> dropped;
  const std::uint32_t cell = 1u << dropped, rest = magnitude % cell, below = magnitude - rest;
  const bool is_up = (random >> (32 - dropped)) >= cell - rest && below + cell < 0x7f800000u;
  return (sign | (is_up ? below + cell : below)) >> dropped;
}
template <int Dropped>
struct dither_kernel {
  template <int Width>
  LEANOPT_INLINE static void run(const float* from, const float* random, float* out,
                                 std::size_t n) {
    using leanopt::bits;
    using leanopt::real;
    using V = lanes_of<Width, float>;
    using L = lane_traits<V>;
    for (std::size_t i = 0; i < n; i += L::count)
      L::store(out + i,
               V(real(leanopt::dither(L::load(from + i), bits(L::load(random + i)), Dropped) >>
                      Dropped)));
  }
};
template <int Dropped>
void check_dither() {
  const std::vector<float> from = patterns_to_narrow();
  patterns::source random(8);
  std::vector<float> draws(from.size()), out(from.size());
  for (std::size_t i = 0; i < draws.size(); ++i) {
    const std::uint32_t ends[] = {0, 0xffffffffu, std::uint32_t(random.word()),
                                  std::uint32_t(random.word())};
    draws[i] = patterns::cast<float>(ends[i % 4]);
  }
  for (const level l : levels::all_here()) {
    launch<dither_kernel<Dropped>>(l, from.data(), static_cast<const float*>(draws.data()),
                                   out.data(), from.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
      const auto x = patterns::cast<std::uint32_t>(from[i]);
      const auto draw = patterns::cast<std::uint32_t>(draws[i]);
      ASSERT_EQ(patterns::cast<std::uint32_t>(out[i]), rounded(x, draw, Dropped))
          << std::hex << x << " by " << draw << at(l);
    }
  }
}
TEST(Number, FloatsAreRoundedByRandomBits) {
  check_dither<8>();
  check_dither<16>();
}

TEST(Number, TheReferenceKnowsTheLandmarks) {  // what is compared with must be right by itself
  EXPECT_EQ(float16.nearest(patterns::cast<std::uint32_t>(1.0f)), 0x3c00u);
  EXPECT_EQ(float16.nearest(patterns::cast<std::uint32_t>(-2.0f)), 0xc000u);
  EXPECT_EQ(float16.nearest(patterns::cast<std::uint32_t>(65504.0f)), 0x7bffu);
  EXPECT_EQ(float16.nearest(patterns::cast<std::uint32_t>(65519.0f)), 0x7bffu);
  EXPECT_EQ(float16.nearest(patterns::cast<std::uint32_t>(65520.0f)), 0x7c00u);
  EXPECT_EQ(float16.nearest(patterns::cast<std::uint32_t>(0x1p-24f)), 0x0001u);
  EXPECT_EQ(float16.nearest(patterns::cast<std::uint32_t>(0x1p-25f)), 0x0000u);
  EXPECT_EQ(float16.nearest(patterns::cast<std::uint32_t>(0x1.8p-24f)), 0x0002u);
  EXPECT_EQ(bfloat16.nearest(patterns::cast<std::uint32_t>(1.0f)), 0x3f80u);
  EXPECT_EQ(bfloat16.nearest(0x3f808000u), 0x3f80u);
  EXPECT_EQ(bfloat16.nearest(0x3f818000u), 0x3f82u);
  EXPECT_EQ(bfloat16.nearest(0x7f7fffffu), 0x7f80u);
  EXPECT_EQ(bfloat16.nearest(0x00000001u), 0x0000u);
}

}  // namespace
