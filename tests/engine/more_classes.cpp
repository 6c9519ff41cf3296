// The classes that are named by template: formats and weights that the others have not.

#include <leanopt/leanopt.hpp>

#include "tests/engine/classes.hpp"

#include <vector>

namespace classes {
namespace {

/// AdamW with moments of a format, or with weights of a kind, or both.
template <class Format, class Weights = leanopt::weights::plain>
subject adamw(std::string name) {
  using Class = leanopt::basic_adamw<Format, Weights>;
  return subject_of<Class>(std::move(name), typename Class::Options(1e-2).weight_decay(0.1),
                           Weights::takes_float16);
}
template <class Format, class Weights = leanopt::weights::plain>
subject adafactor(std::string name) {
  using Class = leanopt::basic_adafactor<Format, Weights>;
  return subject_of<Class>(std::move(name), typename Class::Options(), Weights::takes_float16);
}

}  // namespace

std::vector<subject> more() {
  using namespace leanopt;
  return {adamw<formats::dynamic8>("AdamWDynamic8"),
          adamw<formats::bfloat16>("AdamWBfloat16"),
          adamw<formats::bfloat16_stochastic>("AdamWBfloat16Stochastic"),
          adamw<formats::full, weights::stochastic>("AdamWStochastic"),
          adamw<formats::full, weights::split24>("AdamWSplit24"),
          adamw<formats::full, weights::split32>("AdamWSplit32"),
          adamw<formats::log8, weights::split24>("AdamW8bitSplit24"),
          adafactor<formats::bfloat16_stochastic>("AdafactorBfloat16Stochastic"),
          adafactor<formats::full, weights::split32>("AdafactorSplit32"),
          adafactor<formats::log8, weights::split24>("Adafactor8bitSplit24")};
}

}  // namespace classes
