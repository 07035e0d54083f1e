// Counts what PyTorch's CPU allocator has given out, whichever thread takes it back: its profiler
// does not see what the threads of a process group free.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex mutex;
std::unordered_map<void*, std::int64_t> sizes;  // of what was given out since `count`
std::int64_t alive = 0;
std::int64_t peak = 0;
c10::Allocator* under = nullptr;

void take_back(void* data) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = sizes.find(data);
    if (found != sizes.end()) {
      alive -= found->second;
      sizes.erase(found);
    }
  }
  under->raw_deleter()(data);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr inner = under->allocate(size);
    void* data = inner.get();
    if (data == nullptr) {
      return inner;
    }
    inner.release_context();
    const std::lock_guard<std::mutex> lock(mutex);
    sizes[data] = static_cast<std::int64_t>(size);
    alive += static_cast<std::int64_t>(size);
    peak = std::max(peak, alive);
    return {data, data, &take_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &take_back; }
  void copy_data(void* to, const void* from, size_t size) const override {
    under->copy_data(to, from, size);
  }
};

Counting counting;

}  // namespace

// Count from now on, once in a process.
extern "C" void count() {
  under = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counting, /*priority=*/100);
}

extern "C" std::int64_t alive_bytes() {
  const std::lock_guard<std::mutex> lock(mutex);
  return alive;
}

// The most that were alive at once since the last call.
extern "C" std::int64_t take_peak_bytes() {
  const std::lock_guard<std::mutex> lock(mutex);
  const std::int64_t found = peak;
  peak = alive;
  return found;
}
