// The reader of the golden files and the comparison behind them: the known answers of the input
// generator, one small file with every kind of line, and that a damaged file is refused. A golden
// test is worth what its reader refuses.

#include "tests/support/golden.hpp"
#include "tests/support/tolerance.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

const std::string whole_file = R"(golden 1
# a comment
case every.line.f32
peer some.Class 1.0
ctor fused true
group 0
opt lr 0.01
opt eps1 none
group 1
opt lr 1e-3
param m 0 f32 2 2 2
init m x 4 1 -2 inf -inf
grad m u 1 24 0
gradat m 2 c 0.5
nograd m 3
param v 1 bf16 1 3
init v r 1 2 c 3
grad v s 7 8 0 1
set 2 1 lr 0.25
steps 3
after 1
tensor m value f32 2 2 2
3f800000 c0000000
7f800000 ff800000
sample v value bf16 1 3 2 2
3f80 bfc0
tensor v codes u8 1 3
00ff10
tensor v half f16 0
3c01
int m step 1
after 3
tensor m value f64 0
3ff8000000000000
end
)";

std::vector<golden::recorded_case> read(const std::string& text) {
  std::istringstream input(text);
  return golden::read(input, "text");
}

std::string replaced(const std::string& what, const std::string& by) {
  std::string text = whole_file;
  const std::size_t at = text.find(what);
  if (at == std::string::npos) throw std::logic_error("not in the file: " + what);
  return text.replace(at, what.size(), by);
}

golden::generator generator_of(const std::string& tokens) {
  const std::string text = replaced("grad m u 1 24 0", "grad m " + tokens);
  return read(text).at(0).parameters.at(0).gradient;
}

TEST(generator, gives_the_known_words) {
  EXPECT_EQ(golden::draw(100000, 0, 0), 0x3514acc53e6d6850u);
  EXPECT_EQ(golden::draw(100000, 0, 1), 0xecd65d2c71a972ceu);
  EXPECT_EQ(golden::draw(100000, 0, 2), 0x94cd3efd6e9f854au);
  EXPECT_EQ(golden::draw(1, 2, 3), 0x064507e41f1b0060u);
}

TEST(generator, gives_the_known_uniform_numbers) {
  const golden::generator uniform = generator_of("u 100000 24 0");
  EXPECT_EQ(uniform(0, 0), -0x1.2bad5p-1);
  EXPECT_EQ(uniform(0, 1), 0x1.b35974p-1);
  EXPECT_EQ(uniform(0, 2), 0x1.4cd3ep-3);
}

TEST(generator, scales_by_the_low_bits_or_keeps_few) {
  const golden::generator uniform = generator_of("u 9 24 0");
  const golden::generator wide = generator_of("w 9 24 0 3");
  const golden::generator sparse = generator_of("s 9 24 0 2");
  int kept = 0;
  for (int i = 0; i < 64; ++i) {
    const std::uint64_t word = golden::draw(9, 5, static_cast<std::uint64_t>(i));
    EXPECT_EQ(wide(5, i), std::ldexp(uniform(5, i), -static_cast<int>(word % 8)));
    EXPECT_EQ(sparse(5, i), word % 4 == 0 ? uniform(5, i) : 0.0);
    kept += sparse(5, i) != 0 ? 1 : 0;
  }
  EXPECT_GT(kept, 0);
  EXPECT_LT(kept, 64);
}

TEST(generator, repeats_constants_lists_and_zero_rows) {
  const auto parsed = read(whole_file).at(0);
  const double infinity = HUGE_VAL;
  EXPECT_EQ(parsed.parameters.at(0).initial_values(),
            (std::vector<double>{1, -2, infinity, -infinity}));
  EXPECT_EQ(parsed.parameters.at(1).initial_values(), (std::vector<double>{0, 3, 0}));
}

