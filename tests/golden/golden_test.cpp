// Replays recorded runs of the Python optimizers with the classes that users of this library see,
// and compares parameters and state: golden_test FILE TYPE runs every case of that type in FILE.txt
// (golden_test adamw f32). The files are those of the repository, or of the folder that the
// environment variable LEANOPT_GOLDEN names. A case that is no target is counted with its reason;
// an option or a field that is not known here is a failure, since ignoring it would hide a mistake.

#include "tests/support/golden.hpp"

#include <leanopt/leanopt.hpp>

#include "tests/support/tolerance.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using golden::number_type;

constexpr int exit_failed = 1;
constexpr int exit_usage = 2;
// What ctest is told to show as "skipped": all cases of this type wait or are no targets.
constexpr int exit_all_excluded = 77;
constexpr int shown_failures = 10;

torch::Dtype scalar_type(number_type type) {
  switch (type) {
    case number_type::f64: return torch::kFloat64;
    case number_type::f32: return torch::kFloat32;
    case number_type::f16: return torch::kFloat16;
    case number_type::bf16: return torch::kBFloat16;
    case number_type::u8: return torch::kUInt8;
  }
  throw std::logic_error("number type without a scalar type");
}

torch::Tensor make_tensor(const std::vector<double>& values, const golden::parameter& like) {
  return torch::tensor(values, torch::kFloat64).to(scalar_type(like.type)).reshape(like.sizes);
}

[[noreturn]] void fail_unknown(const std::string& what, const std::string& name) {
  throw std::runtime_error("this test does not know the " + what + " '" + name + "'");
}

// Peers: how a recorded class maps onto one of ours

/// What a peer keeps for one parameter, under the names of this library.
struct parameter_state {
  std::int64_t step = 0;
  std::map<std::string, torch::Tensor> tensors;
};

template <class State>
parameter_state view_adam_state(const torch::optim::OptimizerParamState& stored) {
  const auto& state = static_cast<const State&>(stored);
  parameter_state view{state.step(), {}};
  view.tensors["exp_avg"] = state.exp_avg();
  view.tensors["exp_avg_sq"] = state.exp_avg_sq();
  if (state.max_exp_avg_sq().defined()) view.tensors["max_exp_avg_sq"] = state.max_exp_avg_sq();
  return view;
}

parameter_state view_named_state(const torch::optim::OptimizerParamState& stored) {
  const auto& state = static_cast<const leanopt::ParamState&>(stored);
  parameter_state view{state.step(), {}};
  for (const auto& [name, tensor] : state.tensors()) view.tensors[name] = tensor;
  return view;
}

template <class Options>
void assign_adam_option(Options& options, const std::string& key, const std::string& value) {
  if (key == "lr") {
    options.lr(golden::parse_real(value));
  } else if (key == "beta1") {
    options.betas(std::make_tuple(golden::parse_real(value), std::get<1>(options.betas())));
  } else if (key == "beta2") {
    options.betas(std::make_tuple(std::get<0>(options.betas()), golden::parse_real(value)));
  } else if (key == "eps") {
    options.eps(golden::parse_real(value));
  } else if (key == "weight_decay") {
    options.weight_decay(golden::parse_real(value));
  } else if (key == "amsgrad") {
    options.amsgrad(golden::parse_boolean(value));
  } else if (key == "maximize") {
    options.maximize(golden::parse_boolean(value));
  } else {
    fail_unknown("option", key);
  }
}

/// Two epsilons are one option with us and two with the peers.
void assign_adafactor_eps(leanopt::AdafactorOptions& options, const std::string& key,
                          const std::string& value) {
  auto [eps1, eps2] = options.eps();
  if (key == "eps1") {
    eps1 = golden::parse_optional_real(value);
  } else {
    eps2 = golden::parse_real(value);
  }
  options.eps(std::make_tuple(eps1, eps2));
}

/// Whether the peer was run with its fused kernel, which computes in float32 and rounds once.
bool is_fused(const golden::recorded_case& recorded) {
  const auto fused = recorded.constructor.find("fused");
  return fused != recorded.constructor.end() && golden::parse_boolean(fused->second);
}

