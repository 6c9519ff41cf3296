// dynamic8_strict against what bitsandbytes did: its quantizer (quantize.txt) and every step of its
// 8-bit Adam that was recorded along with the state before it (bnb8.txt). The peer ran on the CPU,
// where its codes come from 65536 bins and not from the nearest value; that rule stands in
// bitsandbytes.hpp, so that states can be compared code by code.

#include "tests/formats/bitsandbytes.hpp"

#include <leanopt/formats/dynamic8.hpp>
#include <leanopt/formats/full.hpp>
#include <leanopt/rules/adam.hpp>

#include "tests/formats/support.hpp"
#include "tests/support/levels.hpp"
#include "tests/support/plain_options.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

namespace {

using bitsandbytes::coder;
using bitsandbytes::to_floats;
using format_runs::encoded;
using format_runs::level;
using format_runs::values;
using leanopt::formats::dynamic8_blocks;
using leanopt::formats::dynamic8_strict;

std::uint32_t bits(float x) { return patterns::cast<std::uint32_t>(x); }
std::vector<std::uint8_t> to_codes(const std::vector<double>& x) { return {x.begin(), x.end()}; }

/// How many recorded codes were compared, and how many of them are not the nearest.
struct tally {
  std::int64_t codes = 0, others = 0;

  /// `nearest` is our code of a scaled number and `recorded` the peer's.
  void compare(const coder& rule, float scaled, int nearest, int recorded) {
    ASSERT_EQ(recorded, rule.binned(scaled)) << scaled;
    ++codes;
    if (nearest == recorded) return;
    ++others;
    // The bin's centre is half a bin off at most, which may make two codes change places.
    const double distance = std::abs(double(rule.values()[std::size_t(nearest)]) - double(scaled));
    ASSERT_LE(std::abs(double(rule.values()[std::size_t(recorded)]) - double(scaled)),
              distance + tolerance::bitsandbytes_bin)
        << scaled << " has code " << nearest << " or " << recorded;
  }
  void report(const std::string& what) const {
    std::cout << what << ": " << codes << " codes, of which bins make " << others
              << " other than the nearest\n";
    EXPECT_GT(others, 0) << "the peer's bins were not seen at all";
  }
};

// ---- the quantizer ------------------------------------------------------------------------------

std::vector<golden::recorded_case> quantizer_cases() {
  auto all = golden::read_file(bitsandbytes::file("quantize"));
  const auto is_other = [](const golden::recorded_case& one) {
    return one.options.at("blocksize") == "4096";  // our blocks have 256 values at most
  };
  all.erase(std::remove_if(all.begin(), all.end(), is_other), all.end());
  return all;
}

/// f(case, format, range) for the recorded runs, the last two as types.
template <class F>
void each_quantizer_case(F f) {
  int count = 0;
  for (const golden::recorded_case& one : quantizer_cases()) {
    SCOPED_TRACE(one.name);
    const bool is_signed = one.options.at("map") == "signed";
    const auto with_format = [&](auto format) {
      if (is_signed)
        f(one, format, std::integral_constant<values, values::any>{});
      else
        f(one, format, std::integral_constant<values, values::non_negative>{});
    };
    const std::string& block = one.options.at("blocksize");
    if (block == "256")
      with_format(dynamic8_strict{});
    else if (block == "64")
      with_format(dynamic8_blocks<64, true>{});
    else
      FAIL() << "blocks of " << block;
    if (testing::Test::HasFatalFailure()) return;
    ++count;
  }
  ASSERT_GT(count, 20);
}
std::vector<float> input_of(const golden::recorded_case& one) {
  const auto* given = golden::find(one.tensors, "input", "value");
  return to_floats(given != nullptr ? given->values : one.input);
}
const std::vector<double>& output_of(const golden::recorded_case& one, const std::string& field) {
  return golden::find(one.tensors, "output", field)->values;
}

TEST(BitsandbytesQuantizer, HeadersAreTheLargestMagnitudes) {
  each_quantizer_case([](const golden::recorded_case& one, auto format, auto range) {
    using Format = decltype(format);
    const std::vector<float> x = input_of(one), absmax = to_floats(output_of(one, "absmax"));
    for (const level l : levels::all_here()) {
      const auto e = format_runs::encode<Format, range()>(l, x, 0);
      ASSERT_EQ(e.blocks(), absmax.size());
      for (std::size_t b = 0; b < absmax.size(); ++b)
        if (std::isfinite(absmax[b])) {  // the peer lets an infinite element set the scale
          ASSERT_EQ(bits(e.headers[b]), bits(absmax[b])) << b;
        }
    }
  });
}

TEST(BitsandbytesQuantizer, RecordedCodesDecodeToTheRecordedValues) {
  each_quantizer_case([](const golden::recorded_case& one, auto format, auto range) {
    using Format = decltype(format);
    const std::vector<std::uint8_t> codes = to_codes(output_of(one, "codes"));
    const std::vector<float> absmax = to_floats(output_of(one, "absmax"));
    encoded<Format> e(codes.size());
    std::copy(codes.begin(), codes.end(), e.codes.begin());
    std::copy(absmax.begin(), absmax.end(), e.headers.begin());
    const auto decoded = format_runs::decode<Format, range()>(level::scalar, e);
    const auto expected = to_floats(output_of(one, "dequantized"));
    for (std::size_t i = 0; i < codes.size(); ++i)
      ASSERT_EQ(patterns::comparable(decoded[i]), patterns::comparable(expected[i])) << i;
  });
}

/// The search of the quantizer on a GPU has no rule of signs: there a negative number next to zero
/// becomes zero, and in a step it does not.
TEST(BitsandbytesQuantizer, CodesAreTheNearestWithTiesToTheEven) {
  int compared = 0, sign_rule = 0;
  each_quantizer_case([&](const golden::recorded_case& one, auto format, auto range) {
    const auto* nearest = golden::find(one.tensors, "derived", "nearest_even_codes");
    if (nearest == nullptr) return;
    const std::vector<std::uint8_t> expected = to_codes(nearest->values);
    const std::vector<float> x = input_of(one);
    for (const level l : levels::all_here()) {
      const auto e = format_runs::encode<decltype(format), range()>(l, x, 0);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const bool kept_sign = range() == values::any && x[i] < 0 && expected[i] == 127;
        ASSERT_EQ(int(e.codes[i]), kept_sign ? 126 : int(expected[i])) << i << ": " << x[i];
        ++compared;
        sign_rule += kept_sign;
      }
    }
  });
  EXPECT_GT(compared, 10000);
  EXPECT_GT(sign_rule, 0);
}

