// The device through the CUDA runtime.
#include <cuda_runtime.h>

#include <algorithm>
#include <new>
#include <unordered_map>
#include <utility>

#include "base/device.h"
#include "base/error.h"
#include "base/gpus.h"
#include "gpu/memory/no_gpu.h"

namespace fw {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail_internal("{}: {}", what, cudaGetErrorString(status));
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record(cudaStream_t stream) const { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  // Since `start`, once both are done.
  double milliseconds_since(const Event& start) const {
    check(cudaEventSynchronize(event_), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start.event_, event_), "cudaEventElapsedTime");
    return static_cast<double>(ms);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// A captured graph.
class Graph final : public RecordedWork {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& work) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      work();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);  // the stream must not stay in capture
      if (graph != nullptr) cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    const cudaError_t status = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "cudaGraphInstantiate");
    check(cudaGraphUpload(exec_, stream), "cudaGraphUpload");
  }
  ~Graph() override {
    cudaStreamSynchronize(stream_);  // it may be running
    cudaGraphExecDestroy(exec_);
  }
  void queue() override { check(cudaGraphLaunch(exec_, stream_), "cudaGraphLaunch"); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
};

// Into pinned memory, after what the stream has, by a stream of its own: what comes next on the first does not wait
// for the copy.
class PinnedReadBack final : public ReadBack {
 public:
  PinnedReadBack(cudaStream_t stream, size_t bytes) : stream_(stream), bytes_(bytes) {
    check(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaHostAlloc(&memory_, bytes, cudaHostAllocDefault), "cudaHostAlloc");
  }
  ~PinnedReadBack() override {
    cudaStreamSynchronize(copies_.get());
    cudaFreeHost(memory_);
    cudaEventDestroy(ready_);
  }
  void queue(const void* from) override {
    check(cudaEventRecord(ready_, stream_), "cudaEventRecord");
    check(cudaStreamWaitEvent(copies_.get(), ready_, 0), "cudaStreamWaitEvent");
    check(cudaMemcpyAsync(memory_, from, bytes_, cudaMemcpyDeviceToHost, copies_.get()), "cudaMemcpyAsync");
  }
  const void* wait() override {
    check(cudaStreamSynchronize(copies_.get()), "work on the device");
    return memory_;
  }

 private:
  Stream copies_;
  cudaStream_t stream_;
  size_t bytes_;
  cudaEvent_t ready_ = nullptr;
  void* memory_ = nullptr;
};

// Everything goes through one stream of its own, so that calls are done in order and nothing else on the device is
// waited for.
class CudaDevice final : public Device {
 public:
  fw_device kind() const override { return FW_DEVICE_CUDA; }
  size_t alignment() const override { return 256; }  // what cudaMalloc gives
  bool host_memory() const override { return false; }
  void* stream() const override { return stream_.get(); }

  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, bytes);
    if (status == cudaErrorMemoryAllocation) throw std::bad_alloc();
    check(status, "cudaMalloc");
    sizes_[memory] = bytes;
    bytes_ += bytes;
    peak_ = std::max(peak_, bytes_);
    return memory;
  }
  void release(void* memory) noexcept override {
    cudaStreamSynchronize(stream_.get());
    cudaFree(memory);
    if (const auto found = sizes_.find(memory); found != sizes_.end()) {
      bytes_ -= found->second;
      sizes_.erase(found);
    }
  }
  size_t peak_bytes() const override { return peak_; }
  // From memory that is not pinned the runtime has copied the source when the call returns.
  void from_host(void* to, const void* from, size_t bytes) override { move(to, from, bytes, cudaMemcpyHostToDevice); }
  void to_host(void* to, const void* from, size_t bytes) override {
    move(to, from, bytes, cudaMemcpyDeviceToHost);
    synchronise();
  }
  void copy(void* to, const void* from, size_t bytes) override { move(to, from, bytes, cudaMemcpyDeviceToDevice); }
  void fill(void* to, int byte, size_t bytes) override {
    check(cudaMemsetAsync(to, byte, bytes, stream_.get()), "cudaMemsetAsync");
  }
  void synchronise() override { check(cudaStreamSynchronize(stream_.get()), "work on the device"); }
  std::unique_ptr<RecordedWork> record(const std::function<void()>& work) override {
    return std::make_unique<Graph>(stream_.get(), work);
  }
  std::unique_ptr<ReadBack> read_back(size_t bytes) override {
    return std::make_unique<PinnedReadBack>(stream_.get(), bytes);
  }

 private:
  void move(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) const {
    check(cudaMemcpyAsync(to, from, bytes, kind, stream_.get()), "cudaMemcpyAsync");
  }
  Stream stream_;
  std::unordered_map<void*, size_t> sizes_;
  size_t bytes_ = 0, peak_ = 0;
};

}  // namespace

