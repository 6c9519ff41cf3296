// Steps in a device's memory: which tensors one list takes, what of them stays there and what is
// sent with each step, and who counts the steps. Only for programs that link leanopt::cuda.
#pragma once

#include <leanopt/engine/device.hpp>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <utility>

namespace leanopt::engine {

/// A list of tensors of one device. What the list alone decides is sent when it is made, the
/// gradients' pointers and what groups have in common with each step. As long as the host knows
/// which steps count, it makes the coefficients; from the first step on of which only the device
/// knows (found_inf is there, a graph captures it) or whose rate the device has, the device makes
/// them and counts, with the same bits. Steps wait for nothing and allocate nothing, but for
/// scalars that are elsewhere or of another type.
class device_list : public device_work {
 public:
  bool fits(const device_step& x, bool is_captured) const override {
    if (!x.is_like(tensors_)) return false;
    if (is_captured || counts_)
      for (std::size_t g = 0; g < counted_.size(); ++g)
        if (x.groups()[g].step - 1 != counted_[g]) return false;
    return true;
  }

  void run(const device_step& x, const scalar_tensors& scalars, bool by_device,
           bool is_captured) override {
    const c10::DeviceGuard guard(device());
    const cuda::stream s = cuda::current_stream(device().index());
    const bool knows_steps = counts_ || is_captured;
    counts_ = counts_ || by_device;
    was_captured_ = was_captured_ || is_captured;
    char* to = moving_.data();
    const auto put = [&](const auto& number) {
      std::memcpy(to, &number, sizeof number);
      to += sizeof number;
    };
    for (const device_step::item& one : x.items()) put(one.job->work.g.data);
    for (const device_step::group& g : x.groups()) put(rate_of(g));
    if (!knows_steps)
      for (std::size_t g = 0; g < counted_.size(); ++g)
        put(counted_[g] = x.groups()[g].step - counts_);  // which counts this one, too
    if (!counts_)
      for (const device_step::group& g : x.groups()) {
        write_group(g, to);
        to += group_bytes();
      }
    send(at_.gradients, moving_.data(), std::size_t(to - moving_.data()), s);

    const at::Tensor inv_scale = there(scalars.inv_scale, at::kDouble),
                     clip = there(scalars.clip, at::kDouble),
                     found_inf = there(scalars.found_inf, at::kFloat);
    cuda::device_scalars of_step;
    if (inv_scale.defined()) of_step.inv_scale = static_cast<const double*>(inv_scale.data_ptr());
    if (clip.defined()) of_step.clip = static_cast<const double*>(clip.data_ptr());
    if (found_inf.defined()) of_step.found_inf = static_cast<const float*>(found_inf.data_ptr());
    if (counts_)
      check_cuda(prepare(at<char>(at_.counted), at<char>(at_.groups), counted_.size(), of_step, s));
    check_cuda(step(at<char>(0), at<const void*>(at_.gradients), at<char>(at_.groups),
                    at<char>(at_.books), of_step, s));
  }

  bool counts_steps() const override { return counts_; }
  void settle(const settler& f) override {
    if (!counts_) return;
    const at::Tensor steps = read(at_.steps, counted_.size());
    const auto* now = static_cast<const std::int64_t*>(steps.data_ptr());
    for (const device_step::item& x : tensors_.items()) f(x, counted_[x.group], now[x.group]);
    counted_.assign(now, now + counted_.size());
    counts_ = was_captured_;  // a graph that is replayed goes on counting
  }
  bool was_captured() const override { return was_captured_; }
  std::int64_t bytes() const override { return std::int64_t(memory_.nbytes()); }

