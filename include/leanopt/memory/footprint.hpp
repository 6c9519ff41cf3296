// What training with an optimizer costs, to the byte: predicted from shapes and options before
// anything is allocated, and measured on an optimizer that has stepped. Both give the same figures
// in the same structure.
#pragma once

#include <leanopt/formats/dynamic8.hpp>
#include <leanopt/memory/size.hpp>

#include <torch/optim/adagrad.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <iomanip>
#include <locale>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace leanopt {

/// Bytes by what they hold. A step count is 8 bytes, as it is kept; compute_optimizer_size counts
/// it as Python's class would.
struct bytes_by_category {
  std::int64_t parameters = 0, gradients = 0;
  std::int64_t moments = 0;   ///< in full precision
  std::int64_t codes = 0;     ///< of compressed moments
  std::int64_t headers = 0;   ///< one per block of codes
  std::int64_t factors = 0;   ///< rows and columns of a second moment
  std::int64_t residual = 0;  ///< bits of split weights
  std::int64_t counters = 0;  ///< step counts, and the RMS that Hugging Face's Adafactor keeps

  /// Every category with its name.
  static constexpr auto members() {
    using b = bytes_by_category;
    using member = std::pair<const char*, std::int64_t b::*>;
    return std::array{member("parameters", &b::parameters), member("gradients", &b::gradients),
                      member("moments", &b::moments),       member("codes", &b::codes),
                      member("headers", &b::headers),       member("factors", &b::factors),
                      member("residual", &b::residual),     member("counters", &b::counters)};
  }

  std::int64_t state() const { return moments + codes + headers + factors + residual + counters; }
  std::int64_t total() const { return parameters + gradients + state(); }
  bytes_by_category& operator+=(const bytes_by_category& b) {
    for (auto member : members()) this->*member.second += b.*member.second;
    return *this;
  }
  friend bool operator==(const bytes_by_category& a, const bytes_by_category& b) {
    for (auto member : members())
      if (a.*member.second != b.*member.second) return false;
    return true;
  }
  friend bool operator!=(const bytes_by_category& a, const bytes_by_category& b) {
    return !(a == b);
  }
};

/// The shape of a parameter that need not exist.
struct parameter_shape {
  std::vector<std::int64_t> sizes;
  at::ScalarType type = at::kFloat;
  std::string name = "";
  at::ScalarType gradient = at::ScalarType::Undefined;  ///< of its gradient; undefined: `type`
  /// Where it is: only in a program that links leanopt::cuda another than the CPU.
  at::Device device = at::kCPU;

  std::int64_t elements() const { return c10::multiply_integers(sizes); }
};

/// What the parameters, gradients and state of a model cost.
struct footprint {
  struct parameter {
    parameter_shape shape;
    std::size_t group = 0;
    bytes_by_category bytes;
    std::int64_t numbers = 0;  ///< of state, of any width
  };
  std::vector<parameter> parameters;
  std::int64_t code_books = 0;  ///< of dynamic8 and the tables to look codes up, once
  std::int64_t scratch = 0;     ///< that the optimizer keeps between steps, on host and devices
  /// Tensors that a step makes and drops, at its peak: none in ours, unless gradients are float64
  /// and parameters are not, or the reverse. Of LibTorch's classes those of a parameter's size.
  std::int64_t transient = 0;
  std::int64_t bookkeeping = 0;  ///< lists and objects of the host; measured, of ours only

  bytes_by_category sum() const {
    bytes_by_category all;
    for (const parameter& p : parameters) all += p.bytes;
    return all;
  }
  bytes_by_category sum(std::size_t group) const {
    bytes_by_category all;
    for (const parameter& p : parameters)
      if (p.group == group) all += p.bytes;
    return all;
  }
  std::int64_t elements() const {
    std::int64_t n = 0;
    for (const parameter& p : parameters) n += p.shape.elements();
    return n;
  }
  std::int64_t numbers() const {
    std::int64_t n = code_books ? formats::dynamic8::table_elements : 0;
    for (const parameter& p : parameters) n += p.numbers;
    return n;
  }
  /// All bytes but the host's bookkeeping.
  std::int64_t total() const { return sum().total() + code_books + scratch + transient; }
  std::int64_t state() const { return sum().state() + code_books; }
  double bytes_per_parameter() const {
    return elements() ? double(total()) / double(elements()) : 0;
  }
};
/// Megabytes of 2^20 bytes.
constexpr double megabytes(std::int64_t bytes) { return double(bytes) / (1 << 20); }

