#include "report/page.h"

#include <fmt/format.h>

namespace fw {
namespace {

// Readable on a screen of any width, in light and dark, and on paper.
constexpr const char* kStyle =
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "section{margin:2.5rem 0}h1{font-size:1.6rem}h2{font-size:1.25rem;border-bottom:1px solid "
    "#8886;padding-bottom:.2rem;overflow-wrap:anywhere}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{padding:.3rem .8rem;border-bottom:1px solid "
    "#8884;white-space:nowrap}th{text-align:left}.number{text-align:right}"
    "figure{margin:1.5rem "
    "0;background:#fff;border-radius:6px;overflow:hidden}svg{display:block;width:100%;height:auto}";

// The <svg> element of a file of gnuplot's, without what stands before it in a file of its own.
std::string svg_element(const std::string& file) {
  const size_t begin = file.find("<svg");
  return begin == std::string::npos ? std::string() : file.substr(begin);
}

std::string picture(const PageSection& section, size_t number) {
  std::string note;
  const std::string file = draw_svg(1080, 540, fmt::format("figure{}", number), note, [&] {
    return run_curves_script(section.curves, section.value, CurveOver::kStep, "");
  });
  const std::string svg = svg_element(file);
  if (svg.empty()) return fmt::format("<p>The curves are not here: {}.</p>\n", html_text(note));
  return fmt::format("<figure role=\"img\" aria-label=\"curves of {}\">{}</figure>\n", html_text(section.title), svg);
}

}  // namespace

std::string html_page(const std::string& title, const std::vector<PageSection>& sections) {
  std::string page = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\">\n"
      "<title>{0}</title>\n<style>{1}</style>\n</head>\n<body>\n<h1>{0}</h1>\n",
      html_text(title), kStyle);
  for (size_t i = 0; i < sections.size(); ++i) {
    const PageSection& s = sections[i];
    page += fmt::format("<section>\n<h2>{}</h2>\n", html_text(s.title));
    if (!s.text.empty()) page += fmt::format("<p>{}</p>\n", html_text(s.text));
    if (!s.table.empty()) page += fmt::format("<div class=\"wide\">\n{}</div>\n", s.table.html());
    if (!s.curves.empty()) page += picture(s, i);
    page += "</section>\n";
  }
  return page + "</body>\n</html>\n";
}

std::string markdown_page(const std::string& title, const std::vector<PageSection>& sections) {
  std::string page = fmt::format("# {}\n", markdown_text(title));
  for (const PageSection& s : sections) {
    page += fmt::format("\n## {}\n\n", markdown_text(s.title));
    if (!s.text.empty()) page += fmt::format("{}\n\n", markdown_text(s.text));
    if (!s.table.empty()) page += s.table.markdown();
  }
  return page;
}

}  // namespace fw
