// generate: several texts from one state, prompts from a file, conversations, end tokens, JSON.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "cli/program.h"

namespace fw::test {
namespace {

using testing::HasSubstr;
using testing::Not;
using Json = nlohmann::json;
using Args = std::vector<std::string>;

class Generate : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<Folder>();
    spill(*folder_ / "text", small_text());
    trained_ = run(tiny_train(*folder_ / "text", *folder_ / "run"));
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override { ASSERT_EQ(trained_.code, 0) << trained_.out << trained_.err; }

  static std::string path(const std::string& name) { return *folder_ / name; }
  static Args command(const Args& more) {
    return Args{"generate", *folder_ / "run", "--threads", "1", "--no-echo"} + more;
  }
  static std::string text(const Args& more) {
    const Outcome outcome = run(command(more));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  }
  static std::vector<Json> lines(const std::string& out) {
    std::vector<Json> objects;
    std::istringstream in(out);
    for (std::string line; std::getline(in, line);) objects.push_back(Json::parse(line));
    return objects;
  }
  static std::vector<Json> json(const Args& more) { return lines(text(more + Args{"--json"})); }
  // Ids as text: bytes are tokens.
  static std::string bytes(const Json& object) {
    std::string s;
    for (const int id : object.at("ids")) s += static_cast<char>(id);
    return s;
  }

