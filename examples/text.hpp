// Text for a terminal: numbers as people read them, and a table whose columns line up.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace text {

inline std::string with_commas(std::int64_t value) {
  std::string digits = std::to_string(value);
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t end = digits.size(); end > first + 3;) {
    end -= 3;
    digits.insert(end, 1, ',');
  }
  return digits;
}

inline std::string fixed(double value, int decimals) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.*f", decimals, value);
  return buffer;
}

// Names to the left, figures to the right: the first `names` columns are names.
class table {
 public:
  table(std::vector<std::string> header, std::size_t names) : names_(names) {
    rows_.push_back(std::move(header));
  }

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  friend std::ostream& operator<<(std::ostream& out, const table& t) {
    std::vector<std::size_t> widths(t.rows_.front().size(), 0);
    for (const auto& row : t.rows_) {
      for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
    }
    for (std::size_t r = 0; r < t.rows_.size(); ++r) {
      out << t.line(t.rows_[r], widths) << '\n';
      if (r == 0) out << rule(widths) << '\n';
    }
    return out;
  }

 private:
  static constexpr std::size_t gap = 2;

  std::string line(const std::vector<std::string>& row,
                   const std::vector<std::size_t>& widths) const {
    std::string result;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string padding(widths[c] - row[c].size(), ' ');
      if (c > 0) result.append(gap, ' ');
      result += c < names_ ? row[c] + padding : padding + row[c];
    }
    return result;
  }

  static std::string rule(const std::vector<std::size_t>& widths) {
    std::size_t total = gap * (widths.size() - 1);
    for (const std::size_t width : widths) total += width;
    return std::string(total, '-');
  }

  std::vector<std::vector<std::string>> rows_;
  std::size_t names_;
};

}  // namespace text
