// CRC-32C (Castagnoli, as in iSCSI, RFC 3720): for formats of others that ask for it. Our own files have
// base/checksum.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace fw {

uint32_t crc32c(std::string_view bytes);

}  // namespace fw
