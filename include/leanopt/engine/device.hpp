// What the front knows of steps on devices, in every program: without LEANOPT_WITH_CUDA nothing
// here is to be linked.
#pragma once

#include <leanopt/engine/cuda_api.hpp>
#include <leanopt/engine/dispatch.hpp>

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

// The type of the devices that are stepped; tests on machines that have none name another.
#ifndef LEANOPT_DEVICE_TYPE
#define LEANOPT_DEVICE_TYPE at::kCUDA
#endif

namespace leanopt::engine {

/// Whether this program can step tensors on a device: the target leanopt::cuda defines
/// LEANOPT_WITH_CUDA.
inline bool can_step_on(at::Device d) {
#ifdef LEANOPT_WITH_CUDA
  if (d.type() == LEANOPT_DEVICE_TYPE) return true;
#endif
  return d.is_cpu();
}
/// @throws where `error`, a cudaError_t, is one.
inline void check_cuda([[maybe_unused]] int error) {
#ifdef LEANOPT_WITH_CUDA
  TORCH_CHECK(error == 0, "leanopt: CUDA error ", error, ": ", cuda::text_of<>(error));
#endif
}
/// Whether what is put on a device now is recorded in a graph.
inline bool is_capturing([[maybe_unused]] at::Device d) {
  bool result = false;
#ifdef LEANOPT_WITH_CUDA
  const c10::DeviceGuard guard(d);
  if (!d.is_cpu()) check_cuda(cuda::is_capturing<>(cuda::current_stream(d.index()), &result));
#endif
  return result;
}

/// nvcc's -use_fast_math changes the numbers, and kernels cannot see it when they are compiled.
/// @throws where the device's arithmetic is not IEEE's. Waits for the device.
inline void check_arithmetic([[maybe_unused]] at::Device d) {
#ifdef LEANOPT_WITH_CUDA
  const c10::DeviceGuard guard(d);
  const at::Tensor result = at::zeros({1}, at::TensorOptions(at::kInt).device(d));
  check_cuda(cuda::check_arithmetic<>(static_cast<std::uint32_t*>(result.data_ptr()),
                                      cuda::current_stream(d.index())));
  TORCH_CHECK(result.item<int>() == 1,
              "leanopt: the kernels of leanopt::cuda were compiled with -use_fast_math, which "
              "changes the numbers; compile leanopt_cuda.cu without it");
#endif
}

/// Scalars of a step as tensors of one element; undefined where there is none.
struct scalar_tensors {
  at::Tensor inv_scale, clip, found_inf;
};

/// The tensors that one kernel steps together on one device in one step.
class device_step {
 public:
  /// What tensors have in common that stand side by side.
  struct group {
    const void* options;  ///< of the rule's own class
    const double* lr;     ///< in the device's memory, instead of that of the options; or null
    std::uint64_t seed;
    double epsilon;
    std::int64_t step;  ///< the number of this step, as far as the host knows
    bool operator==(const group& b) const {
      return options == b.options && lr == b.lr && seed == b.seed && epsilon == b.epsilon &&
             step == b.step;
    }
  };
  struct item {
    const tensor_job* job;
    std::uint64_t ordinal;
    std::uint64_t plan;  ///< its number
    bool skips_elements;
    const void *parameter, *state;  ///< for device_work::settle()
    std::size_t group = 0;
  };

  void clear() {
    items_.clear();
    groups_.clear();
  }
  void add(item x, const group& g) {
    if (groups_.empty() || !(groups_.back() == g)) groups_.push_back(g);
    x.group = groups_.size() - 1;
    items_.push_back(x);
  }
  const std::vector<item>& items() const { return items_; }
  const std::vector<group>& groups() const { return groups_; }

