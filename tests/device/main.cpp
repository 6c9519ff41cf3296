// The main program of the tests on CUDA devices: where there is none, all of them are skipped.

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cstring>
#include <iostream>

namespace {
constexpr int exit_skipped = 77;
}

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  if (!torch::cuda::is_available() && !testing::GTEST_FLAG(list_tests)) {
    std::cout << "skipped: LibTorch sees no CUDA device\n";
    return exit_skipped;
  }
  return RUN_ALL_TESTS();
}
