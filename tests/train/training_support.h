// What the training tests share: a text, a small model and run, and the bytes of a folder.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/temp_folder.h"
#include "model/config.h"
#include "tokenizer/tokenizer.h"
#include "train/token_file.h"
#include "train/trainer.h"

namespace fw::testing {

// `documents` documents of words, of very different lengths, a line "%" between them. The same for a seed.
std::string sample_text(int documents, uint64_t seed);

// A token file of bytes at `path`, documents split at "%".
std::shared_ptr<const TokenFile> byte_file(const std::string& text, const std::string& path);

ModelConfig tiny_model();                      // about 10,000 parameters
TrainConfig tiny_run(const std::string& out);  // 15 steps of 4 x 32 tokens, checkpoints every 5, records every 4

// A trainer of the tiny model on sample_text, with and without a held-out file.
std::unique_ptr<Trainer> make_trainer(const TrainConfig& config, const std::string& folder, bool with_valid = false,
                                      const ModelConfig& model = tiny_model(), Communicator& ranks = one_rank());

// Content of every file in a folder, by name.
std::map<std::string, std::string> folder_content(const std::string& folder);

// The records of metrics.jsonl without the numbers that a clock makes.
std::vector<nlohmann::json> records(const std::string& path);

std::string read_text(const std::string& path);
void write_text(const std::string& path, const std::string& content);

}  // namespace fw::testing