TEST(BitsandbytesQuantizer, RecordedCodesAreThoseOfItsBins) {
  tally first, second;
  each_quantizer_case([&](const golden::recorded_case& one, auto format, auto range) {
    if (golden::find(one.tensors, "derived", "nearest_even_codes") == nullptr) return;
    constexpr bool is_signed = range() == values::any;
    const std::vector<float> x = input_of(one), absmax = to_floats(output_of(one, "absmax"));
    const std::vector<double>& recorded = output_of(one, "codes");
    const auto e = format_runs::encode<decltype(format), range()>(level::scalar, x, 0);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float scaled = x[i] * (1 / absmax[i / format.block]);
      (is_signed ? first : second)
          .compare(coder::of(is_signed), scaled, e.codes[i], int(recorded[i]));
    }
  });
  first.report("quantizer, any sign");
  second.report("quantizer, not negative");
}

// ---- steps --------------------------------------------------------------------------------------

/// A parameter and its moments at one time.
struct snapshot {
  std::int64_t steps = 0;  ///< that the parameter has had
  std::vector<float> value;
  std::vector<float> moment[2];        ///< of small tensors
  std::vector<std::uint8_t> codes[2];  ///< of others
  std::vector<float> absmax[2];
  std::int64_t stride = 1;  ///< every how many elements there are

  bool is_compressed() const { return !codes[0].empty(); }
};

std::vector<float> fields(const golden::checkpoint& at, const std::string& parameter,
                          const std::string& field) {
  const auto* found = golden::find(at.tensors, parameter, field);
  return found == nullptr ? std::vector<float>() : to_floats(found->values);
}

snapshot start_of(const golden::parameter& p) {
  snapshot result;
  result.value = to_floats(p.initial_values());
  return result;
}
snapshot snapshot_of(const golden::checkpoint& at, const std::string& parameter) {
  snapshot result;
  for (const auto& record : at.integers)
    if (record.parameter == parameter) result.steps = record.value;
  const auto* value = golden::find(at.tensors, parameter, "value");
  result.value = to_floats(value->values);
  result.stride = value->stride;
  for (int k = 0; k < 2; ++k) {
    const std::string number = std::to_string(k + 1);
    const auto* state = golden::find(at.tensors, parameter, "state" + number);
    if (state == nullptr) continue;  // before the first step
    if (state->type == golden::number_type::u8) {
      result.codes[k] = to_codes(state->values);
      result.absmax[k] = fields(at, parameter, "absmax" + number);
    } else {
      result.moment[k] = to_floats(state->values);
    }
  }
  return result;
}

