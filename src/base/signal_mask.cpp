#include "base/signal_mask.h"

#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <new>

namespace fw {
namespace {

thread_local bool t_blocked = false;

sigset_t deferrable() {
  sigset_t set;
  sigfillset(&set);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&set, fault);
  return set;
}

}  // namespace

void block_signals() {
  const sigset_t set = deferrable();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  t_blocked = true;
}

SignalsBlocked::SignalsBlocked() {
  if (t_blocked) return;
  const sigset_t set = deferrable();
  ::pthread_sigmask(SIG_BLOCK, &set, &before_);
  restore_ = t_blocked = true;
}

SignalsBlocked::~SignalsBlocked() {
  if (!restore_) return;
  t_blocked = false;
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

AlternateStack::AlternateStack() {
  stack_t now{};
  if (::sigaltstack(nullptr, &now) != 0 || (now.ss_flags & SS_DISABLE) == 0) return;
  constexpr long kEnough = 64 * 1024;  // of which a frame with the registers of AMX takes 11 KiB
  stack_t stack{};
  stack.ss_size = static_cast<size_t>(std::max(kEnough, ::sysconf(_SC_SIGSTKSZ)));
  memory_.reset(new (std::nothrow) char[stack.ss_size]);  // a thread that begins has nobody to tell
  if (!memory_) return;
  stack.ss_sp = memory_.get();
  if (::sigaltstack(&stack, nullptr) != 0) memory_.reset();
}

AlternateStack::~AlternateStack() {
  if (!memory_) return;
  stack_t none{};
  none.ss_flags = SS_DISABLE;
  ::sigaltstack(&none, nullptr);
}

}  // namespace fw
