// Requests: from the raw files of data sets with the harness's wording, to JSON lines and back, and what is refused.
#include "tasks/raw_requests.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/temp_folder.h"
#include "support/error_of.h"
#include "tasks/unicode.h"

namespace fw {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

Request only(const std::string& task, const std::string& line, const RecallOptions& recall = {}) {
  const testing::TempFolder folder;
  write_file_atomic(folder.path("raw"), line + "\n");
  const RequestFile file = requests_from_raw(task, folder.path("raw"), recall, false);
  EXPECT_EQ(file.requests.size(), 1u);
  EXPECT_EQ(file.requests.front().task, task);
  EXPECT_EQ(file.requests.front().id, "0");
  return file.requests.front();
}

TEST(RawRequests, MultipleChoice) {
  const Request piqa = only("piqa", R"({"goal": "Open it", "sol1": "pull", "sol2": "push", "label": 1})");
  EXPECT_THAT(piqa.contexts, ElementsAre("Question: Open it\nAnswer:"));
  EXPECT_THAT(piqa.choices, ElementsAre("pull", "push"));
  EXPECT_EQ(piqa.gold, 1);

  const Request hellaswag = only(
      "hellaswag",
      R"({"activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he STARTS", "endings": [" is [sic] up. ", "a [title] b", "c", "d"], "label": "2"})");
  EXPECT_THAT(hellaswag.contexts, ElementsAre("Roof: A man sits. He starts"));
  EXPECT_THAT(hellaswag.choices, ElementsAre("is up.", "a. b", "c", "d"));
  EXPECT_EQ(hellaswag.gold, 2);

  const Request winogrande = only(
      "winogrande",
      R"({"sentence": "The cup beat the box as _ was small.", "option1": "the cup", "option2": "the box", "answer": "2"})");
  EXPECT_EQ(winogrande.kind, RequestKind::kContexts);
  EXPECT_THAT(winogrande.contexts, ElementsAre("The cup beat the box as the cup", "The cup beat the box as the box"));
  EXPECT_THAT(winogrande.choices, ElementsAre("was small."));
  EXPECT_EQ(winogrande.gold, 1);

  const Request arc =
      only("arc_easy",
           R"({"question": "Why?", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}, "answerKey": "C"})");
  EXPECT_THAT(arc.contexts, ElementsAre("Question: Why?\nAnswer:"));
  EXPECT_EQ(arc.gold, 2);
  EXPECT_EQ(only("arc_challenge",
                 R"({"question": "Why?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": 2})")
                .gold,
            1);
  EXPECT_THAT(
      only("openbookqa",
           R"({"question_stem": "The sun", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"})")
          .contexts,
      ElementsAre("The sun"));
  const Request social =
      only("social_iqa",
           R"({"context": "C.", "question": "Q?", "answerA": "a", "answerB": "b", "answerC": "c", "label": "3"})");
  EXPECT_THAT(social.contexts, ElementsAre("Q: C. Q?\nA:"));
  EXPECT_EQ(social.gold, 2);
  const Request boolq = only("boolq", R"({"passage": "P", "question": "is it", "label": 0})");
  EXPECT_THAT(boolq.contexts, ElementsAre("P\nQuestion: is it?\nAnswer:"));
  EXPECT_THAT(boolq.choices, ElementsAre("no", "yes"));
  const Request sciq = only(
      "sciq",
      R"({"support": "S.", "question": "Q", "distractor1": "a", "distractor2": "b", "distractor3": "c", "correct_answer": "d"})");
  EXPECT_THAT(sciq.contexts, ElementsAre("S.\nQuestion: Q\nAnswer:"));
  EXPECT_THAT(sciq.choices, ElementsAre("a", "b", "c", "d"));
  EXPECT_EQ(sciq.gold, 3);
}

TEST(RawRequests, TheLastWord) {
  const Request r = only("lambada", R"({"text": "He said the last word"})");
  EXPECT_THAT(r.contexts, ElementsAre("He said the last"));
  EXPECT_THAT(r.choices, ElementsAre(" word"));
}