 protected:
  device_list(at::Device d, const device_step& x, std::int64_t* skipped)
      : device_work(d), tensors_(x), skipped_(skipped) {
    for (const device_step::group& g : x.groups()) counted_.push_back(g.step - 1);
  }
  /// Memory of the device that it takes, or would.
  std::int64_t lay_out() {
    list_tensors();
    const std::size_t n = counted_.size();
    std::size_t next = 0;
    const auto place = [&](std::size_t bytes) {
      const std::size_t here = next;
      next += cuda::aligned(bytes);
      return here;
    };
    place(table_bytes());
    at_.counted = place(n * counted_bytes());
    at_.books = place(books_of_format().second);
    at_.gradients = next;
    at_.rates = at_.gradients + tensors_.items().size() * sizeof(void*);
    at_.steps = at_.rates + n * sizeof(double);
    at_.groups = at_.steps + n * sizeof(std::int64_t);
    return std::int64_t(at_.groups + n * group_bytes());
  }
  void build() {
    const c10::DeviceGuard guard(device());
    const cuda::stream s = cuda::current_stream(device().index());
    memory_ = at::zeros({lay_out()}, at::TensorOptions(at::kByte).device(device()));
    const std::vector<char> table = table_image(at<char>(0));
    send(0, table.data(), table.size(), s);
    check_cuda(set_units(at<char>(0), s));
    std::vector<char> counted(counted_.size() * counted_bytes());
    for (std::size_t g = 0; g < counted_.size(); ++g) {
      const device_step::group& x = tensors_.groups()[g];
      write_counted(x, x.lr ? x.lr : at<double>(at_.rates) + g, at<std::int64_t>(at_.steps) + g,
                    counted.data() + g * counted_bytes());
    }
    send(at_.counted, counted.data(), counted.size(), s);
    send(at_.steps, counted_.data(), counted_.size() * sizeof counted_[0], s);
    const auto books = books_of_format();
    send(at_.books, books.first, books.second, s);
    moving_.resize(std::size_t(bytes()) - at_.gradients);
  }

  // What depends on rule, format and type.

  virtual std::size_t group_bytes() const = 0;
  virtual std::size_t counted_bytes() const = 0;
  virtual double rate_of(const device_step::group& g) const = 0;
  virtual void write_group(const device_step::group& g, char* to) const = 0;
  virtual void write_counted(const device_step::group& g, const double* lr, std::int64_t* step,
                             char* to) const = 0;
  virtual std::pair<const char*, std::size_t> books_of_format() const = 0;
  virtual void clear_table() = 0;
  virtual void add_to_table(const cuda::tensor& t, const tensor_job& job) = 0;
  virtual std::size_t table_bytes() const = 0;
  virtual std::vector<char> table_image(char* memory) const = 0;
  virtual int set_units(char* memory, cuda::stream s) const = 0;
  virtual int prepare(const char* counted, char* groups, std::size_t count,
                      const cuda::device_scalars& scalars, cuda::stream s) const = 0;
  virtual int step(char* memory, const void* const* gradients, const char* groups,
                   const char* books, const cuda::device_scalars& scalars,
                   cuda::stream s) const = 0;

 private:
  /// Where what is, in bytes from the beginning of the memory. What is sent with each step comes
  /// last and in the order of how often it is needed.
  struct layout {
    std::size_t counted, books, gradients, rates, steps, groups;
  };

  void list_tensors() {
    clear_table();
    for (const device_step::item& x : tensors_.items()) {
      cuda::tensor t = cuda::tensor_of(x.job->work);
      t.ordinal = x.ordinal;
      t.skipped = x.skips_elements ? skipped_ : nullptr;
      t.group = std::uint32_t(x.group);
      add_to_table(t, *x.job);
    }
  }
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(memory_.data_ptr()) + offset);
  }
  void send(std::size_t to, const void* bytes, std::size_t count, cuda::stream s) const {
    check_cuda(cuda::send<>(at<char>(to), bytes, count, s));
  }
  /// So many numbers of 64 bits. Waits for the device.
  at::Tensor read(std::size_t from, std::size_t count) const {
    return memory_.narrow(0, std::int64_t(from), std::int64_t(count * sizeof(std::int64_t))).cpu();
  }
  at::Tensor there(const at::Tensor& scalar, at::ScalarType type) const {
    if (!scalar.defined()) return scalar;
    if (scalar.is_cpu())  // a copy would wait for the device
      return at::full({}, scalar.item<double>(), at::TensorOptions(type).device(device()));
    return scalar.to(device(), type);
  }

  device_step tensors_;                // when the list was made: what it points to may be gone
  std::int64_t* skipped_;              // elements, of all lists of the device
  std::vector<std::int64_t> counted_;  // steps in the device's memory, as the host knows them
  std::vector<char> moving_;           // what is sent with each step
  layout at_{};
  at::Tensor memory_;
  bool counts_ = false, was_captured_ = false;
};

