#include "report/table.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <sstream>

#include "base/error.h"
#include "base/printable.h"

namespace fw {

size_t display_width(std::string_view text) {
  size_t n = 0;
  for (const char c : text) n += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return n;
}

void Table::column(std::string heading, Align align) { columns_.push_back({std::move(heading), align}); }

void Table::row(std::vector<std::string> cells) {
  if (cells.size() != columns_.size())
    fail_internal("table row: expected {} cells, got {}", columns_.size(), cells.size());
  rows_.push_back(std::move(cells));
}

void Table::mark_best(size_t column, const std::vector<std::optional<double>>& values, Best best) {
  if (values.size() != rows_.size())
    fail_internal("table column {}: expected {} values, got {}", column, rows_.size(), values.size());
  std::vector<double> known;
  for (const std::optional<double>& value : values) {
    if (value && std::isfinite(*value)) known.push_back(*value);
  }
  if (known.empty()) return;
  const auto [low, high] = std::minmax_element(known.begin(), known.end());
  if (*low == *high) return;
  const double target = best == Best::kLowest ? *low : *high;
  for (size_t row = 0; row < values.size(); ++row) {
    if (values[row] == target) marked_.insert({row, column});
  }
}

std::string Table::text() const {
  std::vector<size_t> width;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t w = display_width(columns_[c].heading);
    for (const auto& r : rows_) w = std::max(w, display_width(r[c]));
    width.push_back(w);
  }
  std::string out;
  const auto line = [&](const auto& cell) {
    std::string s;
    for (size_t c = 0; c < columns_.size(); ++c) {
      const std::string& value = cell(c);
      const std::string pad(width[c] - display_width(value), ' ');
      if (c > 0) s += "  ";
      s += columns_[c].align == Align::kRight ? pad + value : value + pad;
    }
    s.erase(s.find_last_not_of(' ') + 1);
    out += s + "\n";
  };
  line([&](size_t c) -> const std::string& { return columns_[c].heading; });
  size_t total = 0;
  for (const size_t w : width) total += w + 2;
  out += std::string(total > 2 ? total - 2 : 0, '-') + "\n";
  for (const auto& r : rows_) line([&](size_t c) -> const std::string& { return r[c]; });
  return out;
}

std::string html_text(const std::string& text) {
  std::string out;
  for (const char c : printable_lines(text)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

namespace {

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || static_cast<unsigned char>(c) >= 0x80;
}

// Whether text[at] has a meaning where it stands. A backslash before it takes that away.
bool is_markup(const std::string& text, size_t at) {
  const char c = text[at], before = at > 0 ? text[at - 1] : ' ', behind = at + 1 < text.size() ? text[at + 1] : ' ';
  if (std::string_view("\\`*[]<>|~$").find(c) != std::string_view::npos) return true;
  switch (c) {
    case '_':
      return !is_word(before) || !is_word(behind);
    case '&':
      return is_word(behind) || behind == '#';
    case '#':
      return before == ' ' || behind == ' ' || at == 0;
    case ':':
      return behind == '/';  // of an address
    case '.':
    case ')':
      // The number of a list, and an address without a scheme.
      return (at > 0 && behind == ' ' && text.find_first_not_of("0123456789") == at) ||
             (at >= 3 && (text.compare(at - 3, 3, "www") == 0 || text.compare(at - 3, 3, "WWW") == 0));
    case '-':
    case '+':
      return at == 0 && text.size() > 1 && behind == ' ';  // of a list
    default:
      return false;
  }
}

}  // namespace

std::string markdown_text(const std::string& text) {
  const std::string line = printable(text);
  std::string out;
  for (size_t i = 0; i < line.size(); ++i) {
    if (is_markup(line, i)) out += '\\';
    out += line[i];
  }
  return out;
}

namespace {

// The cells of a line, without their marks. Without the bars at both ends there are none.
std::vector<std::string> markdown_cells(const std::string& line) {
  std::vector<std::string> cells;
  std::string cell;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '\\' && i + 1 < line.size()) {
      cell += line[++i];
    } else if (line[i] == '|') {
      const size_t begin = cell.find_first_not_of(' '), end = cell.find_last_not_of(' ');
      cells.push_back(begin == std::string::npos ? "" : cell.substr(begin, end - begin + 1));
      cell.clear();
    } else if (line[i] != '*') {
      cell += line[i];
    }
  }
  const bool between_bars = cells.size() > 1 && cells.front().empty() && cell.empty();
  if (!between_bars) return {};
  cells.erase(cells.begin());
  return cells;
}

}  // namespace

