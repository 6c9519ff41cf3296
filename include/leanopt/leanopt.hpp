// All that a training program includes: the optimizers by the names people type, their options, and
// how large their state is.
#pragma once

#if defined LEANOPT_COMPILED && defined LEANOPT_WITH_CUDA
#error "leanopt::compiled steps on the CPU only: link leanopt::compiled or leanopt::cuda, not both"
#endif

#include <leanopt/config.hpp>
#include <leanopt/engine/quantize.hpp>
#include <leanopt/formats/bfloat16.hpp>
#include <leanopt/formats/dynamic8.hpp>
#include <leanopt/formats/full.hpp>
#include <leanopt/formats/log8.hpp>
#include <leanopt/memory/size.hpp>
#include <leanopt/optim/optimizer.hpp>
#include <leanopt/optim/rows.hpp>
#include <leanopt/rules/adafactor.hpp>
#include <leanopt/rules/adam.hpp>
#include <leanopt/weights/plain.hpp>
#include <leanopt/weights/split.hpp>
#include <leanopt/weights/stochastic.hpp>

#include <vector>

namespace leanopt {

template <class Format = formats::full, class Weights = weights::plain>
using basic_adam = optimizer<rules::adam, Format, Weights>;
template <class Format = formats::full, class Weights = weights::plain>
using basic_adamw = optimizer<rules::adamw, Format, Weights>;
template <class Format = formats::full, class Weights = weights::plain>
using basic_adafactor = optimizer<rules::adafactor, Format, Weights>;

// Where the library leanopt::compiled is linked, constructors, destructors and step() of the
// classes stand there, and with them all that they call: the sources of a program compile none of
// it.
#ifdef LEANOPT_COMPILED
#define LEANOPT_MEMBERS(Class)                                                           \
  explicit Class(const std::vector<OptimizerParamGroup>& groups, Options defaults = {}); \
  explicit Class(std::vector<Tensor> params, Options defaults = {});                     \
  Class(Class&&) = default;                                                              \
  Class& operator=(Class&&) = default;                                                   \
  ~Class() override;                                                                     \
  Tensor step(LossClosure closure = nullptr) override;
#else
#define LEANOPT_MEMBERS(Class) using optimizer::optimizer;
#endif

// Classes, not aliases, so that programs can forward-declare them.

/// Adam with weight decay as an L2 term. 8 bytes of state per parameter.
class Adam : public basic_adam<> {
 public:
  LEANOPT_MEMBERS(Adam)
};
/// Adam with decoupled weight decay. 8 bytes of state per parameter.
class AdamW : public basic_adamw<> {
 public:
  LEANOPT_MEMBERS(AdamW)
};
/// Adafactor in torch.optim's form, or Hugging Face's with AdafactorOptions::hugging_face(). About
/// 4 (n + m) bytes of state for a matrix of n x m, 4 per element of a vector.
class Adafactor : public basic_adafactor<> {
 public:
  LEANOPT_MEMBERS(Adafactor)
};
/// Adam with both moments in 8 bits. 2.0156 bytes of state per parameter.
class Adam8bit : public basic_adam<formats::log8> {
 public:
  LEANOPT_MEMBERS(Adam8bit)
};
/// AdamW with both moments in 8 bits. 2.0156 bytes of state per parameter.
class AdamW8bit : public basic_adamw<formats::log8> {
 public:
  LEANOPT_MEMBERS(AdamW8bit)
};
/// Adafactor in Hugging Face's form with a first moment in 8 bits. 1.0078 bytes of state per
/// parameter above Adafactor's.
class Adafactor8bit : public basic_adafactor<formats::log8> {
 public:
  LEANOPT_MEMBERS(Adafactor8bit)
};

#undef LEANOPT_MEMBERS

using AdamOptions = Adam::Options;
using AdamWOptions = AdamW::Options;
using AdafactorOptions = Adafactor::Options;
using Adam8bitOptions = Adam8bit::Options;
using AdamW8bitOptions = AdamW8bit::Options;
using Adafactor8bitOptions = Adafactor8bit::Options;
using AdamParamState = Adam::State;
using AdamWParamState = AdamW::State;
using AdafactorParamState = Adafactor::State;
using Adam8bitParamState = Adam8bit::State;
using AdamW8bitParamState = AdamW8bit::State;
using Adafactor8bitParamState = Adafactor8bit::State;

}  // namespace leanopt