/// Parameters that share options.
template <class Optimizer>
struct shape_group {
  std::vector<parameter_shape> parameters;
  options_of<Optimizer> options = {};
};

namespace detail {

inline constexpr std::int64_t book_bytes = sizeof(formats::dynamic8::host_books);

/// Of all parameters; with more, sums of bytes could overflow.
inline constexpr std::int64_t most_elements = std::int64_t(1) << 54;

/// Takes the elements of `s` from those that are `left`. @throws for sizes that no tensor has.
inline void take_elements(const parameter_shape& s, place where, std::int64_t& left) {
  std::int64_t elements = 1;  // as if no size were 0, so that none hides another
  for (const std::int64_t size : s.sizes) {
    TORCH_CHECK(size >= 0 && size <= left / elements, "leanopt: ", where, " has the sizes ",
                at::IntArrayRef(s.sizes),
                "; give none below 0, and at most 2^54 elements in all parameters together");
    elements *= std::max<std::int64_t>(size, 1);
  }
  left -= s.elements();
}
template <class Rule, class Format, class Weights>
void check_options(const options<Rule, Format, Weights>& o, std::size_t group) {
  o.check("group " + std::to_string(group), Format::compressed);
}
inline void check_options(const OptimizerOptions&, std::size_t) {}  // LibTorch's constructors do
inline footprint::parameter shape_only(const parameter_shape& s, std::size_t group) {
  footprint::parameter p;
  p.shape = s;
  p.group = group;
  const auto bytes = [&](at::ScalarType t) {
    return s.elements() * std::int64_t(c10::elementSize(t));
  };
  p.bytes.parameters = bytes(s.type);
  p.bytes.gradients = bytes(s.gradient == at::ScalarType::Undefined ? s.type : s.gradient);
  return p;
}
inline void keep(footprint::parameter& p, std::int64_t bytes_by_category::*what, std::int64_t n,
                 std::int64_t width) {
  p.bytes.*what += n * width;
  p.numbers += n;
}

/// Adds what an optimizer of ours keeps of a parameter.
template <class Rule, class Format, class Weights>
void add_state(footprint::parameter& p, const options<Rule, Format, Weights>& o) {
  using bytes = bytes_by_category;
  using residual = typename Weights::residual;
  const parameter_shape& shape = p.shape;
  const std::int64_t n = shape.elements();
  const auto full = std::int64_t(c10::elementSize(full_type(shape.type)));
  keep(p, &bytes::counters, 1, sizeof(std::int64_t));
  if (n == 0) return;
  const auto slot = [&](const slot_spec& s) {
    const bool factor = s.shape == extent::row || s.shape == extent::column;
    keep(p,
         s.shape == extent::one ? &bytes::counters
         : factor               ? &bytes::factors
                                : &bytes::moments,
         c10::multiply_integers(slot_sizes(s, shape.sizes)), full);
  };
  const auto moment = [&](const slot_spec& s) {
    if constexpr (Format::compressed) {
      using header = typename Format::header;
      if (n >= o.min_compressed_elements()) {
        keep(p, &bytes::codes, n, sizeof(typename Format::template stored<float>));
        if constexpr (has_headers<Format>)
          keep(p, &bytes::headers, (n + Format::block - 1) / Format::block, sizeof(header));
        return;
      }
    }
    slot(s);
  };
  if constexpr (Rule::elementwise) {
    using all = typename Rule::template formula<true>;
    for (int k = 0; k < (Rule::is_long(o) ? 3 : 2); ++k) moment(all::slots[k]);
  } else {
    const auto& [exp_avg, row, column, variance] = Rule::moments;
    if (Rule::is_long(o)) moment(exp_avg);
    if (shape.sizes.size() > 1) {
      slot(row);
      slot(column);
    } else {
      slot(variance);
    }
    if (Rule::keeps_rms(o)) slot({"RMS", values::non_negative, extent::one});
  }
  if constexpr (!std::is_void_v<residual>)
    if (shape.type == at::kBFloat16) keep(p, &bytes::residual, n, sizeof(residual));
}
/// What a step's lists of tensors take in devices' memory, if the tensors are in row-major order.
template <class Rule, class Format, class Weights, class Groups>
std::int64_t bytes_on_devices(const optimizer<Rule, Format, Weights>*, const Groups& groups) {
  engine::device_lists lists;
  std::deque<engine::tensor_job> jobs;
  static char kept;  // of a matrix or a vector
  for (const auto& group : groups)
    for (const parameter_shape& s : group.parameters) {
      const auto* kernel =
          optimizer<Rule, Format, Weights>::kernel_for(group.options, s.type, s.elements());
      if (s.device.is_cpu() || !kernel) continue;
      engine::tensor_job& job = jobs.emplace_back();
      job.work = cpu::matrix_step(s.sizes.data(), s.sizes.size());
      if (c10::isComplexType(s.type)) job.work.elements *= 2;
      if (job.work.elements) (s.sizes.size() > 1 ? job.work.row : job.work.variance) = &kept;
      if (!Rule::elementwise) job.epsilon = engine::epsilon_of(s.type);
      engine::device_step::item x{};
      x.job = &job;
      x.skips_elements = group.options.nonfinite() == nonfinite::skip_element;
      lists.add(*kernel, s.device, x, {&group.options, nullptr, 0, job.epsilon, 1});
    }
  return lists.predicted_bytes();
}
template <class Rule, class Format, class Weights, class Groups>
void add_shared(footprint& f, const optimizer<Rule, Format, Weights>* of, const Groups& groups) {
  f.scratch += bytes_on_devices(of, groups);
  if constexpr (has_tables<Format>)
    if (f.sum().codes) f.code_books = book_bytes;
  if constexpr (!Rule::elementwise) {
    engine::scratch_plan plan;
    for (const footprint::parameter& p : f.parameters) {
      const parameter_shape& s = p.shape;
      if (s.elements() == 0 || !s.device.is_cpu()) continue;
      const cpu::matrix_step t(s.sizes.data(), s.sizes.size());
      engine::with_arithmetic(s.type, [&](auto zero) {
        plan.add(t.elements, cpu::matrix_passes<Rule, decltype(zero), Weights>::scratch_bytes(
                                 t, s.sizes.size() > 1));
      });
    }
    if (!f.parameters.empty())
      for (std::size_t w = 0; w < plan.threads(); ++w)
        f.scratch += std::int64_t(plan.doubles(w) * sizeof(double));
  }
}

// LibTorch's classes keep moments of the parameter's type.
inline void add_stock(footprint::parameter& p, int moments, int figures) {
  const parameter_shape& s = p.shape;
  keep(p, &bytes_by_category::counters, figures, 8);
  keep(p, &bytes_by_category::moments, moments * s.elements(),
       std::int64_t(c10::elementSize(s.type)));
}
inline void add_state(footprint::parameter& p, const torch::optim::AdamOptions& o) {
  add_stock(p, o.amsgrad() ? 3 : 2, 1);
}
inline void add_state(footprint::parameter& p, const torch::optim::AdamWOptions& o) {
  add_stock(p, o.amsgrad() ? 3 : 2, 1);
}
inline void add_state(footprint::parameter& p, const torch::optim::SGDOptions& o) {
  if (o.momentum() != 0) add_stock(p, 1, 0);
}
inline void add_state(footprint::parameter& p, const torch::optim::RMSpropOptions& o) {
  add_stock(p, 1 + (o.momentum() > 0) + o.centered(), 1);
}
inline void add_state(footprint::parameter& p, const torch::optim::AdagradOptions&) {
  add_stock(p, 1, 1);
}
template <class Groups>
void add_shared(footprint&, const torch::optim::Optimizer*, const Groups&) {}
/// How many tensors of a parameter's size LibTorch's class of these options holds at once in a step
/// that it drops again.
inline int temporaries(const OptimizerOptions& o) {
  namespace optim = torch::optim;  // leanopt::AdamOptions is another class
  if (const auto* adam = dynamic_cast<const optim::AdamOptions*>(&o))
    return 2 + (adam->weight_decay() != 0);
  if (dynamic_cast<const optim::AdamWOptions*>(&o)) return 2;
  if (const auto* sgd = dynamic_cast<const optim::SGDOptions*>(&o))
    return (sgd->weight_decay() != 0) + (sgd->momentum() != 0 && sgd->nesterov());
  if (const auto* rms = dynamic_cast<const optim::RMSpropOptions*>(&o))
    return 1 + (rms->weight_decay() != 0);
  if (const auto* ada = dynamic_cast<const optim::AdagradOptions*>(&o))
    return 1 + (ada->weight_decay() != 0);
  return 0;
}
inline void add_transient(footprint& f, const footprint::parameter& p, const OptimizerOptions& o) {
  f.transient = std::max(f.transient, temporaries(o) * p.bytes.parameters);
}

/// Of a gradient, which LibTorch's SGD and Adagrad take sparse.
inline std::int64_t bytes_held(const Tensor& t) {
  if (!t.is_sparse()) return std::int64_t(t.nbytes());
  return std::int64_t(t._indices().nbytes() + t._values().nbytes());
}
inline parameter_shape shape_of(const Tensor& p) {
  const bool there = engine::can_step_on(p.device());
  return {p.sizes().vec(), p.scalar_type(), "", at::ScalarType::Undefined,
          there ? p.device() : at::Device(at::kCPU)};
}

/// What a tensor in a state is for; `ours` is null for LibTorch's optimizers.
inline std::int64_t bytes_by_category::*category_of(const description* ours,
                                                    const std::string& name, const Tensor& t) {
  if (!ours) return &bytes_by_category::moments;
  if (is_header(name)) return &bytes_by_category::headers;
  if (name == residual_name) return &bytes_by_category::residual;
  for (const slot_spec& s : ours->slots) {
    if (name != s.name) continue;
    if (s.shape == extent::one) return &bytes_by_category::counters;
    if (s.shape != extent::element) return &bytes_by_category::factors;
  }
  const codec& c = ours->compressed;
  return c.block && t.scalar_type() == c.code_type ? &bytes_by_category::codes
                                                   : &bytes_by_category::moments;
}

}  // namespace detail

