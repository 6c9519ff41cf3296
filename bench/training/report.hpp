// What the runs of all seeds say together: differences of each contestant from the float32 run of
// the same seed, as a table; and what is wrong with a run.
#pragma once

#include "bench/training/contestants.hpp"
#include "bench/training/task.hpp"
#include "examples/text.hpp"

#include <cmath>
#include <map>
#include <string>
#include <vector>

namespace training {

/// One task: outcomes[name of a contestant][number of the seed].
using outcomes = std::map<std::string, std::vector<outcome>>;

struct differences {
  double mean, spread, largest;  ///< the largest by amount, with its sign

  explicit differences(const std::vector<double>& all) : mean(0), spread(0), largest(0) {
    const auto count = static_cast<double>(all.size());
    for (const double d : all) {
      mean += d / count;
      if (!(std::abs(d) <= std::abs(largest))) largest = d;
    }
    for (const double d : all) spread += (d - mean) * (d - mean);
    spread = all.size() > 1 ? std::sqrt(spread / (count - 1)) : std::nan("");
  }
};

/// Rows for `field`, the training or the validation loss.
inline text::table compare(const outcomes& runs, const std::vector<contestant>& contestants,
                           double outcome::*field) {
  text::table table({"optimizer", "loss", "paired with", "difference", "in %", "spread", "largest"},
                    1);
  for (const contestant& who : contestants) {
    const std::vector<outcome>& ours = runs.at(who.name);
    const std::vector<outcome>& theirs = runs.at(who.reference);
    double loss = 0, reference_loss = 0;
    std::vector<double> apart;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      loss += ours[i].*field / static_cast<double>(ours.size());
      reference_loss += theirs[i].*field / static_cast<double>(ours.size());
      apart.push_back(ours[i].*field - theirs[i].*field);
    }
    if (who.is_reference()) {
      table.add({who.name, text::fixed(loss, 4)});
      continue;
    }
    const auto signed_text = [](double value, int decimals) {
      std::string sign = value < 0 ? "" : "+";
      return sign += text::fixed(value, decimals);
    };
    const differences d(apart);
    table.add({who.name, text::fixed(loss, 4), who.reference, signed_text(d.mean, 5),
               signed_text(100 * d.mean / reference_loss, 2),
               ours.size() > 1 ? text::fixed(d.spread, 5) : "-", signed_text(d.largest, 5)});
  }
  return table;
}

/// What is wrong with a run; empty where nothing is. Its losses are finite and fell, and where it
/// is judged it ended no further from `theirs`, the float32 run, than `granted` of what that one
/// fell by.
inline std::string find_fault(const contestant& who, const outcome& ours, const outcome& theirs,
                              double granted) {
  if (!std::isfinite(ours.training) || !std::isfinite(ours.validation))
    return "the loss is not finite";
  if (!(ours.training < ours.start)) return "the loss did not fall";
  if (!who.judged) return "";
  for (double outcome::*field : {&outcome::training, &outcome::validation}) {
    const double apart = std::abs(ours.*field - theirs.*field) / (theirs.start - theirs.*field);
    if (!(apart <= granted))
      return "a loss of " + text::fixed(ours.*field, 4) + " beside " +
             text::fixed(theirs.*field, 4) + " of " + who.reference + ", " +
             text::fixed(100 * apart, 2) + " % of its fall apart, " +
             text::fixed(100 * granted, 2) + " % granted";
  }
  return "";
}

}  // namespace training
