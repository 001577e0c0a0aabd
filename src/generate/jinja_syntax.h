// The parts of a Jinja template (jinja.h): tokens, expressions, statements.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace fw::jinja {

// A discarded value stands for Jinja's undefined.
using Value = nlohmann::ordered_json;

struct Expr {
  enum class Kind {
    kLiteral,    // value
    kName,       // text
    kList,       // children
    kDict,       // children: key, value, key, value ...
    kAttribute,  // children: of what; text
    kItem,       // children: of what, which
    kSlice,      // children: of what, begin, end, step (a literal null where it is not given)
    kCall,       // children: callee, arguments; names: of the last arguments
    kFilter,     // text; children: of what, arguments; names: of the last arguments
    kTest,       // text; children: of what, arguments
    kNot,
    kNegative,
    kBinary,  // text: the operator, also "and", "or", "in"
    kChoice,  // children: condition, then, else
  };
  Kind kind = Kind::kLiteral;
  int line = 0;
  Value value;
  std::string text;
  std::vector<std::string> names;
  std::vector<Expr> children;
  bool calls = false;  // it or a part of it is a call, which may change variables
};

struct Statement {
  enum class Kind {
    kText,    // text
    kOutput,  // exprs[0]
    kIf,      // exprs: conditions; bodies: one for each, then the else body if there is one
    kFor,     // names: targets; exprs: of what, and the condition of the items; bodies: of an item, if there is none
    kSet,     // names: targets, or one and text: its attribute; exprs[0], or bodies[0]
    kMacro,   // text: name; names: parameters; exprs: defaults of the last ones; bodies[0]
    kGroup,   // bodies[0], in its own scope where text is "with" (names and exprs: its variables)
    kBreak,
    kContinue,
  };
  Kind kind = Kind::kText;
  int line = 0;
  std::string text;
  std::vector<std::string> names;
  std::vector<Expr> exprs;
  std::vector<std::vector<Statement>> bodies;
};

// Throws Error(kUsage) "<where>, line N: ...".
std::vector<Statement> parse(std::string_view text, const std::string& where);

}  // namespace fw::jinja