/// What `Optimizer`, of ours or of LibTorch's but LBFGS, will cost after a step in which every
/// parameter has a gradient, with as many threads as LibTorch uses now. Of parameters on devices,
/// what lists them there counts as scratch, as of tensors and gradients in row-major order. Options
/// are taken as they are: nothing is inherited. @throws for options that ours would refuse, and for
/// sizes that no tensor has.
template <class Optimizer>
footprint predict(const std::vector<shape_group<Optimizer>>& groups) {
  footprint f;
  std::int64_t left = detail::most_elements;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    detail::check_options(groups[g].options, g);
    for (std::size_t i = 0; i < groups[g].parameters.size(); ++i) {
      const parameter_shape& s = groups[g].parameters[i];
      detail::take_elements(s, {g, i}, left);
      f.parameters.push_back(detail::shape_only(s, g));
      detail::add_state(f.parameters.back(), groups[g].options);
      if constexpr (!std::is_base_of_v<detail::front, Optimizer>)
        detail::add_transient(f, f.parameters.back(), groups[g].options);
    }
  }
  detail::add_shared(f, static_cast<const Optimizer*>(nullptr), groups);
  return f;
}
template <class Optimizer>
footprint predict(const std::vector<parameter_shape>& parameters,
                  const options_of<Optimizer>& o = {}) {
  return predict<Optimizer>({shape_group<Optimizer>{parameters, o}});
}
/// The same of tensors, which may be on the meta device, where they take no memory.
template <class Optimizer>
footprint predict(const std::vector<Tensor>& parameters, const options_of<Optimizer>& o = {}) {
  std::vector<parameter_shape> shapes;
  for (const Tensor& p : parameters) shapes.push_back(detail::shape_of(p));
  return predict<Optimizer>(shapes, o);
}

