// Ctrl-C and SIGTERM: the first asks to stop at the next step, the second ends the program at once.
#pragma once

#include <atomic>

namespace fw::cli {

// Installs the handlers; the flag becomes true with the first signal.
const std::atomic<bool>& stop_on_signal();

// Signals end the program again.
void default_signals();

}  // namespace fw::cli
