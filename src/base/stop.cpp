#include "base/stop.h"

namespace fw {
namespace {

std::atomic<bool> g_stop{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may only touch lock-free atomics");

}  // namespace

const std::atomic<bool>& stop_flag() { return g_stop; }
void request_stop() { g_stop.store(true); }
void withdraw_stop() { g_stop.store(false); }

void stop_point(const char* what, int64_t done, int64_t total, const char* unit) {
  if (!g_stop.load(std::memory_order_relaxed)) return;
  if (total < 0) throw Stopped(fmt::format("{}: stopped after {} {}", what, done, unit));
  throw Stopped(fmt::format("{}: stopped after {} of {} {}", what, done, total, unit));
}

}  // namespace fw
