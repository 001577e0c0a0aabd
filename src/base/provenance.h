// Where a result comes from: the program, the command, the device and the day.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace fw {

struct Provenance {     // "": not known, of results of earlier versions
  std::string program;  // "fastweight 0.2.0, commit 0123abcd"
  std::string command;  // as a shell reads it
  std::string device;   // "NVIDIA H200", or the name of the processor
  std::string date;     // of the end, in UTC: "2026-12-01"
};

nlohmann::json to_json(const Provenance& provenance);
// Of an absent (null) object all is unknown. Throws nlohmann::json::exception for values of other types.
Provenance provenance_from_json(const nlohmann::json& json);

std::string today_utc();
// The words of a command, quoted where a shell would split or change them.
std::string command_text(const std::vector<std::string>& words);

// A sentence for the caption of a table. A field that differs between the results reads "several", one that none of
// them has is left out. "" when nothing is known.
std::string provenance_text(const std::vector<Provenance>& all);

}  // namespace fw
