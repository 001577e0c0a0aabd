#include "train/best_model.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace fw {
namespace {

namespace fs = std::filesystem;

// Where the next one is written, and where the one before it waits until the next is in its place.
std::string next_path(const std::string& run) { return run + "/.tmp-best-next"; }
std::string last_path(const std::string& run) { return run + "/.tmp-best-last"; }

}  // namespace

std::string best_path(const std::string& run) { return run + "/best"; }

void write_best(const std::string& run, const BestRecord& record, const LanguageModel<float>& model,
                const Tokenizer& tokenizer) {
  const std::string next = next_path(run), last = last_path(run), path = best_path(run);
  try {
    recover_best(run);
    make_folders(next);
    save_trained(next, model);
    tokenizer.save(next);
    write_file_atomic(next + "/best.json", nlohmann::json{{"step", record.step}, {"loss", record.loss}}.dump(2) + "\n");
    sync_folder(next);
    if (file_exists(path)) fs::rename(path, last);
    fs::rename(next, path);
    sync_folder(run);
    fs::remove_all(last);
  } catch (const std::exception& error) {
    recover_best(run);
    fail_io("the best model so far was not written to '{}': {}; the one before it is untouched", path, error.what());
  }
}

BestRecord read_best(const std::string& run) {
  const std::string path = best_path(run) + "/best.json";
  if (!file_exists(path)) return {};
  try {
    const nlohmann::json json = parse_json(read_file(path, size_t{1} << 16), "'" + path + "'");
    return {json.at("step").get<int64_t>(), json.at("loss").get<double>()};
  } catch (const std::exception&) {
    return {};
  }
}

void recover_best(const std::string& run) {
  const std::string last = last_path(run);
  std::error_code ignored;
  if (file_exists(last) && !file_exists(best_path(run))) fs::rename(last, best_path(run), ignored);
  fs::remove_all(last, ignored);
  fs::remove_all(next_path(run), ignored);
}

}  // namespace fw