/// A list for the kernel of a rule, a format and the type T in which it computes.
template <class Rule, class Options, class Formula, class Format, class Weights, class T>
class compiled_list final : public device_list {
  using group = cuda::group<Rule, T>;
  using counted = cuda::counted_group<Rule>;
  using table = std::conditional_t<Rule::elementwise, cuda::table, cuda::matrix_table<T>>;
  using books = typename tables_of<Format>::type;
  static_assert(alignof(group) <= 8 && sizeof(group) % 8 == 0 && alignof(counted) <= 8);

 public:
  compiled_list(at::Device d, const device_step& x, std::int64_t* skipped)
      : device_list(d, x, skipped) {}
  static constexpr device_kernel kernel{
      [](at::Device d, const device_step& x,
         std::int64_t* skipped) -> std::unique_ptr<device_work> {
        auto list = std::make_unique<compiled_list>(d, x, skipped);
        list->build();
        return list;
      },
      [](const device_step& x) { return compiled_list(at::kCPU, x, nullptr).lay_out(); }};

 protected:
  std::size_t group_bytes() const override { return sizeof(group); }
  std::size_t counted_bytes() const override { return sizeof(counted); }
  double rate_of(const device_step::group& g) const override { return options_of(g).lr(); }
  void write_group(const device_step::group& g, char* to) const override {
    const group x = cuda::group_of<Rule, T>(options_of(g), g.seed, g.step, g.epsilon);
    std::memcpy(to, &x, sizeof x);
  }
  void write_counted(const device_step::group& g, const double* lr, std::int64_t* step,
                     char* to) const override {
    const counted x{cuda::constants_of<Rule>(options_of(g)), lr, step, g.seed, g.epsilon};
    std::memcpy(to, &x, sizeof x);
  }
  std::pair<const char*, std::size_t> books_of_format() const override {
    if constexpr (std::is_void_v<books>)
      return {nullptr, 0};
    else
      return {reinterpret_cast<const char*>(&books::shared()), sizeof(books)};
  }
  void clear_table() override { table_.clear(); }
  void add_to_table(const cuda::tensor& given, const tensor_job& job) override {
    cuda::tensor t = given;
    if (t.p.type == number::bfloat16) t.weights = cuda::kind_of<Weights>;
    if constexpr (Rule::elementwise) {
      table_.add(t);
    } else {
      cuda::matrix m = cuda::matrix_of(job.work);
      m.rms = job.rms;
      m.group = t.group;
      table_.add(t, m);
    }
  }
  std::size_t table_bytes() const override { return table_.bytes(); }
  std::vector<char> table_image(char* memory) const override { return table_.image(memory); }
  int set_units(char* memory, cuda::stream s) const override {
    if constexpr (Rule::elementwise)
      return cuda::set_units<>(table_.list_at(memory), table_.tensors(), s);
    else
      return cuda::set_units<>(table_.list_at(memory).list, table_.tensors(), s);
  }
  int prepare(const char* counted_groups, char* groups, std::size_t count,
              const cuda::device_scalars& scalars, cuda::stream s) const override {
    return cuda::prepare<Rule, T>(reinterpret_cast<const counted*>(counted_groups),
                                  reinterpret_cast<group*>(groups), std::uint32_t(count), scalars,
                                  s);
  }
  int step(char* memory, const void* const* gradients, const char* groups, const char* tables,
           const cuda::device_scalars& scalars, cuda::stream s) const override {
    auto all = table_.list_at(memory);
    const auto complete = [&](cuda::work_list& list) {
      list.gradients = gradients;
      if constexpr (!std::is_void_v<books>) list.tables = tables;
    };
    if constexpr (Rule::elementwise) {
      complete(all);
      return cuda::step<Formula, Format, T>(all, reinterpret_cast<const group*>(groups), scalars,
                                            s);
    } else {
      complete(all.list);
      all.groups = reinterpret_cast<const group*>(groups);
      return cuda::adafactor_step<Formula, Format, T>(all, scalars, s);
    }
  }

 private:
  static const Options& options_of(const device_step::group& g) {
    return *static_cast<const Options*>(g.options);
  }
  table table_;
};

}  // namespace leanopt::engine
