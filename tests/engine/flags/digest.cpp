// Prints a digest of what the kernels do, one line for each instruction set of this machine. With
// any compiler and any flags that the library promises to bear, all lines are the same.

#include "tests/engine/kernel_runs.hpp"
#include "tests/support/levels.hpp"
#include "tests/support/patterns.hpp"

#include <cinttypes>
#include <cstdio>

int main() {
  using namespace kernel_runs;
  for (const level l : levels::all_here()) {
    patterns::digest all;
    const auto add = [&](std::uint64_t value) { all.add(&value, 1); };
    for (const patterns::kind k : patterns::all_kinds) {
      for (const std::size_t n : {100u, 1000u, 4097u}) {
        add(run<adam_formula<true>, full, float>(l, n, k, 4));
        add(run<adam_formula<false>, full, double>(l, n, k, 4));
        add(run<adam_formula<false>, log8, float>(l, n, k, 4));
        add(run<adafactor_formula<true>, log8, double>(l, n, k, 4));
      }
      for (const bool hugging_face : {false, true}) {
        add(run_adafactor<full, float>(l, {2, 70, 129}, hugging_face, k, 3));
        add(run_adafactor<log8, float>(l, {1, 1, 500, true}, hugging_face, k, 3));
      }
      add(run_16_bits<adam_formula<false>, log8>(l, 1000, leanopt::number::bfloat16, 3));
      add(run_16_bits<adam_formula<false>, full>(l, 1000, leanopt::number::float16, 3));
    }
    std::printf("%016" PRIx64 "\n", all.value());
  }
}
