// Steps in a device's memory: which tensors one launch takes, what of them stays there and what is
// sent with each step, and who counts the steps. Only for programs that link leanopt::cuda.
#pragma once

#include <leanopt/engine/device.hpp>

#include <ATen/ops/zeros.h>

#include <cstring>
#include <utility>

namespace leanopt::engine {

/// A list of tensors of one device. What changes with the list alone is sent when it does, the
/// gradients' pointers and what groups have in common with each step. As long as the host knows
/// which steps count, it makes the coefficients; from the first step on of which only the device
/// knows (found_inf is there, a graph captures it) or whose rate the device has, the device makes
/// them and counts, with the same bits. Without a wait, and without an allocation as long as the
/// list stays.
class device_list : public device_work {
 public:
  using device_work::device_work;

  void clear() override {
    items_.clear();
    groups_.clear();
  }
  void add(const item& x) override {
    const group_key key{x.options, x.lr, x.seed, x.job->epsilon, x.step};
    if (groups_.empty() || !(groups_.back() == key)) groups_.push_back(key);
    items_.push_back(x);
    items_.back().group = std::uint32_t(groups_.size() - 1);
  }
  bool is_empty() const override { return items_.empty(); }
  bool is_current(bool by_device) const override {
    if (items_.size() != listed_.size() || groups_.size() != counted_.size()) return false;
    for (std::size_t i = 0; i < items_.size(); ++i)
      if (items_[i].made != listed_[i].made || items_[i].group != listed_[i].group ||
          items_[i].lr != listed_[i].lr)
        return false;
    if (by_device || counts_)
      for (std::size_t g = 0; g < groups_.size(); ++g)
        if (groups_[g].step - 1 != counted_[g]) return false;
    return true;
  }

  void rebuild() override {
    const c10::DeviceGuard guard(device());
    skipped_before_ = skipped_elements();
    counts_ = false;
    listed_ = items_;
    counted_.clear();
    for (const group_key& g : groups_) counted_.push_back(g.step - 1);
    lay_out();
    if (was_captured_) {  // a graph may be replayed that uses it
      kept_.push_back(memory_);
      was_captured_ = false;
      memory_ = at::Tensor();
    }
    const bool first = !memory_.defined();
    if (first || memory_.numel() < std::int64_t(at_.end))
      memory_ = at::zeros({std::int64_t(at_.end)}, at::TensorOptions(at::kByte).device(device()));
    const cuda::stream s = cuda::current_stream(device().index());
    if (first) check_arithmetic(s);

    list_tensors();
    std::vector<char> image = table_image(memory());
    send(0, image, s);
    check_cuda(set_units(memory(), s));
    image.assign(groups_.size() * counted_bytes(), 0);
    for (std::size_t g = 0; g < groups_.size(); ++g)
      write_counted(groups_[g], groups_[g].lr ? groups_[g].lr : at<double>(at_.rates) + g,
                    at<std::int64_t>(at_.steps) + g, image.data() + g * counted_bytes());
    send(at_.counted, image, s);
    const auto books = books_of_format();
    image.assign(books.first, books.first + books.second);
    send(at_.books, image, s);
    image.assign(sizeof(std::int64_t), 0);
    send(at_.skipped, image, s);
    image.resize(counted_.size() * sizeof(std::int64_t));
    std::memcpy(image.data(), counted_.data(), image.size());
    send(at_.steps, image, s);
    moving_.resize(at_.end - at_.gradients);
  }

  void run(const scalar_tensors& scalars, bool by_device, bool is_captured) override {
    const c10::DeviceGuard guard(device());
    const cuda::stream s = cuda::current_stream(device().index());
    counts_ = counts_ || by_device;
    was_captured_ = was_captured_ || is_captured;
    char* to = moving_.data();
    const auto put = [&](const auto& x) {
      std::memcpy(to, &x, sizeof x);
      to += sizeof x;
    };
    for (const listed_item& x : items_) put(x.job->work.g.data);
    for (const group_key& g : groups_) put(rate_of(g));
    if (!counts_) {
      for (const group_key& g : groups_) put(g.step);
      for (const group_key& g : groups_) {
        write_group(g, to);
        to += group_bytes();
      }
    }
    check_cuda(cuda::send<>(memory() + at_.gradients, moving_.data(),
                            std::size_t(to - moving_.data()), s));

    const at::Tensor inv_scale = there(scalars.inv_scale, at::kDouble),
                     clip = there(scalars.clip, at::kDouble),
                     found_inf = there(by_device ? scalars.found_inf : at::Tensor(), at::kFloat);
    cuda::device_scalars of_step;
    if (inv_scale.defined()) of_step.inv_scale = static_cast<const double*>(inv_scale.data_ptr());
    if (clip.defined()) of_step.clip = static_cast<const double*>(clip.data_ptr());
    if (found_inf.defined()) of_step.found_inf = static_cast<const float*>(found_inf.data_ptr());
    if (counts_)
      check_cuda(prepare(memory() + at_.counted, memory() + at_.groups,
                         std::uint32_t(groups_.size()), of_step, s));
    else
      for (std::size_t g = 0; g < groups_.size(); ++g) counted_[g] = groups_[g].step;
    check_cuda(step(memory(), at<const void*>(at_.gradients), memory() + at_.groups,
                    memory() + at_.books, of_step, s));
  }