/// The options of a group at a step, as those of AdamW: bitsandbytes' Adam decays as AdamW does.
plain_options::adamw options_at(const golden::recorded_case& run, std::size_t group,
                                std::int64_t step) {
  golden::settings all = run.groups.at(group);
  for (const golden::assignment& change : run.assignments)
    if (change.group == group && change.step <= step) all[change.key] = change.value;
  const auto real = [&](const char* key) { return golden::parse_real(all.at(key)); };
  plain_options::adamw o;
  o.lr(real("lr")).eps(real("eps")).weight_decay(real("weight_decay"));
  o.betas({real("beta1"), real("beta2")});
  return o;
}

/// A step of a recorded parameter: the state before it, what goes in, and the state after it.
struct recorded_step {
  std::string name;
  snapshot before, after;
  plain_options::adamw options;
  std::vector<float> gradient;  ///< empty where there is none
  golden::number_type type;
};

std::vector<recorded_step> recorded_steps() {
  std::vector<recorded_step> result;
  for (const golden::recorded_case& run : golden::read_file(bitsandbytes::file("bnb8"))) {
    if (run.peer.find("Adam") == std::string::npos) continue;  // Lion is no rule of ours
    for (const golden::parameter& p : run.parameters) {
      snapshot before = start_of(p);
      std::int64_t time = 0;
      for (const golden::checkpoint& at : run.checkpoints) {
        if (golden::find(at.tensors, p.name, "value") == nullptr) continue;
        snapshot after = snapshot_of(at, p.name);
        if (at.step == time + 1 && (time > 0 || after.stride == 1)) {
          const auto g = p.gradient_values(at.step);
          std::vector<float> gradient;
          for (std::size_t i = 0; g && i < g->size(); i += std::size_t(after.stride))
            gradient.push_back(float((*g)[i]));
          result.push_back({run.name + ", " + p.name + ", step " + std::to_string(at.step), before,
                            after, options_at(run, p.group, at.step), gradient, p.type});
        }
        before = std::move(after);
        time = at.step;
      }
    }
  }
  return result;
}

/// A moment before a step, in full precision.
template <values Range>
std::vector<float> decoded(const snapshot& s, int k) {
  if (!s.is_compressed())
    return s.moment[k].empty() ? std::vector<float>(s.value.size()) : s.moment[k];
  encoded<dynamic8_strict> e(s.value.size());
  std::copy(s.codes[k].begin(), s.codes[k].end(), e.codes.begin());
  std::copy(s.absmax[k].begin(), s.absmax[k].end(), e.headers.begin());
  return format_runs::decode<dynamic8_strict, Range>(level::scalar, e);
}

using formula = leanopt::rules::adam_formula<false>;
constexpr bool is_signed[] = {true, false};

/// Takes a step of p in float32; m, v and their headers are what the format stores.
template <class Format, class Code>
void take(level l, const recorded_step& one, std::vector<float>& p, std::vector<Code> (&moments)[2],
          std::vector<float> (&headers)[2]) {
  leanopt::cpu::tensor_step t;
  t.p.data = p.data();
  t.g.data = const_cast<float*>(one.gradient.data());
  t.elements = p.size();
  for (int k = 0; k < 2; ++k) {
    t.slots[k] = moments[k].data();
    t.headers[k] = headers[k].data();
  }
  const leanopt::cpu::float_environment guard;
  leanopt::cpu::step<formula, Format, float, leanopt::weights::plain>(
      l, t, leanopt::rules::adamw::prepare<float>(one.options, one.after.steps), {}, 0, p.size());
}

/// A step in full precision from the recorded state.
struct full_step {
  std::vector<float> value, moments[2];

  explicit full_step(const recorded_step& one)
      : value(one.before.value),
        moments{decoded<values::any>(one.before, 0), decoded<values::non_negative>(one.before, 1)} {
    std::vector<float> none[2];
    take<leanopt::formats::full>(level::scalar, one, value, moments, none);
  }
};

float largest_of(const std::vector<float>& x) {
  float largest = 0;
  for (const float one : x) largest = std::max(largest, std::abs(one));
  return largest;
}

