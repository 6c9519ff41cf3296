// Calls the CUDA engine, to be built without it.
#include <leanopt/engine/cuda_api.hpp>

int main() { return leanopt::cuda::current_stream(0) != nullptr; }
