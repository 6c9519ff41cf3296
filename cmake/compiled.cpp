// The source of the library leanopt::compiled: what leanopt.hpp only declares where
// LEANOPT_COMPILED is defined.
#include <leanopt/leanopt.hpp>

#include <utility>
#include <vector>

namespace leanopt {

#define LEANOPT_DEFINE(Class)                                                    \
  Class::Class(const std::vector<OptimizerParamGroup>& groups, Options defaults) \
      : optimizer(groups, std::move(defaults)) {}                                \
  Class::Class(std::vector<Tensor> params, Options defaults)                     \
      : optimizer(std::move(params), std::move(defaults)) {}                     \
  Class::~Class() = default;                                                     \
  Tensor Class::step(LossClosure closure) { return optimizer::step(std::move(closure)); }

LEANOPT_DEFINE(Adam)
LEANOPT_DEFINE(AdamW)
LEANOPT_DEFINE(Adafactor)
LEANOPT_DEFINE(Adam8bit)
LEANOPT_DEFINE(AdamW8bit)
LEANOPT_DEFINE(Adafactor8bit)

}  // namespace leanopt