std::optional<std::string> exclude_adam(const golden::recorded_case&, number_type type) {
  if (type != number_type::bf16) return std::nullopt;
  return "no target: the for-loop rounds every operation to bfloat16";
}

struct adam_peer {
  using optimizer = leanopt::Adam;
  using options = leanopt::AdamOptions;

  static options defaults() { return {}; }
  static void assign(options& target, const std::string& key, const std::string& value) {
    assign_adam_option(target, key, value);
  }
  static std::string our_name(const std::string& field) { return field; }
  static parameter_state view(const torch::optim::OptimizerParamState& stored) {
    return view_adam_state<torch::optim::AdamParamState>(stored);
  }
  static std::optional<std::string> exclude(const golden::recorded_case& recorded,
                                            number_type type) {
    return exclude_adam(recorded, type);
  }
  static double allowed(const golden::tensor_record& record, number_type) {
    return record.type == number_type::f64 ? tolerance::golden_adam_f64
                                           : tolerance::golden_adam_f32;
  }
};

struct adamw_peer : adam_peer {
  using optimizer = leanopt::AdamW;
  using options = leanopt::AdamWOptions;

  static options defaults() { return {}; }
  static void assign(options& target, const std::string& key, const std::string& value) {
    assign_adam_option(target, key, value);
  }
  static parameter_state view(const torch::optim::OptimizerParamState& stored) {
    return view_adam_state<torch::optim::AdamWParamState>(stored);
  }
};

/// bfloat16 parameters and moments, those without elements too, as the fused kernel has them.
template <class Optimizer>
struct fused_peer {
  using optimizer = Optimizer;
  using options = typename Optimizer::Options;

  static options defaults() { return options().min_compressed_elements(0); }
  static void assign(options& target, const std::string& key, const std::string& value) {
    assign_adam_option(target, key, value);
  }
  static std::string our_name(const std::string& field) { return field; }
  static parameter_state view(const torch::optim::OptimizerParamState& stored) {
    return view_named_state(stored);
  }
  static std::optional<std::string> exclude(const golden::recorded_case& recorded, number_type) {
    for (const golden::settings& group : recorded.groups) {
      const auto amsgrad = group.find("amsgrad");
      if (amsgrad != group.end() && golden::parse_boolean(amsgrad->second))
        return "no target: amsgrad is kept in full precision only";
    }
    return std::nullopt;
  }
  static double allowed(const golden::tensor_record&, number_type) {
    return tolerance::golden_fused_bf16;
  }
};
using fused_adam_peer = fused_peer<leanopt::basic_adam<leanopt::formats::bfloat16>>;
using fused_adamw_peer = fused_peer<leanopt::basic_adamw<leanopt::formats::bfloat16>>;

struct torch_adafactor_peer {
  using optimizer = leanopt::Adafactor;
  using options = leanopt::AdafactorOptions;

  static options defaults() { return {}; }
  static void assign(options& target, const std::string& key, const std::string& value) {
    if (key == "lr") {
      target.lr(golden::parse_real(value));
    } else if (key == "beta2_decay") {
      target.beta2_decay(golden::parse_real(value));
    } else if (key == "eps1" || key == "eps2") {
      assign_adafactor_eps(target, key, value);
    } else if (key == "d") {
      target.d(golden::parse_real(value));
    } else if (key == "weight_decay") {
      target.weight_decay(golden::parse_real(value));
    } else if (key == "maximize") {
      target.maximize(golden::parse_boolean(value));
    } else {
      fail_unknown("option", key);
    }
  }
  static std::string our_name(const std::string& field) { return field; }
  static parameter_state view(const torch::optim::OptimizerParamState& stored) {
    return view_named_state(stored);
  }
  static std::optional<std::string> exclude(const golden::recorded_case&, number_type type) {
    if (type != number_type::bf16) return std::nullopt;
    return "no target: the peer computes in place in bfloat16";
  }
  static double allowed(const golden::tensor_record& record, number_type) {
    return record.type == number_type::f64 ? tolerance::golden_torch_adafactor_f64
                                           : tolerance::golden_torch_adafactor_f32;
  }
};

