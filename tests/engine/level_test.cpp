// The classes at a forced instruction set, and the main program of all tests of the classes in this
// folder. With an argument it is the test of a level: it runs all classes on all types at the level
// that ATEN_CPU_CAPABILITY has chosen, starts itself again at another and compares the digests.
//   default | avx2 | avx512   the level that the variable has to have chosen
//   unknown                   the variable has no level's name, which has to be an error
//   digests                   prints the digests and no more
// Without a word of these it is GoogleTest's.

#include <leanopt/leanopt.hpp>

#include "tests/engine/classes.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace classes {

std::vector<subject> all() {
  using namespace leanopt;
  const auto hugging_face = [] { return AdafactorOptions::hugging_face(); };
  std::vector<subject> result = {
      subject_of<Adam>("Adam", AdamOptions(1e-2).weight_decay(0.1)),
      subject_of<Adam>("AdamAmsgrad", AdamOptions(1e-2).amsgrad(true)),
      subject_of<AdamW>("AdamW", AdamWOptions(1e-2).weight_decay(0.1)),
      subject_of<Adam8bit>("Adam8bit", Adam8bitOptions(1e-2).weight_decay(0.1)),
      subject_of<AdamW8bit>("AdamW8bit", AdamW8bitOptions(1e-2).weight_decay(0.1)),
      subject_of<Adafactor>("Adafactor", AdafactorOptions().weight_decay(0.1)),
      subject_of<Adafactor>("AdafactorHuggingFace", hugging_face()),
      subject_of<Adafactor>("AdafactorHuggingFaceBeta1", hugging_face().beta1(0.9)),
      subject_of<Adafactor8bit>("Adafactor8bit", Adafactor8bitOptions()),
  };
  for (subject& s : more()) result.push_back(std::move(s));
  return result;
}

std::vector<std::pair<std::string, Tensor>> state_of(Optimizer& optimizer, const Tensor& p) {
  std::vector<std::pair<std::string, Tensor>> result;
  const auto it = optimizer.state().find(p.unsafeGetTensorImpl());
  if (it == optimizer.state().end()) return result;
  const auto collect = [&](const std::string& name, const Tensor& t) {
    result.emplace_back(name, t);
  };
  using torch::optim::AdamParamState;
  using torch::optim::AdamWParamState;
  if (const auto* own = dynamic_cast<const leanopt::ParamState*>(it->second.get()))
    leanopt::detail::each_tensor(*own, collect);
  else if (const auto* adam = dynamic_cast<const AdamParamState*>(it->second.get()))
    leanopt::detail::each_tensor(*adam, collect);
  else
    leanopt::detail::each_tensor(dynamic_cast<const AdamWParamState&>(*it->second), collect);
  return result;
}

Tensor slot_of(Optimizer& optimizer, const Tensor& p, const std::string& name) {
  return leanopt::slot(optimizer, p, name);
}

std::int64_t steps_of(Optimizer& optimizer, const Tensor& p) {
  const auto it = optimizer.state().find(p.unsafeGetTensorImpl());
  if (it == optimizer.state().end()) return 0;
  if (const auto* own = dynamic_cast<const leanopt::ParamState*>(it->second.get()))
    return own->step();
  if (const auto* adam = dynamic_cast<const torch::optim::AdamParamState*>(it->second.get()))
    return adam->step();
  return dynamic_cast<const torch::optim::AdamWParamState&>(*it->second).step();
}

skipped skipped_by(const Optimizer& optimizer) {
  const auto& ours = dynamic_cast<const leanopt::detail::front&>(optimizer);
  return {ours.skipped_elements(), ours.skipped_steps()};
}

}  // namespace classes

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
    leanopt::AdamW optimizer(classes::small_parameters(torch::kFloat));
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
