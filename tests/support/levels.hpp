// The instruction sets of the CPU engine on this machine, for tests that compare them. A level that
// the processor or the compiler lacks is named, so that a run that compared nothing can be seen.
#pragma once

#include <leanopt/engine/cpu.hpp>

#include <vector>

namespace levels {

inline std::vector<leanopt::cpu::level> all_here() {
  using leanopt::cpu::level;
  std::vector<level> result;
  for (const level l : {level::scalar, level::avx2, level::avx512, level::avx512vbmi})
    if (l <= leanopt::cpu::best_level()) result.push_back(l);
  return result;
}

}  // namespace levels

/// Skips a test that compares levels where there is but one. @pre inside a TEST
#define LEANOPT_NEEDS_VECTOR_LEVELS()                                              \
  if (levels::all_here().size() == 1)                                              \
  GTEST_SKIP() << "this processor or compiler has the scalar level only: no level" \
                  " to compare it with"