struct hf_adafactor_peer {
  using optimizer = leanopt::Adafactor;
  using options = leanopt::AdafactorOptions;

  static options defaults() { return leanopt::AdafactorOptions::hugging_face(); }
  static void assign(options& target, const std::string& key, const std::string& value) {
    if (key == "lr") {
      // None is how the peer says "from the step"; here it is a rate that was never set.
      if (const auto rate = golden::parse_optional_real(value)) target.lr(*rate);
    } else if (key == "eps1" || key == "eps2") {
      assign_adafactor_eps(target, key, value);
    } else if (key == "clip_threshold") {
      target.clip_threshold(golden::parse_real(value));
    } else if (key == "decay_rate") {
      target.decay_rate(golden::parse_real(value));
    } else if (key == "beta1") {
      target.beta1(golden::parse_optional_real(value));
    } else if (key == "weight_decay") {
      target.weight_decay(golden::parse_real(value));
    } else if (key == "scale_parameter") {
      target.scale_parameter(golden::parse_boolean(value));
    } else if (key == "relative_step") {
      target.relative_step(golden::parse_boolean(value));
    } else if (key == "warmup_init") {
      target.warmup_init(golden::parse_boolean(value));
    } else {
      fail_unknown("option", key);
    }
  }
  static std::string our_name(const std::string& field) {
    static const std::map<std::string, std::string> names = {
        {"exp_avg_sq_row", "row_var"}, {"exp_avg_sq_col", "col_var"}, {"exp_avg_sq", "variance"}};
    const auto found = names.find(field);
    return found == names.end() ? field : found->second;
  }
  static parameter_state view(const torch::optim::OptimizerParamState& stored) {
    return view_named_state(stored);
  }
  static std::optional<std::string> exclude(const golden::recorded_case&, number_type) {
    return std::nullopt;
  }
  static double allowed(const golden::tensor_record& record, number_type type) {
    if (record.type == number_type::f64) return tolerance::golden_hf_adafactor_f64;
    if (record.field == "RMS") return tolerance::golden_rms_f32;
    if (type == number_type::bf16 && record.field == "value") {
      return tolerance::golden_hf_adafactor_bf16_value;
    }
    return tolerance::golden_hf_adafactor_f32;
  }
};

// Comparing

/// Counts what was compared and keeps the first differences in words.
class verdict {
 public:
  void compare(double actual, double expected, double allowed, const std::string& where,
               std::int64_t index) {
    ++values_;
    const double difference = tolerance::golden_difference(actual, expected);
    if (difference > worst_) {
      worst_ = difference;
      worst_where_ = where + "[" + std::to_string(index) + "]";
    }
    if (difference > allowed) {
      std::ostringstream text;
      text.precision(17);
      text << where << "[" << index << "]: " << actual << " instead of " << expected
           << " (difference " << difference << ", allowed " << allowed << ")";
      fail(text.str());
    }
  }

  void fail(const std::string& what) {
    if (++failures_ <= shown_failures) std::cout << "FAILED " << what << '\n';
  }

  std::int64_t failures() const { return failures_; }
  std::int64_t values() const { return values_; }

  void print() const {
    std::cout << values_ << " values compared, " << failures_ << " failures, largest difference "
              << worst_;
    if (worst_ > 0) std::cout << " (" << worst_where_ << ")";
    std::cout << '\n';
  }

 private:
  std::int64_t values_ = 0;
  std::int64_t failures_ = 0;
  double worst_ = 0;
  std::string worst_where_;
};

template <class Peer>
typename Peer::options group_options(const golden::settings& recorded) {
  typename Peer::options options = Peer::defaults();
  for (const auto& [key, value] : recorded) Peer::assign(options, key, value);
  return options;
}

