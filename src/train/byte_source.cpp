#include "train/byte_source.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/stop.h"

namespace fw {
namespace {

constexpr std::string_view kStandardInput = "-";
constexpr std::string_view kGzip = "\x1f\x8b";
constexpr std::string_view kZstd = "\x28\xb5\x2f\xfd";
constexpr std::string_view kParquet = "PAR1";
constexpr size_t kLongestMagic = 10;

// Packed texts and encodings that are not read, by their first bytes.
struct Refused {
  std::string_view magic;
  const char *what, *instead;
};
constexpr Refused kRefused[] = {{std::string_view("\xfd\x37zXZ\0", 6), "an .xz file", "xz -dc"},
                                {"BZh91AY&SY", "a .bz2 file", "bzip2 -dc"},
                                {std::string_view("\x04\x22\x4d\x18", 4), "an .lz4 file", "lz4 -dc"},
                                {std::string_view("PK\x03\x04", 4), "a .zip file", "unzip -p"},
                                {std::string_view("7z\xbc\xaf\x27\x1c", 6), "a .7z file", "7z x -so"}};
// The longer ones first: that of UTF-32 begins as that of UTF-16 does.
struct Mark {
  std::string_view bytes;
  const char* encoding;
};
constexpr Mark kMarks[] = {{std::string_view("\xff\xfe\0\0", 4), "UTF-32"},
                           {std::string_view("\0\0\xfe\xff", 4), "UTF-32"},
                           {std::string_view("\xff\xfe", 2), "UTF-16"},
                           {std::string_view("\xfe\xff", 2), "UTF-16"}};
constexpr std::string_view kUtf8Mark = "\xef\xbb\xbf";

// pzstd and others write a frame first that is skipped: four bytes, of which the first has 16 values.
bool is_zstd(std::string_view head) {
  if (head.starts_with(kZstd)) return true;
  return head.size() >= 4 && (static_cast<unsigned char>(head[0]) & 0xf0) == 0x50 &&
         head.substr(1, 3) == "\x2a\x4d\x18";
}

// bzip2's block sizes are digits.
bool begins_with(std::string_view head, std::string_view magic) {
  if (!magic.starts_with("BZh")) return head.starts_with(magic);
  return head.size() >= magic.size() && head.starts_with("BZh") && head[3] >= '1' && head[3] <= '9' &&
         head.substr(4, 6) == magic.substr(4);
}
constexpr size_t kPiece = size_t{1} << 17;

std::string reason(int error) { return std::generic_category().message(error); }

class FileBytes final : public ByteSource {
 public:
  explicit FileBytes(const std::string& path)
      : path_(path == kStandardInput ? "standard input" : path), input_(path == kStandardInput) {
    if (input_) {
      fd_ = STDIN_FILENO;
      return;
    }
    // Without O_NONBLOCK a named pipe would wait here for its writer.
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd_ < 0) fail_usage("cannot open '{}': {}", path, reason(errno));
    struct stat info = {};
    const int status = ::fstat(fd_, &info);
    if (status == 0 && S_ISREG(info.st_mode)) return;
    const int error = errno;
    ::close(fd_);
    if (status != 0) fail_usage("cannot open '{}': {}", path, reason(error));
    fail_usage("cannot read '{}': expected a regular file, it is a {}", path,
               S_ISDIR(info.st_mode) ? "folder" : "device or a pipe");
  }
  ~FileBytes() override {
    if (!input_) ::close(fd_);
  }
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;

  size_t read(std::span<char> out) override {
    size_t used = std::min(out.size(), ahead_.size());
    std::copy_n(ahead_.data(), used, out.data());
    ahead_.erase(0, used);
    while (used < out.size()) {
      if (input_) wait();
      const ssize_t n = ::read(fd_, out.data() + used, std::min(out.size() - used, size_t{1} << 30));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_io("cannot read '{}': {}", path_, reason(errno));
      if (n == 0) break;
      used += static_cast<size_t>(n);
    }
    return used;
  }
  // The first bytes, which stay to be read.
  std::string peek(size_t count) {
    std::string bytes(count, '\0');
    bytes.resize(read(bytes));
    ahead_ = bytes;
    return bytes;
  }

