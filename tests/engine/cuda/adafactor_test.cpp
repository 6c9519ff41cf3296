// Adafactor's four launches under the emulator have the bits of the CPU engine: for every shape,
// type and layout, with all matrices of a step together, and with elements that are left out.

#include "tests/conformance/lists.hpp"
#include "tests/engine/cuda/runs.hpp"

#include <gtest/gtest.h>

#include <deque>

namespace {

using namespace cuda_runs;
using namespace kernel_runs;
using leanopt::formats::full;
using leanopt::formats::log8;
using leanopt::rules::adafactor;
using leanopt::weights::plain;
using leanopt::weights::split24;
using patterns::kind;
using torch_form = way<adafactor, false>;
using hugging_face_form = way<adafactor, true>;

const shape shapes[] = {{1, 1, 1},       {1, 1, 7},        {1, 1, 256},       {1, 1, 5000},
                        {1, 7, 1},       {1, 1000, 1},     {1, 2, 2},         {70, 2, 2},
                        {30, 1, 5},      {9, 3, 17},       {1, 63, 100},      {1, 65, 1025},
                        {2, 130, 17},    {3, 65, 129},     {1, 300, 255},     {5, 1, 300},
                        {1, 1, 1, true}, {1, 1, 15, true}, {1, 1, 257, true}, {1, 1, 9001, true},
                        {1, 260, 40}};

/// Some steps of all shapes in one list on the CUDA engine, and one by one on the CPU's.
template <class Way, class Format, class Weights, class T>
void check(number type, kind k, bool skips, const layout* l = nullptr) {
  patterns::source random(std::uint64_t(k) + 7);
  std::deque<tensor> a, b;
  for (const shape& s : shapes) {
    if (l && s.elements() != l->room) continue;
    a.push_back(fresh<typename Way::formula, Format, Weights>(type, s, random, l, l));
    a.back().skips = skips;
    b.push_back(a.back());
  }
  std::vector<tensor*> all;
  for (tensor& t : b) all.push_back(&t);
  const std::vector<weights_kind> kinds(all.size(), leanopt::cuda::kind_of<Weights>);
  const auto o = Way::options();
  for (int i = 1; i <= 3; ++i) {
    emulator::here().seed = unsigned(i);
    for (std::size_t j = 0; j < a.size(); ++j) {
      a[j].set_gradient(k, random);
      b[j].g = a[j].g;
      kernel_runs::step<Way, Format, Weights>(leanopt::cpu::best_level(), o, i, a[j]);
    }
    cuda_runs::adafactor_step<Way, Format, T>(o, i, all, kinds);
    for (std::size_t j = 0; j < a.size(); ++j)
      ASSERT_EQ(difference(b[j], a[j]), "") << a[j].shape.text() << ", step " << i << ", kind "
                                            << int(k) << (skips ? ", skipping" : "");
  }
}
#if defined(__SANITIZE_ADDRESS__)  // so that it takes seconds, not minutes
constexpr kind kinds[] = {kind::normal};
#else
constexpr auto& kinds = patterns::all_kinds;
#endif
template <class Way, class Format, class Weights, class T>
void check_kinds(number type) {
  for (const kind k : kinds) {
    ASSERT_NO_FATAL_FAILURE((check<Way, Format, Weights, T>(type, k, false)));
    ASSERT_NO_FATAL_FAILURE((check<Way, Format, Weights, T>(type, k, true)));
  }
}

TEST(Adafactor, HasTheBitsOfTheCpuInTorchForm) {
  check_kinds<torch_form, full, plain, float>(number::float32);
}
TEST(Adafactor, HasTheBitsOfTheCpuInHuggingFaceForm) {
  check_kinds<hugging_face_form, full, plain, float>(number::float32);
}
TEST(Adafactor, HasTheBitsOfTheCpuInEightBits) {
  check_kinds<hugging_face_form, log8, plain, float>(number::float32);
}
TEST(Adafactor, HasTheBitsOfTheCpuInDouble) {
  check_kinds<torch_form, full, plain, double>(number::float64);
}
TEST(Adafactor, HasTheBitsOfTheCpuInSixteenBits) {
  check_kinds<torch_form, full, split24, float>(number::bfloat16);
  check_kinds<torch_form, full, plain, float>(number::float16);
}
TEST(Adafactor, TakesAnyLayout) {
  const layout transpose{{300, 255}, {1, 300}, 300 * 255};
  check<torch_form, full, plain, float>(number::float32, kind::normal, false, &transpose);
  check<hugging_face_form, log8, split24, float>(number::bfloat16, kind::normal, false, &transpose);
}

}  // namespace
