// How long this process has run, its loading included.
#pragma once

namespace fw {

// Seconds since the system started this process, to its clock's hundredth of a second; since the first call where the
// system does not say (/proc/self/stat).
double seconds_since_process_start();

}  // namespace fw