 private:
  // A pipe's writer may take its time, and whoever waits can be asked to end.
  static void wait() {
    constexpr int kMilliseconds = 200;
    pollfd input = {STDIN_FILENO, POLLIN, 0};
    while (!stop_flag()) {
      if (::poll(&input, 1, kMilliseconds) != 0) return;
    }
    throw Stopped("stopped while standard input was read, which cannot be read again: nothing of it is kept");
  }

  std::string path_, ahead_;  // ahead: read by peek()
  bool input_;
  int fd_ = -1;
};

// What both formats share: packed bytes come piece by piece from the file.
class Packed : public ByteSource {
 public:
  Packed(const std::string& path, std::unique_ptr<ByteSource> file)
      : path_(path), file_(std::move(file)), in_(kPiece) {}

 protected:
  // More packed bytes into the empty buffer; false at the file's end.
  bool refill() {
    const size_t n = file_->read(in_);
    remaining_ = std::span(in_).first(n);
    return n > 0;
  }
  [[noreturn]] void fail_damaged(const char* format, std::string_view what) const {
    fail_usage("'{}': damaged {} file: {}; make or fetch it again", path_, format, what);
  }

  std::string path_;
  std::span<char> remaining_;  // packed bytes that wait

 private:
  std::unique_ptr<ByteSource> file_;
  std::vector<char> in_;
};

class GzipBytes final : public Packed {
 public:
  GzipBytes(const std::string& path, std::unique_ptr<ByteSource> file) : Packed(path, std::move(file)) {
    constexpr int kGzipOnly = 16;
    if (inflateInit2(&stream_, MAX_WBITS + kGzipOnly) != Z_OK) throw std::bad_alloc();
  }
  ~GzipBytes() override { inflateEnd(&stream_); }
  GzipBytes(const GzipBytes&) = delete;
  GzipBytes& operator=(const GzipBytes&) = delete;

  size_t read(std::span<char> out) override {
    size_t used = 0;
    while (used < out.size()) {
      if (remaining_.empty() && !refill()) {
        if (!between_) fail_damaged("gzip", "it ends in the middle");
        break;
      }
      if (between_) begin_member();
      if (remaining_.empty()) continue;
      const size_t room = std::min(out.size() - used, size_t{1} << 30);
      stream_.next_in = reinterpret_cast<Bytef*>(remaining_.data());
      stream_.avail_in = static_cast<uInt>(remaining_.size());
      stream_.next_out = reinterpret_cast<Bytef*>(out.data() + used);
      stream_.avail_out = static_cast<uInt>(room);
      const int status = inflate(&stream_, Z_NO_FLUSH);
      remaining_ = remaining_.last(stream_.avail_in);
      used += room - stream_.avail_out;
      if (status == Z_MEM_ERROR) throw std::bad_alloc();
      if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR)
        fail_damaged("gzip", stream_.msg != nullptr ? stream_.msg : "unknown data");
      between_ = status == Z_STREAM_END;
    }
    return used;
  }

 private:
  // A file may have several members one after the other (as `cat a.gz b.gz` makes) and zeros after the last (as tapes
  // do).
  void begin_member() {
    if (began_) {
      while (!remaining_.empty() && remaining_[0] == '\0') remaining_ = remaining_.subspan(1);
      if (remaining_.empty()) return;
      inflateReset(&stream_);
    }
    began_ = true;
    between_ = false;
  }

  z_stream stream_ = {};
  bool between_ = true, began_ = false;  // no member is open
};

class ZstdBytes final : public Packed {
 public:
  ZstdBytes(const std::string& path, std::unique_ptr<ByteSource> file)
      : Packed(path, std::move(file)), stream_(ZSTD_createDStream()) {
    if (stream_ == nullptr) throw std::bad_alloc();
  }
  ~ZstdBytes() override { ZSTD_freeDStream(stream_); }
  ZstdBytes(const ZstdBytes&) = delete;
  ZstdBytes& operator=(const ZstdBytes&) = delete;

