// The least that any program with LibTorch costs to compile: the denominator of compile_bench.py.
#include <torch/torch.h>

int main() { return 0; }
