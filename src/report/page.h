// A page of tables and curves for a set of runs: one HTML file that needs nothing else (no network, no scripts), and
// the same tables in Markdown.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "report/curves.h"
#include "report/plot.h"
#include "report/table.h"

namespace fw {

struct PageSection {
  std::string title, text;  // text: a paragraph; may be empty
  Table table;
  std::vector<RunCurve> curves;  // none: no picture
  CurveValue value = CurveValue::kLoss;
  std::vector<Plot> plots;                                      // pictures besides; one without a line is left out
  std::vector<std::string> svgs;                                // texts of SVG files
  std::vector<std::pair<std::string, std::string>> quotations;  // a heading and lines of text
};

// Pictures are drawn by gnuplot and stand in the page as SVG; where it is missing or fails the page says so in their
// place.
std::string html_page(const std::string& title, const std::vector<PageSection>& sections);
std::string markdown_page(const std::string& title, const std::vector<PageSection>& sections);

// The pictures of the sections as files of their own. `name` is made of the section's title and of what is drawn
// ("mqar-accuracy"), without a folder and an ending. Files of analyses are left out.
struct SectionPicture {
  std::string name, script;
};
std::vector<SectionPicture> section_pictures(const std::vector<PageSection>& sections);

}  // namespace fw
