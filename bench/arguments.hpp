// Arguments of the benches that Google Benchmark does not know.
#pragma once

#include <benchmark/benchmark.h>

#include <iostream>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace bench {

class arguments {
 public:
  arguments(int argc, char** argv) : words_(argv, argv + argc) {}

  /// The value of `--name=value`, which is then removed from the list; else `otherwise`.
  double number(const std::string& name, double otherwise) {
    const std::string value = take(name);
    if (value.empty()) return otherwise;
    std::size_t read = 0;
    double x = 0;
    try {
      x = std::stod(value, &read);
    } catch (const std::logic_error&) {
    }
    if (read != value.size() || !(x > 0))
      throw std::invalid_argument("--" + name + "=" + value + " is no number above 0");
    return x;
  }
  std::vector<int> counts(const std::string& name, const std::string& otherwise) {
    const std::string value = take(name);
    std::istringstream list(value.empty() ? otherwise : value);
    std::vector<int> result;
    for (std::string one; std::getline(list, one, ',');) {
      std::size_t read = 0;
      try {
        result.push_back(std::stoi(one, &read));
      } catch (const std::logic_error&) {
      }
      if (one.empty() || read != one.size() || result.back() < 1)
        throw std::invalid_argument("--" + name + " takes counts of at least 1, separated by ,");
    }
    return result;
  }
  /// Hands the rest to Google Benchmark. @throws when there is something that it does not know.
  void initialize_benchmark() {
    int count = int(words_.size());
    words_.push_back(nullptr);
    benchmark::Initialize(&count, words_.data());
    if (benchmark::ReportUnrecognizedArguments(count, words_.data()))
      throw std::invalid_argument("unknown argument");
  }

 private:
  std::string take(const std::string& name) {
    const std::string start = "--" + name + "=";
    for (auto it = words_.begin(); it != words_.end(); ++it)
      if (std::string word = *it; word.compare(0, start.size(), start) == 0) {
        words_.erase(it);
        return word.substr(start.size());
      }
    return "";
  }
  std::vector<char*> words_;
};

/// The main of the bench `name`: `run` registers its rows, which are then reported, unless it
/// returns an exit status other than 0.
template <class F>
int main_of(const char* name, const char* usage, int argc, char** argv, F run) try {
#if !defined(__OPTIMIZE__)
  std::cerr << name
            << ": built without optimisation, so its figures would mean nothing; configure with "
               "-DCMAKE_BUILD_TYPE=Release\n";
  return 1;
#endif
  arguments given(argc, argv);
  if (const int status = run(given)) return status;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
} catch (const std::exception& e) {
  std::cerr << name << ": " << e.what() << '\n' << usage;
  return 1;
}
/// A row that is measured once, by `report`, which sets its time.
template <class F>
void add_row(const std::string& name, F report) {
  benchmark::RegisterBenchmark(name.c_str(), report)
      ->Iterations(1)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

/// Whether --benchmark_filter takes the row `name`: races are only run for rows that are asked for.
inline bool is_wanted(const std::string& name) {
  std::string filter = benchmark::GetBenchmarkFilter();
  if (filter.empty() || filter == "all") return true;
  const bool negative = filter[0] == '-';
  if (negative) filter.erase(0, 1);
  return std::regex_search(name, std::regex(filter, std::regex::extended)) != negative;
}

}  // namespace bench