  bool counts_steps() const override { return counts_; }
  void settle(const settler& f) override {
    if (!counts_) return;
    const at::Tensor steps = read(at_.steps, counted_.size());
    const auto* now = static_cast<const std::int64_t*>(steps.data_ptr());
    for (const listed_item& x : listed_) f(x, counted_[x.group], now[x.group]);
    counted_.assign(now, now + counted_.size());
    counts_ = was_captured_;  // a graph that is replayed goes on counting
  }
  std::int64_t skipped_elements() const override {
    if (!memory_.defined()) return 0;
    return skipped_before_ + *static_cast<const std::int64_t*>(read(at_.skipped, 1).data_ptr());
  }
  std::int64_t bytes() const override {
    std::int64_t sum = memory_.defined() ? std::int64_t(memory_.nbytes()) : 0;
    for (const at::Tensor& t : kept_) sum += std::int64_t(t.nbytes());
    return sum;
  }

 protected:
  /// What tensors of a step share that stand side by side.
  struct group_key {
    const void* options;
    const double* lr;
    std::uint64_t seed;
    double epsilon;
    std::int64_t step;
    bool operator==(const group_key& b) const {
      return options == b.options && lr == b.lr && seed == b.seed && epsilon == b.epsilon &&
             step == b.step;
    }
  };

  // What depends on rule, format and type.

  virtual std::size_t group_bytes() const = 0;
  virtual std::size_t counted_bytes() const = 0;
  virtual double rate_of(const group_key& g) const = 0;
  virtual void write_group(const group_key& g, char* to) const = 0;
  virtual void write_counted(const group_key& g, const double* lr, std::int64_t* step,
                             char* to) const = 0;
  virtual std::pair<const char*, std::size_t> books_of_format() const = 0;
  virtual void clear_table() = 0;
  virtual void add_to_table(const cuda::tensor& t, const item& x) = 0;
  virtual std::size_t table_bytes() const = 0;
  virtual std::vector<char> table_image(char* memory) const = 0;
  virtual int set_units(char* memory, cuda::stream s) const = 0;
  virtual int prepare(const char* counted, char* groups, std::uint32_t count,
                      const cuda::device_scalars& scalars, cuda::stream s) const = 0;
  virtual int step(char* memory, const void* const* gradients, const char* groups,
                   const char* books, const cuda::device_scalars& scalars,
                   cuda::stream s) const = 0;

 private:
  struct listed_item : item {
    listed_item(const item& x) : item(x) {}
    std::uint32_t group = 0;
  };
  /// Where what is, in bytes from the beginning of the memory. What is sent with each step comes
  /// last and in the order of how often it is needed.
  struct layout {
    std::size_t counted, books, skipped, gradients, rates, steps, groups, end;
  };