/// One recorded case and our optimizer beside it.
template <class Peer>
class replay {
 public:
  replay(const golden::recorded_case& recorded, verdict& result)
      : recorded_(recorded),
        result_(result),
        type_(golden::parse_type(golden::type_suffix(recorded.name))) {
    std::vector<std::vector<torch::Tensor>> members(recorded.groups.size());
    for (const golden::parameter& each : recorded.parameters) {
      const torch::Tensor tensor = make_tensor(each.initial_values(), each).requires_grad_();
      tensors_[each.name] = tensor;
      members[each.group].push_back(tensor);
    }
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (std::size_t number = 0; number < members.size(); ++number) {
      const auto options = group_options<Peer>(recorded.groups[number]);
      groups.emplace_back(members[number], std::make_unique<typename Peer::options>(options));
    }
    optimizer_ = std::make_unique<typename Peer::optimizer>(std::move(groups), Peer::defaults());
  }

  void run() {
    std::int64_t step = 0;
    for (const golden::checkpoint& expected : recorded_.checkpoints) {
      while (step < expected.step) take_step(++step);
      compare(expected);
    }
  }

 private:
  void take_step(std::int64_t step) {
    for (const golden::assignment& change : recorded_.assignments) {
      if (change.step != step) continue;
      auto& group = optimizer_->param_groups().at(change.group);
      Peer::assign(static_cast<typename Peer::options&>(group.options()), change.key, change.value);
    }
    for (const golden::parameter& each : recorded_.parameters) {
      const auto values = each.gradient_values(step);
      tensors_.at(each.name).mutable_grad() = values ? make_tensor(*values, each) : torch::Tensor();
    }
    optimizer_->step();
  }

  void compare(const golden::checkpoint& expected) {
    std::map<std::string, parameter_state> states;
    for (const golden::parameter& each : recorded_.parameters) {
      const auto& stored = optimizer_->state();
      const auto found = stored.find(tensors_.at(each.name).unsafeGetTensorImpl());
      if (found != stored.end()) states[each.name] = Peer::view(*found->second);
    }

    std::map<std::string, std::set<std::string>> named;
    for (const golden::tensor_record& record : expected.tensors) {
      const std::string where = place(expected, record.parameter, record.field);
      if (record.field == "value") {
        compare_tensor(record, tensors_.at(record.parameter), where);
        continue;
      }
      const std::string name = Peer::our_name(record.field);
      named[record.parameter].insert(name);
      const auto& ours = states[record.parameter].tensors;
      const auto found = ours.find(name);
      if (found == ours.end()) {
        // A parameter without elements has no factors and no RMS here; the peer keeps 0/0 there.
        if (tensors_.at(record.parameter).numel() == 0) continue;
        result_.fail(where + ": the optimizer keeps no such tensor");
      } else {
        compare_tensor(record, found->second, where);
      }
    }
    for (const golden::integer_record& record : expected.integers) {
      const std::string where = place(expected, record.parameter, record.field);
      if (record.field != "step") fail_unknown("counter", record.field);
      result_.compare(static_cast<double>(states[record.parameter].step),
                      static_cast<double>(record.value), 0, where, 0);
    }
    for (const auto& [parameter, state] : states) {
      for (const auto& [name, tensor] : state.tensors) {
        if (named[parameter].count(name) == 0) {
          result_.fail(place(expected, parameter, name) + ": the peer keeps no such tensor");
        }
      }
    }
  }

  void compare_tensor(const golden::tensor_record& record, const torch::Tensor& tensor,
                      const std::string& where) {
    if (tensor.scalar_type() != scalar_type(record.type)) {
      result_.fail(where + ": the tensor has another type: " + c10::toString(tensor.scalar_type()));
      return;
    }
    // Row and column factors keep their dropped dimension with some peers and not with others: the
    // order of the values is the same.
    if (tensor.numel() != golden::count_elements(record.sizes)) {
      result_.fail(where + ": the tensor has another number of elements");
      return;
    }
    const torch::Tensor values = tensor.detach().to(torch::kFloat64).contiguous().view(-1);
    const double* actual = values.data_ptr<double>();
    const double allowed = Peer::allowed(record, type_);
    for (std::size_t i = 0; i < record.values.size(); ++i) {
      const std::int64_t at = static_cast<std::int64_t>(i) * record.stride;
      result_.compare(actual[at], record.values[i], allowed, where, at);
    }
  }