  static std::unique_ptr<Folder> folder_;
  static Outcome trained_;
};
std::unique_ptr<Folder> Generate::folder_;
Outcome Generate::trained_;

TEST_F(Generate, SamplesAreThoseOfTheSeedsThatFollow) {
  const auto samples = json({"--prompt", "the state ", "--tokens", "40", "--seed", "7", "--samples", "3"});
  ASSERT_EQ(samples.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(samples[static_cast<size_t>(i)].at("sample"), i);
    EXPECT_EQ(bytes(samples[static_cast<size_t>(i)]),
              text({"--prompt", "the state ", "--tokens", "40", "--seed", std::to_string(7 + i)}));
  }
  EXPECT_NE(bytes(samples[0]), bytes(samples[1]));
  const std::string shown = text({"--prompt", "the state ", "--tokens", "5", "--seed", "7", "--samples", "2"});
  EXPECT_EQ(shown,
            "--- sample 0\n" + bytes(samples[0]).substr(0, 5) + "\n--- sample 1\n" + bytes(samples[1]).substr(0, 5));
}

TEST_F(Generate, JsonSaysWhatCameAndWhyItStopped) {
  const auto one = json({"--prompt", "key", "--tokens", "30"});
  ASSERT_EQ(one.size(), 1u);
  for (const char* key :
       {"prompt", "sample", "text", "ids", "logprobs", "stopped_by", "prompt_tokens", "prompt_seconds", "seconds"})
    EXPECT_TRUE(one[0].contains(key)) << key;
  EXPECT_EQ(one[0].size(), 9u) << "docs/json.md lists the keys";
  EXPECT_EQ(one[0].at("stopped_by"), "tokens");
  EXPECT_EQ(one[0].at("ids").size(), 30u);
  EXPECT_EQ(one[0].at("logprobs").size(), 30u);
  for (const double p : one[0].at("logprobs")) EXPECT_LE(p, 0);
  EXPECT_EQ(one[0].at("prompt_tokens"), 3);
  const std::string whole = bytes(one[0]);
  EXPECT_EQ(json({"--prompt", "key", "--tokens", "30", "--stop", whole.substr(10, 2)})[0].at("stopped_by"), "stop");
  // Bytes that are no text are still JSON: an untrained model writes all of them.
  const auto hot = json({"--tokens", "200", "--temperature", "50"});
  EXPECT_EQ(hot[0].at("ids").size(), 200u);
}

TEST_F(Generate, EndTokensStop) {
  const std::string whole = text({"--prompt", "key", "--tokens", "30"});
  const std::string id = std::to_string(static_cast<int>(static_cast<unsigned char>(whole[12])));
  EXPECT_EQ(text({"--prompt", "key", "--tokens", "30", "--end-token", "7," + id}),
            whole.substr(0, whole.find(whole[12])));
  // A model that names its own, as published ones do.
  const std::string model = path("with-end");
  ASSERT_EQ(run(tiny_train(path("text"), path("gated")) + Args{"--rule", "gated_deltanet"}).code, 0);
  ASSERT_EQ(run({"export", path("gated"), model}).code, 0);
  const Args write{"generate", model, "--tokenizer", "bytes", "--prompt", "key", "--tokens", "30", "--no-echo"};
  const std::string all = run(write).out;
  ASSERT_EQ(all.size(), 30u);
  Json config = Json::parse(slurp(model + "/config.json"));
  config["eos_token_id"] = Json::array({999999, static_cast<int>(static_cast<unsigned char>(all[12]))});
  spill(model + "/config.json", config.dump());
  EXPECT_EQ(run(write).out, all.substr(0, all.find(all[12])));
  EXPECT_EQ(run(write + Args{"--ignore-end"}).out, all);
  // Imported it still ends there.
  ASSERT_EQ(run({"import", model, path("imported"), "--tokenizer", "bytes"}).code, 0);
  EXPECT_EQ(run({"generate", path("imported"), "--prompt", "key", "--tokens", "30", "--no-echo"}).out,
            all.substr(0, all.find(all[12])));
  EXPECT_EQ(run(command({"--end-token", "256"})).code, 2);
}

// Messages stand where the template has them.
TEST_F(Generate, ChatsAsTheTemplateHasIt) {
  const std::string model = path("chat");
  const Args train =
      tiny_train(path("text"), path("chat-run")) + Args{"--rule", "gated_deltanet", "--vocab-size", "258"};
  ASSERT_EQ(run(train).code, 0);
  ASSERT_EQ(run({"export", path("chat-run"), model}).code, 0);
  Json tokenizer = Json::parse(slurp(model + "/tokenizer.json"));
  for (const auto& [id, content] : {std::pair(256, "<|im_start|>"), std::pair(257, "<|im_end|>")}) {
    Json token = {{"id", id}, {"content", content}, {"special", true}};
    for (const char* key : {"single_word", "lstrip", "rstrip", "normalized"}) token[key] = false;
    tokenizer["added_tokens"].push_back(token);
  }
  spill(model + "/tokenizer.json", tokenizer.dump());
  const Args base{"generate", model, "--greedy", "--tokens", "6"};
  EXPECT_THAT(run(base + Args{"--chat", "--prompt", "hi"}).err, HasSubstr("has no chat template"));
  spill(model + "/chat_template.jinja", "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}");
  EXPECT_THAT(run(base + Args{"--chat", "--prompt", "hi"}).err, HasSubstr("expected a special token"));
  spill(model + "/chat_template.jinja",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content|trim }}<|im_end|>\n{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}");
  const auto answer = [&](const Args& more) { return run(base + Args{"--json"} + more).out; };
  const auto ids = [&](const std::string& out) { return lines(out).back().at("ids"); };
  const std::string user = "<|im_start|>user\n", end = "<|im_end|>\n", assistant = "<|im_start|>assistant\n";
  const std::string first = "<|im_start|>system\nbe kind" + end + user + "hi" + end + assistant;
  const std::string chat = answer({"--chat", "--system", "be kind", "--prompt", "hi"});
  EXPECT_EQ(lines(chat)[0].at("prompt_tokens"), 17 + 21);
  EXPECT_EQ(ids(chat), ids(answer({"--prompt", first, "--end-token", "257"})));
  EXPECT_EQ(ids(answer({"--chat", "--system", "be kind", "--prompt", " hi\n"})), ids(chat));
  // The second message comes after the answer and its end.
  const Outcome talk =
      run_with_input(base + Args{"--json", "--chat", "--system", "be kind", "--conversation"}, "hi\nand then?\n");
  ASSERT_EQ(talk.code, 0) << talk.err;
  const std::vector<Json> turns = lines(talk.out);
  ASSERT_EQ(turns.size(), 2u);
  EXPECT_EQ(turns[0].at("ids"), ids(chat));
  const bool ended = turns[0].at("stopped_by") == "end";
  EXPECT_EQ(turns[1].at("prompt_tokens"), 21 + 7 + (ended ? 1 : 2));
  EXPECT_THAT(run(base + Args{"--chat", "--before", "x"}).err, HasSubstr("expected neither --before nor --after"));
  EXPECT_THAT(run(base + Args{"--system", "x"}).err, HasSubstr("--system: expected --chat"));
}