  /// Whether both are of the same tensors in the same groups, whatever their number of steps.
  bool is_like(const device_step& b) const {
    const auto same_item = [](const item& x, const item& y) {
      return x.plan == y.plan && x.ordinal == y.ordinal && x.group == y.group;
    };
    const auto same_group = [](const group& x, const group& y) { return x.lr == y.lr; };
    return std::equal(items_.begin(), items_.end(), b.items_.begin(), b.items_.end(), same_item) &&
           std::equal(groups_.begin(), groups_.end(), b.groups_.begin(), b.groups_.end(),
                      same_group);
  }

 private:
  std::vector<item> items_;
  std::vector<group> groups_;
};

/// A list of tensors in a device's memory, for one kernel: see device_list.
class device_work {
 public:
  using settler =
      std::function<void(const device_step::item&, std::int64_t known, std::int64_t now)>;

  explicit device_work(at::Device d) : device_(d) {}
  device_work(const device_work&) = delete;
  device_work& operator=(const device_work&) = delete;
  virtual ~device_work() = default;

  at::Device device() const { return device_; }

  /// Whether the list is that of this step, and has its number where the host cannot send it: where
  /// the device counts already, and in a graph, which would send it again.
  virtual bool fits(const device_step& x, bool is_captured) const = 0;
  /// Puts the step on the device's stream. With `by_device` it is the device that counts it.
  /// @pre it fits.
  virtual void run(const device_step& x, const scalar_tensors& scalars, bool by_device,
                   bool is_captured) = 0;

  /// Whether the device may have counted steps that the host does not know.
  virtual bool counts_steps() const = 0;
  /// If so, f for the tensors of the list, with the steps that the host knew of and all there were.
  /// Waits for the device.
  virtual void settle(const settler& f) = 0;
  /// Whether a graph may be replayed that uses it.
  virtual bool was_captured() const = 0;
  /// Memory of the device.
  virtual std::int64_t bytes() const = 0;

 private:
  at::Device device_;
};

/// What makes the lists of a kernel, and tells what memory of the device one would take. In the
/// device's memory `skipped` counts the elements that nonfinite::skip_element leaves out.
struct device_kernel {
  std::unique_ptr<device_work> (*make)(at::Device, const device_step&, std::int64_t* skipped);
  std::int64_t (*bytes)(const device_step&);
};

/// The lists of an optimizer, on all devices. Programs step other parameters at other times, so
/// that some are kept: those used last, of 4 MiB together, and those that a graph may use.
class device_lists {
 public:
  // Of each step, in this order.
  void clear() {
    for (part& one : parts_) one.step.clear();
  }
  /// Adds a tensor to what one kernel steps on one device; returns which part this is.
  std::size_t add(const device_kernel& kernel, at::Device device, const device_step::item& x,
                  const device_step::group& g) {
    const auto same = [&](const part& one) {
      return one.kernel == &kernel && one.device == device;
    };
    const auto it = std::find_if(parts_.begin(), parts_.end(), same);
    const auto n = std::size_t(it - parts_.begin());
    if (it == parts_.end()) parts_.push_back({&kernel, device, {}, nullptr});
    parts_[n].step.add(x, g);
    return n;
  }
  /// Whether the devices have it all.
  bool find(bool is_captured) {
    bool found = true;
    for (part& one : parts_) {
      one.use = nullptr;
      if (one.step.items().empty()) continue;
      for (const auto& k : lists_)
        if (k->kernel == one.kernel && k->work->device() == one.device &&
            k->work->fits(one.step, is_captured))
          one.use = k.get();
      found = found && one.use;
    }
    return found;
  }
  /// Makes the lists that are not there yet. @pre find() says so, and nothing is captured.
  void make() {
    for (const part& one : parts_) {
      if (one.use || one.step.items().empty()) continue;
      const auto same = [&](const auto& k) { return k->work->device() == one.device; };
      if (std::none_of(lists_.begin(), lists_.end(), same)) check_arithmetic(one.device);
      lists_.push_back(std::make_unique<list>(
          list{one.kernel, one.kernel->make(one.device, one.step, counter_of(one)), ++lists_made_,
               turn_}));
    }
    find(/*is_captured=*/false);
    forget();
  }
  void run(const scalar_tensors& scalars, bool by_device, bool is_captured) {
    ++turn_;
    for (part& one : parts_) {
      if (one.step.items().empty()) continue;
      one.use->used = turn_;
      one.use->work->run(one.step, scalars, by_device, is_captured);
    }
  }

