// The library's version and its few macros.
#pragma once

#define LEANOPT_VERSION_MAJOR 0
#define LEANOPT_VERSION_MINOR 1
#define LEANOPT_VERSION_PATCH 0

// A function that the host and a device compile; always inlined, because it has no target
// attribute of its own and becomes AVX2 or AVX-512 code inside the engine's entry points.
#if defined(__CUDACC__)
#define LEANOPT_HD __host__ __device__ __forceinline__
#else
#define LEANOPT_HD [[gnu::always_inline]] inline
#endif

// The same without the inlining: for arithmetic that is called from where the consumer's flags
// hold.
#if defined(__CUDACC__)
#define LEANOPT_HD_CALL __host__ __device__
#else
#define LEANOPT_HD_CALL
#endif

// The same as LEANOPT_HD for the host alone.
#define LEANOPT_INLINE [[gnu::always_inline]] inline

// The same for a lambda, after its parameters: there [[gnu::always_inline]] would mean the type.
#define LEANOPT_LAMBDA __attribute__((always_inline))

// Before a loop of a constant number of turns whose arrays shall be registers, and before one that
// is rare and shall stay short, which nvcc alone must be told.
#if defined(__CUDACC__)
#define LEANOPT_UNROLL _Pragma("unroll")
#define LEANOPT_ROLL _Pragma("unroll 1")
#else
#define LEANOPT_UNROLL _Pragma("GCC unroll 16")
#define LEANOPT_ROLL
#endif

// LEANOPT_EXACT_BEGIN ... LEANOPT_EXACT_END stand around every namespace with arithmetic: IEEE
// operations, one by one, whatever the flags of the consumer's build. g++: under any flags,
// -Ofast -march=native included. clang: under any but -ffast-math, which is refused below, and an
// explicit -ffp-contract=fast, which no macro tells.
#if defined(__CUDACC__)
#define LEANOPT_EXACT_BEGIN
#define LEANOPT_EXACT_END
#elif defined(__clang__)
#define LEANOPT_EXACT_BEGIN _Pragma("float_control(precise, on, push)")
#define LEANOPT_EXACT_END _Pragma("float_control(pop)")
#else
#define LEANOPT_EXACT_BEGIN                                                                       \
  _Pragma("GCC push_options")                                                                     \
      _Pragma("GCC optimize(\"fp-contract=off,no-fast-math,no-unsafe-math-optimizations\")")      \
          _Pragma("GCC optimize(\"no-associative-math,no-reciprocal-math,no-finite-math-only\")") \
              _Pragma("GCC optimize(\"signed-zeros,trapping-math\")")
#define LEANOPT_EXACT_END _Pragma("GCC pop_options")
#endif
#if defined(__clang__) && defined(__FAST_MATH__)
#error "leanopt: compile without -ffast-math; the optimizers promise the same bits on every path"
#endif