TEST(RawRequests, Recall) {
  const Request fda = only("fda", R"({"text": "Device A. Class: II. Class: ", "key": "Class", "value": "II"})");
  EXPECT_THAT(fda.contexts, ElementsAre("Device A. Class: II."));
  EXPECT_EQ(fda.question, " Class:");
  EXPECT_THAT(fda.answers, ElementsAre("II"));
  EXPECT_EQ(fda.max_gen, 48);
  EXPECT_THAT(fda.until, ElementsAre("\n"));
  EXPECT_EQ(fda.truncation, Truncation::kAnswerWindow);
  EXPECT_EQ(fda.max_length, 2000);
  const Request swde =
      only("swde", R"({"text": "Page text. Summary of information above: Year", "key": "Year", "value": "1999"})");
  EXPECT_THAT(swde.contexts, ElementsAre("Page text."));
  EXPECT_EQ(swde.question, ". Year:");
  const Request stored =
      only("fda", R"({"text": "Device A. Class: ", "key": "Class", "value": "II"})", {.as_stored = true});
  EXPECT_THAT(stored.contexts, ElementsAre("Device A. Class: "));
  EXPECT_EQ(stored.question, "");
  EXPECT_EQ(stored.truncation, Truncation::kLeft);
  const Request squad = only("squad", R"({"text": "T. The answer is", "value": "x"})");
  EXPECT_THAT(squad.contexts, ElementsAre("T. The answer is"));
  const Request trivia = only(
      "triviaqa",
      R"({"context": "[DOC] [TLE] Title. He was born in", "question": "He was born in", "answers": ["Rome", "Roma"]})");
  EXPECT_THAT(trivia.contexts, ElementsAre("  Title."));
  EXPECT_EQ(trivia.question, ". He was born in");
  EXPECT_THAT(trivia.answers, ElementsAre("Rome", "Roma"));
}

TEST(RawRequests, WikiTextAsItWasBefore) {
  EXPECT_EQ(wikitext_detokenized("= Title = \n \n It 's a \" fine \" ( big ) well @-@ made , 1 @,@ 000 @.@ 5 thing ; "
                                 "so . \n = = Part = = \n the dogs ' bowl : "
                                 "N of [ x ] { y } ? no ! "),
            "= Title =\n\nIt's a \"fine\" (big) well-made, 1,000.5 thing; so.\n== Part ==\nthe dogs' bowl: 1 of [x] "
            "{y}? no! ");
  EXPECT_EQ(wikitext_detokenized("20 \u00b0 C"), "20\u00b0C");
  EXPECT_EQ(wikitext_detokenized("he said ' yes ' to"), "he said 'yes' to");
}

TEST(RawRequests, PagesOfAText) {
  const testing::TempFolder folder;
  write_file_atomic(folder.path("wiki"),
                    " \n = One = \n \n some text \n = = Part = = \n more \n = Two = \n \n last words \n");
  const RequestFile file = requests_from_raw("wikitext", folder.path("wiki"), {}, false);
  ASSERT_EQ(file.requests.size(), 2u);
  EXPECT_EQ(file.requests[0].text, " = One =\n\nsome text\n== Part ==\nmore\n");
  EXPECT_EQ(file.requests[0].bytes, 10 + 2 + 12 + 15 + 7);  // line by line, from the title on
  EXPECT_EQ(file.requests[1].id, "1");
  // Split at white space: an empty piece before the first word and one after the last.
  EXPECT_EQ(file.requests[1].words, 2 + 5);
  // As lines of pages, the same.
  write_file_atomic(folder.path("pages"), nlohmann::json{{"page", " = Two = \n \n last words \n"}}.dump());
  const RequestFile pages = requests_from_raw("wikitext", folder.path("pages"), {}, false);
  EXPECT_EQ(pages.requests[0].text, file.requests[1].text);
  EXPECT_EQ(pages.requests[0].words, file.requests[1].words);
}