/// What an optimizer of ours or of LibTorch's and its parameters hold now.
inline footprint measure(const Optimizer& optimizer) {
  footprint f;
  const auto* ours = dynamic_cast<const detail::front*>(&optimizer);
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g)
    for (const Tensor& t : optimizer.param_groups()[g].params()) {
      footprint::parameter p;
      p.shape = detail::shape_of(t);
      p.group = g;
      p.bytes.parameters = std::int64_t(t.nbytes());
      if (t.grad().defined()) p.bytes.gradients = detail::bytes_held(t.grad());
      const auto it = optimizer.state().find(t.unsafeGetTensorImpl());
      if (it != optimizer.state().end() && it->second) {
        detail::each_part(
            *it->second, [&](std::int64_t) { detail::keep(p, &bytes_by_category::counters, 1, 8); },
            [&](const std::string& name, const Tensor& x) {
              detail::keep(p, detail::category_of(ours ? &ours->what() : nullptr, name, x),
                           x.numel(), std::int64_t(x.element_size()));
              if (detail::uses_code_books(name, x)) f.code_books = detail::book_bytes;
            });
      }
      const OptimizerParamGroup& group = optimizer.param_groups()[g];
      if (!ours && group.has_options()) detail::add_transient(f, p, group.options());
      f.parameters.push_back(std::move(p));
    }
  if (ours) {
    f.scratch = ours->scratch_bytes();
    f.bookkeeping = ours->bookkeeping_bytes();
  }
  return f;
}

