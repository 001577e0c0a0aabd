#include "emulation/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

namespace fw::cuda::emulation {
namespace {

std::size_t page() {
  static const std::size_t bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

class Memory {
 public:
  static Memory& instance() {
    static Memory* const memory = new Memory();  // never destroyed: static objects may still own pieces
    return *memory;
  }

  void* allocate(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const std::size_t inside = (bytes + page() - 1) / page() * page() + (bytes == 0 ? page() : 0);
    void* base = mmap(nullptr, inside + 2 * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    char* first = static_cast<char*>(base) + page();
    if (open_ > 0) protect(first, inside, true);
    // At the end of its pages, as far as the alignment lets it.
    char* piece = first + (inside - bytes) / kAlignment * kAlignment;
    pieces_[piece] = {first, inside};
    return piece;
  }

  void release(void* memory) {
    if (memory == nullptr) return;
    const std::lock_guard lock(mutex_);
    const auto found = pieces_.find(memory);
    if (found == pieces_.end()) {
      std::fprintf(stderr, "emulation: released memory that the device has not: %p\n", memory);
      std::abort();
    }
    munmap(found->second.first - page(), found->second.bytes + 2 * page());
    pieces_.erase(found);
  }

  void open() {
    const std::lock_guard lock(mutex_);
    if (open_++ == 0) protect_all(true);
  }
  void close() {
    const std::lock_guard lock(mutex_);
    if (--open_ == 0) protect_all(false);
  }

 private:
  static constexpr std::size_t kAlignment = 256;
  struct Pages {
    char* first;
    std::size_t bytes;
  };

  static void protect(char* first, std::size_t bytes, bool open) {
    if (mprotect(first, bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE) != 0) {
      std::perror("emulation: mprotect");
      std::abort();
    }
  }
  void protect_all(bool open) {
    for (const auto& [piece, pages] : pieces_) protect(pages.first, pages.bytes, open);
  }

  std::mutex mutex_;
  int open_ = 0;
  std::map<void*, Pages> pieces_;
};

}  // namespace

void* allocate(std::size_t bytes) { return Memory::instance().allocate(bytes); }
void release(void* memory) noexcept { Memory::instance().release(memory); }
Open::Open() { Memory::instance().open(); }
Open::~Open() { Memory::instance().close(); }

}  // namespace fw::cuda::emulation