TEST(RawRequests, BadLinesAreNamedAndSkippedOnlyOnRequest) {
  const testing::TempFolder folder;
  const std::string path = folder.path("raw");
  write_file_atomic(path, R"({"goal": "g", "sol1": "a", "sol2": "b", "label": 1}
{"goal": "g", "sol1": "a", "label": 1}
not json
{"goal": "g", "sol1": "a", "sol2": "b", "label": 7}
)");
  EXPECT_THAT(error_of([&] { requests_from_raw("piqa", path, {}, false); }),
              HasSubstr(path + ":2: the key \"sol2\" is missing; --skip-bad"));
  const RequestFile file = requests_from_raw("piqa", path, {}, true);
  EXPECT_EQ(file.requests.size(), 1u);
  ASSERT_EQ(file.skipped.size(), 3u);
  EXPECT_THAT(file.skipped[1], HasSubstr(path + ":3: expected JSON"));
  EXPECT_THAT(file.skipped[2], HasSubstr(path + ":4: label: expected 0 to 1, got '7'"));
  EXPECT_THAT(error_of([&] { requests_from_raw("piqua", path, {}, false); }), HasSubstr("did you mean 'piqa'?"));
}

TEST(Requests, ComeBackFromTheirLines) {
  const testing::TempFolder folder;
  const char* lines[] = {
      R"({"choices":["a","b"],"ctx":"Question: x\nAnswer:","gold":1,"id":"7","task":"piqa","type":"mc"})",
      R"({"cont":"was small.","ctxs":["the cup","the box"],"gold":0,"id":"3","task":"winogrande","type":"mc_ctx"})",
      R"({"cont":" word","ctx":"the last","id":"0","task":"lambada","type":"ll"})",
      R"({"id":"0","n_bytes":9,"n_words":2,"task":"wikitext","text":"some text","type":"rolling"})",
      R"({"answers":["II"],"id":"5","max_ctx":2000,"max_gen":48,"metric":"contains","prompt_ctx":"doc","prompt_q":" Key:","task":"fda","trunc":"answer_window","type":"gen","until":["\n"]})",
      R"({"answers":["1234567"],"id":"0","max_gen":128,"max_len":4096,"metric":"substr_all","prompt":"p","task":"niah_single_2","type":"gen","until":[]})"};
  std::string text;
  for (const char* line : lines) text.append(line).append("\n\n");
  write_file_atomic(folder.path("r"), text);
  const RequestFile file = read_requests(folder.path("r"), "", false);
  ASSERT_EQ(file.requests.size(), std::size(lines));
  for (size_t i = 0; i < std::size(lines); ++i) EXPECT_EQ(to_json(file.requests[i]).dump(), lines[i]);
  EXPECT_EQ(read_requests(folder.path("r"), "fda", false).requests.size(), 1u);
  EXPECT_THAT(error_of([&] { read_requests(folder.path("r"), "sciq", false); }),
              HasSubstr("no request of the task 'sciq'; its tasks are piqa, winogrande"));
}

TEST(Requests, LinesThatAreNone) {
  const auto refused = [](const std::string& line) {
    return error_of([&] { request_from_json(nlohmann::json::parse(line), "f:1"); });
  };
  EXPECT_EQ(refused("3"), "f:1: expected a JSON object, got 3");
  EXPECT_EQ(refused(R"({"task":"a","id":"0","type":"mcc"})"),
            "f:1: type: expected one of mc, mc_ctx, ll, rolling, gen, got 'mcc'; did you mean 'mc'?");
  EXPECT_EQ(refused(R"({"task":"a","id":"0","type":"mc","ctx":"c","choices":["a"],"gold":0})"),
            "f:1: choices: expected at least 2, got 1");
  EXPECT_EQ(refused(R"({"task":"a","id":"0","type":"mc","ctx":"c","choices":["a",""],"gold":0})"),
            "f:1: choices: expected texts, got an empty one");
  EXPECT_EQ(refused(R"({"task":"a","id":"0","type":"mc","ctx":"c","choices":["a","b"],"gold":2})"),
            "f:1: gold: expected a whole number from 0 to 1, got 2");
  EXPECT_EQ(refused(R"({"task":"a","id":"0","type":"ll","ctx":"c"})"), "f:1: the key \"cont\" is missing");
  EXPECT_EQ(refused(R"({"task":"a","id":[],"type":"ll","ctx":"c"})"), "f:1: id: expected a string, got []");
  EXPECT_EQ(refused(R"({"task":"a","id":0,"type":"gen","prompt":"p","answers":[],"max_gen":3,"metric":"contains"})"),
            "f:1: answers: expected at least 1, got 0");
}