std::string plain_text(const std::string& markdown) {
  std::string out;
  for (size_t i = 0; i < markdown.size(); ++i) {
    if (markdown[i] == '\\' && i + 1 < markdown.size()) ++i;
    out += markdown[i];
  }
  return out;
}

Table table_from_markdown(const std::string& lines) {
  std::istringstream in(lines);
  std::string headings, rule, line;
  std::getline(in, headings);
  std::getline(in, rule);
  const std::vector<std::string> names = markdown_cells(headings), aligns = markdown_cells(rule);
  if (names.empty() || names.size() != aligns.size())
    fail_usage("expected a Markdown table, got '{}'", printable(headings));
  Table table;
  for (size_t c = 0; c < names.size(); ++c)
    table.column(names[c], aligns[c].ends_with(':') ? Table::Align::kRight : Table::Align::kLeft);
  while (std::getline(in, line)) {
    std::vector<std::string> cells = markdown_cells(line);
    if (cells.size() != names.size()) fail_usage("expected a row of {} cells, got '{}'", names.size(), printable(line));
    table.row(std::move(cells));
  }
  return table;
}

std::string Table::html() const {
  std::string out = "<table>\n";
  const auto row = [&](const auto& cell, const char* tag) {
    out += "<tr>";
    for (size_t c = 0; c < columns_.size(); ++c) {
      const char* kind = columns_[c].align == Align::kRight ? " class=\"number\"" : "";
      out += fmt::format("<{0}{1}>{2}</{0}>", tag, kind, cell(c));
    }
    out += "</tr>\n";
  };
  row([&](size_t c) { return html_text(columns_[c].heading); }, "th");
  for (size_t r = 0; r < rows_.size(); ++r) {
    row(
        [&](size_t c) {
          const std::string text = html_text(rows_[r][c]);
          return marked_.count({r, c}) != 0 ? "<strong>" + text + "</strong>" : text;
        },
        "td");
  }
  return out + "</table>\n";
}

std::string Table::markdown() const {
  std::string out = "|";
  for (const Column& c : columns_) out += " " + markdown_text(c.heading) + " |";
  out += "\n|";
  for (const Column& c : columns_) out += c.align == Align::kRight ? "---:|" : "---|";
  out += "\n";
  for (size_t r = 0; r < rows_.size(); ++r) {
    out += "|";
    for (size_t c = 0; c < columns_.size(); ++c) {
      const char* mark = marked_.count({r, c}) != 0 ? "**" : "";
      out += fmt::format(" {0}{1}{0} |", mark, markdown_text(rows_[r][c]));
    }
    out += "\n";
  }
  return out;
}

std::string wrap(std::string_view text, size_t width, size_t indent) {
  std::string out;
  size_t used = 0;
  bool line_empty = true;
  const std::string margin(indent, ' ');
  const auto new_line = [&] {
    out += "\n";
    used = 0;
    line_empty = true;
  };
  size_t at = 0;
  while (at < text.size()) {
    if (text[at] == '\n') {
      new_line();
      ++at;
      continue;
    }
    if (text[at] == ' ') {
      ++at;
      continue;
    }
    const size_t end = std::min(text.find_first_of(" \n", at), text.size());
    const std::string_view word = text.substr(at, end - at);
    const size_t w = display_width(word);
    if (!line_empty && used + 1 + w > width) new_line();
    if (line_empty) {
      if (!out.empty()) out += margin;
    } else {
      out += ' ';
      ++used;
    }
    out += word;
    used += w;
    line_empty = false;
    at = end;
  }
  return out;
}

}  // namespace fw
