// The rules, formats and weights that the batteries run over, one word each: a new one is tested by
// adding it here. The batteries run over every list, and over every pairing of a rule's formulas
// with the formats and the weights.
#pragma once

#include <leanopt/formats/bfloat16.hpp>
#include <leanopt/formats/dynamic8.hpp>
#include <leanopt/formats/full.hpp>
#include <leanopt/formats/log8.hpp>
#include <leanopt/rules/adafactor.hpp>
#include <leanopt/rules/adam.hpp>
#include <leanopt/weights/plain.hpp>
#include <leanopt/weights/split.hpp>
#include <leanopt/weights/stochastic.hpp>

namespace conformance {

using namespace leanopt;  // NOLINT: a list of names

template <class... T>
struct list {};

using all_rules = list<rules::adam, rules::adamw, rules::adafactor>;

using compressed_formats =
    list<formats::bfloat16, formats::bfloat16_stochastic, formats::log8, formats::log8_blocks<128>,
         formats::log8_blocks<64>, formats::dynamic8, formats::dynamic8_strict,
         formats::dynamic8_blocks<64, false>>;

using all_weights = list<weights::plain, weights::stochastic, weights::split24, weights::split32>;

}  // namespace conformance
