// The readers of model files on files that are damaged at every byte, without LibTorch, so that
// sanitizers see all that they do: a model, if the damage is to a name or a value, or plan::error.

#include "examples/plan/read_model.hpp"
#include "tests/examples/damage.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace {

namespace fs = std::filesystem;

class ModelFiles : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "model_files_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// The number of parameters, or -1 where the file is refused.
  std::int64_t parameters_of(const std::string& contents) const {
    const std::string path = folder_ / GetParam();
    fs::remove(path);  // to overwrite a file may wait for the disk
    std::ofstream(path, std::ios::binary) << contents;
    try {
      plan::model m;
      plan::read_model({path}, "", m);
      return m.elements();
    } catch (const plan::error& e) {
      EXPECT_EQ(std::string(e.what()).rfind(path + ": ", 0), 0u) << e.what();
      return -1;
    }
  }

  const std::string good_ = damage::read(damage::sample(GetParam()));
  fs::path folder_;
};
INSTANTIATE_TEST_SUITE_P(File, ModelFiles, damage::samples(), damage::test_name);

TEST_P(ModelFiles, that_end_early_are_refused) {
  ASSERT_GT(parameters_of(good_), 0);
  damage::each_early_end(
      good_, [&](const std::string& bad) { ASSERT_EQ(parameters_of(bad), -1) << bad.size(); });
}

TEST_P(ModelFiles, with_a_wrong_byte_are_read_or_refused) {
  std::size_t refused = 0, all = 0;
  damage::each_wrong_byte(good_, [&](const std::string& bad) {
    refused += parameters_of(bad) == -1;
    ++all;
  });
  EXPECT_GT(refused, all / 8);  // about what a file has apart from values, gaps and names
}

}  // namespace
