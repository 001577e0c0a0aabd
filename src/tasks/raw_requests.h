// Requests from the raw files of data sets, as their publishers have them: JSON lines with the fields named here, or
// for wikitext the text itself. The wording of contexts is that of lm-evaluation-harness (zero-shot), of the recall
// suite that of JRT.
//
//   piqa                         goal, sol1, sol2, label
//   hellaswag                    activity_label, ctx_a, ctx_b, endings, label
//   winogrande                   sentence, option1, option2, answer
//   arc_easy, arc_challenge      question, choices {text, label}, answerKey
//   openbookqa                   question_stem, choices {text, label}, answerKey
//   social_iqa                   context, question, answerA, answerB, answerC, label (1 to 3)
//   boolq                        passage, question, label
//   sciq                         support, question, distractor1 to 3, correct_answer
//   lambada                      text
//   wikitext                     page; or a plain text, a page from each title (" = Title = ") to the next
//   swde, fda, squad             text, key, value (squad: no key)
//   nq, triviaqa, drop           context, question, answers
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tasks/request.h"

namespace fw {

std::vector<std::string> raw_tasks();
std::vector<std::string> recall_tasks();  // those that RecallOptions are of

// Of the recall suite (the last two lines above).
struct RecallOptions {
  int64_t max_context = 2000;  // tokens of prompt and output
  // of the document; squad's, whose question is inside, is always cut at its left
  Truncation truncation = Truncation::kAnswerWindow;
  // swde and fda: the text as it stands in the file, as lm-evaluation-harness asks it
  bool as_stored = false;
};

// Throws Error(kUsage) for an unknown task, and naming file and line for a line that lacks a field; with skip_bad such
// lines are left out and named.
RequestFile requests_from_raw(const std::string& task, const std::string& path, const RecallOptions& recall,
                              bool skip_bad);

// WikiText's tokenized text as it was before: " @-@ " is "-", " , " is ", ", and so on; the harness's steps in its
// order.
std::string wikitext_detokenized(std::string_view page);

}  // namespace fw