// What would be refused among requests is refused among raw lines: no score is made of an answer that every output has.
TEST(RawRequests, AreCheckedAsRequestsAre) {
  const testing::TempFolder folder;
  const auto refused = [&](const std::string& task, const std::string& line) {
    write_file_atomic(folder.path("raw"), line);
    return error_of([&] { requests_from_raw(task, folder.path("raw"), {}, false); });
  };
  EXPECT_THAT(refused("squad", R"({"text": "t", "value": ""})"),
              HasSubstr("answers: expected texts, got an empty one"));
  EXPECT_THAT(refused("nq", R"({"context": "c", "question": "q", "answers": []})"),
              HasSubstr("answers: expected at least 1"));
  EXPECT_THAT(refused("piqa", R"({"goal": "g", "sol1": "", "sol2": "b", "label": 0})"),
              HasSubstr("choices: expected texts, got an empty one"));
  EXPECT_THAT(
      refused("hellaswag", R"({"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["one"], "label": 0})"),
      HasSubstr("choices: expected at least 2, got 1"));
}

TEST(Requests, NumbersAsPythonWritesThem) {
  const testing::TempFolder folder;
  const std::string good =
      R"({"task":"a","id":"0","type":"ll","ctx":"c","cont":" d","score":NaN,"other":[-Infinity,1e999]})";
  write_file_atomic(folder.path("r"), good);
  EXPECT_EQ(read_requests(folder.path("r"), "", false).requests.size(), 1u);
  const auto refused = [&](const std::string& gold) {
    write_file_atomic(folder.path("r"),
                      R"({"task":"a","id":"0","type":"mc","ctx":"c","choices":["a","b"],"gold":)" + gold + "}");
    return error_of([&] { read_requests(folder.path("r"), "", false); });
  };
  EXPECT_THAT(refused("NaN"), HasSubstr("gold: expected a whole number from 0 to 1, got NaN"));
  EXPECT_THAT(refused("-Infinity"), HasSubstr("got -Infinity"));
  EXPECT_THAT(refused("1e999"), HasSubstr("got Infinity"));
}

TEST(Unicode, WhatBytesDoNotSay) {
  EXPECT_EQ(code_points("na\u00efve \U0001f600"), 7);
  EXPECT_EQ(capitalized("\u00e9COLE"), "\u00c9cole");
  EXPECT_EQ(capitalized(""), "");
  EXPECT_TRUE(contains_ignoring_case("die STRA\u00dfe", "stra\u00dfE"));
  EXPECT_EQ(trailing_space("a \u00a0\n"), 4u);
  EXPECT_EQ(trailing_space("  "), 2u);
  EXPECT_EQ(stripped(" \t a b\u2003"), "a b");
  EXPECT_EQ(pieces_between_space(" a  b\n"), 4);  // "", a, b, ""
  EXPECT_EQ(pieces_between_space("a b"), 2);
  EXPECT_THAT(words_of(" one\n two "), ElementsAre("one", "two"));
  EXPECT_THAT(sentences_of("First one. Second, too?  Third!"), ElementsAre("First one.", "Second, too?", "Third!"));
}

}  // namespace
}  // namespace fw
