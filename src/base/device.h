// Devices. `Device` is what everything above the operations knows of one: its memory and the order of its work. The
// host is one. The CUDA device is the other, and one of three files is linked for it:
// - device/cuda.cpp: a build with CUDA,
// - device/none.cpp: a build without, where each call throws DeviceError,
// - device/emulated.cpp: kernels run on the CPU.
//
// Below, for programs that call the C header with device pointers (tests, selftest, bench): its name, plain memory and
// times.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"

namespace fw {

// Work of a device that is queued again and again with the same arguments: what changes from one time to the next is
// read from its memory.
class RecordedWork {
 public:
  RecordedWork() = default;
  RecordedWork(const RecordedWork&) = delete;
  RecordedWork& operator=(const RecordedWork&) = delete;
  virtual ~RecordedWork() = default;
  virtual void queue() = 0;
};

// A copy of device memory on its way to the host, in memory of its own, so that the host can go on meanwhile.
class ReadBack {
 public:
  ReadBack() = default;
  ReadBack(const ReadBack&) = delete;
  ReadBack& operator=(const ReadBack&) = delete;
  virtual ~ReadBack() = default;
  // One at a time: wait() comes between two, and before what is at `from` is overwritten.
  virtual void queue(const void* from) = 0;
  // The bytes, valid until the next queue(), once what was queued before that copy is done; what was queued after
  // it is not waited for.
  virtual const void* wait() = 0;
};

// Calls of one device come from one thread at a time and are done in order: what is queued later sees what was queued
// before.
class Device {
 public:
  virtual ~Device() = default;
  virtual fw_device kind() const = 0;
  // Of allocations, and of what an arena gives.
  virtual size_t alignment() const = 0;
  // Whether the host may read and write the memory itself, between calls.
  virtual bool host_memory() const = 0;
  // What kernels are queued on (a cudaStream_t); null on the host.
  virtual void* stream() const { return nullptr; }

  // bytes > 0, not initialised. Throws std::bad_alloc.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) noexcept = 0;
  // `from` may change once the call has returned.
  virtual void from_host(void* to, const void* from, size_t bytes) = 0;
  // `to` is filled when the call returns: waits for what is queued.
  virtual void to_host(void* to, const void* from, size_t bytes) = 0;
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  virtual void fill(void* to, int byte, size_t bytes) = 0;
  // Waits for all work; throws Error(kInternal) if any of it failed.
  virtual void synchronise() = 0;
  // What `work` queues, as one thing: a CUDA graph there, elsewhere `work` itself, which is called anew each time (and
  // not here). It must not allocate, wait or read the host's memory but for arguments; memory it names and what it
  // captures outlive the result.
  virtual std::unique_ptr<RecordedWork> record(const std::function<void()>& work);
  virtual std::unique_ptr<ReadBack> read_back(size_t bytes);
  // The most that was allocated at a time, where the device counts it; else 0.
  virtual size_t peak_bytes() const { return 0; }
};

Device& host_device();
// The calling thread's current CUDA device. Throws DeviceError saying why there is none.
Device& cuda_device();
// Makes that of the number the current one, before the first call of cuda_device(). Throws Error(kUsage) for a number
// that there is not.
void select_cuda_device(int number);

// By the name that users give: cpu, cuda, or cuda:N for the N-th of several. Throws Error(kUsage) for another,
// DeviceError saying why there is none.
Device& device_named(const std::string& name);
// Whether it is such a name.
bool is_device_name(const std::string& name);

struct DeviceInfo {
  std::string name;  // "NVIDIA H200"
  int major = 0, minor = 0;
  int sm_count = 0;
  std::string driver, runtime;  // versions, "13.0"
  bool emulated = false;
};

// The calling thread's device. Throws DeviceError saying why there is none.
DeviceInfo device_info();
// What device code this build has: "sm_80, sm_90a and PTX for newer GPUs"; "": none.
std::string device_code();

// Bytes of device memory.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes);
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  DeviceMemory(DeviceMemory&& other) noexcept;
  ~DeviceMemory();
  void* data() const { return data_; }
  size_t size() const { return bytes_; }
  // All three wait for all work on the device, and what they do is over when they return.
  void from_host(const void* source, size_t bytes) const;
  void to_host(void* target, size_t bytes) const;
  void fill(int byte) const;

 private:
  size_t bytes_ = 0;
  void* data_ = nullptr;
};

// Queues a copy within device memory.
void device_copy(void* target, const void* source, size_t bytes, void* stream);

// Waits for all work on the device; throws Error(kInternal) if any of it failed.
void device_synchronize();

// Milliseconds on the device of each call of body(i) on the default stream, i < repeats, by events; after `warmup`
// calls that are not timed. With graph: each timed call is a replay of a captured graph of `inner` calls, and the time
// is divided by it.
std::vector<double> device_times(int warmup, int repeats, const std::function<void(int, void* stream)>& body);
std::vector<double> device_graph_times(int warmup, int repeats, int inner,
                                       const std::function<void(int, void* stream)>& body);

}  // namespace fw
