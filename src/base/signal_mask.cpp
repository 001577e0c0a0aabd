#include "base/signal_mask.h"

#include <initializer_list>

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

}  // namespace fw
