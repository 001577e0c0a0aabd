#include "training_support.h"

#include <fstream>
#include <sstream>
#include <stdexcept>

#include "base/file.h"
#include "base/random.h"
#include "train/token_writer.h"

namespace fw::testing {

namespace fs = std::filesystem;

std::string sample_text(int documents, uint64_t seed) {
  static constexpr const char* kWords[] = {"delta", "rule", "key", "value",  "gate",  "state",
                                           "a",     "the",  "of",  "writes", "reads", "erases"};
  Random random(seed);
  std::string text;
  for (int i = 0; i < documents; ++i) {
    if (i > 0) text += "%\n";
    // Every other document is a single word, so that windows differ much in how many tokens they score.
    const uint64_t words = i % 2 == 0 ? 1 : 1 + random.below(60);
    for (uint64_t w = 0; w < words; ++w)
      text += std::string(kWords[random.below(std::size(kWords))]) + (w + 1 == words ? ".\n" : " ");
  }
  return text;
}

std::shared_ptr<const TokenFile> byte_file(const std::string& text, const std::string& path) {
  write_token_file(text, "%", *byte_tokenizer(), path);
  return std::make_shared<const TokenFile>(path);
}

ModelConfig tiny_model() {
  ModelConfig config;
  config.hidden_size = 16;
  config.num_hidden_layers = 1;
  config.num_heads = 2;
  config.head_dim = 8;
  config.intermediate_size = 32;
  return config;
}

TrainConfig tiny_run(const std::string& out) {
  TrainConfig config;
  config.out = out;
  config.steps = 15;
  config.batch = 4;
  config.length = 32;
  config.lr = 1e-2;
  config.min_lr = 1e-3;
  config.warmup = 3;
  config.log_every = 4;
  config.checkpoint_every = 5;
  return config;
}

std::unique_ptr<Trainer> make_trainer(const TrainConfig& config, const std::string& folder, bool with_valid,
                                      const ModelConfig& model, Communicator& ranks) {
  const std::string train = folder + "/train.tokens", valid = folder + "/valid.tokens";
  if (ranks.rank() == 0) {
    make_folders(folder);
    byte_file(sample_text(60, 11), train);
    if (with_valid) byte_file(sample_text(8, 12), valid);
  }
  ranks.barrier();
  return std::make_unique<Trainer>(config, model, std::shared_ptr<const Tokenizer>(byte_tokenizer()),
                                   std::make_shared<const TokenFile>(train),
                                   with_valid ? std::make_shared<const TokenFile>(valid) : nullptr, ranks);
}

std::map<std::string, std::string> folder_content(const std::string& folder) {
  std::map<std::string, std::string> content;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    content[entry.path().filename().string()] = entry.is_directory() ? "(folder)" : read_text(entry.path().string());
  }
  return content;
}

std::vector<nlohmann::json> records(const std::string& path) {
  std::istringstream in(read_text(path));
  std::vector<nlohmann::json> all;
  for (std::string line; std::getline(in, line);) {
    nlohmann::json record = nlohmann::json::parse(line);
    record.erase("ms");
    record.erase("tokens_per_second");
    all.push_back(std::move(record));
  }
  return all;
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot open " + path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_text(const std::string& path, const std::string& content) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << content;
  if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

}  // namespace fw::testing
