// The plan as a table, as a chart and as JSON.
#pragma once

#include "examples/plan/model.hpp"
#include "examples/plan/rows.hpp"
#include "examples/plan/svg.hpp"
#include "examples/text.hpp"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

namespace plan {

struct report {
  std::string name;
  double fit;  ///< GiB
  const model& of;
  std::vector<row> rows;
};

namespace detail {

inline constexpr double gib = 1 << 30, mib = 1 << 20;

inline const char* short_name(at::ScalarType t) { return t == at::kFloat ? "fp32" : "bf16"; }

/// 6.74 B: billions, or millions, of parameters.
inline std::string in_short(double n) {
  return n >= 1e9 ? text::fixed(n / 1e9, 2) + " B" : text::fixed(n / 1e6, 2) + " M";
}
/// How many models of this kind fit.
inline double models_in(double fit, const row& r) { return fit * gib / double(r.cost.total()); }
inline std::string plain(double x) {
  std::ostringstream out;
  out << x;
  return out.str();
}

}  // namespace detail

/// Large models in GiB, small ones in MiB.
inline std::ostream& operator<<(std::ostream& out, const report& r) {
  const model& m = r.of;
  out << printable(r.name) << ": " << text::with_commas(std::int64_t(m.tensors().size()))
      << " tensors, " << text::with_commas(m.elements()) << " parameters";
  if (m.tied()) out << "; " << m.tied() << " tied to another, counted once";
  if (m.left_out()) out << "; " << m.left_out() << " that are not trained, left out";
  out << "\n\n";

  const bool large = double(m.elements()) > detail::gib;
  const double unit = large ? detail::gib : detail::mib;
  const std::string name = large ? " GiB" : " MiB";
  text::table table({"optimizer", "weights", "gradients", "bytes/param", "state" + name,
                     "total" + name, detail::plain(r.fit) + " GiB hold"},
                    3);
  for (const row& line : r.rows)
    table.add({line.what.optimizer, line.what.weights, detail::short_name(line.gradients),
               text::fixed(line.cost.bytes_per_parameter(), 2),
               text::fixed(double(line.cost.state()) / unit, 3),
               text::fixed(double(line.cost.total()) / unit, 3),
               detail::in_short(detail::models_in(r.fit, line) * double(m.elements()))});
  return out
         << table
         << "\nNames without torch:: are leanopt's. Weights \"bf16 + 8\" keep 8 more bits each, "
            "counted as state.\nThe total has the optimizer's scratch and temporary tensors too; "
            "activations come on top.\n";
}

inline chart as_chart(const report& r) {
  chart c;
  c.title = "Training memory of " + r.name;
  c.subtitle = detail::in_short(double(r.of.elements())) +
               " parameters; activations come on top. Optimizers without torch:: are leanopt's.";
  c.axis = "bytes per parameter";
  c.parts = {{"weights", "#3f6fb0"}, {"gradients", "#e3a23c"}, {"optimizer", "#b5532f"}};
  const double n = double(r.of.elements());
  for (const row& line : r.rows) {
    const leanopt::bytes_by_category bytes = line.cost.sum();
    const std::int64_t rest = line.cost.total() - bytes.parameters - bytes.gradients;
    c.bars.push_back({line.what.optimizer,
                      line.what.weights,
                      {double(bytes.parameters) / n, double(bytes.gradients) / n, double(rest) / n},
                      text::fixed(line.cost.bytes_per_parameter(), 2) + " · " +
                          text::fixed(double(line.cost.total()) / detail::gib, 1) + " GiB"});
  }
  c.limit = r.fit * detail::gib / n;
  c.limit_name = detail::plain(r.fit) + " GiB";
  return c;
}

inline std::string as_json(const report& r) {
  using json = nlohmann::ordered_json;
  json all = {
      {"model", r.name},      {"tensors", r.of.tensors().size()}, {"parameters", r.of.elements()},
      {"tied", r.of.tied()},  {"left_out", r.of.left_out()},      {"fit_gib", r.fit},
      {"rows", json::array()}};
  for (const row& line : r.rows) {
    const leanopt::footprint& f = line.cost;
    const leanopt::bytes_by_category sum = f.sum();
    json bytes;
    for (const auto& [name, member] : leanopt::bytes_by_category::members())
      bytes[name] = sum.*member;
    bytes["code_books"] = f.code_books;
    bytes["scratch"] = f.scratch;
    bytes["transient"] = f.transient;
    const double models = detail::models_in(r.fit, line);
    all["rows"].push_back(
        {{"optimizer", line.what.argument},
         {"class", line.what.optimizer},
         {"weights", line.what.weights},
         {"gradients", detail::short_name(line.gradients)},
         {"bytes", bytes},
         {"state", f.state()},
         {"total", f.total()},
         {"bytes_per_parameter", f.bytes_per_parameter()},
         {"models_that_fit", models},
         {"parameters_that_fit", std::int64_t(models * double(r.of.elements()))}});
  }
  return all.dump(2, ' ', false, json::error_handler_t::replace) + '\n';
}

}  // namespace plan
