// memory_plan as a function: what its main does, and its tests.
#pragma once

#include "examples/plan/arguments.hpp"
#include "examples/plan/read_model.hpp"
#include "examples/plan/report.hpp"
#include "examples/plan/rows.hpp"

#include <exception>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace plan {

namespace detail {

inline void write_file(const std::string& path, const std::string& contents) {
  std::ofstream file(path, std::ios::binary);
  file << contents;
  if (!file.flush()) throw std::runtime_error(path + ": cannot be written");
}

inline void run(const arguments& a, std::ostream& out) {
  model m(a.skipped);
  read_model(a.models, LEANOPT_PLAN_DATA_FOLDER, m);
  std::string name = std::filesystem::path(a.models.front()).filename().string();
  if (a.models.size() > 1) name += " and " + std::to_string(a.models.size() - 1) + " more";
  report r{name, a.fit, m, {}};
  for (const contender& c : contenders())
    if (a.optimizers.empty() || a.optimizers.count(c.argument))
      r.rows.push_back(plan_for(c, m, a.gradients));
  if (!a.svg.empty()) write_file(a.svg, to_svg(as_chart(r)));
  if (!a.json.empty()) write_file(a.json, as_json(r));
  out << r;
}

}  // namespace detail

/// Returns the exit code: 0, 2 where an argument or a model's file is wrong, 1 where anything else
/// fails.
inline int run(const std::vector<std::string>& words, std::ostream& out, std::ostream& err) {
  try {
    const arguments a = parse_arguments(words);
    if (a.help)
      out << usage;
    else
      detail::run(a, out);
    if (!out.flush()) throw std::runtime_error("the output cannot be written");
    return 0;
  } catch (const usage_error& e) {
    err << "memory_plan: " << e.what() << "\n\n" << usage;
    return 2;
  } catch (const error& e) {
    err << "memory_plan: " << e.what() << '\n';
    return 2;
  } catch (const std::exception& e) {
    err << "memory_plan: " << e.what() << '\n';
    return 1;
  }
}

}  // namespace plan
