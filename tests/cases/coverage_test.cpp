// Which cases run with which kinds of optimizers, and why the others do not: every case has, for
// each kind, either a test in this program or a reason here, and never both.

#include <gtest/gtest.h>

#include <iostream>
#include <string>
#include <vector>

namespace {

struct left_out {
  std::vector<int> cases;
  std::vector<std::string> kinds;
  std::string reason;
};

const std::vector<left_out>& table() {
  static const std::vector<left_out> entries = {
      {{1, 2, 3, 4, 5, 6, 8, 9},
       {"8bit"},
       "about Adafactor's factors and rates; 8 bits keep only a first moment, which these lack or, "
       "once rounded, have no known values for"},
      {{7}, {"float64", "float32", "8bit"}, "options alone, no number is stored"},
      {{11}, {"float64"}, "the sum only fails in single precision"},
      {{11}, {"8bit"}, "Adafactor8bit takes the root mean square with the same code"},
      {{12}, {"float64", "float32"}, "runs with float32 and bfloat16 side by side"},
      {{12}, {"8bit"}, "the floor is torch.optim's form's, which has no first moment to compress"},
      {{22}, {"float64", "float32", "8bit"}, "runs with half and bfloat16 parameters"},
      {{23},
       {"float64", "float32", "8bit"},
       "runs with a bfloat16 and a float64 parameter under each default type; the step number "
       "of 8-bit state is the same integer"},
      {{34}, {"float64", "float32"}, "counts the bytes of 8-bit state"}};
  return entries;
}

const std::vector<std::string> kinds = {"float64", "float32", "8bit"};

/// The cases of this program.
std::vector<int> numbers() {
  std::vector<int> result;
  for (int number = 1; number <= 24; ++number) result.push_back(number);
  result.push_back(34);
  return result;
}

std::string id_of(int number) { return (number < 10 ? "D0" : "D") + std::to_string(number); }

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// How many tests of a case there are whose names end in `end`, run or not.
int count_tests(const std::string& id, const std::string& end) {
  int count = 0;
  const auto& program = *testing::UnitTest::GetInstance();
  for (int i = 0; i < program.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *program.GetTestSuite(i);
    if (suite.name() != id) continue;
    for (int j = 0; j < suite.total_test_count(); ++j) {
      count += ends_with(suite.GetTestInfo(j)->name(), end);
    }
  }
  return count;
}

std::vector<std::string> reasons_of(int number, const std::string& kind) {
  std::vector<std::string> reasons;
  for (const auto& [cases, kinds, reason] : table()) {
    for (const int c : cases) {
      for (const std::string& k : kinds) {
        if (c == number && k == kind) reasons.push_back(reason);
      }
    }
  }
  return reasons;
}

TEST(coverage, every_case_runs_in_every_kind_or_says_why_not) {
  for (const int number : numbers()) {
    const std::string id = id_of(number);
    EXPECT_GT(count_tests(id, ""), 0) << id;
    for (const std::string& kind : kinds) {
      const int tests = count_tests(id, "_" + kind);
      const std::vector<std::string> reasons = reasons_of(number, kind);
      EXPECT_EQ(reasons.size(), tests == 0 ? 1u : 0u)
          << id << " with " << kind << ": " << tests << " tests, reasons "
          << testing::PrintToString(reasons);
      for (const std::string& reason : reasons) {
        std::cout << id << ' ' << kind << " left out: " << reason << '\n';
      }
    }
  }
}

}  // namespace