  void lay_out() {
    list_tensors();
    const std::size_t n = groups_.size();
    std::size_t next = 0;
    const auto place = [&](std::size_t bytes) {
      const std::size_t here = next;
      next += (bytes + 15) / 16 * 16;
      return here;
    };
    place(table_bytes());
    at_.counted = place(n * counted_bytes());
    at_.books = place(books_of_format().second);
    at_.skipped = place(sizeof(std::int64_t));
    at_.gradients = next;
    at_.rates = at_.gradients + items_.size() * sizeof(void*);
    at_.steps = at_.rates + n * sizeof(double);
    at_.groups = at_.steps + n * sizeof(std::int64_t);
    at_.end = at_.groups + n * group_bytes();
  }
  /// Pointers to the memory itself are there only once it is.
  void list_tensors() {
    clear_table();
    for (const listed_item& x : items_) {
      const cpu::matrix_step& work = x.job->work;
      cuda::tensor t;
      t.p = work.p;
      t.g = work.g;
      for (int k = 0; k < 3; ++k) {
        t.slots[k] = work.slots[k];
        t.headers[k] = work.headers[k];
      }
      t.elements = work.elements;
      t.ordinal = x.ordinal;
      if (x.skips_elements && memory()) t.skipped = at<std::int64_t>(at_.skipped);
      t.group = x.group;
      add_to_table(t, x);
    }
  }
  char* memory() const {
    return memory_.defined() ? static_cast<char*>(memory_.data_ptr()) : nullptr;
  }
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(memory() + offset);
  }
  void send(std::size_t to, const std::vector<char>& bytes, cuda::stream s) const {
    check_cuda(cuda::send<>(memory() + to, bytes.data(), bytes.size(), s));
  }
  /// So many numbers of 64 bits. Waits for the device.
  at::Tensor read(std::size_t from, std::size_t count) const {
    return memory_.narrow(0, std::int64_t(from), std::int64_t(count * sizeof(std::int64_t))).cpu();
  }
  at::Tensor there(const at::Tensor& scalar, at::ScalarType type) const {
    return scalar.defined() ? scalar.to(device(), type) : scalar;
  }
  void check_arithmetic(cuda::stream s) const {
    check_cuda(cuda::check_arithmetic<>(at<std::uint32_t>(at_.skipped), s));
    TORCH_CHECK(*static_cast<const std::int64_t*>(read(at_.skipped, 1).data_ptr()) == 1,
                "leanopt: the kernels of leanopt::cuda were compiled with -use_fast_math, which "
                "changes the numbers; compile leanopt_cuda.cu without it");
  }

  std::vector<listed_item> items_, listed_;  // of this step; in the device's memory
  std::vector<group_key> groups_;            // of this step
  std::vector<std::int64_t> counted_;        // steps in the device's memory, as the host knows them
  std::vector<char> moving_;                 // what is sent with each step
  layout at_{};
  at::Tensor memory_;
  std::vector<at::Tensor> kept_;
  std::int64_t skipped_before_ = 0;
  bool counts_ = false, was_captured_ = false;
};

/// A list for the kernel of a rule, a format and the type T in which it computes.
template <class Rule, class Options, class Formula, class Format, class Weights, class T>
class compiled_list final : public device_list {
  using group = cuda::group<Rule, T>;
  using counted = cuda::counted_group<Rule>;
  using table = std::conditional_t<Rule::elementwise, cuda::table, cuda::matrix_table<T>>;
  using books = typename cuda::tables_of<Format>::type;
  static_assert(alignof(group) <= 8 && sizeof(group) % 8 == 0 && alignof(counted) <= 8);

 public:
  using device_list::device_list;
  static std::unique_ptr<device_work> make(at::Device d) {
    return std::make_unique<compiled_list>(d);
  }

 protected:
  std::size_t group_bytes() const override { return sizeof(group); }
  std::size_t counted_bytes() const override { return sizeof(counted); }
  double rate_of(const group_key& g) const override { return options_of(g).lr(); }
  void write_group(const group_key& g, char* to) const override {
    const group x = cuda::group_of<Rule, T>(options_of(g), g.seed, g.step, g.epsilon);
    std::memcpy(to, &x, sizeof x);
  }
  void write_counted(const group_key& g, const double* lr, std::int64_t* step,
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
  void add_to_table(const cuda::tensor& given, const item& x) override {
    cuda::tensor t = given;
    if (t.p.type == number::bfloat16) t.weights = cuda::kind_of<Weights>;
    if constexpr (Rule::elementwise) {
      table_.add(t);
    } else {
      const cpu::matrix_step& work = x.job->work;
      cuda::matrix m;
      m.batch = work.batch;
      m.rows = work.rows;
      m.columns = work.row ? work.columns : work.elements;  // of a vector and of what is empty
      m.row = work.row;
      m.column = work.column;
      m.variance = work.variance;
      m.rms = x.job->rms;
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
  int prepare(const char* counted_groups, char* groups, std::uint32_t count,
              const cuda::device_scalars& scalars, cuda::stream s) const override {
    return cuda::prepare<Rule, T>(reinterpret_cast<const counted*>(counted_groups),
                                  reinterpret_cast<group*>(groups), count, scalars, s);
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
  static const Options& options_of(const group_key& g) {
    return *static_cast<const Options*>(g.options);
  }
  table table_;
};

}  // namespace leanopt::engine
