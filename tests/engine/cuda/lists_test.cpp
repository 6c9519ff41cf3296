// Lists of many tensors and what the kernels read beside them: empty tensors at every place, places
// in memory that are not aligned, more elements than 32 bits count, scalars on the device.

#include "tests/conformance/lists.hpp"

#include "tests/engine/cuda/runs.hpp"

#include <gtest/gtest.h>

#include <deque>
#include <sys/mman.h>

namespace {

using namespace cuda_runs;
using namespace kernel_runs;
using leanopt::formats::full;
using leanopt::formats::log8;
using leanopt::weights::plain;
using patterns::kind;
using adamw_way = way<leanopt::rules::adamw, false>;

template <class Format>
tensor fresh_of(std::size_t n, patterns::source& random) {
  tensor t = fresh<adamw_way::formula, Format, plain>(number::float32, {1, 1, n}, random);
  t.set_gradient(kind::normal, random);
  return t;
}
/// One step of tensors of these sizes, together and one by one.
template <class Format>
void check_list(const std::vector<std::size_t>& sizes) {
  patterns::source random(sizes.size() + 1);
  std::deque<tensor> a, b;
  std::vector<tensor*> all;
  for (const std::size_t n : sizes) {
    a.push_back(fresh_of<Format>(n, random));
    b.push_back(a.back());
    all.push_back(&b.back());
  }
  const auto o = adamw_way::options();
  cuda_runs::step<adamw_way, Format, float>(o, 1, all, std::vector<weights_kind>(sizes.size()));
  for (std::size_t j = 0; j < sizes.size(); ++j) {
    if (sizes[j])
      kernel_runs::step<adamw_way, Format, plain>(leanopt::cpu::best_level(), o, 1, a[j]);
    ASSERT_EQ(difference(b[j], a[j]), "") << "tensor " << j << " of " << sizes.size();
  }
}
TEST(Lists, OfAnyNumberOfTensors) {
  for (const std::size_t n : {0, 1, 2, 3, 31, 1000}) {
    std::vector<std::size_t> sizes;
    for (std::size_t i = 0; i < n; ++i) sizes.push_back(i * 97 % 600 + 1);
    check_list<log8>(sizes);
    check_list<full>(sizes);
  }
}
TEST(Lists, HaveEmptyTensorsAnywhere) {
  for (unsigned empty = 0; empty < 32; ++empty) {
    std::vector<std::size_t> sizes;
    for (unsigned i = 0; i < 5; ++i)
      sizes.push_back(empty >> i & 1 ? 0 : 300 * i + 5000 * (i == 3) + 1);
    check_list<log8>(sizes);
  }
}

/// Operands and state that begin `shift` elements after an aligned place.
template <class Format>
void check_shifted(std::size_t shift_p, std::size_t shift_g, std::size_t shift_slots) {
  constexpr std::size_t n = 700;
  patterns::source random(3);
  tensor a = fresh_of<Format>(n, random);
  const std::size_t width = a.slots[0].width();
  std::vector<float> p(n + 8), g(n + 8);
  std::vector<std::uint64_t> memory[2];
  char* slots[2];
  for (int k = 0; k < 2; ++k) {
    memory[k].resize(n + 16);
    slots[k] = reinterpret_cast<char*>(memory[k].data()) + shift_slots * width;
  }
  std::copy_n(a.p.data<float>(), n, p.data() + shift_p);
  std::copy_n(a.g.data<float>(), n, g.data() + shift_g);

  leanopt::cuda::tensor t = tensor_of(a, weights_kind::plain, 0);
  std::vector<std::uint16_t> headers[2] = {std::vector<std::uint16_t>(3),
                                           std::vector<std::uint16_t>(3)};
  t.p.data = p.data() + shift_p;
  for (int k = 0; k < 2; ++k) {
    t.slots[k] = slots[k];
    t.headers[k] = headers[k].data();
  }
  leanopt::cuda::table table;
  table.add(t);
  device_list device(table);
  device.set_gradients({g.data() + shift_g});
  const auto o = adamw_way::options();
  const auto group = leanopt::cuda::group_of<leanopt::rules::adamw, float>(o, 1, 1, 0);
  ASSERT_EQ(
      (leanopt::cuda::step<adamw_way::formula, Format, float>(device.list(), &group, {}, nullptr)),
      0);
  kernel_runs::step<adamw_way, Format, plain>(leanopt::cpu::best_level(), o, 1, a);
  EXPECT_EQ(std::memcmp(p.data() + shift_p, a.p.data(), n * sizeof(float)), 0);
  for (int k = 0; k < 2; ++k) EXPECT_EQ(std::memcmp(slots[k], a.slots[k].data(), n * width), 0);
  for (std::size_t i = 0; i < p.size(); ++i)
    EXPECT_TRUE((shift_p <= i && i < shift_p + n) || p[i] == 0) << "written outside: " << i;
}
TEST(Lists, MayBeginAnywhere) {
  for (std::size_t p = 0; p < 4; ++p)
    for (std::size_t g = 0; g < 4; ++g)
      for (std::size_t slots = 0; slots < 4; ++slots) {
        check_shifted<log8>(p, g, slots);
        check_shifted<full>(p, g, slots);
      }
}

/// Memory that is there once it is touched.
class sparse_memory {
 public:
  explicit sparse_memory(std::size_t bytes) : bytes_(bytes) {
    at_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
               -1, 0);
  }
  ~sparse_memory() { munmap(at_, bytes_); }
  sparse_memory(const sparse_memory&) = delete;
  sparse_memory& operator=(const sparse_memory&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(at_);
  }

