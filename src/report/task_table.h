// The table and the learning curves of a task's cells (tasks/cell.h).
#pragma once

#include <string>
#include <vector>

#include "report/curves.h"
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

// Accuracy over steps, a curve for each cell.
std::vector<RunCurve> task_curves(const std::vector<TaskResult>& results);

// Accuracy at the training length over steps, a curve for each cell: base + ".svg" and ".png".
PictureResult write_task_curves(const std::vector<TaskResult>& results, const std::string& base);

}  // namespace fw
