// A chart of stacked horizontal bars as an SVG file.
#pragma once

#include "examples/text.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace plan {

/// `text` inside of XML. What is no UTF-8, or of its rarer ranges, becomes '?'.
inline std::string xml(std::string_view text) {
  std::string result;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  for (std::size_t i = 0; i < text.size();) {
    const unsigned char first = byte(i);
    const std::size_t length = first < 0x80                    ? 1
                               : first >= 0xc2 && first < 0xe0 ? 2
                               : first >= 0xe1 && first < 0xed ? 3
                                                               : 0;
    bool whole = length > 0 && length <= text.size() - i;
    for (std::size_t k = 1; whole && k < length; ++k) whole = byte(i + k) >> 6 == 2;
    if (!whole || first < ' ' || first == 0x7f) {
      result += '?';
      ++i;
      continue;
    }
    switch (first) {
      case '&': result += "&amp;"; break;
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '"': result += "&quot;"; break;
      default: result += text.substr(i, length);
    }
    i += length;
  }
  return result;
}

struct bar {
  std::string label, detail;   ///< on the left, the second one paler
  std::vector<double> values;  ///< one per series
  std::string figure;          ///< on the right
};
struct series {
  std::string name, colour;
};
struct chart {
  std::string title, subtitle, axis;
  std::vector<series> parts;
  std::vector<bar> bars;
  double limit = 0;  ///< a line across all bars, if it is within them
  std::string limit_name;
};

namespace detail {

/// About five even steps to `largest`.
inline double tick_of(double largest) {
  const double rough = largest / 5, power = std::pow(10, std::floor(std::log10(rough)));
  for (const double step : {1.0, 2.0, 5.0})
    if (step * power >= rough) return step * power;
  return 10 * power;
}
inline std::string number(double x) { return text::fixed(x, 1); }

}  // namespace detail

inline std::string to_svg(const chart& c) {
  constexpr double width = 960, left = 320, right = 180, pitch = 28, thick = 18, baseline = 13.5,
                   top = 120;
  const double bottom = top + pitch * double(c.bars.size());
  double largest = 0;
  for (const bar& b : c.bars)
    largest = std::max(largest, std::accumulate(b.values.begin(), b.values.end(), 0.0));
  if (!(largest > 0)) largest = 1;
  const double scale = (width - left - right) / largest;

  std::ostringstream out;
  const auto words = [&](double x, double y, const char* style, const std::string& what) {
    out << "<text x=\"" << detail::number(x) << "\" y=\"" << detail::number(y) << "\" " << style
        << '>' << xml(what) << "</text>\n";
  };
  const auto box = [&](double x, double y, double w, double h, const std::string& colour) {
    out << "<rect x=\"" << detail::number(x) << "\" y=\"" << detail::number(y) << "\" width=\""
        << detail::number(w) << "\" height=\"" << detail::number(h) << "\" fill=\"" << colour
        << "\"/>\n";
  };
  const auto line = [&](double x, const char* style) {
    out << "<line x1=\"" << detail::number(x) << "\" y1=\"" << detail::number(top - 6) << "\" x2=\""
        << detail::number(x) << "\" y2=\"" << detail::number(bottom) << "\" " << style << "/>\n";
  };

  const double height = bottom + 44;
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << width << ' ' << height
      << "\" width=\"" << width << "\" height=\"" << height
      << "\" font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\" font-size=\"13\" "
         "fill=\"#1f2933\" role=\"img\">\n<title>"
      << xml(c.title) << "</title>\n";
  box(0, 0, width, height, "#ffffff");
  words(24, 34, "font-size=\"18\" font-weight=\"600\"", c.title);
  words(24, 56, "fill=\"#5f6b7a\"", c.subtitle);
  double x = left;
  for (const series& s : c.parts) {
    box(x, 74, 12, 12, s.colour);
    words(x + 18, 84.5, "fill=\"#3e4c59\"", s.name);
    x += 42 + 7 * double(s.name.size());
  }

  const double step = detail::tick_of(largest);
  for (int k = 0; k * step <= largest; ++k) {
    line(left + k * step * scale, "stroke=\"#e4e7eb\"");
    const int decimals = step < 1 ? 1 : 0;
    words(left + k * step * scale, bottom + 18, "text-anchor=\"middle\" fill=\"#7b8794\"",
          text::fixed(k * step, decimals));
  }
  words(left + (width - left - right) / 2, bottom + 36, "text-anchor=\"middle\" fill=\"#7b8794\"",
        c.axis);

  double y = top;
  for (const bar& b : c.bars) {
    out << "<text x=\"" << left - 12 << "\" y=\"" << detail::number(y + baseline)
        << "\" text-anchor=\"end\">" << xml(b.label) << " <tspan fill=\"#7b8794\">" << xml(b.detail)
        << "</tspan></text>\n";
    x = left;
    for (std::size_t s = 0; s < b.values.size(); ++s) {
      box(x, y, b.values[s] * scale, thick, c.parts[s].colour);
      x += b.values[s] * scale;
    }
    y += pitch;
  }
  if (c.limit > 0 && c.limit <= largest) {
    line(left + c.limit * scale, "stroke=\"#b42318\" stroke-dasharray=\"5 4\"");
    words(left + c.limit * scale, top - 10, "text-anchor=\"middle\" fill=\"#b42318\"",
          c.limit_name);
  }
  y = top;
  for (const bar& b : c.bars) {  // above the line, with a rim of the ground
    const double length = std::accumulate(b.values.begin(), b.values.end(), 0.0) * scale;
    words(left + length + 8, y + baseline,
          "font-weight=\"600\" stroke=\"#ffffff\" stroke-width=\"4\" paint-order=\"stroke\"",
          b.figure);
    y += pitch;
  }
  out << "</svg>\n";
  return out.str();
}

}  // namespace plan
