// The CPU engine, without LibTorch: fused loops over blocks of a tensor, staged in L1. One text for
// every instruction set.
#pragma once

#include <leanopt/engine/cpu/elementwise.hpp>
#include <leanopt/engine/cpu/matrix.hpp>