namespace detail {
/// f(name, bytes) for every category that is not empty.
template <class F>
void each_category(const footprint& x, F f) {
  const bytes_by_category all = x.sum();
  for (const auto& [name, member] : bytes_by_category::members())
    if (all.*member) f(name, all.*member);
  if (x.code_books) f("code books", x.code_books);
  if (x.scratch) f("scratch", x.scratch);
  if (x.transient) f("transient", x.transient);
}
inline std::string quoted(const std::string& text) {
  std::ostringstream out;
  out << '"';
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out << '\\' << c;
    else if (static_cast<unsigned char>(c) < 0x20)
      out << "\\u" << std::hex << std::setw(4) << std::setfill('0') << int(c) << std::dec;
    else
      out << c;
  }
  out << '"';
  return out.str();
}
}  // namespace detail

/// A table of the categories: bytes, megabytes of 2^20 bytes, bytes per parameter.
inline std::ostream& operator<<(std::ostream& out, const footprint& f) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  const auto line = [&](const std::string& name, std::int64_t bytes) {
    const double each = f.elements() ? double(bytes) / double(f.elements()) : 0;
    text << std::left << std::setw(12) << name << std::right << std::setw(18) << bytes << std::fixed
         << std::setprecision(4) << std::setw(16) << megabytes(bytes) << std::setw(12) << each
         << '\n';
  };
  text << std::left << std::setw(12) << "what" << std::right << std::setw(18) << "bytes"
       << std::setw(16) << "MB" << std::setw(12) << "B/param" << '\n';
  detail::each_category(f, line);
  line("total", f.total());
  if (f.bookkeeping) line("bookkeeping", f.bookkeeping);  // not in the total
  text << f.elements() << " parameters in " << f.parameters.size() << " tensors, state "
       << f.numbers() << " numbers\n";
  return out << text.str();
}

/// The same for tools, parameter by parameter: JSON (RFC 8259), where names are UTF-8.
inline std::string to_json(const footprint& f) {
  std::ostringstream out;
  out.imbue(std::locale::classic());  // the program's may group digits
  const auto list = [&](const bytes_by_category& b) {
    const char* comma = "";
    for (const auto& [name, member] : bytes_by_category::members()) {
      out << comma << detail::quoted(name) << ':' << b.*member;
      comma = ",";
    }
  };
  out << "{\"parameters\":[";
  const char* comma = "";
  for (const footprint::parameter& p : f.parameters) {
    out << comma << "{\"group\":" << p.group << ",\"name\":" << detail::quoted(p.shape.name)
        << ",\"type\":" << detail::quoted(c10::toString(p.shape.type)) << ",\"sizes\":[";
    for (std::size_t d = 0; d < p.shape.sizes.size(); ++d)
      out << (d ? "," : "") << p.shape.sizes[d];
    out << "],\"numbers\":" << p.numbers << ",\"bytes\":{";
    list(p.bytes);
    out << "}}";
    comma = ",";
  }
  out << "],\"bytes\":{";
  list(f.sum());
  out << "},\"code_books\":" << f.code_books << ",\"scratch\":" << f.scratch
      << ",\"transient\":" << f.transient << ",\"bookkeeping\":" << f.bookkeeping
      << ",\"elements\":" << f.elements() << ",\"numbers\":" << f.numbers()
      << ",\"state\":" << f.state() << ",\"total\":" << f.total() << '}';
  return out.str();
}

}  // namespace leanopt
