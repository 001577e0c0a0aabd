// Signals of the program. It computes on a thread to which none is delivered (base/signal_mask.h); the main thread only
// waits for it and takes them.
//
// SIGINT (Ctrl-C), SIGTERM and SIGHUP (the terminal went away): a command that watches for them is asked to stop
// (base/stop.h), saves what it has and ends with 128 + the signal. The next one ends the program at once with
// kExitAtOnce. Commands that do not watch end as ever. SIGPIPE and SIGXFSZ are errors of the write that meets them.
#pragma once

#include <atomic>
#include <functional>

namespace fw::cli {

// Runs `work` on a thread of its own and returns what it returns, which must not throw.
int run_apart_from_signals(const std::function<int()>& work);

// From here on the first signal asks to stop; returns what becomes true then (base/stop.h). SIGHUP that was ignored
// when the program began (nohup) remains so.
const std::atomic<bool>& stop_on_signal();

// 128 + the signal that asked to stop, here or (note_signal) on another rank.
int stopped_exit_code();
// The signal that asked to stop; 0: none came to this process.
int stop_signal();
// A signal that another rank got.
void note_signal(int number);

}  // namespace fw::cli