TEST_F(Generate, PromptsGoOnFromOneState) {
  spill(path("prompts"), "key\n\nthe state\nit");
  const auto objects = json({"--prompt", "and a ", "--prompts", path("prompts"), "--tokens", "20", "--samples", "2",
                             "--before", "<", "--after", ">"});
  ASSERT_EQ(objects.size(), 8u);
  const Args prompts{"and a <key>", "and a <>", "and a <the state>", "and a <it>"};
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(objects[i].at("prompt"), i / 2);
    EXPECT_EQ(objects[i].at("sample"), i % 2);
  }
  // The prefix's state, its own file, and the whole prompt at once give the same where rounding does: greedy.
  for (size_t i = 0; i < 4; ++i) {
    const auto greedy = json({"--prompt", "and a ", "--prompts", path("prompts"), "--tokens", "20", "--before", "<",
                              "--after", ">", "--greedy"});
    EXPECT_EQ(bytes(greedy[i]), text({"--prompt", prompts[i], "--tokens", "20", "--greedy"})) << i;
  }
  ASSERT_EQ(text({"--prompt", "and a ", "--tokens", "0", "--state-save", path("prefix")}), "");
  spill(path("two"), "key\nit");
  spill(path("prompts.jsonl"), "{\"prompt\": \"key\"}\n{\"prompt\": \"two\\nlines\"}\n");
  spill(path("number.jsonl"), "{\"prompt\": 5}\n");
  const Outcome number = run(command({"--prompts", path("number.jsonl")}));
  EXPECT_THAT(number.err, HasSubstr("\"prompt\" is not a string"));
  EXPECT_THAT(number.err, Not(HasSubstr("--field")));
  const auto loaded =
      json({"--state-load", path("prefix"), "--prompts", path("prompts.jsonl"), "--tokens", "20", "--greedy"});
  ASSERT_EQ(loaded.size(), 2u);
  EXPECT_EQ(bytes(loaded[1]), text({"--prompt", "and a two\nlines", "--tokens", "20", "--greedy"}));
  // The same through a pipe, and the prompt too.
  const Args piped{"--prompt", "and a ", "--prompts", "-", "--tokens", "20", "--greedy"};
  EXPECT_EQ(run_with_input(command(piped), "key\nit").out,
            text({"--prompt", "and a ", "--prompts", path("two"), "--tokens", "20", "--greedy"}));
  EXPECT_EQ(run_with_input(command({"--prompt-file", "-", "--tokens", "20", "--greedy"}), "and a key").out,
            text({"--prompt", "and a key", "--tokens", "20", "--greedy"}));
  EXPECT_EQ(run_with_input(command({"--prompt-file", "-", "--prompts", "-"}), "key").code, 2);
  spill(path("empty"), "");
  EXPECT_EQ(run(command({"--prompts", path("empty")})).code, 2);
  spill(path("bad.jsonl"), "{\"text\": \"key\"}\n");
  EXPECT_THAT(run(command({"--prompts", path("bad.jsonl")})).err, HasSubstr("bad.jsonl:1"));
}

// More texts than slots, some longer than others; printed in the order of the lines.
TEST_F(Generate, ABatchGivesWhatEachTextGivesAlone) {
  spill(path("lines"), "key\n\nthe state\nit\nand the\na");
  for (const char* seed : {"3", "4"}) {
    const Args all{
        "--prompt", "and a ", "--prompts", path("lines"),          "--tokens", "30", "--samples", "2", "--seed",
        seed,       "--stop", "e",         "--repetition-penalty", "1.2"};
    EXPECT_EQ(text(all + Args{"--batch", "3"}), text(all));
    const auto alone = json(all), beside = json(all + Args{"--batch", "4"});
    ASSERT_EQ(alone.size(), 12U);
    ASSERT_EQ(beside.size(), alone.size());
    for (size_t i = 0; i < alone.size(); ++i) {
      for (const char* key : {"prompt", "sample", "text", "ids", "logprobs", "stopped_by", "prompt_tokens"})
        EXPECT_EQ(beside[i].at(key), alone[i].at(key)) << i << ' ' << key;
    }
  }
  EXPECT_EQ(text({"--samples", "3", "--tokens", "0", "--batch", "2"}), text({"--samples", "3", "--tokens", "0"}));
  EXPECT_EQ(text({"--samples", "5", "--tokens", "9", "--batch", "2"}), text({"--samples", "5", "--tokens", "9"}));
  EXPECT_THAT(run(command({"--prompt", "a", "--batch", "2"})).err, HasSubstr("--batch"));
  EXPECT_EQ(run(command({"--samples", "2", "--batch", "0"})).code, 2);
}

