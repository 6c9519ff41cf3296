// The one CUDA source of leanopt, which the target leanopt::cuda compiles. The rules, formats and
// types that it lists can step on CUDA devices; others need a line like these in a source of the
// program's own.
#include <leanopt/engine/cuda.cuh>
#include <leanopt/formats/bfloat16.hpp>
#include <leanopt/formats/dynamic8.hpp>
#include <leanopt/formats/full.hpp>
#include <leanopt/formats/log8.hpp>
#include <leanopt/rules/adafactor.hpp>
#include <leanopt/rules/adam.hpp>

namespace leanopt::cuda {

#define LEANOPT_STEP(formula, format, T)                                                \
  template int step<formula, format, T>(const work_list&,                               \
                                        const group_step<typename formula::coeffs<T>>*, \
                                        const device_scalars&, stream);
#define LEANOPT_PREPARE(rule, T)                                                            \
  template int prepare<rule, T>(const counted_group<rule>*, group<rule, T>*, std::uint32_t, \
                                const device_scalars&, stream);
#define LEANOPT_ADAFACTOR(first_moment, format, T)                                \
  template int adafactor_step<rules::adafactor_formula<first_moment>, format, T>( \
      const matrix_list<T>&, const device_scalars&, stream);
#define LEANOPT_CODES_OF(formula, format)                                               \
  template int encode<formula, format>(const coded&, const float* const(&)[3], stream); \
  template int decode<formula, format>(const coded&, float* const(&)[3], stream);
#define LEANOPT_CODES(format)                              \
  LEANOPT_CODES_OF(one_slot<values::any>, format)          \
  LEANOPT_CODES_OF(one_slot<values::non_negative>, format) \
  LEANOPT_CODES_OF(rules::adam_formula<false>, format)     \
  LEANOPT_CODES_OF(rules::adafactor_formula<true>, format)

template int is_capturing<>(stream, bool*);
template const char* text_of<>(int);
template int check_arithmetic<>(std::uint32_t*, stream);
template int send<>(void*, const void*, std::size_t, stream);
template int set_units<>(const work_list&, std::size_t, stream);
template int global_norm<>(const work_list&, double*, norm_result*, double, const device_scalars&,
                           stream);

using adam = rules::adam_formula<false>;
using amsgrad = rules::adam_formula<true>;

LEANOPT_STEP(adam, formats::full, float)
LEANOPT_STEP(adam, formats::bfloat16, float)
LEANOPT_STEP(adam, formats::bfloat16_stochastic, float)
LEANOPT_STEP(adam, formats::log8, float)
LEANOPT_STEP(adam, formats::dynamic8, float)
LEANOPT_STEP(adam, formats::dynamic8_strict, float)
LEANOPT_STEP(amsgrad, formats::full, float)
LEANOPT_STEP(adam, formats::full, double)
LEANOPT_STEP(adam, formats::bfloat16, double)
LEANOPT_STEP(adam, formats::bfloat16_stochastic, double)
LEANOPT_STEP(adam, formats::log8, double)
LEANOPT_STEP(adam, formats::dynamic8, double)
LEANOPT_STEP(adam, formats::dynamic8_strict, double)
LEANOPT_STEP(amsgrad, formats::full, double)

LEANOPT_PREPARE(rules::adam, float)
LEANOPT_PREPARE(rules::adam, double)
LEANOPT_PREPARE(rules::adamw, float)
LEANOPT_PREPARE(rules::adamw, double)
LEANOPT_PREPARE(rules::adafactor, float)
LEANOPT_PREPARE(rules::adafactor, double)

LEANOPT_ADAFACTOR(false, formats::full, float)
LEANOPT_ADAFACTOR(true, formats::full, float)
LEANOPT_ADAFACTOR(true, formats::bfloat16, float)
LEANOPT_ADAFACTOR(true, formats::bfloat16_stochastic, float)
LEANOPT_ADAFACTOR(true, formats::log8, float)
LEANOPT_ADAFACTOR(true, formats::dynamic8, float)
LEANOPT_ADAFACTOR(true, formats::dynamic8_strict, float)
LEANOPT_ADAFACTOR(false, formats::full, double)
LEANOPT_ADAFACTOR(true, formats::full, double)
LEANOPT_ADAFACTOR(true, formats::bfloat16, double)
LEANOPT_ADAFACTOR(true, formats::bfloat16_stochastic, double)
LEANOPT_ADAFACTOR(true, formats::log8, double)
LEANOPT_ADAFACTOR(true, formats::dynamic8, double)
LEANOPT_ADAFACTOR(true, formats::dynamic8_strict, double)

LEANOPT_CODES(formats::bfloat16)
LEANOPT_CODES(formats::bfloat16_stochastic)
LEANOPT_CODES(formats::log8)
LEANOPT_CODES(formats::dynamic8)
LEANOPT_CODES(formats::dynamic8_strict)

}  // namespace leanopt::cuda
