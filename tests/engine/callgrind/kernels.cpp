// Steps of the float kernels, AVX2, each between two dumps of callgrind's counts; prints a line per
// step: its name and its number of parameters. Those of double are left out: valgrind 3.19 does not
// know one of the moves between registers that g++ makes there.

#include <leanopt/formats/bfloat16.hpp>
#include <leanopt/formats/dynamic8.hpp>
#include <leanopt/formats/full.hpp>
#include <leanopt/formats/log8.hpp>
#include <leanopt/weights/plain.hpp>
#include <leanopt/weights/split.hpp>

#include "tests/engine/kernel_runs.hpp"
#include "tests/support/patterns.hpp"

#include <cstdio>

namespace {

using namespace kernel_runs;
using namespace leanopt::formats;
using namespace leanopt::weights;
using leanopt::rules::adafactor;
using adamw = way<leanopt::rules::adamw, false>;
using torch_form = way<adafactor, false>;
using hugging_face_form = way<adafactor, true>;

}  // namespace

/// Callgrind dumps its counts when this function returns.
[[gnu::noinline]] void dump_counts() {
  asm volatile("");  // or else the compiler sees that it does nothing
}

namespace {

/// The second step of a matrix: the first finds state that is all zero.
template <class Way, class Format, class Weights>
void count(const char* name, number type) {
  const shape s{1, 256, 512};
  patterns::source random(1);
  tensor x = fresh<typename Way::formula, Format, Weights>(type, s, random);
  const auto o = Way::options();
  x.set_gradient(patterns::kind::normal, random);
  const auto step_number = [&](int n) {
    step_in<Way, Format, Weights, float>(level::avx2, o, n, x, cut::whole);
  };
  step_number(1);
  dump_counts();  // what came before
  step_number(2);
  dump_counts();
  std::printf("%s %zu\n", name, s.elements());
}

}  // namespace

int main() {
  constexpr number f32 = number::float32, bf16 = number::bfloat16;
  count<adamw, full, plain>("adamw_float32", f32);
  count<adamw, full, plain>("adamw_bfloat16", bf16);
  count<adamw, log8, plain>("adamw_log8_float32", f32);
  count<adamw, log8, plain>("adamw_log8_bfloat16", bf16);
  count<adamw, log8, split24>("adamw_log8_split24", bf16);
  count<adamw, dynamic8, plain>("adamw_dynamic8_float32", f32);
  count<adamw, bfloat16, plain>("adamw_moments_of_bfloat16", f32);
  count<torch_form, full, plain>("adafactor_float32", f32);
  count<hugging_face_form, log8, plain>("adafactor_log8_float32", f32);
  count<hugging_face_form, log8, split24>("adafactor_log8_split24", bf16);
}
