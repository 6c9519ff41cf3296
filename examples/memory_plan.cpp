// memory_plan: what training a model costs with each optimizer, before anything is allocated. The
// model comes from a checkpoint's header, from a list of shapes or from a built-in name:
//   memory_plan model.safetensors --fit=24 --svg=plan.svg

#include "examples/plan/program.hpp"

#include <iostream>

int main(int argc, char** argv) { return plan::run({argv + 1, argv + argc}, std::cout, std::cerr); }
