// A program on leanopt::cuda: LibTorch's CUDA libraries must be loaded with it, with one CUDA
// runtime, and an 8-bit optimizer must step, on a device too where there is one.
#include <leanopt/leanopt.hpp>

#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <set>
#include <string>

// Files of this process whose name begins so.
int loaded(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  std::set<std::string> files;
  for (std::string line; std::getline(maps, line);) {
    const std::size_t file = line.rfind('/');
    if (file != std::string::npos && line.compare(file + 1, name.size(), name) == 0)
      files.insert(line.substr(line.find('/')));
  }
  for (const std::string& file : files) std::printf("%s\n", file.c_str());
  return static_cast<int>(files.size());
}

bool moves(torch::Device device) {
  torch::Tensor parameter =
      torch::ones({64, 128}, torch::TensorOptions(device).requires_grad(true));
  leanopt::AdamW8bit optimizer({parameter}, leanopt::AdamW8bitOptions(1e-3));
  parameter.sum().backward();
  optimizer.step();
  const bool moved = (parameter < 1).all().item<bool>();
  std::printf("on %s, moved: %d\n", device.str().c_str(), moved);
  return moved;
}

int main() {
  const bool available = torch::cuda::is_available();
  std::printf("CUDA available: %d\n", available);
  const bool one_runtime = loaded("libtorch_cuda.so") == 1 && loaded("libcudart") == 1;
  return one_runtime && moves(torch::kCPU) && (!available || moves(torch::kCUDA)) ? 0 : 1;
}