TEST(reader, keeps_all_that_a_case_says) {
  const auto cases = read(whole_file);
  ASSERT_EQ(cases.size(), 1u);
  const golden::recorded_case& parsed = cases[0];
  EXPECT_EQ(parsed.name, "every.line.f32");
  EXPECT_EQ(golden::type_suffix(parsed.name), "f32");
  EXPECT_EQ(parsed.peer, "some.Class");
  EXPECT_EQ(parsed.peer_version, "1.0");
  EXPECT_EQ(parsed.constructor, (golden::settings{{"fused", "true"}}));
  ASSERT_EQ(parsed.groups.size(), 2u);
  EXPECT_EQ(parsed.groups[0], (golden::settings{{"lr", "0.01"}, {"eps1", "none"}}));
  ASSERT_EQ(parsed.parameters.size(), 2u);
  EXPECT_EQ(parsed.parameters[0].sizes, (golden::shape{2, 2}));
  EXPECT_EQ(parsed.parameters[1].group, 1u);
  EXPECT_EQ(parsed.parameters[1].type, golden::number_type::bf16);
  ASSERT_EQ(parsed.assignments.size(), 1u);
  EXPECT_EQ(parsed.assignments[0].step, 2);
  EXPECT_EQ(parsed.assignments[0].group, 1u);
  EXPECT_EQ(parsed.assignments[0].key, "lr");
  EXPECT_EQ(parsed.assignments[0].value, "0.25");
  EXPECT_EQ(parsed.steps, 3);
}

TEST(reader, tells_undefined_gradients_from_special_ones) {
  const golden::parameter m = read(whole_file).at(0).parameters.at(0);
  EXPECT_EQ(m.gradient_values(1).value().at(3), golden::uniform(golden::draw(1, 1, 3), 24, 0));
  EXPECT_EQ(m.gradient_values(2).value(), (std::vector<double>(4, 0.5)));
  EXPECT_FALSE(m.gradient_values(3).has_value());
}

TEST(reader, decodes_every_type) {
  const auto parsed = read(whole_file).at(0);
  ASSERT_EQ(parsed.checkpoints.size(), 2u);
  const auto& tensors = parsed.checkpoints[0].tensors;
  ASSERT_EQ(tensors.size(), 4u);
  EXPECT_EQ(tensors[0].values, (std::vector<double>{1, -2, HUGE_VAL, -HUGE_VAL}));
  EXPECT_EQ(tensors[1].stride, 2);
  EXPECT_EQ(tensors[1].values, (std::vector<double>{1, -1.5}));
  EXPECT_EQ(tensors[2].values, (std::vector<double>{0, 255, 16}));
  EXPECT_EQ(tensors[3].values, (std::vector<double>{1 + 0x1p-10}));
  EXPECT_EQ(parsed.checkpoints[1].tensors.at(0).values, (std::vector<double>{1.5}));
  EXPECT_EQ(parsed.checkpoints[0].integers.at(0).value, 1);
}

const std::string function_file = R"(golden 1
case a.function
peer some.function 1.0
opt map signed
input 3 abs x 3 1 -2 0.5
tensor output codes u8 1 3
00ff10
end
)";

TEST(reader, keeps_what_a_function_made_of_an_input) {
  const golden::recorded_case parsed = read(function_file).at(0);
  EXPECT_EQ(parsed.options, (golden::settings{{"map", "signed"}}));
  EXPECT_EQ(parsed.input, (std::vector<double>{1, 2, 0.5}));
  ASSERT_EQ(parsed.tensors.size(), 1u);
  const golden::tensor_record* codes = golden::find(parsed.tensors, "output", "codes");
  ASSERT_EQ(codes, &parsed.tensors[0]);
  EXPECT_EQ(codes->values, (std::vector<double>{0, 255, 16}));
  EXPECT_EQ(golden::find(parsed.tensors, "output", "absmax"), nullptr);
}