 private:
  void* at_;
  std::size_t bytes_;
};
TEST(Lists, CountElementsInSixtyFourBits) {
  constexpr std::size_t n = (std::size_t(5) << 30) + 300, last = n / 4096 * 4096;
  const sparse_memory p(n * 4), g(n * 4), m(n), v(n), hm(n / 128 + 2), hv(n / 128 + 2);
  patterns::source random(4);
  for (std::size_t i = last; i < n; ++i) {
    p.as<float>()[i] = random.number<float>(kind::normal);
    g.as<float>()[i] = random.number<float>(kind::normal);
  }
  leanopt::cuda::tensor t;
  t.p.data = p.as<void>();
  t.slots[0] = m.as<void>();
  t.slots[1] = v.as<void>();
  t.headers[0] = hm.as<void>();
  t.headers[1] = hv.as<void>();
  t.elements = n;
  const std::vector<float> before(p.as<float>() + last, p.as<float>() + n);
  leanopt::cuda::table table;
  leanopt::cuda::tensor alone = t;
  table.add(t);
  // The last unit alone: the list begins there.
  const void* gradients[] = {g.as<void>()};
  const std::uint32_t zero = 0;
  leanopt::cuda::work_list list;
  alone.first_unit = 0;
  list.tensors = &alone;
  list.gradients = gradients;
  list.tensor_of_unit = &zero - (last / 4096);
  list.units = 1;
  list.first = last / 4096;
  const auto o = adamw_way::options();
  const auto group = leanopt::cuda::group_of<leanopt::rules::adamw, float>(o, 1, 1, 0);
  ASSERT_EQ((leanopt::cuda::step<adamw_way::formula, log8, float>(list, &group, {}, nullptr)), 0);

  leanopt::cpu::tensor_step c;
  std::vector<float> p_of_cpu = before;
  std::vector<std::uint8_t> codes[2] = {std::vector<std::uint8_t>(n - last),
                                        std::vector<std::uint8_t>(n - last)};
  std::vector<std::uint16_t> headers[2] = {std::vector<std::uint16_t>(2),
                                           std::vector<std::uint16_t>(2)};
  c.p.data = p_of_cpu.data() - last;
  c.g.data = g.as<void>();
  for (int k = 0; k < 2; ++k) {
    c.slots[k] = codes[k].data() - last;
    c.headers[k] = headers[k].data() - last / 256;
  }
  c.elements = n;
  c.key = leanopt::random_key(1, 1, 0);
  leanopt::cpu::step<adamw_way::formula, log8, float, plain>(
      leanopt::cpu::best_level(), c, leanopt::rules::adamw::prepare<float>(o, 1), {}, last, n);
  EXPECT_EQ(std::memcmp(p_of_cpu.data(), p.as<float>() + last, (n - last) * 4), 0);
  EXPECT_EQ(std::memcmp(codes[0].data(), m.as<char>() + last, n - last), 0);
  EXPECT_EQ(std::memcmp(codes[1].data(), v.as<char>() + last, n - last), 0);
  EXPECT_EQ(std::memcmp(headers[0].data(), hm.as<std::uint16_t>() + last / 256, 4), 0);
}

// ---- scalars ------------------------------------------------------------------------------------