// Of a text, of texts side by side, and of a conversation whose state is kept in the middle of a ring.
TEST_F(Generate, ARingGivesTheTextOfSteps) {
  const Args one{"--prompt", "and the ", "--tokens", "40", "--greedy"};
  const std::string steps = text(one + Args{"--ring", "0"});
  EXPECT_EQ(text(one), steps) << "the CPU has none of itself";
  for (const char* ring : {"1", "2", "16", "64"}) EXPECT_EQ(text(one + Args{"--ring", ring}), steps) << ring;
  const Args several{"--prompt", "and the ", "--tokens", "30", "--samples", "5", "--seed", "2"};
  EXPECT_EQ(text(several + Args{"--ring", "1", "--batch", "3"}), text(several));
  EXPECT_EQ(text(several + Args{"--ring", "6", "--batch", "3"}), text(several + Args{"--ring", "6"}));
  for (const char* ring : {"0", "6"}) {
    const Args first{"--prompt", "the ", "--tokens", "9", "--greedy", "--ring", ring, "--state-save", path("ringed")};
    EXPECT_EQ(run(command(first)).code, 0);
    // Nobody sees from a state whether there was a ring.
    const Args next{"--state-load", path("ringed"), "--tokens", "20", "--greedy"};
    EXPECT_EQ(text(next + Args{"--ring", "0"}), text(next + Args{"--ring", "6"})) << ring;
  }
  EXPECT_THAT(run(command(one + Args{"--ring", "65"})).err, HasSubstr("decode ring: expected 0 to 64 tokens, got 65"));
  EXPECT_THAT(run(command(one + Args{"--ring", "2", "--decode-bits"})).err,
              HasSubstr("--ring: expected 0 or 1 with --decode-bits"));
  EXPECT_EQ(text(one + Args{"--ring", "1", "--decode-bits"}), text(one + Args{"--decode-bits"}));
}

// Ends of all kinds come in the middle of drafts that are right: a number of tokens, a stop text, an end token.
TEST_F(Generate, DraftsGiveTheTextOfSingleTokens) {
  const std::string prompt = "and the state and the state and the ";
  for (const Args& ends :
       {Args{"--tokens", "41"}, Args{"--tokens", "60", "--stop", "s"}, Args{"--tokens", "60", "--end-token", "116"}}) {
    const Args one = Args{"--prompt", prompt, "--greedy"} + ends;
    const auto single = json(one);
    for (const char* drafts : {"1", "4", "7", "16"}) {
      const auto got = json(one + Args{"--drafts", drafts});
      for (const char* key : {"text", "ids", "stopped_by"})
        EXPECT_EQ(got.at(0).at(key), single.at(0).at(key)) << drafts << ' ' << key;
      // 17 rows of a product round otherwise.
      if (std::string(drafts) != "16") {
        EXPECT_EQ(got.at(0).at("logprobs"), single.at(0).at("logprobs")) << drafts;
      }
    }
  }
  spill(path("drafted"), "key\n\nthe state the state the\nit\nand the\na");
  const Args several{"--prompt", prompt,      "--prompts", path("drafted"), "--tokens",
                     "30",       "--samples", "2",         "--stop",        "e"};
  EXPECT_EQ(text(several + Args{"--drafts", "4"}), text(several));
  EXPECT_EQ(text(several + Args{"--drafts", "3", "--batch", "3"}), text(several));
  // A state that is kept between drafts is that of the text.
  for (const char* drafts : {"0", "5"}) {
    EXPECT_EQ(run(command({"--prompt", prompt, "--tokens", "9", "--greedy", "--drafts", drafts, "--state-save",
                           path(std::string("after") + drafts)}))
                  .code,
              0);
    EXPECT_EQ(text({"--state-load", path(std::string("after") + drafts), "--tokens", "20", "--greedy"}),
              text({"--state-load", path("after0"), "--tokens", "20", "--greedy", "--drafts", "4"}));
  }
  const Outcome stats = run(command({"--prompt", prompt, "--tokens", "40", "--greedy", "--drafts", "4", "--stats"}));
  EXPECT_THAT(stats.err, testing::ContainsRegex("; [1-9][0-9]* of [1-9][0-9]* drafts accepted"));
  EXPECT_THAT(run(command({"--prompt", prompt, "--stats"})).err, testing::Not(HasSubstr("drafts")));
  for (const char* drafts : {"-1", "17"})
    EXPECT_THAT(run(command({"--prompt", prompt, "--drafts", drafts})).err,
                HasSubstr(std::string("--drafts: expected 0 to 16, got ") + drafts));
  EXPECT_THAT(run(command({"--prompt", prompt, "--drafts", "2", "--ring", "4"})).err,
              HasSubstr("drafts: expected none with a decode ring of 4 tokens, got 2"));
}

