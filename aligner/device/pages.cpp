// Large tensors on the CPU out of pages that freed ones left.
//
// PyTorch asks the C library for aligned memory. glibc's heap looks for a block that is larger than
// the tensor by the alignment, so the block that a tensor of the same size has left never serves:
// training held twice the memory of its tensors. Without the heap every tensor takes pages from the
// system, which clears each when it is first written to, and that costs more than the arithmetic.
//
// Here a tensor takes the smallest range of free pages that it fits in, and leaves the rest of it;
// ranges that touch become one. Pages are never returned, as with `keep_freed_memory`.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kLeast = std::size_t{1} << 20;    // smaller tensors are the C library's
constexpr std::size_t kRegion = std::size_t{64} << 20;  // taken from the system at a time

struct State {
  std::mutex mutex;
  std::map<char*, std::size_t> free_by_place;
  std::set<std::pair<std::size_t, char*>> free_by_size;  // the same ranges
  std::unordered_map<void*, std::size_t> taken;
  std::size_t held = 0;
  c10::Allocator* under = nullptr;
};

// Never destroyed: tensors of other modules are freed after this library's end.
State& state() {
  static State* const kept = new State;
  return *kept;
}

void forget_free(std::map<char*, std::size_t>::iterator range) {
  state().free_by_size.erase({range->second, range->first});
  state().free_by_place.erase(range);
}

void add_free(char* place, std::size_t size) {
  auto& ranges = state().free_by_place;
  auto next = ranges.lower_bound(place);
  if (next != ranges.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == place) {
      place = before->first;
      size += before->second;
      forget_free(before);
    }
  }
  if (next != ranges.end() && place + size == next->first) {
    size += next->second;
    forget_free(next);
  }
  ranges[place] = size;
  state().free_by_size.insert({size, place});
}

// `size` bytes, a multiple of a page; nullptr where the system gives none.
void* take(std::size_t size) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto found = state().free_by_size.lower_bound({size, nullptr});
  if (found == state().free_by_size.end()) {
    const std::size_t wanted = size > kRegion ? size : kRegion;
    void* const fresh =
        mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) {
      return nullptr;
    }
    state().held += wanted;
    add_free(static_cast<char*>(fresh), wanted);
    found = state().free_by_size.lower_bound({size, nullptr});
  }
  const auto [have, place] = *found;
  forget_free(state().free_by_place.find(place));
  if (have > size) {
    add_free(place + size, have - size);
  }
  state().taken[place] = size;
  return place;
}

void give_back(void* data) {
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const auto found = state().taken.find(data);
    if (found != state().taken.end()) {
      add_free(static_cast<char*>(data), found->second);
      state().taken.erase(found);
      return;
    }
  }
  state().under->raw_deleter()(data);
}

struct Pages final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size < kLeast) {
      c10::DataPtr inner = state().under->allocate(size);
      void* const data = inner.get();
      if (data != nullptr) {
        inner.release_context();
      }
      return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
    }
    void* const data = take((size + kPage - 1) / kPage * kPage);
    TORCH_CHECK(data != nullptr, "can't allocate memory: you tried to allocate ", size, " bytes.");
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

}  // namespace

// Serve PyTorch's tensors on the CPU from now on; once in a process.
extern "C" void serve() {
  state().under = c10::GetCPUAllocator();
  // A process that is forked must not inherit a lock that another thread holds.
  pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); },
                 [] { state().mutex.unlock(); });
  static Pages* const pages = new Pages;
  c10::SetCPUAllocator(pages, /*priority=*/50);
}

// Bytes taken from the system so far.
extern "C" std::int64_t held_bytes() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return static_cast<std::int64_t>(state().held);
}
