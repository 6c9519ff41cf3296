// A file that may be damaged: nothing is read, and no memory is taken, beyond what is there.
#pragma once

#include "examples/plan/model.hpp"

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

namespace plan {

/// The number of `sizeof(T)` bytes at `from`, least significant byte first.
template <class T>
T little_endian(const char* from) {
  T value = 0;
  for (std::size_t i = sizeof(T); i-- > 0;) value = T(value << 8) | T(std::uint8_t(from[i]));
  return value;
}

class file {
 public:
  /// @throws where `path` is no file that can be read.
  explicit file(const std::string& path) {
    std::error_code failed;
    const auto status = std::filesystem::status(path, failed);
    if (!std::filesystem::exists(status)) throw error("there is no such file or built-in model");
    if (std::filesystem::is_directory(status)) throw error("is a folder: name the files in it");
    if (!std::filesystem::is_regular_file(status)) throw error("is no regular file");
    size_ = std::filesystem::file_size(path, failed);
    stream_.open(path, std::ios::binary);
    if (failed || !stream_) throw error("cannot be opened for reading");
  }

  std::uint64_t size() const { return size_; }

  /// Exactly `n` bytes from `offset` on. @throws where the file ends before; `what` names them.
  std::string read(std::uint64_t offset, std::uint64_t n, const std::string& what) {
    if (offset > size_ || n > size_ - offset)
      throw error("ends before the end of " + what + ": it is truncated or damaged");
    std::string bytes(std::size_t(n), '\0');
    stream_.clear();
    stream_.seekg(std::streamoff(offset));
    if (!stream_.read(bytes.data(), std::streamsize(n))) throw error(what + " cannot be read");
    return bytes;
  }

 private:
  std::ifstream stream_;
  std::uint64_t size_ = 0;
};

}  // namespace plan
