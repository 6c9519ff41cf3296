// torch::save and torch::load: LibTorch's own layout, so that its class of the same rule reads ours
// (full precision) and we read its, with positions as keys instead of addresses, and one more entry
// that says which rule and format wrote it.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace leanopt::detail {

/// Who wrote an archive.
struct archive_signature {
  std::string rule, format, weights;
  /// A group option by which LibTorch's archives of the rule are known; empty where LibTorch has no
  /// such class.
  std::string stock_option;
  static constexpr int version = 1;

  std::string text() const {
    return rule + ' ' + format + ' ' + weights + ' ' + std::to_string(version);
  }
  /// @throws unless the state in an archive signed `text` can become ours: of the same rule, of the
  /// same weights or plain ones, and in our format or in full precision, which is compressed at the
  /// next step.
  void check(const std::string& text) const {
    archive_signature other;
    int number = 0;
    std::istringstream(text) >> other.rule >> other.format >> other.weights >> number;
    TORCH_CHECK(number == version, "leanopt: the archive has version ", number,
                ", this library reads version ", version);
    TORCH_CHECK(other.rule == rule && (other.weights == weights || other.weights == "plain") &&
                    (other.format == format || other.format == "full"),
                "leanopt: the archive was written by ", other.rule, " (", other.format, ", ",
                other.weights, "), this optimizer is ", rule, " (", format, ", ", weights, ")");
  }
};

template <class States, class Convert>
void write_archive(torch::serialize::OutputArchive& archive,
                   const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   const States& state, const archive_signature& signature,
                   std::int64_t next_ordinal, Convert options_of_group) {
  using torch::serialize::OutputArchive;
  const auto unit = archive.compilation_unit();
  archive.write("pytorch_version", torch::IValue("1.5.0"));  // LibTorch asserts this very string
  archive.write("leanopt", torch::IValue(signature.text()));
  archive.write("leanopt_next_ordinal", torch::IValue(next_ordinal));
  OutputArchive states(unit), groups(unit);
  groups.write("param_groups/size", torch::tensor(std::int64_t(param_groups.size())));
  std::int64_t key = 0;
  for (std::size_t i = 0; i < param_groups.size(); ++i) {
    OutputArchive group(unit), options(unit);
    const auto& params = param_groups[i].params();
    group.write("params/size", torch::tensor(std::int64_t(params.size())));
    for (std::size_t j = 0; j < params.size(); ++j) {
      const auto name = std::to_string(++key);
      group.write("params/" + std::to_string(j), torch::IValue(name));
      const auto it = state.find(params[j].unsafeGetTensorImpl());
      if (it == state.end() || !it->second) continue;
      OutputArchive one(unit);
      it->second->serialize(one);
      states.write(name, one);
    }
    options_of_group(i)->serialize(options);
    group.write("options", options);
    groups.write("param_groups/" + std::to_string(i), group);
  }
  archive.write("state", states);
  archive.write("param_groups", groups);
}

/// What an archive holds, in our types.
struct archive_contents {
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  std::vector<std::pair<torch::Tensor, std::unique_ptr<torch::optim::OptimizerParamState>>> states;
  std::int64_t next_ordinal = 0;
};

/// Reads and checks an archive of ours or LibTorch's against the groups of an optimizer.
template <class Options, class NewState, class CheckState, class CheckOptions>
archive_contents read_archive(torch::serialize::InputArchive& archive,
                              const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                              const archive_signature& signature, Options options_of_group,
                              NewState new_state, CheckState check_state,
                              CheckOptions check_options) {
  using torch::serialize::InputArchive;
  archive_contents result;
  torch::IValue value;
  if (archive.try_read("leanopt_next_ordinal", value)) result.next_ordinal = value.toInt();
  InputArchive states, groups;
  TORCH_CHECK(archive.try_read("state", states) && archive.try_read("param_groups", groups),
              "leanopt: this is no archive of an optimizer: it lacks `state` or `param_groups`");
  const bool ours = archive.try_read("leanopt", value);
  if (ours) signature.check(value.toStringRef());
  TORCH_CHECK(ours || !signature.stock_option.empty(),
              "leanopt: the archive is of another optimizer than ", signature.rule,
              ": it was not written by leanopt");
  torch::Tensor size;
  const auto expect = [&](std::size_t here, const std::string& what) {
    TORCH_CHECK(size.item<std::int64_t>() == std::int64_t(here), "leanopt: the archive has ",
                size.item<std::int64_t>(), ' ', what, ", the optimizer ", here);
  };
  groups.read("param_groups/size", size);
  expect(param_groups.size(), "parameter groups");
  for (std::size_t i = 0; i < param_groups.size(); ++i) {
    InputArchive group, options;
    groups.read("param_groups/" + std::to_string(i), group);
    group.read("options", options);
    TORCH_CHECK(ours || options.try_read(signature.stock_option, value),
                "leanopt: the archive's group ", i, " has no ", signature.stock_option,
                ": it is of another optimizer than ", signature.rule);
    result.options.push_back(options_of_group(i));
    result.options.back()->serialize(options);
    check_options(*result.options.back(), i);
    const auto& params = param_groups[i].params();
    group.read("params/size", size);
    expect(params.size(), "parameters in group " + std::to_string(i));
    for (std::size_t j = 0; j < params.size(); ++j) {
      group.read("params/" + std::to_string(j), value);
      InputArchive one;
      if (!states.try_read(value.toStringRef(), one)) continue;
      auto s = new_state();
      try {
        s->serialize(one);
      } catch (const c10::Error& e) {  // LibTorch's classes call a missing key a bug of LibTorch
        TORCH_CHECK(false, "leanopt: the archive's state of parameter ", j, " of group ", i,
                    " is damaged or another optimizer's: ", e.what_without_backtrace());
      }
      check_state(*s, params[j], i, j);
      result.states.emplace_back(params[j], std::move(s));
    }
  }
  return result;
}

}  // namespace leanopt::detail