TEST(Scalars, MultiplyGradientsAsTheCpuDoes) {
  const double inv_scale = 1.0 / 1024, clip = 0.3;
  for (const bool clips : {false, true})
    for (const std::size_t n : {256, 300}) {
      patterns::source random(n);
      tensor a = fresh_of<log8>(n, random), b = a;
      const auto o = adamw_way::options();
      leanopt::cuda::device_scalars scalars;
      scalars.inv_scale = &inv_scale;
      if (clips) scalars.clip = &clip;
      cuda_runs::step<adamw_way, log8, float>(o, 1, {&b}, {weights_kind::plain}, scalars);
      leanopt::cpu::matrix_step work = work_of(a, 1);
      work.g.factor = clips ? inv_scale * clip : inv_scale;
      leanopt::cpu::step<adamw_way::formula, log8, float, plain>(
          leanopt::cpu::best_level(), work, leanopt::rules::adamw::prepare<float>(o, 1), {}, 0, n);
      EXPECT_EQ(difference(b, a), "");
    }
}
TEST(Scalars, CallAStepOff) {
  patterns::source random(1);
  const tensor before = fresh_of<log8>(1000, random);
  for (const float found : {0.0f, 1.0f}) {
    tensor t = before;
    leanopt::cuda::device_scalars scalars;
    scalars.found_inf = &found;
    cuda_runs::step<adamw_way, log8, float>(adamw_way::options(), 1, {&t}, {weights_kind::plain},
                                            scalars);
    EXPECT_EQ(difference(t, before).empty(), found == 1.0f);
  }
}

// ---- coefficients made on the device ------------------------------------------------------------

template <class Rule, class T, class Options>
void check_prepare(Options o) {
  std::int64_t steps[] = {0, 999999};
  double lr = 0.01;
  leanopt::cuda::counted_group<Rule> groups[2];
  for (int i = 0; i < 2; ++i) {
    groups[i].options = leanopt::cuda::constants_of<Rule>(o);
    groups[i].step = &steps[i];
    groups[i].seed = std::uint64_t(i);
    groups[i].epsilon = kernel_runs::epsilon_of(number::float32);
  }
  groups[1].lr = &lr;
  const double own = o.lr();
  leanopt::cuda::group<Rule, T> made[2];
  for (int turn = 1; turn <= 50; ++turn) {
    lr /= 1.1;
    const float found = turn % 7 == 0;
    leanopt::cuda::device_scalars scalars;
    scalars.found_inf = &found;
    const std::int64_t before[] = {steps[0], steps[1]};
    ASSERT_EQ((leanopt::cuda::prepare<Rule, T>(groups, made, 2, scalars, nullptr)), 0);
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(steps[i], before[i] + !found);
      if (found) continue;
      o.lr(i ? lr : own);
      const auto expected =
          leanopt::cuda::group_of<Rule, T>(o, std::uint64_t(i), steps[i], groups[i].epsilon);
      ASSERT_EQ(std::memcmp(&made[i].coeffs, &expected.coeffs, sizeof expected.coeffs), 0);
      ASSERT_EQ(made[i].key, expected.key);
      if constexpr (!Rule::elementwise) {
        ASSERT_EQ(made[i].step, steps[i]);
        ASSERT_EQ(made[i].options.lr(), o.lr());
      }
    }
  }
}
TEST(Prepare, CountsStepsAndHasTheBitsOfTheHost) {
  check_prepare<leanopt::rules::adamw, float>(adamw_way::options());
  check_prepare<leanopt::rules::adam, double>(way<leanopt::rules::adam, false>::options());
  check_prepare<leanopt::rules::adafactor, float>(way<leanopt::rules::adafactor, false>::options());
  check_prepare<leanopt::rules::adafactor, double>(way<leanopt::rules::adafactor, true>::options());
}

// ---- elements that are left out -----------------------------------------------------------------

template <class Format, class T>
void check_skipping(number type) {
  for (const std::size_t n : {256, 777, 4096 + 300}) {
    patterns::source random(n);
    tensor a = fresh<adamw_way::formula, Format, plain>(type, {1, 1, n}, random);
    a.skips = true;
    tensor b = a;
    const auto o = adamw_way::options();
    for (int i = 1; i <= 3; ++i) {
      a.set_gradient(kind::non_finite, random);
      b.g = a.g;
      kernel_runs::step<adamw_way, Format, plain>(leanopt::cpu::best_level(), o, i, a);
      cuda_runs::step<adamw_way, Format, T>(o, i, {&b}, {weights_kind::plain});
      ASSERT_EQ(difference(b, a), "") << n << ", step " << i;
    }
    EXPECT_GT(b.skipped, 0);
  }
}
TEST(Skipping, LeavesOutWhatTheCpuLeavesOut) {
  check_skipping<log8, float>(number::float32);
  check_skipping<log8, float>(number::bfloat16);
  check_skipping<log8, double>(number::float64);
  check_skipping<full, float>(number::float32);
  check_skipping<leanopt::formats::bfloat16, float>(number::float32);
}

}  // namespace