Device& cuda_device() {
  static_cast<void>(device_info());  // throws where there is none
  // Never destroyed: the runtime may be gone before static objects are.
  static CudaDevice* const instance = new CudaDevice();
  return *instance;
}

void select_cuda_device(int number) {
  const int count = cuda_device_count();
  if (number >= count) fail_usage("device: expected cuda:0 to cuda:{}, got cuda:{}", count - 1, number);
  check(cudaSetDevice(number), "cudaSetDevice");
}

int cuda_device_count() {
  int count = 0;
  static_cast<void>(device_info());  // throws where there is none
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return count;
}

std::string cuda_device_address() {
  int device = 0;
  char address[32] = "";
  static_cast<void>(device_info());  // throws where there is none
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetPCIBusId(address, sizeof(address), device), "cudaDeviceGetPCIBusId");
  return address;
}

std::shared_ptr<std::byte> cuda_staging(size_t bytes) {
  Device& device = cuda_device();
  void* memory = nullptr;
  const cudaError_t status = cudaHostAlloc(&memory, bytes, cudaHostAllocDefault);
  if (status == cudaErrorMemoryAllocation) throw std::bad_alloc();
  check(status, "cudaHostAlloc");
  return {static_cast<std::byte*>(memory), [stream = static_cast<cudaStream_t>(device.stream())](std::byte* given) {
            cudaStreamSynchronize(stream);  // a copy may still read it
            cudaFreeHost(given);
          }};
}

std::string device_code() {
#if defined(FW_DEVICE_CODE)
  return FW_DEVICE_CODE;
#else
  return "sm_80, sm_90a and PTX for newer GPUs";
#endif
}

DeviceInfo device_info() {
  int count = 0, device = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    throw DeviceError(why_no_gpu(status != cudaSuccess ? cudaGetErrorString(status) : "no device"));
  }
  check(cudaGetDevice(&device), "cudaGetDevice");
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  int driver = 0, runtime = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  DeviceInfo info;
  info.name = properties.name;
  info.major = properties.major;
  info.minor = properties.minor;
  info.sm_count = properties.multiProcessorCount;
  info.driver = version_text(driver);
  info.runtime = version_text(runtime);
  return info;
}

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(bytes) {
  if (bytes > 0) check(cudaMalloc(&data_, bytes), "cudaMalloc");
}
DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : bytes_(std::exchange(other.bytes_, 0)), data_(std::exchange(other.data_, nullptr)) {}
DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) cudaFree(data_);
}
void DeviceMemory::from_host(const void* source, size_t bytes) const {
  device_synchronize();
  if (bytes > 0) check(cudaMemcpy(data_, source, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
  device_synchronize();  // a stream that does not wait for the default one would run ahead of the copy's last part
}
void DeviceMemory::to_host(void* target, size_t bytes) const {
  device_synchronize();
  if (bytes > 0) check(cudaMemcpy(target, data_, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
}
void DeviceMemory::fill(int byte) const {
  if (bytes_ > 0) check(cudaMemset(data_, byte, bytes_), "cudaMemset");
  device_synchronize();  // as in from_host(): on a GPU that others use too, a captured graph overtook it
}

void device_copy(void* target, const void* source, size_t bytes, void* stream) {
  check(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)),
        "cudaMemcpyAsync");
}

void device_synchronize() { check(cudaDeviceSynchronize(), "work on the device"); }

std::vector<double> device_times(int warmup, int repeats, const std::function<void(int, void*)>& body) {
  const Stream stream;
  for (int i = 0; i < warmup; ++i) body(i, stream.get());
  std::vector<double> times;
  const Event start, stop;
  for (int i = 0; i < repeats; ++i) {
    start.record(stream.get());
    body(warmup + i, stream.get());
    stop.record(stream.get());
    times.push_back(stop.milliseconds_since(start));
  }
  device_synchronize();
  return times;
}

std::vector<double> device_graph_times(int warmup, int repeats, int inner,
                                       const std::function<void(int, void*)>& body) {
  const Stream stream;
  for (int i = 0; i < warmup; ++i) body(i, stream.get());
  check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  for (int i = 0; i < inner; ++i) body(i, stream.get());
  check(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  std::vector<double> times;
  const Event start, stop;
  for (int i = -1; i < repeats; ++i) {
    start.record(stream.get());
    check(cudaGraphLaunch(exec, stream.get()), "cudaGraphLaunch");
    stop.record(stream.get());
    const double ms = stop.milliseconds_since(start);
    if (i >= 0) times.push_back(ms / inner);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  return times;
}

}  // namespace fw