TEST(reader, tells_functions_from_optimizers) {
  const auto expect_refused = [](std::string text, const std::string& what, const std::string& by) {
    EXPECT_THROW(read(text.replace(text.find(what), what.size(), by)), std::runtime_error) << by;
  };
  expect_refused(function_file, "end\n", "steps 1\nend\n");
  expect_refused(function_file, "tensor output", "after 1\ntensor output");
  expect_refused(function_file, "tensor output codes u8 1 3\n00ff10\n", "");
  expect_refused(function_file, "abs", "negated");
  expect_refused(whole_file, "group 0\n", "opt map signed\ngroup 0\n");
  expect_refused(whole_file, "group 0\n", "input 1 plain c 1\ngroup 0\n");
  expect_refused(whole_file, "group 0\n", "tensor output codes u8 1 1\n00\ngroup 0\n");
}

struct damage {
  std::string label;
  std::string what;
  std::string by;
};

// GoogleTest would print the bytes of the struct, addresses included, into the name of the test.
void PrintTo(const damage& each, std::ostream* out) { *out << each.label; }

class damaged_file : public testing::TestWithParam<damage> {};

TEST_P(damaged_file, is_refused) {
  EXPECT_THROW(read(replaced(GetParam().what, GetParam().by)), std::runtime_error);
}

INSTANTIATE_TEST_SUITE_P(reader, damaged_file,
                         testing::Values(damage{"other_version", "golden 1", "golden 2"},
                                         damage{"unknown_line", "steps 3", "saved 3"},
                                         damage{"unknown_generator", "grad m u", "grad m q"},
                                         damage{"unknown_type", "param v 1 bf16", "param v 1 e4m3"},
                                         damage{"unknown_group", "param v 1", "param v 2"},
                                         damage{"unknown_parameter", "int m step", "int q step"},
                                         damage{"option_given_twice", "opt eps1 none",
                                                "opt lr none"},
                                         damage{"parameter_given_twice", "param v 1", "param m 1"},
                                         damage{"value_missing", "7f800000 ff800000", "7f800000"},
                                         damage{"value_too_many", "3f80 bfc0", "3f80 bfc0 0000"},
                                         damage{"value_of_other_width", "3f80 bfc0", "3f800 bfc0"},
                                         damage{"sample_outside", "1 3 2 2\n", "1 3 3 2\n"},
                                         damage{"words_left_over", "steps 3", "steps 3 4"},
                                         damage{"words_missing", "nograd m 3", "nograd m"},
                                         damage{"number_damaged", "after 3", "after 3x"},
                                         damage{"checkpoint_too_late", "after 3", "after 4"},
                                         damage{"step_without_gradient", "grad v s 7 8 0 1\n", ""},
                                         damage{"start_missing", "init v r 1 2 c 3\n", ""},
                                         damage{"end_missing", "end\n", ""}),
                         [](const auto& info) { return info.param.label; });

TEST(reader, names_source_and_line) {
  try {
    read(replaced("steps 3", "steps three"));
    FAIL() << "the file was accepted";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("text:20: "), std::string::npos) << error.what();
  }
}

TEST(reader, refuses_a_missing_file) {
  EXPECT_THROW(golden::read_file(testing::TempDir() + "no_such_golden_file.txt"),
               std::runtime_error);
}

TEST(difference, is_relative_above_the_floor_and_absolute_below) {
  EXPECT_EQ(tolerance::golden_difference(2.5, 2.0), 0.25);
  EXPECT_EQ(tolerance::golden_difference(-2.0, 2.0), 2.0);
  EXPECT_EQ(tolerance::golden_difference(1e-4, 0.0), 1e-4 / tolerance::golden_floor);
}

TEST(difference, takes_nan_for_nan_only) {
  const double nan = std::nan("");
  EXPECT_EQ(tolerance::golden_difference(nan, nan), 0);
  EXPECT_EQ(tolerance::golden_difference(nan, 1), HUGE_VAL);
  EXPECT_EQ(tolerance::golden_difference(1, nan), HUGE_VAL);
  EXPECT_EQ(tolerance::golden_difference(HUGE_VAL, HUGE_VAL), 0);
  EXPECT_EQ(tolerance::golden_difference(HUGE_VAL, -HUGE_VAL), HUGE_VAL);
  EXPECT_EQ(tolerance::golden_difference(HUGE_VAL, 1), HUGE_VAL);
}

}  // namespace
