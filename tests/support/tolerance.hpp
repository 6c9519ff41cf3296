// Every tolerance of the tests, each with where it comes from. A test never invents one of its own,
// so what the library promises to agree with, and how closely, can be read here in one piece.
#pragma once

#include <algorithm>
#include <cmath>

namespace tolerance {

// Trajectories of the Python optimizers (tests/data/golden)
//
// Differences are relative to max(|expected|, golden_floor): the inputs are of the order of 1, so
// a value below 0.01 is the rest of a cancellation, and its absolute error is that of its terms.
// The agreement that the data's README derives is the largest difference, over all cases and up to
// 20 steps, between the peer and a restatement of its formulas in double precision: the peer's own
// rounding. Ours has as many operations in another order and so an error of the same size, and two
// results that lie that far from the exact one, on either side of it, are twice as far apart.

inline constexpr double golden_floor = 0.01;

inline constexpr double golden_adam_f64 = 2 * 6e-15;
inline constexpr double golden_adam_f32 = 2 * 2.6e-6;
inline constexpr double golden_torch_adafactor_f64 = 2 * 9e-14;
inline constexpr double golden_torch_adafactor_f32 = 2 * 5e-6;
inline constexpr double golden_hf_adafactor_f64 = 2 * 3e-15;
inline constexpr double golden_hf_adafactor_f32 = 2 * 3.7e-6;

// Hugging Face's class computes a bfloat16 parameter in float32 and rounds it once, so there is one
// right answer, and a difference is a wrong one. Its float32 state has the float32 agreement.
inline constexpr double golden_hf_adafactor_bf16_value = 0;

// RMS is a norm over the whole tensor, which the peer adds up in single precision. That of the
// start values of the largest parameter, 33,153 elements, is 1.2e-5 off the exact one; the sums of
// later steps are as long and may fall worse. Ours errs by far less, so nothing is doubled.
inline constexpr double golden_rms_f32 = 2e-5;

/// The difference that the golden tolerances bound. A NaN agrees with a NaN and nothing else.
inline double golden_difference(double actual, double expected) {
  if (std::isnan(expected) && std::isnan(actual)) return 0;
  if (actual == expected) return 0;
  const double difference = std::abs(actual - expected);
  if (!std::isfinite(difference)) return HUGE_VAL;
  return difference / std::max(std::abs(expected), golden_floor);
}

// Repeated training runs (tests/data/training)
//
// The same runs in float64 move a loss by up to 9e-4 (Hugging Face's Adafactor, cnn): what 460
// steps make of the last bit. Different convolution and matrix kernels change as many last bits,
// so 1e-3 is expected and five times that is granted. Accuracies moved by no sample; one of 359
// that lies on the border between two classes may still fall on the other side.
inline constexpr double training_loss = 5e-3;
inline constexpr int training_accuracy_samples = 1;

// torch.optim.Adafactor's default floor, the epsilon of the parameter's type, acts on row means of
// squared gradients that the cnn reaches, and whether it acts decides the size of a step: there the
// float64 run moves by up to 7 % in loss, and float32 runs on kernels that differ in the last bit
// by a good part of it. Before epoch 10 the accuracy moves by up to 14 points and bounds nothing.
inline constexpr int floored_training_first_epoch = 10;
inline constexpr double floored_training_loss = 5e-2;
inline constexpr int floored_training_accuracy_samples = 2;

// Runs with 8-bit state are other runs, of which the peers' own differ from their float32 ones by
// -5.1 % to +4.7 % in the loss of one seed. So the mean over the seeds may be off by 5 %, and no
// seed may leave the float32 band at its bad end by more than 2 %. The mean accuracy has to lie in
// the float32 band. So has that of each seed, but for one sample: the ends of the band are float32
// runs that are themselves repeatable to one sample only, and seed 3 is the lower end for both
// nets.
inline constexpr double compressed_mean_loss = 5e-2;
inline constexpr double compressed_loss_above_band = 2e-2;
inline constexpr int compressed_accuracy_samples = training_accuracy_samples;

// Formulas against a restatement in long double (tests/rules)
//
// A step of Adam has about ten roundings, of which each moves p by at most half a unit in the last
// place of p or of the step, and 50 steps add up: 50 * 10 / 2 = 250 units at worst. Moments are
// compared in units of their largest value and have fewer.
inline constexpr double adam_formula_f64 = 250 * 0x1p-52;
inline constexpr double adam_formula_f32 = 250 * 0x1p-23;

// Adafactor's update is a product of two roots and a quotient of means: some fifteen roundings a
// step and 20 steps, as above. Its float means are sums of at most 64 squares in each of a few
// parts, of which the worst case is 64 halves more, once: the moving average forgets it as it
// repeats it.
inline constexpr double adafactor_formula_f64 = (20 * 15 + 64) / 2 * 0x1p-52;
inline constexpr double adafactor_formula_f32 = (20 * 15 + 64) / 2 * 0x1p-23;

// Values that log8 stores (tests/optim)
//
// A code has at least three bits below its leading one, so neighbours lie at most an eighth of the
// larger one apart, and a value is rounded to one of its two neighbours. No value of a block is
// above the block's largest, so an eighth of that bounds the error of each.
inline constexpr double log8_of_largest = 1.0 / 8;

// Cases with known results (tests/cases)
//
// The results are those of the formulas in 50 digits, given with ten, so at worst (a leading 1) the
// number itself is off by 5e-10 of itself; float64 adds nothing that is visible beside it.
inline constexpr double case_f64 = 1e-9;

// Up to three steps in float32: each rounds the parameter, half an ulp or 6e-8 of itself, and moves
// it by a few hundredths, which are off by some ten ulps after two means, two roots and a division.
// Together 3.5e-7, and as much again because the errors of a matrix reach each other by its means.
inline constexpr double case_f32 = 1e-6;

// Where a parameter moves little its change is compared, of which ten digits are known. Beside this
// fraction of the change each step may round the parameter itself, by half an ulp.
inline constexpr double case_change_f64 = 1e-6;
inline constexpr double case_change_f32 = 1e-2;
inline constexpr double half_ulp_f64 = 0x1p-53;
inline constexpr double half_ulp_f32 = 0x1p-24;

// The second step with log8 state of one element. Alone in its block, a moment x has 32 codes to
// the octave and a base of at most x / 2^3.9, and rounding moves it by less than one code: by less
// than q = 2^-5 (1 + 2^-3.9) = 0.0334 of itself. Where old and new gradient have the same sign, the
// step m / sqrt(v) is off by less than (1 + q) / sqrt(1 - q) - 1 of itself.
inline constexpr double case_second_step_8bit = 0.0512;

// A correction read off a bfloat16 parameter, as the square of its distance from 0: the parameter
// has 8 bits, so it is rounded by 2^-9 of itself, which a square doubles.
inline constexpr double case_correction_bf16 = 0x1p-8 * (1 + 0x1p-8);

}  // namespace tolerance