  /// The number of the list of a part; 0 where it has none.
  std::uint64_t list_of(std::size_t part) const {
    return parts_[part].use ? parts_[part].use->number : 0;
  }
  /// Whether the device may have counted steps of the list of that number.
  bool counts_steps(std::uint64_t number) const {
    return std::any_of(lists_.begin(), lists_.end(), [&](const auto& k) {
      return k->number == number && k->work->counts_steps();
    });
  }
  /// See device_work, of all lists.
  void settle(const device_work::settler& f) const {
    for (const auto& k : lists_) k->work->settle(f);
  }
  /// How many elements nonfinite::skip_element left out. Waits for devices where that can be.
  std::int64_t skipped_elements() const {
    std::int64_t sum = 0;
    for (const at::Tensor& n : skipped_) sum += n.item<std::int64_t>();
    return sum;
  }
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const auto& k : lists_) sum += k->work->bytes();
    for (const at::Tensor& n : skipped_) sum += std::int64_t(n.nbytes());
    return sum;
  }
  /// What the lists of what was added would take.
  std::int64_t predicted_bytes() const {
    std::int64_t sum = 0;
    std::vector<at::Device> counting;
    for (const part& one : parts_) {
      sum += one.kernel->bytes(one.step);
      if (!skips_elements(one.step) ||
          std::find(counting.begin(), counting.end(), one.device) != counting.end())
        continue;
      counting.push_back(one.device);
      sum += std::int64_t(sizeof(std::int64_t));
    }
    return sum;
  }

 private:
  struct list {
    const device_kernel* kernel;
    std::unique_ptr<device_work> work;
    std::uint64_t number;  ///< of all that were ever made; from 1
    std::uint64_t used;    ///< the turn
  };
  /// What one kernel steps on one device, and the list that has it.
  struct part {
    const device_kernel* kernel;
    at::Device device;
    device_step step;
    list* use;
  };

  static bool skips_elements(const device_step& x) {
    const auto& all = x.items();
    return std::any_of(all.begin(), all.end(), [](auto& one) { return one.skips_elements; });
  }
  /// Of the device, which all its lists share, so that none must be read before it goes; or null.
  std::int64_t* counter_of(const part& one) {
    if (!skips_elements(one.step)) return nullptr;
    auto it = std::find_if(skipped_.begin(), skipped_.end(),
                           [&](const at::Tensor& n) { return n.device() == one.device; });
    if (it == skipped_.end())
      it = skipped_.insert(it, at::zeros({}, at::TensorOptions(at::kLong).device(one.device)));
    return static_cast<std::int64_t*>(it->data_ptr());
  }
  void forget() {
    constexpr std::int64_t most = 4 << 20;
    std::sort(lists_.begin(), lists_.end(),
              [](const auto& a, const auto& b) { return a->used > b->used; });
    std::int64_t bytes = 0;
    const auto is_over = [&](const auto& k) {
      bytes += k->work->bytes();
      const bool used = std::any_of(parts_.begin(), parts_.end(),
                                    [&](const part& one) { return one.use == k.get(); });
      return bytes > most && !used && !k->work->was_captured();
    };
    lists_.erase(std::remove_if(lists_.begin(), lists_.end(), is_over), lists_.end());
  }

  std::vector<part> parts_;
  std::vector<std::unique_ptr<list>> lists_;
  std::uint64_t lists_made_ = 0, turn_ = 0;
  std::vector<at::Tensor> skipped_;  // by device
};

}  // namespace leanopt::engine