  size_t read(std::span<char> out) override {
    ZSTD_outBuffer to = {out.data(), out.size(), 0};
    while (to.pos < to.size) {
      // With unwritten bytes of its own the decoder goes on without new ones.
      if (remaining_.empty() && !more_inside_ && !refill()) {
        if (inside_) fail_damaged("Zstandard", "it ends in the middle");
        break;
      }
      ZSTD_inBuffer from = {remaining_.data(), remaining_.size(), 0};
      const size_t status = ZSTD_decompressStream(stream_, &to, &from);
      if (ZSTD_getErrorCode(status) == ZSTD_error_frameParameter_windowTooLarge) {
        fail_usage(
            "'{}': it was packed with a window of more than 128 MiB (zstd --long), which is not read: unpack it (zstd "
            "-dc --long=31), or pack it again "
            "without --long",
            path_);
      }
      if (ZSTD_isError(status)) fail_damaged("Zstandard", ZSTD_getErrorName(status));
      remaining_ = remaining_.subspan(from.pos);
      inside_ = status != 0;
      more_inside_ = inside_ && to.pos == to.size;
    }
    return to.pos;
  }

 private:
  ZSTD_DStream* stream_;
  bool inside_ = false, more_inside_ = false;
};

// Unpacked text from after its byte order mark.
class Text final : public ByteSource {
 public:
  Text(const std::string& path, std::unique_ptr<ByteSource> bytes)
      : path_(path == kStandardInput ? "standard input" : path), bytes_(std::move(bytes)) {}

  size_t read(std::span<char> out) override {
    if (!std::exchange(begun_, true)) begin();
    size_t used = std::min(out.size(), ahead_.size());
    std::copy_n(ahead_.data(), used, out.data());
    ahead_.erase(0, used);
    if (used < out.size()) used += bytes_->read(out.subspan(used));
    return used;
  }

 private:
  void begin() {
    ahead_.resize(4);
    ahead_.resize(bytes_->read(ahead_));
    drop_byte_order_mark(ahead_, path_);
  }

  std::string path_, ahead_;  // ahead: read to look for the mark
  std::unique_ptr<ByteSource> bytes_;
  bool begun_ = false;
};

std::unique_ptr<ByteSource> open_packed(const std::string& path) {
  auto file = std::make_unique<FileBytes>(path);
  const std::string head = file->peek(kLongestMagic);
  if (head.starts_with(kGzip)) return std::make_unique<GzipBytes>(path, std::move(file));
  if (is_zstd(head)) return std::make_unique<ZstdBytes>(path, std::move(file));
  for (const Refused& other : kRefused) {
    if (begins_with(head, other.magic)) {
      fail_usage("'{}': it is {}, which is not read: unpack it ({} '{}' > text), or pack it with gzip or zstd", path,
                 other.what, other.instead, path);
    }
  }
  if (head.starts_with(kParquet)) {
    fail_usage(
        "'{}': Parquet is not read by this program (Debian has no library for it); write it as JSON lines first, for "
        "example with\n  python3 -c \"import "
        "pandas; "
        "pandas.read_parquet('in.parquet').to_json('out.jsonl.gz', orient='records', lines=True)\"",
        path);
  }
  const bool named_gzip = path.ends_with(".gz"), named_zstd = path.ends_with(".zst");
  if ((named_gzip || named_zstd) && !head.empty()) {
    fail_usage("'{}': expected a {} file after its name, its first bytes are those of something else", path,
               named_gzip ? "gzip" : "Zstandard");
  }
  return file;
}

}  // namespace

std::unique_ptr<ByteSource> open_bytes(const std::string& path) {
  return std::make_unique<Text>(path, open_packed(path));
}

void drop_byte_order_mark(std::string& text, const std::string& name) {
  for (const Mark& mark : kMarks) {
    if (!text.starts_with(mark.bytes)) continue;
    fail_usage("'{}': expected text in UTF-8, it is {} by its byte order mark: convert it (iconv -f {} -t UTF-8 '{}')",
               name, mark.encoding, mark.encoding, name);
  }
  if (text.starts_with(kUtf8Mark)) text.erase(0, kUtf8Mark.size());
}

std::string packing_of(const std::string& path) {
  const std::string head = file_start(path, kLongestMagic);
  return head.starts_with(kGzip) ? "gzip" : is_zstd(head) ? "Zstandard" : "";
}

}  // namespace fw
