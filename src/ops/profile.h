// Profile: how long each operation of a model's passes takes, what it moves and computes. While one lives, the models
// that are made then run their operations one at a time, each waited for, and under its name in the list (ops.def). The
// recurrence's calls are its own (nn/recurrence.cpp). Results keep their bits. Times are those of operations alone,
// with the wait for each: on a GPU a step takes less than their sum.
//
// Bytes: each tensor of a call once, as read or written. Operations: of products, attention (of the pairs that see each
// other) and the recurrence (in its token form), a multiplication and an addition being two; of all others none.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/device.h"

namespace fw {

struct OperationTime {
  std::string name;
  int64_t calls = 0;
  double seconds = 0, bytes = 0, flops = 0;  // of all calls
};

class Profile {
 public:
  Profile();  // Error(kInternal) where there is one already
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;
  static Profile* current();  // null: there is none

  void add(const std::string& name, double seconds, double bytes, double flops);
  void clear() { of_.clear(); }
  std::vector<OperationTime> by_time() const;  // the longest first

 private:
  std::map<std::string, OperationTime> of_;
};

// A call as the profile sees it, if there is one: from here to the end of the scope. What it calls in turn counts as
// its own.
class ProfiledCall {
 public:
  ProfiledCall(const char* name, const Device& device, double bytes, double flops);
  ~ProfiledCall();
  ProfiledCall(const ProfiledCall&) = delete;
  ProfiledCall& operator=(const ProfiledCall&) = delete;

 private:
  const char* name_;
  Device* device_;  // null: nobody looks
  double bytes_, flops_;
  std::chrono::steady_clock::time_point start_;
};

// What a device does at most, measured: a long copy of activations (bytes read and written) and a large product.
struct DeviceLimits {
  double bytes_per_second = 0, flops_per_second = 0;
};
// Of rows x 2,048 numbers, in the type of the device's activations.
DeviceLimits measure_limits(Device& device, int64_t rows);

// What an operation is, for shares: "products", "recurrence", "attention" or "rest".
const char* kind_of_operation(const std::string& name);

}  // namespace fw
