// Runs the built program as a user does, and what the tests of it share.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace fw::test {

struct Outcome {
  int code = -1;  // 128 + signal when it was killed
  std::string out, err;
  long peak_kib = 0;  // of its resident memory
};

class Program {
 public:
  // Starts it with these arguments; standard output and error go to files, standard input comes from one (/dev/null
  // without). launcher: another program with its arguments, which starts it. program: another one than the built
  // fastweight.
  explicit Program(const std::vector<std::string>& args, const std::string& path_variable = "",
                   const std::string& input = "/dev/null", const std::vector<std::string>& launcher = {},
                   const std::string& program = "");
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  void signal(int number) const;
  pid_t pid() const { return pid_; }
  std::string out() const;  // so far
  Outcome wait();

 private:
  pid_t pid_ = -1;
  std::string folder_;
};

Outcome run(const std::vector<std::string>& args);
// With `input` on standard input.
Outcome run_with_input(const std::vector<std::string>& args, const std::string& input);

// On a terminal of 80 columns, with these variables beside the environment ("TERM=dumb"): all that it writes there.
std::string run_on_terminal(const std::vector<std::string>& args, const std::vector<std::string>& variables);

// A folder of its own for a test, removed at the end.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string slurp(const std::string& path);
void spill(const std::string& path, const std::string& content);
// A file or folder of tests/cli/cases: small inputs of other programs.
std::string case_path(const std::string& name);
// A copy of such a folder that may be written to.
void copy_case(const std::string& name, const std::string& to);
// English-like lines, always the same.
std::string small_text();
// Options of a tiny model and run on `text` into `out`, a few hundred milliseconds of work.
std::vector<std::string> tiny_train(const std::string& text, const std::string& out);
std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b);

}  // namespace fw::test
