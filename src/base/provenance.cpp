#include "base/provenance.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <string_view>

namespace fw {

nlohmann::json to_json(const Provenance& p) {
  return {{"program", p.program}, {"command", p.command}, {"device", p.device}, {"date", p.date}};
}

Provenance provenance_from_json(const nlohmann::json& json) {
  if (json.is_null()) return {};
  return {json.at("program").get<std::string>(), json.at("command").get<std::string>(),
          json.at("device").get<std::string>(), json.at("date").get<std::string>()};
}

std::string today_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm day{};
  gmtime_r(&now, &day);
  return fmt::format("{:04}-{:02}-{:02}", day.tm_year + 1900, day.tm_mon + 1, day.tm_mday);
}

std::string command_text(const std::vector<std::string>& words) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./,:@%";
  std::string text;
  for (const std::string& word : words) {
    if (!text.empty()) text += ' ';
    if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) {
      text += word;
      continue;
    }
    text += '\'';
    for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
    text += '\'';
  }
  return text;
}

std::string provenance_text(const std::vector<Provenance>& all) {
  const auto agreed = [&](std::string Provenance::*field) -> std::string {
    if (all.empty()) return "";
    const std::string& first = all.front().*field;
    return std::ranges::all_of(all, [&](const Provenance& p) { return p.*field == first; }) ? first : "several";
  };
  const std::string program = agreed(&Provenance::program), command = agreed(&Provenance::command),
                    device = agreed(&Provenance::device), date = agreed(&Provenance::date);
  std::string text;
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, value);
  };
  add("program", program);
  add("device", device);
  add("date", date);
  add("command", command);
  return text.empty() ? "" : fmt::format("Provenance: {}.", text);
}

}  // namespace fw
