// Prints a digest of what the kernels do, one line for each instruction set of this machine. With
// any compiler and any flags that the library promises to bear, all lines are the same.

#include "tests/conformance/lists.hpp"
#include "tests/engine/kernel_runs.hpp"
#include "tests/support/levels.hpp"
#include "tests/support/patterns.hpp"

#include <cinttypes>
#include <cstdio>

int main() {
  using namespace kernel_runs;
  using namespace leanopt::formats;
  using namespace leanopt::weights;
  using adamw = way<leanopt::rules::adamw, false>;
  using amsgrad = way<leanopt::rules::adam, true>;
  using torch_form = way<leanopt::rules::adafactor, false>;
  using hugging_face_form = way<leanopt::rules::adafactor, true>;
  constexpr number f32 = number::float32, f64 = number::float64, bf16 = number::bfloat16;
  for (const level l : levels::all_here()) {
    patterns::digest all;
    const auto add = [&](std::uint64_t value) { all.add(&value, 1); };
    for (const patterns::kind k : patterns::all_kinds) {
      for (const shape& s : {shape{1, 1, 100}, shape{1, 1, 1000}, shape{1, 17, 241}}) {
        add(run<amsgrad, full, plain, float>(l, f32, s, k, 4));
        add(run<adamw, full, split32, double>(l, f64, s, k, 4));
        add(run<adamw, log8, split24, float>(l, bf16, s, k, 4));
        add(run<adamw, dynamic8, split32, float>(l, bf16, s, k, 4));
        add(run<adamw, bfloat16_stochastic, plain, float>(l, number::float16, s, k, 4));
      }
      for (const shape& s : {shape{2, 70, 129}, shape{1, 1, 500, true}}) {
        add(run<torch_form, full, stochastic, float>(l, bf16, s, k, 3));
        add(run<hugging_face_form, log8_blocks<64>, plain, float>(l, f32, s, k, 3));
        add(run<hugging_face_form, dynamic8_strict, plain, double>(l, f64, s, k, 3));
        add(run<hugging_face_form, bfloat16, split24, float>(l, bf16, s, k, 3));
      }
    }
    std::printf("%016" PRIx64 "\n", all.value());
  }
}
