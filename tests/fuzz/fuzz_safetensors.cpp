// Fuzzes the safetensors reader: every tensor that it lets through lies inside the file and can be read.
#include <cstring>
#include <vector>

#include "base/safetensors.h"
#include "fuzz_support.h"

namespace {

template <class T>
void read_as(const fw::SafetensorsReader& reader, const std::string& name, const fw::TensorInfo& tensor) {
  fw::fuzz::expect_error_or_nothing([&] {
    std::vector<T> out(static_cast<size_t>(tensor.count()));
    reader.read<T>(name, tensor.shape, std::span<T>(out));
  });
}

void read_all(std::span<const std::byte> content) {
  using fw::fuzz::require;
  const fw::SafetensorsReader reader(content, "input");
  size_t total = 0;
  for (const auto& [name, tensor] : reader.tensors()) {
    require(reader.has(name), "a listed tensor is there");
    require(tensor.count() >= 0, "a tensor has a count");
    require(tensor.bytes.data() >= content.data() &&
                tensor.bytes.data() + tensor.bytes.size() <= content.data() + content.size(),
            "a tensor lies inside the file");
    require(static_cast<size_t>(tensor.count()) <= tensor.bytes.size(), "an element takes at least a byte");
    total += tensor.bytes.size();
    read_as<float>(reader, name, tensor);
    read_as<double>(reader, name, tensor);
    read_as<int32_t>(reader, name, tensor);
    read_as<int64_t>(reader, name, tensor);
    read_as<uint8_t>(reader, name, tensor);
  }
  require(total <= content.size(), "no byte belongs to two tensors");
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto content = fw::fuzz::bytes_of(data, size);
  fw::fuzz::expect_error_or_nothing([&] { read_all(content); });
  // The same bytes as header and tensors with a length that fits, which chance would rarely give: the first byte says
  // how many bytes at the end are tensors.
  if (size < 1 || data[0] > size - 1) return 0;
  const uint64_t header = size - 1 - data[0];
  std::vector<std::byte> framed(8 + size - 1);
  std::memcpy(framed.data(), &header, 8);
  std::memcpy(framed.data() + 8, data + 1, size - 1);
  fw::fuzz::expect_error_or_nothing([&] { read_all(framed); });
  return 0;
}