TEST_F(Generate, AnotherSeedWithALoadedState) {
  ASSERT_EQ(
      run(command({"--prompt", "the state ", "--tokens", "0", "--seed", "7", "--state-save", path("seeded")})).code, 0);
  const auto from = [&](const Args& more) {
    return text(Args{"--state-load", path("seeded"), "--tokens", "40"} + more);
  };
  const std::string own = text({"--prompt", "the state ", "--tokens", "40", "--seed", "7"});
  EXPECT_EQ(from({}), own) << "without --seed the state's own numbers go on";
  EXPECT_EQ(from({"--seed", "9"}), text({"--prompt", "the state ", "--tokens", "40", "--seed", "9"}));
  const auto samples = lines(from({"--samples", "3", "--json"}));
  EXPECT_EQ(bytes(samples[0]), own);
  EXPECT_NE(bytes(samples[1]), own);
  EXPECT_NE(bytes(samples[1]), bytes(samples[2]));
}

TEST_F(Generate, AConversationKeepsTheState) {
  const Args turns{"--conversation", "--tokens", "12", "--greedy"};
  const Outcome talk = run_with_input(command(turns + Args{"--json"}), "key\nthe state\nit");
  ASSERT_EQ(talk.code, 0) << talk.err;
  const auto objects = lines(talk.out);
  ASSERT_EQ(objects.size(), 3u);
  std::string all;
  for (size_t i = 0; i < 3; ++i) {
    all += std::string(i == 0 ? "key" : i == 1 ? "the state" : "it") + "\n";
    EXPECT_EQ(bytes(objects[i]), text({"--prompt", all, "--tokens", "12", "--greedy"})) << "turn " << i;
    all += bytes(objects[i]);
  }
  // As text, a line break after each turn; and in two parts with the state between them.
  const Outcome plain = run_with_input(command(turns), "key\nthe state\nit");
  std::string expected;
  for (const Json& turn : objects) expected += bytes(turn) + (bytes(turn).back() == '\n' ? "" : "\n");
  EXPECT_EQ(plain.out, expected);
  const Outcome first = run_with_input(command(turns + Args{"--state-save", path("talk")}), "key\nthe state\n");
  const Outcome second = run_with_input(command(turns + Args{"--state-load", path("talk")}), "it\n");
  EXPECT_EQ(first.out + second.out, expected);
  EXPECT_EQ(run_with_input(command(turns), "").out, "");
}

TEST_F(Generate, ThePromptComesFirst) {
  const std::string after = text({"--prompt", "key", "--tokens", "9"});
  const auto echoed = [](const Args& more) {
    return run(Args{"generate", path("run"), "--threads", "1", "--prompt", "key", "--tokens", "9"} + more);
  };
  EXPECT_EQ(echoed({}).out, "key" + after);
  EXPECT_EQ(echoed({"--echo"}).out, "key" + after);
  EXPECT_EQ(bytes(Json::parse(echoed({"--json"}).out)), after);
  spill(path("lines"), "the\n");
  const std::string line = text({"--prompts", path("lines"), "--tokens", "4"});
  EXPECT_EQ(run({"generate", path("run"), "--prompts", path("lines"), "--tokens", "4"}).out,
            "--- prompt 0, sample 0\nthe" + line.substr(line.find('\n') + 1));
  // What is typed in a conversation stands there already.
  const Args talk{"generate", path("run"), "--conversation", "--tokens", "4", "--greedy"};
  EXPECT_EQ(run_with_input(talk, "key\n").out, run_with_input(talk + Args{"--no-echo"}, "key\n").out);
}

