// Fuzzes the reader of requests (docs/tasks.md): what it lets through writes and reads back the same, and keeps what
// scoring relies on.
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "fuzz_support.h"
#include "tasks/request.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fw::fuzz::require;
  fw::fuzz::expect_error_or_nothing([&] {
    const nlohmann::json json = fw::parse_json(std::string_view(reinterpret_cast<const char*>(data), size), "input");
    const fw::Request request = fw::request_from_json(json, "input:1");
    require(!request.task.empty(), "a request has a task");
    const bool chosen = request.kind == fw::RequestKind::kChoices || request.kind == fw::RequestKind::kContexts;
    const size_t choices = request.kind == fw::RequestKind::kChoices ? request.choices.size() : request.contexts.size();
    require(!chosen || (request.gold >= 0 && static_cast<size_t>(request.gold) < choices),
            "the right choice is one of them");
    require(request.kind != fw::RequestKind::kGenerate || (request.max_gen > 0 && !request.answers.empty()),
            "what is generated has an end and answers");
    require(request.kind != fw::RequestKind::kRolling || (request.bytes > 0 && request.words > 0),
            "a text has bytes and words");
    const nlohmann::json written = fw::to_json(request);
    require(fw::to_json(fw::request_from_json(written, "written")) == written,
            "a request reads back as it was written");
  });
  return 0;
}
