// Fuzzes the readers of model configurations (config.json, ours and those of Hugging Face): what they let through is
// valid, writes and reads back the same.
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "fuzz_support.h"
#include "model/config.h"
#include "model/interop/hf_config.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fw::fuzz::require;
  fw::fuzz::expect_error_or_nothing([&] {
    const nlohmann::json json = fw::parse_json(std::string_view(reinterpret_cast<const char*>(data), size), "input");
    const bool is_hf = fw::is_hf_config(json);
    const fw::ModelConfig config = is_hf ? fw::config_from_hf(json, "input") : fw::config_from_json(json, "input");
    if (is_hf) require(fw::config_to_hf(config) == json, "a Hugging Face config is exported as it came");
    const double parameters = fw::parameter_count(config);
    require(std::isfinite(parameters) && parameters > 0, "a valid config has parameters");
    require(config.v_heads() % config.num_heads == 0 && config.head_v_dim() > 0 && config.mlp_size() > 0,
            "a valid config has whole heads");
    const nlohmann::json written = fw::config_to_json(config);
    require(fw::config_to_json(fw::config_from_json(written, "written")) == written,
            "a config reads back as it was written");
  });
  return 0;
}
