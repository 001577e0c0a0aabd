// Table: rows of text under headings, for the terminal. Numbers stand right, words left; widths count characters, not
// bytes, so that UTF-8 text lines up.
#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fw {

class Table {
 public:
  enum class Align { kLeft, kRight };

  void column(std::string heading, Align align = Align::kRight);
  // As many cells as columns; Error(kInternal) otherwise.
  void row(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  // Marks the cells of column `column` that are the best of `values`, one a row (none: the row has none), where there
  // are two that differ. Markdown and HTML show them bold.
  enum class Best { kLowest, kHighest };
  void mark_best(size_t column, const std::vector<std::optional<double>>& values, Best best);
  std::string text() const;      // columns two spaces apart, a line under the headings
  std::string markdown() const;  // a GitHub table
  std::string html() const;      // a <table>; numbers have the class "number"

 private:
  struct Column {
    std::string heading;
    Align align;
  };
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
  std::set<std::pair<size_t, size_t>> marked_;  // row, column
};

// Text as HTML, and as Markdown on one line: no character of it is markup, and control characters are shown
// (printable()).
std::string html_text(const std::string& text);
std::string markdown_text(const std::string& text);
// The text of which markdown_text() made this.
std::string plain_text(const std::string& markdown);
// The table of which Table::markdown() made these lines; Error(kUsage) for other lines.
Table table_from_markdown(const std::string& lines);

// Code points of UTF-8 text.
size_t display_width(std::string_view text);

// Lines of at most `width` characters, broken at spaces; line breaks in the text stay. Lines after the first begin with
// `indent` spaces.
std::string wrap(std::string_view text, size_t width, size_t indent);

}  // namespace fw
