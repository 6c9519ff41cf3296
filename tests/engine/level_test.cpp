// The classes at a forced instruction set, and the main program of all tests of the classes in this
// folder. With an argument it is the test of a level: it runs all classes on all types at the level
// that ATEN_CPU_CAPABILITY has chosen, starts itself again at another and compares the digests.
//   default | avx2 | avx512   the level that the variable has to have chosen
//   unknown                   the variable has no level's name, which has to be an error
//   digests                   prints the digests and no more
// Without a word of these it is GoogleTest's.

#include <leanopt/engine/dispatch.hpp>

#include "tests/engine/classes.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr int exit_skipped = 77;

std::vector<std::string> digests() {
  std::vector<std::string> lines;
  for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble})
    for (const auto& subject : classes::all()) {
      if (type == torch::kHalf && !subject.takes_float16) continue;
      const std::uint64_t digest = classes::run(subject, classes::small_parameters(type), 5);
      char text[32];
      std::snprintf(text, sizeof text, "%016" PRIx64, digest);
      lines.push_back(std::string(text) + "  " + subject.name + ", " + torch::toString(type));
    }
  return lines;
}

/// What this program prints at another level; empty where it fails.
std::vector<std::string> digests_at(const std::string& program, const std::string& level) {
  const std::string command = "ATEN_CPU_CAPABILITY=" + level + " '" + program + "' digests";
  std::vector<std::string> lines;
  FILE* output = popen(command.c_str(), "r");
  if (!output) return {};
  char line[256];
  while (std::fgets(line, sizeof line, output)) {
    line[std::strcspn(line, "\n")] = 0;
    lines.push_back(line);
  }
  return pclose(output) == 0 ? lines : std::vector<std::string>{};
}

int refuse_unknown() {
  try {
    classes::all().front().make(classes::small_parameters(torch::kFloat));
  } catch (const std::exception& e) {
    std::cout << e.what() << '\n';
    return std::strstr(e.what(), "ATEN_CPU_CAPABILITY") ? 0 : 1;
  }
  std::cout << "an unknown level was taken\n";
  return 1;
}

int compare(const std::string& program, const std::string& wanted) {
  const std::string best = leanopt::cpu::name_of(leanopt::cpu::best_level());
  for (const char* level : {"avx512", "avx2", "default"}) {
    if (best == level) break;
    if (wanted != level) continue;
    std::cout << "skipped: the best level of this processor and compiler is " << best << '\n';
    return exit_skipped;
  }
  const std::string mine = leanopt::cpu::name_of(leanopt::engine::level_from_environment());
  if (mine != wanted) {
    std::cout << "the level is " << mine << ", not " << wanted << '\n';
    return 1;
  }
  const std::string other = wanted == best ? "default" : best;
  if (other == wanted) {
    std::cout << "skipped: there is one level here, nothing to compare it with\n";
    return exit_skipped;
  }
  const auto here = digests(), there = digests_at(program, other);
  if (here.empty() || here.size() != there.size()) {
    std::cout << here.size() << " results here, " << there.size() << " at " << other << '\n';
    return 1;
  }
  int different = 0;
  for (std::size_t i = 0; i < here.size(); ++i) {
    if (here[i] == there[i]) continue;
    ++different;
    std::cout << here[i] << " at " << wanted << "\n" << there[i] << " at " << other << "\n\n";
  }
  std::cout << here.size() << " results at " << wanted << " and at " << other << ", " << different
            << " differ\n";
  return different ? 1 : 0;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string word = count == 2 ? arguments[1] : "";
  if (word == "default" || word == "avx2" || word == "avx512") return compare(arguments[0], word);
  if (word == "unknown") return refuse_unknown();
  if (word == "digests") {
    for (const auto& line : digests()) std::cout << line << '\n';
    return 0;
  }
  testing::InitGoogleTest(&count, arguments);
  return RUN_ALL_TESTS();
}
