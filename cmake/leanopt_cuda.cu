// The one CUDA source of leanopt, which nvcc compiles for the library leanopt::cuda. The rules,
// formats and types that it lists can step on CUDA devices; others need a line like these in a
// source of the program's own.
#include <leanopt/engine/cuda.cuh>
#include <leanopt/formats/bfloat16.hpp>
#include <leanopt/formats/dynamic8.hpp>
#include <leanopt/formats/full.hpp>
#include <leanopt/formats/log8.hpp>
#include <leanopt/rules/adafactor.hpp>
#include <leanopt/rules/adam.hpp>

namespace leanopt::cuda {

// These are inline, so that a program's own source may include their header as well; this one keeps
// them for callers that do not.
[[gnu::used]] int send(void* to, const void* from, std::size_t bytes, stream s);
[[gnu::used]] int set_units(const work_list& list, std::size_t tensors, stream s);
[[gnu::used]] int global_norm(const work_list& list, double* sums, norm_result* result, double most,
                              const device_scalars& scalars, stream s);

#define LEANOPT_STEP(formula, format, T)                                                \
  template int step<formula, format, T>(const work_list&,                               \
                                        const group_step<typename formula::coeffs<T>>*, \
                                        const device_scalars&, stream);
#define LEANOPT_PREPARE(rule, T)                                                              \
  template int prepare<rule, T>(const captured_group*, group_step<typename rule::coeffs<T>>*, \
                                std::uint32_t, const device_scalars&, stream);
#define LEANOPT_ADAFACTOR(first_moment, format, T)                                \
  template int adafactor_step<rules::adafactor_formula<first_moment>, format, T>( \
      const matrix_list<T>&, const device_scalars&, stream);
#define LEANOPT_CODES(format)                                                                    \
  template int encode<one_slot<values::any>, format>(const coded&, const float* const(&)[3],     \
                                                     stream);                                    \
  template int encode<one_slot<values::non_negative>, format>(const coded&,                      \
                                                              const float* const(&)[3], stream); \
  template int decode<one_slot<values::any>, format>(const coded&, float* const(&)[3], stream);  \
  template int decode<one_slot<values::non_negative>, format>(const coded&, float* const(&)[3],  \
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
LEANOPT_STEP(adam, formats::log8, double)
LEANOPT_STEP(amsgrad, formats::full, double)

LEANOPT_PREPARE(rules::adam, float)
LEANOPT_PREPARE(rules::adam, double)
LEANOPT_PREPARE(rules::adamw, float)
LEANOPT_PREPARE(rules::adamw, double)

LEANOPT_ADAFACTOR(false, formats::full, float)
LEANOPT_ADAFACTOR(true, formats::full, float)
LEANOPT_ADAFACTOR(true, formats::bfloat16, float)
LEANOPT_ADAFACTOR(true, formats::bfloat16_stochastic, float)
LEANOPT_ADAFACTOR(true, formats::log8, float)
LEANOPT_ADAFACTOR(true, formats::dynamic8, float)
LEANOPT_ADAFACTOR(false, formats::full, double)
LEANOPT_ADAFACTOR(true, formats::full, double)

LEANOPT_CODES(formats::bfloat16)
LEANOPT_CODES(formats::bfloat16_stochastic)
LEANOPT_CODES(formats::log8)
LEANOPT_CODES(formats::dynamic8)
LEANOPT_CODES(formats::dynamic8_strict)

}  // namespace leanopt::cuda
