#include "report/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <string_view>

#include "base/printable.h"

namespace fw {
namespace {

// Readable on a screen of any width, in light and dark, and on paper.
constexpr const char* kStyle =
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "section{margin:2.5rem 0}h1{font-size:1.6rem}h2{font-size:1.25rem;border-bottom:1px solid "
    "#8886;padding-bottom:.2rem;overflow-wrap:anywhere}"
    "pre{white-space:pre-wrap;background:#8881;padding:.6rem;border-radius:6px}"
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

std::string figure(const std::string& svg, const std::string& title, const std::string& note) {
  if (svg.empty()) return fmt::format("<p>The picture is not here: {}.</p>\n", html_text(note));
  return fmt::format("<figure role=\"img\" aria-label=\"picture of {}\">{}</figure>\n", html_text(title), svg);
}

std::string figure(const std::string& script, const std::string& title, size_t& number) {
  if (script.empty()) return {};
  std::string note;
  const std::string file = draw_svg(1080, 540, fmt::format("figure{}", number++), note, [&] { return script; });
  return figure(svg_element(file), title, note);
}

bool is_alphanumeric(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }

// A picture of gnuplot's that has the names that all have.
std::string own_names(std::string svg, size_t& number) {
  const std::string name = fmt::format("figure{}_", number++);
  for (size_t at = 0; (at = svg.find("gnuplot_", at)) != std::string::npos; at += name.size()) svg.replace(at, 8, name);
  return svg_element(svg);
}

// At least as many as the text has in a row, and three.
std::string fence_around(const std::string& text) {
  size_t longest = 2, row = 0;
  for (const char c : text) longest = std::max(longest, row = c == '`' ? row + 1 : 0);
  return std::string(longest + 1, '`');
}

}  // namespace

std::string html_page(const std::string& title, const std::vector<PageSection>& sections) {
  std::string page = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\">\n"
      "<title>{0}</title>\n<style>{1}</style>\n</head>\n<body>\n<h1>{0}</h1>\n",
      html_text(title), kStyle);
  size_t number = 0;  // of the pictures
  for (const PageSection& s : sections) {
    page += fmt::format("<section>\n<h2>{}</h2>\n", html_text(s.title));
    if (!s.text.empty()) page += fmt::format("<p>{}</p>\n", html_text(s.text));
    if (!s.table.empty()) page += fmt::format("<div class=\"wide\">\n{}</div>\n", s.table.html());
    if (!s.curves.empty()) page += figure(run_curves_script(s.curves, s.value, CurveOver::kStep, ""), s.title, number);
    for (const Plot& plot : s.plots) page += figure(plot_script(plot), s.title, number);
    for (const std::string& svg : s.svgs) page += figure(own_names(svg, number), s.title, "its file is empty");
    for (const auto& [heading, text] : s.quotations)
      page += fmt::format("<h3>{}</h3>\n<pre>{}</pre>\n", html_text(heading), html_text(text));
    page += "</section>\n";
  }
  return page + "</body>\n</html>\n";
}

std::vector<SectionPicture> section_pictures(const std::vector<PageSection>& sections) {
  std::vector<SectionPicture> pictures;
  std::set<std::string> names;
  const auto add = [&](std::string name, std::string script) {
    if (script.empty()) return;
    std::ranges::replace_if(
        name, [](char c) { return std::string_view("_.+").find(c) == std::string_view::npos && !is_alphanumeric(c); },
        '-');
    std::string unique = name;
    for (int number = 2; !names.insert(unique).second; ++number) unique = fmt::format("{}-{}", name, number);
    pictures.push_back({std::move(unique), std::move(script)});
  };
  for (const PageSection& s : sections) {
    if (!s.curves.empty())
      add(fmt::format("{}-{}", s.title, name_of(s.value)),
          run_curves_script(s.curves, s.value, CurveOver::kStep, s.title));
    for (const Plot& plot : s.plots) add(fmt::format("{}-{}", s.title, plot.name), plot_script(plot));
  }
  return pictures;
}

std::string markdown_page(const std::string& title, const std::vector<PageSection>& sections) {
  std::string page = fmt::format("# {}\n", markdown_text(title));
  for (const PageSection& s : sections) {
    page += fmt::format("\n## {}\n\n", markdown_text(s.title));
    if (!s.text.empty()) page += fmt::format("{}\n\n", markdown_text(s.text));
    if (!s.table.empty()) page += s.table.markdown();
    for (const auto& [heading, text] : s.quotations) {
      const std::string lines = printable_lines(text), fence = fence_around(lines);
      page += fmt::format("\n### {0}\n\n{1}\n{2}\n{1}\n", markdown_text(heading), fence, lines);
    }
  }
  return page;
}

}  // namespace fw