// Marks of byte order and both ends of lines are no part of a prompt.
TEST_F(Generate, PromptsAreLinesHoweverTheyEnd) {
  spill(path("plain.txt"), "hello\n");
  spill(path("crlf.txt"), "hello\r\n");
  spill(path("bom.txt"), "\xef\xbb\xbfhello\n");
  const auto tokens = [](const std::string& name) {
    return json({"--prompts", path(name), "--tokens", "3", "--greedy"});
  };
  const auto plain = tokens("plain.txt");
  ASSERT_EQ(plain.size(), 1u);
  EXPECT_EQ(plain[0].at("prompt_tokens"), 5);
  for (const char* name : {"crlf.txt", "bom.txt"}) {
    const auto other = tokens(name);
    ASSERT_EQ(other.size(), 1u) << name;
    EXPECT_EQ(other[0].at("prompt_tokens"), 5) << name;
    EXPECT_EQ(other[0].at("ids"), plain[0].at("ids")) << name;
    const auto piped = lines(
        run_with_input(command({"--prompts", "-", "--tokens", "3", "--greedy", "--json"}), slurp(path(name))).out);
    ASSERT_EQ(piped.size(), 1u) << name;
    EXPECT_EQ(piped[0].at("ids"), plain[0].at("ids")) << name;
  }
  EXPECT_EQ(json({"--prompt-file", path("bom.txt"), "--tokens", "1"})[0].at("prompt_tokens"), 6)
      << "with its line's end";
  spill(path("utf16.txt"), std::string("\xff\xfeh\0i\0", 6));
  for (const char* option : {"--prompts", "--prompt-file"}) {
    const Outcome refused = run(command({option, path("utf16.txt")}));
    EXPECT_EQ(refused.code, 2);
    EXPECT_THAT(refused.err, HasSubstr("UTF-16"));
    EXPECT_THAT(refused.err, HasSubstr("iconv"));
  }
}

// A line is answered before the next is there.
TEST_F(Generate, PromptsOfStandardInputAreAnsweredAsTheyCome) {
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  const int input = ::open(path("fifo").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(input, 0);
  Program program(command({"--prompts", "-", "--tokens", "3", "--json"}), "", path("fifo"));
  ASSERT_EQ(::write(input, "key\n", 4), 4);
  for (int i = 0; i < 3000 && program.out().find('\n') == std::string::npos; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_THAT(program.out(), HasSubstr("\"prompt\":0")) << "while the input is open";
  ::close(input);
  EXPECT_EQ(program.wait().code, 0);
}

// A model with a vocabulary beyond its tokenizer's: probabilities are over all of it, as eval has them.
TEST_F(Generate, LogProbabilitiesAreThoseOfTheWholeVocabulary) {
  const std::string padded = path("padded");
  ASSERT_EQ(run(tiny_train(path("text"), padded) + Args{"--vocab-size", "320", "--steps", "0"}).code, 0);
  const auto drawn =
      Json::parse(run({"generate", padded, "--prompt", "ab", "--tokens", "1", "--greedy", "--json"}).out);
  spill(path("scored"), "ab" + bytes(drawn));
  spill(path("before"), "ab");
  const auto nll = [&](const std::string& text) {
    const Outcome outcome = run({"eval", padded, "--text", path(text), "--context", "0", "--json"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return Json::parse(outcome.out)["results"][0]["nll"].get<double>();
  };
  EXPECT_NEAR(drawn.at("logprobs")[0].get<double>(), nll("before") - nll("scored"), 1e-4);
}

TEST_F(Generate, CtrlCKeepsTheState) {
  Program program(command({"--prompt", "key", "--tokens", "100000000", "--state-save", path("cut")}));
  for (int i = 0; i < 3000 && program.out().size() < 20; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  program.signal(SIGINT);
  const Outcome outcome = program.wait();
  EXPECT_EQ(outcome.code, 130) << outcome.err;
  EXPECT_EQ(outcome.out + text({"--state-load", path("cut"), "--tokens", "10"}),
            text({"--prompt", "key", "--tokens", std::to_string(outcome.out.size() + 10)}));
}

}  // namespace
}  // namespace fw::test