void expect_value(float actual, float expected, golden::number_type type) {
  if (type == golden::number_type::bf16) {  // the rounding of a number as near as a float32's
    const auto slack = float(tolerance::bitsandbytes_value *
                             std::max(double(std::abs(actual)), tolerance::golden_floor));
    ASSERT_GE(expected, format_runs::nearest_bfloat16(actual - slack));
    ASSERT_LE(expected, format_runs::nearest_bfloat16(actual + slack));
  } else {
    ASSERT_LE(tolerance::golden_difference(actual, expected), tolerance::bitsandbytes_value)
        << actual << " and " << expected;
  }
}

TEST(BitsandbytesAdam, LeavesParametersWithoutGradientAlone) {
  int count = 0;
  for (const recorded_step& one : recorded_steps()) {
    if (!one.gradient.empty()) continue;
    EXPECT_EQ(one.after.value, one.before.value) << one.name;
    EXPECT_EQ(one.after.steps, one.before.steps) << one.name;
    ++count;
  }
  EXPECT_GT(count, 0);
}

TEST(BitsandbytesAdam, StepsFromItsStatesGiveItsStates) {
  tally count[2];
  int steps = 0;
  for (const recorded_step& one : recorded_steps()) {
    if (one.gradient.empty()) continue;
    SCOPED_TRACE(one.name);
    ASSERT_EQ(one.after.steps, one.before.steps + 1);
    const full_step ours(one);
    for (std::size_t i = 0; i < ours.value.size(); ++i)
      expect_value(ours.value[i], one.after.value[i], one.type);
    for (int k = 0; k < 2; ++k) {
      const std::vector<float>& moments = ours.moments[k];
      if (!one.after.is_compressed()) {
        const double bound = tolerance::bitsandbytes_largest * largest_of(moments);
        for (std::size_t i = 0; i < moments.size(); ++i)
          ASSERT_NEAR(moments[i], one.after.moment[k][i], bound);
        continue;
      }
      const coder& rule = coder::of(is_signed[k]);
      for (std::size_t i = 0; i < moments.size(); ++i) {
        const float largest = largest_of(format_runs::part(moments, i / 256 * 256, 256));
        if (i % 256 == 0) {
          ASSERT_NEAR(largest, one.after.absmax[k][i / 256],
                      tolerance::bitsandbytes_largest * largest);
        }
        const float scaled = moments[i] * (1 / largest);
        count[k].compare(rule, scaled, bitsandbytes::step_code(rule.values(), scaled),
                         one.after.codes[k][i]);
      }
    }
    if (HasFatalFailure()) return;
    ++steps;
  }
  EXPECT_GT(steps, 40);
  count[0].report("exp_avg");
  count[1].report("exp_avg_sq");
}

/// From the recorded codes, by the engine's own 8-bit step at every instruction set.
template <class Format>
void expect_codes_of_engine(const recorded_step& one) {
  constexpr bool strict = std::is_same_v<Format, dynamic8_strict>;
  const full_step expected(one);
  for (const level l : levels::all_here()) {
    std::vector<float> value = one.before.value,
                       headers[] = {one.before.absmax[0], one.before.absmax[1]};
    std::vector<std::uint8_t> codes[] = {one.before.codes[0], one.before.codes[1]};
    take<Format>(l, one, value, codes, headers);
    ASSERT_EQ(value, expected.value);
    for (int k = 0; k < 2; ++k) {
      const bitsandbytes::book& book = bitsandbytes::book_of(is_signed[k]);
      for (std::size_t i = 0; i < value.size(); i += 256) {
        const auto block = format_runs::part(expected.moments[k], i, 256);
        const float largest = largest_of(block);
        ASSERT_EQ(headers[k][i / 256], largest);
        for (std::size_t j = 0; j < block.size(); ++j) {
          int code = bitsandbytes::step_code(book, block[j] * (1 / largest));
          if (!strict && !is_signed[k] && block[j] > 0) code = std::max(code, 1);
          ASSERT_EQ(int(codes[k][i + j]), code) << "element " << i + j;
        }
      }
    }
  }
}
TEST(BitsandbytesAdam, TheEngineStoresTheNearestCodes) {
  int steps = 0;
  for (const recorded_step& one : recorded_steps()) {
    if (one.gradient.empty() || !one.before.is_compressed()) continue;
    SCOPED_TRACE(one.name);
    expect_codes_of_engine<dynamic8_strict>(one);
    expect_codes_of_engine<leanopt::formats::dynamic8>(one);
    if (HasFatalFailure()) return;
    ++steps;
  }
  EXPECT_GT(steps, 20);
}

}  // namespace
