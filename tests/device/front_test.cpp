// The classes on CUDA devices do what they do on the emulator's.
#include "tests/engine/cuda/front_cases.hpp"
