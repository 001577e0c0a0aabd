// A page of tables and curves for a set of runs: one HTML file that needs nothing else (no network, no scripts), and
// the same tables in Markdown.
#pragma once

#include <string>
#include <vector>

#include "report/curves.h"
#include "report/table.h"

namespace fw {

struct PageSection {
  std::string title, text;  // text: a paragraph; may be empty
  Table table;
  std::vector<RunCurve> curves;  // none: no picture
  CurveValue value = CurveValue::kLoss;
};

// Pictures are drawn by gnuplot and stand in the page as SVG; where it is missing or fails the page says so in their
// place.
std::string html_page(const std::string& title, const std::vector<PageSection>& sections);
std::string markdown_page(const std::string& title, const std::vector<PageSection>& sections);

}  // namespace fw
