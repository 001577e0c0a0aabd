// Event files read back by a reader of their own, which shares nothing with the writer: the format is TensorBoard's.
#include "train/event_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <vector>

#include "base/crc32c.h"
#include "training_support.h"

namespace fw {
namespace {

using testing::read_text;
using testing::TempFolder;
using testing::write_text;

struct Event {
  double wall_time = -1;
  int64_t step = 0;
  std::string version;
  std::map<std::string, float> scalars;
};

class Reader {
 public:
  explicit Reader(std::string bytes) : bytes_(std::move(bytes)) {}
  bool done() const { return at_ == bytes_.size(); }
  std::string take(size_t count) {
    if (count > bytes_.size() - at_) throw std::runtime_error("cut short");
    at_ += count;
    return bytes_.substr(at_ - count, count);
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  uint64_t varint() {
    const auto byte = static_cast<unsigned char>(take(1)[0]);
    return byte < 128 ? byte : (byte - 128) + 128 * varint();
  }

 private:
  std::string bytes_;
  size_t at_ = 0;
};

// Bit by bit, and unmasked by undoing what the format says.
uint32_t crc_of_masked(uint32_t masked) {
  const uint32_t rotated = masked - 0xa282ead8u;
  return rotated >> 17 | rotated << 15;
}
uint32_t slow_crc(const std::string& bytes) {
  uint32_t rest = 0xffffffffu;
  for (const char c : bytes) {
    rest ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) rest = rest & 1 ? rest >> 1 ^ 0x82f63b78u : rest >> 1;
  }
  return rest ^ 0xffffffffu;
}

Event parse_event(const std::string& payload) {
  Event event;
  for (Reader in(payload); !in.done();) {
    const uint64_t key = in.varint();
    if (key == 9) {
      event.wall_time = in.number<double>();
    } else if (key == 16) {
      event.step = static_cast<int64_t>(in.varint());
    } else if (key == 26) {
      event.version = in.take(in.varint());
    } else if (key == 42) {
      for (Reader summary(in.take(in.varint())); !summary.done();) {
        EXPECT_EQ(summary.varint(), 10u);
        Reader value(summary.take(summary.varint()));
        EXPECT_EQ(value.varint(), 10u);
        const std::string tag = value.take(value.varint());
        EXPECT_EQ(value.varint(), 21u);
        event.scalars[tag] = value.number<float>();
        EXPECT_TRUE(value.done());
      }
    } else {
      ADD_FAILURE() << "key " << key;
      return event;
    }
  }
  return event;
}

std::vector<Event> read_events(const std::string& path) {
  std::vector<Event> events;
  for (Reader in(read_text(path)); !in.done();) {
    const std::string length = in.take(8);
    EXPECT_EQ(crc_of_masked(in.number<uint32_t>()), slow_crc(length));
    const std::string payload = in.take(Reader(length).number<uint64_t>());
    EXPECT_EQ(crc_of_masked(in.number<uint32_t>()), slow_crc(payload));
    events.push_back(parse_event(payload));
  }
  return events;
}

void append(EventFile& file, int64_t step) {
  const EventScalar scalars[] = {{"train/loss", 1.5 + static_cast<double>(step)}, {"lr", 1e-3}};
  file.append(step, 1e9 + static_cast<double>(step), scalars);
}

TEST(EventFile, ReadsBack) {
  const TempFolder folder;
  const std::string path = folder.path("events.out.tfevents.1");
  {
    EventFile file(path, 0);
    append(file, 10);
    append(file, int64_t{1} << 40);
  }
  const std::vector<Event> events = read_events(path);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_GT(events[0].wall_time, 1e9);
  EXPECT_EQ(events[1].step, 10);
  EXPECT_EQ(events[1].wall_time, 1e9 + 10);
  EXPECT_EQ(events[1].scalars, (std::map<std::string, float>{{"train/loss", 11.5F}, {"lr", 1e-3F}}));
  EXPECT_EQ(events[2].step, int64_t{1} << 40);
}

TEST(EventFile, OpeningDropsWhatCameAfterTheStepAndWhatIsDamaged) {
  const TempFolder folder;
  const std::string path = folder.path("events.out.tfevents.1");
  {
    EventFile file(path, 0);
    for (const int64_t step : {100, 200, 300}) append(file, step);
  }
  const std::string whole = read_text(path);
  const auto steps = [&](int64_t step) {
    { EventFile file(path, step); }
    std::vector<int64_t> found;
    for (const Event& event : read_events(path)) found.push_back(event.step);
    return found;
  };
  EXPECT_EQ(steps(300), (std::vector<int64_t>{0, 100, 200, 300}));
  EXPECT_EQ(read_text(path), whole);
  write_text(path, whole.substr(0, whole.size() - 1));
  EXPECT_EQ(steps(300), (std::vector<int64_t>{0, 100, 200}));
  write_text(path, whole);
  EXPECT_EQ(steps(299), (std::vector<int64_t>{0, 100, 200}));
  {
    EventFile file(path, 299);
    append(file, 250);
  }
  EXPECT_EQ(steps(1000), (std::vector<int64_t>{0, 100, 200, 250}));
  for (size_t at = 0; at < whole.size(); at += 13) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    write_text(path, damaged);
    EXPECT_LE(steps(300).size(), 4u) << at;  // parses, whatever is left
  }
  write_text(path, "");
  EXPECT_EQ(steps(300), (std::vector<int64_t>{0}));
}

TEST(Crc32c, KnownValues) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

}  // namespace
}  // namespace fw
