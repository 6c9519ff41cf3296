// The list of a zip archive and its records. torch.save and torch::save compress nothing.
#pragma once

#include "examples/plan/file.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>

namespace plan {

class zip {
 public:
  struct record {
    std::uint64_t size, stored, header;  ///< bytes, bytes in the archive, where its header begins
    std::uint16_t method;                ///< 0: stored as it is
  };

  /// @throws where `f` is no whole archive.
  explicit zip(file& f) : file_(f) {
    const directory d = find_directory();
    constexpr std::uint64_t longest = 256 << 20;
    if (d.size > longest) damaged();
    const std::string list = f.read(d.offset, d.size, "the archive's list");
    for (std::size_t at = 0; at < list.size();) at += read_entry(list, at);
    if (records_.size() != d.records) damaged();
  }

  const std::unordered_map<std::string, record>& records() const { return records_; }

  std::string read(const record& r, const std::string& what) const {
    if (r.method != 0) throw error(what + " is compressed");
    const std::string header = file_.read(r.header, 30, what);
    if (header.compare(0, 4, "PK\x03\x04") != 0) damaged();
    const std::uint64_t behind =
        30 + little_endian<std::uint16_t>(&header[26]) + little_endian<std::uint16_t>(&header[28]);
    return file_.read(r.header + behind, r.size, what);
  }

 private:
  struct directory {
    std::uint64_t records, size, offset;
  };
  static constexpr std::uint32_t in_extra = 0xffffffff;  // the number has 8 bytes, elsewhere

  [[noreturn]] static void damaged() {
    throw error("is no whole zip archive: it is truncated or damaged");
  }

  // The archive's last record is of 22 bytes and a comment, and tells where the list is. Numbers
  // too large for it are in another one, whose place 20 bytes before it tell.
  directory find_directory() const {
    constexpr std::uint64_t last = 22, locator = 20, longest_comment = 0xffff;
    const std::uint64_t n = std::min(file_.size(), last + locator + longest_comment);
    const std::string tail = file_.read(file_.size() - n, n, "the archive");
    const std::size_t at = tail.rfind("PK\x05\x06");
    if (at == std::string::npos || tail.size() - at < last) damaged();
    const char* const end = &tail[at];
    directory d{little_endian<std::uint16_t>(end + 10), little_endian<std::uint32_t>(end + 12),
                little_endian<std::uint32_t>(end + 16)};
    if (at < locator || tail.compare(at - locator, 4, "PK\x06\x07") != 0) return d;
    const auto place = little_endian<std::uint64_t>(end - locator + 8);
    const std::string large = file_.read(place, 56, "the archive's list");
    if (large.compare(0, 4, "PK\x06\x06") != 0) damaged();
    return {little_endian<std::uint64_t>(&large[32]), little_endian<std::uint64_t>(&large[40]),
            little_endian<std::uint64_t>(&large[48])};
  }

  /// Returns the entry's length.
  std::size_t read_entry(const std::string& list, std::size_t at) {
    constexpr std::size_t fixed = 46;
    const char* const p = list.data() + at;
    if (list.size() - at < fixed || list.compare(at, 4, "PK\x01\x02") != 0) damaged();
    const std::size_t name = little_endian<std::uint16_t>(p + 28);
    const std::size_t extra = little_endian<std::uint16_t>(p + 30);
    const std::size_t length = fixed + name + extra + little_endian<std::uint16_t>(p + 32);
    if (length > list.size() - at) damaged();
    record r{little_endian<std::uint32_t>(p + 24), little_endian<std::uint32_t>(p + 20),
             little_endian<std::uint32_t>(p + 42), little_endian<std::uint16_t>(p + 10)};
    read_extra(p + fixed + name, p + fixed + name + extra, r);
    if (r.header > file_.size() || r.stored > file_.size() - r.header) damaged();
    if (r.method == 0 && r.stored != r.size) damaged();
    if (!records_.emplace(std::string(p + fixed, name), r).second) damaged();
    return length;
  }
  /// The numbers of 8 bytes, in a fixed order, each only where the short one says so.
  static void read_extra(const char* p, const char* end, record& r) {
    while (end - p >= 4) {
      const auto kind = little_endian<std::uint16_t>(p);
      const auto size = std::ptrdiff_t(little_endian<std::uint16_t>(p + 2));
      p += 4;
      if (size > end - p) damaged();
      const char* number = p;
      for (std::uint64_t* field : {&r.size, &r.stored, &r.header}) {
        if (kind != 1 || *field != in_extra) continue;
        if (p + size - number < 8) damaged();
        *field = little_endian<std::uint64_t>(number);
        number += 8;
      }
      p += size;
    }
  }

  file& file_;
  std::unordered_map<std::string, record> records_;
};

}  // namespace plan
