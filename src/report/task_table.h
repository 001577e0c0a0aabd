// The table and the learning curves of a task's cells (tasks/cell.h).
#pragma once

#include <string>
#include <vector>

#include "report/curves.h"
#include "report/plot.h"
#include "report/table.h"
#include "tasks/cell.h"

namespace fw {

// A row for each rule and learning rate, in the order in which they come. A row has the accuracy in per cent at each
// length, mean and, of several seeds, the standard deviation of one (n - 1). The published accuracy stands after it.
// Last the ceiling of a last-write memory where the task has one. mqar_zoology is counted by example (macro), all
// others by question (micro), as their papers do.
Table task_table(const std::vector<TaskResult>& results);

// What the table is of, and how it was trained and judged, in a paragraph. results: at least one.
std::string task_caption(const std::vector<TaskResult>& results);

// As Markdown: the table, what it is of, and what to know of the published numbers beside it.
std::string task_report(const std::vector<TaskResult>& results);

// Accuracy over the lengths that models are judged at: a line for each rule and learning rate, with a band from the
// lowest to the highest seed, and a dotted line at the training length. Of mixtures' tests it is that of the most
// pairs. Without two lengths it has no line.
Plot task_lengths(const std::vector<TaskResult>& results);

// Accuracy over steps, a curve for each rule and learning rate.
std::vector<RunCurve> task_curves(const std::vector<TaskResult>& results);

// Accuracy at the training length over steps: base + ".svg" and ".png"; and over the lengths: base + "-lengths.svg" and
// ".png".
PictureResult write_task_curves(const std::vector<TaskResult>& results, const std::string& base);

}  // namespace fw