  std::string place(const golden::checkpoint& at, const std::string& parameter,
                    const std::string& field) const {
    return recorded_.name + " after " + std::to_string(at.step) + ": " + parameter + " " + field;
  }

  const golden::recorded_case& recorded_;
  verdict& result_;
  number_type type_;
  std::map<std::string, torch::Tensor> tensors_;
  std::unique_ptr<typename Peer::optimizer> optimizer_;
};

// Running a file

/// A case says nothing that is not known here, not even one that is excluded.
template <class Peer>
void check_settings(const golden::recorded_case& recorded) {
  // How the peer was run changes no formula, but only the ways that were judged may pass.
  for (const auto& [key, value] : recorded.constructor) {
    if (key != "foreach" && key != "fused") fail_unknown("constructor argument", key);
    golden::parse_boolean(value);
  }
  for (const golden::settings& group : recorded.groups) group_options<Peer>(group);
  for (const golden::assignment& change : recorded.assignments) {
    typename Peer::options options = Peer::defaults();
    Peer::assign(options, change.key, change.value);
  }
}

struct tally {
  std::int64_t run = 0;
  std::map<std::string, std::int64_t> excluded;
};

template <class Peer>
void run_case(const golden::recorded_case& recorded, tally& count, verdict& result) {
  check_settings<Peer>(recorded);
  const number_type type = golden::parse_type(golden::type_suffix(recorded.name));
  if (const auto reason = Peer::exclude(recorded, type)) {
    ++count.excluded[*reason];
    return;
  }
  ++count.run;
  replay<Peer>(recorded, result).run();
}

void dispatch_case(const golden::recorded_case& recorded, tally& count, verdict& result) {
  const bool is_bf16 = golden::type_suffix(recorded.name) == "bf16";
  if (recorded.peer == "torch.optim.Adam") {
    if (is_bf16 && is_fused(recorded)) return run_case<fused_adam_peer>(recorded, count, result);
    run_case<adam_peer>(recorded, count, result);
  } else if (recorded.peer == "torch.optim.AdamW") {
    if (is_bf16 && is_fused(recorded)) return run_case<fused_adamw_peer>(recorded, count, result);
    run_case<adamw_peer>(recorded, count, result);
  } else if (recorded.peer == "torch.optim.Adafactor") {
    run_case<torch_adafactor_peer>(recorded, count, result);
  } else if (recorded.peer == "transformers.Adafactor") {
    run_case<hf_adafactor_peer>(recorded, count, result);
  } else {
    fail_unknown("peer", recorded.peer);
  }
}

std::string golden_folder() {
  const char* chosen = std::getenv("LEANOPT_GOLDEN");
  return chosen != nullptr && *chosen != '\0' ? chosen : LEANOPT_TEST_DATA "/golden";
}

int run_file(const std::string& file, const std::string& type) {
  golden::parse_type(type);
  const std::string path = golden_folder() + "/" + file + ".txt";
  tally count;
  verdict result;
  for (const golden::recorded_case& recorded : golden::read_file(path)) {
    if (golden::type_suffix(recorded.name) != type) continue;
    try {
      dispatch_case(recorded, count, result);
    } catch (const std::exception& error) {
      result.fail(recorded.name + ": " + error.what());
    }
  }

  std::int64_t excluded = 0;
  for (const auto& [reason, cases] : count.excluded) excluded += cases;
  std::cout << path << ", " << type << ": " << count.run << " cases run, " << excluded
            << " excluded\n";
  for (const auto& [reason, cases] : count.excluded) {
    std::cout << "  excluded: " << cases << ", " << reason << '\n';
  }
  result.print();

  if (count.run == 0 && excluded == 0) result.fail("the file has no case of this type");
  if (count.run > 0 && result.values() == 0) result.fail("the cases expect no values");
  if (result.failures() > 0) return exit_failed;
  return count.run == 0 ? exit_all_excluded : EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: golden_test FILE TYPE, as in: golden_test adamw f32\n";
    return exit_usage;
  }
  try {
    return run_file(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::cout << "FAILED " << error.what() << '\n';
    return exit_failed;
  }
}
