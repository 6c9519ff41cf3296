// The sample files of tests/data/models, and every way to damage one of their bytes.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <fstream>
#include <iterator>
#include <string>

namespace damage {

inline std::string sample(const std::string& name) {
  return LEANOPT_PLAN_DATA_FOLDER "/models/" + name;
}
inline std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The samples that can be read, to be a parameter of tests.
inline auto samples() {
  return testing::Values("reference.safetensors", "state_dict.pt", "checkpoint.pt", "module.pt",
                         "types.pt");
}
inline std::string test_name(const testing::TestParamInfo<const char*>& info) {
  const std::string name = info.param;
  return name.substr(0, name.find('.'));
}

/// f(bytes) for every early end.
template <class F>
void each_early_end(const std::string& good, F f) {
  for (std::size_t n = 0; n < good.size() && !testing::Test::HasFatalFailure(); ++n) {
    SCOPED_TRACE(std::to_string(n) + " bytes");
    f(good.substr(0, n));
  }
}
/// f(bytes) for every byte with some of its bits flipped.
template <class F>
void each_wrong_byte(const std::string& good, F f) {
  for (std::size_t i = 0; i < good.size() && !testing::Test::HasFatalFailure(); ++i)
    for (const int pattern : {0x01, 0x04, 0x80, 0xff}) {
      SCOPED_TRACE("byte " + std::to_string(i) + " with " + std::to_string(pattern));
      std::string bad = good;
      bad[i] = char(bad[i] ^ pattern);
      f(bad);
    }
}

}  // namespace damage
