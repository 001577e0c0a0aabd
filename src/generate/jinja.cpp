#include "generate/jinja.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/stop.h"
#include "generate/jinja_syntax.h"
#include "generate/jinja_text.h"

namespace fw {

struct JinjaTemplate::Program {
  std::vector<jinja::Statement> statements;
  std::string where;
};

namespace jinja {
namespace {

constexpr int64_t kMostSteps = 300'000;
// Values and pieces of text that are copied, compared or searched: together they bound time and memory.
constexpr size_t kMostWork = size_t{1} << 22, kPieceBytes = 128;
constexpr size_t kMostText = size_t{16} << 20, kMostItems = 100'000;
constexpr int kMostLevels = 400;  // of blocks, expressions and macros in one another
constexpr std::string_view kBlank = " \t\n\r\f\v";

Value undefined() { return Value(Value::value_t::discarded); }

bool is_true(const Value& value) {
  if (value.is_discarded() || value.is_null()) return false;
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_string()) return !value.get_ref<const std::string&>().empty();
  if (value.is_number()) return value.get<double>() != 0;
  return !value.empty();
}

// Values in it, and pieces of its text; more than `most` is not counted to the end.
size_t size_of(const Value& value, size_t most) {
  if (value.is_string()) return 1 + value.get_ref<const std::string&>().size() / kPieceBytes;
  size_t size = 1;
  if (value.is_object()) {
    for (auto one = value.begin(); one != value.end() && size <= most; ++one)
      size += 1 + one.key().size() / kPieceBytes + size_of(one.value(), most - std::min(size, most));
  } else if (value.is_array()) {
    for (auto one = value.begin(); one != value.end() && size <= most; ++one)
      size += size_of(*one, most - std::min(size, most));
  }
  return size;
}

// What a call, a filter or a test came with.
struct Arguments {
  std::vector<Value> values;
  std::vector<std::pair<std::string, Value>> named;

  // By index or by name; undefined where it is not given.
  const Value& get(size_t index, std::string_view name) const {
    if (index < values.size()) return values[index];
    for (const auto& [key, value] : named) {
      if (key == name) return value;
    }
    static const Value kUndefined = undefined();
    return kUndefined;
  }
};

class Renderer {
 public:
  Renderer(const std::string& where, const Value& variables) : where_(where), frames_(1) {
    for (const auto& [name, value] : variables.items()) frames_[0][name] = value;
  }

  std::string run(const std::vector<Statement>& statements) {
    body(statements);
    return std::move(out_);
  }

 private:
  enum class Flow { kOn, kBreak, kContinue };
  using Frame = std::map<std::string, Value, std::less<>>;

  [[noreturn]] void fail(int line, std::string_view what) const { fail_usage("{}, line {}: {}", where_, line, what); }
  void step(int line) {
    if (++steps_ > kMostSteps) fail(line, fmt::format("expected a template of at most {} steps, got more", kMostSteps));
    stop_point("template", steps_, -1, "steps");
  }
  void work(int line, size_t size) {
    work_ += std::min(size, kMostWork + 1);
    if (work_ > kMostWork) {
      fail(line,
           fmt::format("expected a template that copies and compares at most {} values ({} bytes of text count as "
                       "one), got more",
                       kMostWork, kPieceBytes));
    }
  }
  void work_text(int line, std::string_view text) { work(line, text.size() / kPieceBytes); }
  const Value& charged(int line, const Value& value) {
    work(line, size_of(value, kMostWork - work_));
    return value;
  }
  Value copied(int line, const Value& value) { return charged(line, value); }

  bool equal(int line, const Value& a, const Value& b) {
    if (a.is_discarded() || b.is_discarded()) return a.is_discarded() && b.is_discarded();
    if (a.is_string() && b.is_string() &&
        a.get_ref<const std::string&>().size() != b.get_ref<const std::string&>().size())
      return false;
    return charged(line, a) == b;
  }

  void write(int line, std::string_view text) {
    if (out_.size() + text.size() > kMostText)
      fail(line, fmt::format("expected at most {} bytes of text, got {}", kMostText, out_.size() + text.size()));
    work_text(line, text);
    out_ += text;
  }

  std::string text_of(int line, const Value& value) {
    if (value.is_discarded()) return "";
    if (value.is_string()) {
      work_text(line, value.get_ref<const std::string&>());
      return value.get<std::string>();
    }
    if (value.is_null()) return "None";
    if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
    if (value.is_number_integer()) return fmt::format("{}", value.get<int64_t>());
    if (value.is_number()) {
      const double number = value.get<double>();
      return number == std::floor(number) && std::abs(number) < 1e15 ? fmt::format("{:.1f}", number)
                                                                     : fmt::format("{}", number);
    }
    fail(line, "a list or an object as text is not understood");
  }

  // ---- statements

  // Counts how deep the stack is.
  struct Level {
    Level(Renderer& renderer, int line) : renderer_(renderer) {
      if (++renderer.levels_ > kMostLevels)
        renderer.fail(line,
                      fmt::format("expected at most {} blocks, expressions and macros in one another", kMostLevels));
    }
    ~Level() { --renderer_.levels_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    Renderer& renderer_;
  };

  Flow body(const std::vector<Statement>& statements) {
    if (statements.empty()) return Flow::kOn;
    const Level level(*this, statements[0].line);
    for (const Statement& one : statements) {
      step(one.line);
      const Flow flow = statement(one);
      if (flow != Flow::kOn) return flow;
    }
    return Flow::kOn;
  }

  Flow statement(const Statement& one) {
    switch (one.kind) {
      case Statement::Kind::kText:
        write(one.line, one.text);
        return Flow::kOn;
      case Statement::Kind::kOutput:
        output(one);
        return Flow::kOn;
      case Statement::Kind::kIf:
        for (size_t i = 0; i < one.bodies.size(); ++i) {
          if (i >= one.exprs.size() || is_met(one.exprs[i])) return body(one.bodies[i]);
        }
        return Flow::kOn;
      case Statement::Kind::kFor:
        return loop(one);
      case Statement::Kind::kSet:
        set(one);
        return Flow::kOn;
      case Statement::Kind::kMacro:
        macros_[one.text] = &one;
        return Flow::kOn;
      case Statement::Kind::kGroup: {
        if (one.text != "with") return body(one.bodies[0]);
        Frame frame;
        for (size_t i = 0; i < one.names.size(); ++i) frame[one.names[i]] = value_of(one.exprs[i]);
        frames_.push_back(std::move(frame));
        const Flow flow = body(one.bodies[0]);
        frames_.pop_back();
        return flow;
      }
      case Statement::Kind::kBreak:
        return Flow::kBreak;
      case Statement::Kind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kOn;
  }

  void output(const Statement& one) {
    Value space;
    const Value& value = look(one.exprs[0], space);
    if (value.is_string())
      write(one.line, value.get_ref<const std::string&>());
    else
      write(one.line, text_of(one.line, value));
  }

  void assign(int line, Frame& frame, const std::vector<std::string>& names, Value value) const {
    if (names.size() == 1) {
      frame[names[0]] = std::move(value);
      return;
    }
    if (!value.is_array() || value.size() != names.size())
      fail(line, fmt::format("expected a list of {} values for as many names, got {}", names.size(),
                             value.is_array() ? fmt::format("one of {}", value.size()) : "no list"));
    for (size_t i = 0; i < names.size(); ++i) frame[names[i]] = std::move(value[i]);
  }

  void set(const Statement& one) {
    Value value;
    if (one.bodies.empty()) {
      value = value_of(one.exprs[0]);
    } else {
      std::string outside = std::exchange(out_, "");
      body(one.bodies[0]);
      value = std::exchange(out_, std::move(outside));
    }
    if (one.text.empty()) return assign(one.line, frames_.back(), one.names, std::move(value));
    Value* space = find(one.names[0]);
    if (space == nullptr || !space->is_object()) fail(one.line, fmt::format("'{}' is no namespace", one.names[0]));
    (*space)[one.text] = std::move(value);
  }

  std::vector<Value> items_of(int line, const Value& value) {
    std::vector<Value> items;
    charged(line, value);
    if (value.is_object()) {
      for (const auto& [key, unused] : value.items()) items.emplace_back(key);
    } else if (value.is_array()) {
      items.assign(value.begin(), value.end());
    } else if (!value.is_discarded()) {
      fail(line, "a loop over something that is no list is not understood");
    }
    return items;
  }

  Flow loop(const Statement& one) {
    std::vector<Value> items = items_of(one.line, looked(one.exprs[0]).value);
    frames_.emplace_back();
    if (one.exprs.size() > 1) {
      std::erase_if(items, [&](const Value& item) {
        assign(one.line, frames_.back(), one.names, copied(one.line, item));
        return !is_met(one.exprs[1]);
      });
    }
    Flow flow = Flow::kOn;
    for (size_t i = 0; i < items.size(); ++i) {
      step(one.line);
      Frame& frame = frames_.back();
      frame.clear();
      assign(one.line, frame, one.names, copied(one.line, items[i]));
      Value about = {{"index", i + 1},
                     {"index0", i},
                     {"revindex", items.size() - i},
                     {"revindex0", items.size() - i - 1},
                     {"first", i == 0},
                     {"last", i + 1 == items.size()},
                     {"length", items.size()}};
      about["previtem"] = i > 0 ? copied(one.line, items[i - 1]) : undefined();
      about["nextitem"] = i + 1 < items.size() ? copied(one.line, items[i + 1]) : undefined();
      frame["loop"] = std::move(about);
      flow = body(one.bodies[0]);
      if (flow == Flow::kBreak) break;
    }
    frames_.pop_back();
    if (items.empty() && one.bodies.size() > 1) return body(one.bodies[1]);
    return Flow::kOn;
  }

  // ---- expressions

  Value* find(std::string_view name) {
    for (size_t i = frames_.size(); i-- > 0;) {
      if (const auto found = frames_[i].find(name); found != frames_[i].end()) return &found->second;
    }
    return nullptr;
  }

  // A value where it is, if it is a variable or a part of one, otherwise in `space`. A call may move it.
  const Value& look(const Expr& expr, Value& space) {
    const bool is_item = expr.kind == Expr::Kind::kItem && !expr.children[1].calls;
    if (expr.kind != Expr::Kind::kLiteral && expr.kind != Expr::Kind::kName && expr.kind != Expr::Kind::kAttribute &&
        !is_item)
      return space = value_of(expr);
    step(expr.line);
    const Level level(*this, expr.line);
    if (expr.kind == Expr::Kind::kLiteral) return expr.value;
    if (expr.kind == Expr::Kind::kName) {
      const Value* found = find(expr.text);
      return found != nullptr ? *found : space = undefined();
    }
    Value inner;
    const Value& container = look(expr.children[0], inner);
    const Value* found = item(expr.line, container, is_item ? value_of(expr.children[1]) : Value(expr.text));
    if (found == nullptr) return space = undefined();
    if (&container == &inner) return space = copied(expr.line, *found);
    return *found;
  }

  // What look() found, or made.
  struct Looked {
    Value space;
    const Value& value;
    Looked(Renderer& renderer, const Expr& expr) : value(renderer.look(expr, space)) {}
    Looked(const Looked&) = delete;
    Looked& operator=(const Looked&) = delete;
  };
  Looked looked(const Expr& expr) { return Looked(*this, expr); }
  // The operand of what `whole` is, which stays as it is while the other parts are evaluated.
  const Value& operand(const Expr& whole, Value& space) {
    bool others_call = false;
    for (size_t i = 1; i < whole.children.size(); ++i) others_call = others_call || whole.children[i].calls;
    return others_call ? space = value_of(whole.children[0]) : look(whole.children[0], space);
  }
  bool is_met(const Expr& expr) { return is_true(looked(expr).value); }

  Value value_of(const Expr& expr) {
    if (expr.kind == Expr::Kind::kLiteral || expr.kind == Expr::Kind::kName || expr.kind == Expr::Kind::kAttribute ||
        (expr.kind == Expr::Kind::kItem && !expr.children[1].calls)) {
      Value space;
      const Value& value = look(expr, space);
      if (&value == &space) return space;
      return copied(expr.line, value);
    }
    step(expr.line);
    const Level level(*this, expr.line);
    Value space;
    switch (expr.kind) {
      case Expr::Kind::kLiteral:
      case Expr::Kind::kName:
      case Expr::Kind::kAttribute:
        break;
      case Expr::Kind::kList: {
        Value list = Value::array();
        for (const Expr& child : expr.children) list.push_back(value_of(child));
        return list;
      }
      case Expr::Kind::kDict: {
        Value object = Value::object();
        for (size_t i = 0; i < expr.children.size(); i += 2) {
          work(expr.line, object.size() / 8);  // keys are looked up one after the other
          std::string key = text_of(expr.line, value_of(expr.children[i]));
          object[std::move(key)] = value_of(expr.children[i + 1]);
        }
        return object;
      }
      case Expr::Kind::kItem: {
        const Value container = value_of(expr.children[0]);
        const Value* found = item(expr.line, container, value_of(expr.children[1]));
        return found == nullptr ? undefined() : copied(expr.line, *found);
      }
      case Expr::Kind::kSlice:
        return slice(expr);
      case Expr::Kind::kCall:
        return call(expr);
      case Expr::Kind::kFilter: {
        const Value& value = operand(expr, space);
        return filter(expr.line, expr.text, value, arguments(expr));
      }
      case Expr::Kind::kTest: {
        const Value& value = operand(expr, space);
        return test(expr.line, expr.text, value, arguments(expr));
      }
      case Expr::Kind::kNot:
        return !is_met(expr.children[0]);
      case Expr::Kind::kNegative:
        return arithmetic(expr.line, "-", Value(0), value_of(expr.children[0]));
      case Expr::Kind::kBinary:
        return binary(expr);
      case Expr::Kind::kChoice:
        return value_of(expr.children[is_met(expr.children[0]) ? 1 : 2]);
    }
    return undefined();
  }

  Arguments arguments(const Expr& expr) {
    Arguments all;
    const size_t named = expr.children.size() - expr.names.size();
    for (size_t i = 1; i < expr.children.size(); ++i) {
      Value value = value_of(expr.children[i]);
      if (i < named)
        all.values.push_back(std::move(value));
      else
        all.named.emplace_back(expr.names[i - named], std::move(value));
    }
    return all;
  }

  // Null: undefined.
  const Value* item(int line, const Value& container, const Value& key) {
    if (container.is_discarded()) fail(line, fmt::format("'{}' of something undefined", text_of(line, key)));
    if (container.is_object() && key.is_string()) {
      work(line, container.size() / 8);
      const auto found = container.find(key.get_ref<const std::string&>());
      return found == container.end() ? nullptr : &*found;
    }
    if (container.is_array() && key.is_number_integer()) {
      const int64_t size = static_cast<int64_t>(container.size()), at = key.get<int64_t>();
      const int64_t index = at < 0 ? at + size : at;
      return index >= 0 && index < size ? &container[static_cast<size_t>(index)] : nullptr;
    }
    if (container.is_string() && key.is_number_integer()) fail(line, "a character of a text is not understood");
    return nullptr;
  }

  Value slice(const Expr& expr) {
    Value space;
    const Value& whole = operand(expr, space);
    const Value begin = value_of(expr.children[1]), end = value_of(expr.children[2]), by = value_of(expr.children[3]);
    for (const Value* one : {&begin, &end, &by}) {
      if (!one->is_null() && !one->is_number_integer()) fail(expr.line, "expected whole numbers between [ and ]");
    }
    const int64_t step_size = by.is_null() ? 1 : by.get<int64_t>();
    if (!whole.is_array() || (step_size != 1 && step_size != -1))
      fail(expr.line, "a part of something that is no list, or of every n-th item, is not understood");
    const int64_t size = static_cast<int64_t>(whole.size());
    const auto index = [&](const Value& given, int64_t standard) {
      if (given.is_null()) return standard;
      const int64_t at = given.get<int64_t>();
      const int64_t low = step_size > 0 ? 0 : -1;
      return std::clamp<int64_t>(at < 0 ? at + size : at, low, size + low);
    };
    const int64_t first = index(begin, step_size > 0 ? 0 : size - 1), last = index(end, step_size > 0 ? size : -1);
    Value part = Value::array();
    for (int64_t i = first; step_size > 0 ? i < last : i > last; i += step_size)
      part.push_back(charged(expr.line, whole[static_cast<size_t>(i)]));
    return part;
  }

  Value binary(const Expr& expr) {
    if (expr.text == "and" || expr.text == "or") {
      Value first = value_of(expr.children[0]);
      return is_true(first) == (expr.text == "and") ? value_of(expr.children[1]) : std::move(first);
    }
    Value space, other;
    const Value &left = operand(expr, space), &right = look(expr.children[1], other);
    if (expr.text == "==") return equal(expr.line, left, right);
    if (expr.text == "!=") return !equal(expr.line, left, right);
    if (expr.text == "in") return contains(expr.line, left, right);
    if (expr.text == "~") return joined(expr.line, text_of(expr.line, left), text_of(expr.line, right));
    if (expr.text[0] == '<' || expr.text[0] == '>') return ordered(expr, left, right);
    return arithmetic(expr.line, expr.text, left, right);
  }

  bool contains(int line, const Value& what, const Value& container) {
    if (container.is_discarded()) return false;
    if (container.is_string() && what.is_string()) {
      const std::string& text = container.get_ref<const std::string&>();
      work_text(line, text);
      return find_text(text, what.get_ref<const std::string&>(), 0) != std::string_view::npos;
    }
    if (container.is_object()) return what.is_string() && item(line, container, what) != nullptr;
    if (!container.is_array()) fail(line, "'in' of something that is no text, list or object");
    work(line, container.size() / 8);
    return std::ranges::any_of(container, [&](const Value& one) { return equal(line, one, what); });
  }

  bool ordered(const Expr& expr, const Value& left, const Value& right) {
    const bool comparable = (left.is_number() && right.is_number()) || (left.is_string() && right.is_string());
    if (!comparable) fail(expr.line, fmt::format("'{}' of values that have no order", expr.text));
    charged(expr.line, left);
    if (expr.text == "<") return left < right;
    if (expr.text == "<=") return left <= right;
    return expr.text == ">" ? left > right : left >= right;
  }

  Value joined(int line, std::string left, std::string_view right) {
    if (left.size() + right.size() > kMostText)
      fail(line, fmt::format("expected a text of at most {} bytes, got {}", kMostText, left.size() + right.size()));
    work(line, (left.size() + right.size()) / kPieceBytes);
    left += right;
    return left;
  }

  Value arithmetic(int line, std::string_view sign, const Value& left, const Value& right) {
    if (sign == "+" && left.is_string() && right.is_string())
      return joined(line, left.get<std::string>(), right.get_ref<const std::string&>());
    if (sign == "+" && left.is_array() && right.is_array()) {
      if (left.size() + right.size() > kMostItems)
        fail(line, fmt::format("expected a list of at most {} items, got {}", kMostItems, left.size() + right.size()));
      Value both = copied(line, left);
      charged(line, right);
      both.insert(both.end(), right.begin(), right.end());
      return both;
    }
    const auto is_small = [](const Value& one) {
      constexpr double kMost = 1e9;
      return one.is_number_integer() && std::abs(one.get<double>()) <= kMost;
    };
    if (!is_small(left) || !is_small(right)) fail(line, fmt::format("'{}' of these values is not understood", sign));
    const int64_t a = left.get<int64_t>(), b = right.get<int64_t>();
    if (sign == "+") return a + b;
    if (sign == "-") return a - b;
    if (sign == "*") return a * b;
    if (b == 0) fail(line, "a division by 0");
    const int64_t quotient = a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
    if (sign == "//") return quotient;
    if (sign == "%") return a - quotient * b;
    return static_cast<double>(a) / static_cast<double>(b);
  }

  // ---- filters, tests, calls

  Value filter(int line, std::string_view name, const Value& value, const Arguments& given) {
    if (name == "default" || name == "d") {
      const bool other = value.is_discarded() || (is_true(given.get(1, "boolean")) && !is_true(value));
      const Value& standard = given.get(0, "default_value");
      return other && standard.is_discarded() ? Value("") : copied(line, other ? standard : value);
    }
    if (name == "safe") return copied(line, value);
    if (name == "string") return text_of(line, value);
    if (name == "length" || name == "count") return length(line, value);
    if (name == "trim") return std::string(trimmed(text_of(line, value), kBlank, true, true));
    if (name == "lower" || name == "upper") return in_case(text_of(line, value), name == "upper");
    if (name == "capitalize" || name == "title") return capitalized(text_of(line, value), name == "title");
    if (name == "replace")
      return replaced(line, text_of(line, value), text_of(line, given.get(0, "old")),
                      text_of(line, given.get(1, "new")));
    if (name == "items") return pairs(line, value);
    if (name == "selectattr" || name == "rejectattr") return chosen(line, value, given, name == "selectattr");
    const bool of_list = name == "list" || name == "first" || name == "last" || name == "join" || name == "map";
    if (!of_list) fail(line, fmt::format("the filter '{}' is not understood", name));
    if ((name == "first" || name == "last") && value.is_array())
      return value.empty() ? undefined() : copied(line, name == "first" ? value.front() : value.back());
    std::vector<Value> items = items_of(line, value);
    if (name == "list") return items;
    if (name == "first") return items.empty() ? undefined() : std::move(items.front());
    if (name == "last") return items.empty() ? undefined() : std::move(items.back());
    if (name == "map") return mapped(line, items, given);
    std::string text;
    const std::string between = text_of(line, given.get(0, "d"));
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) append(line, text, between);
      append(line, text, text_of(line, items[i]));
    }
    return text;
  }

  void append(int line, std::string& text, std::string_view more) {
    if (text.size() + more.size() > kMostText)
      fail(line, fmt::format("expected a text of at most {} bytes, got {}", kMostText, text.size() + more.size()));
    work_text(line, more);
    text += more;
  }

  std::string replaced(int line, const std::string& text, std::string_view from, std::string_view to) {
    if (from.empty()) return text;
    std::string result;
    size_t begin = 0;
    const std::string_view whole = text;
    for (size_t at; (at = find_text(whole, from, begin)) != std::string_view::npos; begin = at + from.size()) {
      append(line, result, whole.substr(begin, at - begin));
      append(line, result, to);
    }
    append(line, result, whole.substr(begin));
    return result;
  }

  Value length(int line, const Value& value) {
    if (value.is_discarded()) return 0;
    if (value.is_array() || value.is_object()) return value.size();
    if (!value.is_string()) fail(line, "a length of something that is no text, list or object");
    const std::string& text = value.get_ref<const std::string&>();  // of UTF-8, by what begins a character
    work_text(line, text);
    return std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
  }

  Value pairs(int line, const Value& value) {
    if (!value.is_object()) fail(line, "items of something that is no object");
    charged(line, value);
    work(line, 2 * value.size());
    Value all = Value::array();
    for (const auto& [key, inner] : value.items()) all.push_back(Value::array({key, inner}));
    return all;
  }

  Value chosen(int line, const Value& value, const Arguments& given, bool keep) {
    Value all = Value::array();
    const Value& attribute = given.get(0, "");
    Arguments rest;
    for (size_t i = 2; i < given.values.size(); ++i) rest.values.push_back(copied(line, given.values[i]));
    for (Value& one : items_of(line, value)) {
      step(line);
      const Value* found = item(line, one, attribute);
      const Value missing = undefined();
      const Value& part = found == nullptr ? missing : *found;
      const bool holds =
          given.values.size() < 2 ? is_true(part) : test(line, text_of(line, given.values[1]), part, rest);
      if (holds == keep) all.push_back(std::move(one));
    }
    return all;
  }

  Value mapped(int line, const std::vector<Value>& items, const Arguments& given) {
    const Level level(*this, line);  // of map('map', ...)
    Value all = Value::array();
    const Value& attribute = given.get(1, "attribute");
    Arguments rest;
    for (size_t i = 1; i < given.values.size(); ++i) rest.values.push_back(copied(line, given.values[i]));
    for (const Value& one : items) {
      step(line);
      if (!given.values.empty()) {
        all.push_back(filter(line, text_of(line, given.values[0]), one, rest));
        continue;
      }
      const Value* found = item(line, one, attribute);
      all.push_back(found == nullptr ? undefined() : copied(line, *found));
    }
    return all;
  }

  bool test(int line, std::string_view name, const Value& value, const Arguments& given) {
    if (name == "defined") return !value.is_discarded();
    if (name == "undefined") return value.is_discarded();
    if (name == "none") return value.is_null();
    if (name == "string") return value.is_string();
    if (name == "mapping") return value.is_object();
    if (name == "sequence" || name == "iterable")
      return value.is_array() || value.is_object() || value.is_string() || value.is_discarded();
    if (name == "number") return value.is_number() || value.is_boolean();
    if (name == "integer") return value.is_number_integer();
    if (name == "float") return value.is_number_float();
    if (name == "boolean") return value.is_boolean();
    if (name == "true") return value.is_boolean() && value.get<bool>();
    if (name == "false") return value.is_boolean() && !value.get<bool>();
    const Value& other = given.get(0, "");
    if (name == "eq" || name == "equalto" || name == "sameas") return equal(line, value, other);
    if (name == "ne") return !equal(line, value, other);
    if (name == "in") return contains(line, value, other);
    if ((name == "odd" || name == "even") && value.is_number_integer())
      return (value.get<int64_t>() % 2 != 0) == (name == "odd");
    fail(line, fmt::format("the test '{}' is not understood", name));
  }

  Value call(const Expr& expr) {
    const Expr& callee = expr.children[0];
    if (callee.kind == Expr::Kind::kAttribute) {
      bool others_call = false;
      for (size_t i = 1; i < expr.children.size(); ++i) others_call = others_call || expr.children[i].calls;
      Value space;
      const Value& value = others_call ? space = value_of(callee.children[0]) : look(callee.children[0], space);
      return method(expr.line, callee.text, value, arguments(expr));
    }
    if (callee.kind != Expr::Kind::kName) fail(expr.line, "a call of this is not understood");
    const std::string& name = callee.text;
    const auto macro = macros_.find(name);
    if (macro != macros_.end()) return expand(*macro->second, arguments(expr));
    Arguments given = arguments(expr);
    if (name == "raise_exception") {
      fail_usage("{}: the template refuses this conversation: {}", where_, text_of(expr.line, given.get(0, "message")));
    }
    if (name == "namespace" || name == "dict") {
      Value object = Value::object();
      for (auto& [key, value] : given.named) object[key] = std::move(value);
      return object;
    }
    if (name == "range") return range(expr.line, given);
    fail(expr.line, fmt::format("the function '{}' is not understood", name));
  }

  Value range(int line, const Arguments& given) {
    for (const Value& one : given.values) {
      if (!one.is_number_integer()) fail(line, "range(): expected whole numbers");
    }
    if (given.values.empty() || given.values.size() > 2)
      fail(line, fmt::format("range(): expected one or two numbers, got {}", given.values.size()));
    const int64_t begin = given.values.size() > 1 ? given.values[0].get<int64_t>() : 0;
    const int64_t end = given.values.back().get<int64_t>();
    if (static_cast<double>(end) - static_cast<double>(begin) > static_cast<double>(kMostItems))
      fail(line, fmt::format("range(): expected at most {} numbers, got them from {} to {}", kMostItems, begin, end));
    work(line, static_cast<size_t>(std::max<int64_t>(end - begin, 0)));
    Value all = Value::array();
    for (int64_t i = begin; i < end; ++i) all.push_back(i);
    return all;
  }

  // A macro sees its parameters and what the template itself has set.
  Value expand(const Statement& macro, const Arguments& given) {
    if (given.values.size() > macro.names.size())
      fail(macro.line, fmt::format("the macro '{}': expected at most {} arguments, got {}", macro.text,
                                   macro.names.size(), given.values.size()));
    Frame frame;
    const size_t first_default = macro.names.size() - macro.exprs.size();
    for (size_t i = 0; i < macro.names.size(); ++i) {
      Value value = copied(macro.line, given.get(i, macro.names[i]));
      if (value.is_discarded() && i >= first_default) value = value_of(macro.exprs[i - first_default]);
      frame[macro.names[i]] = std::move(value);
    }
    std::vector<Frame> outside(std::make_move_iterator(frames_.begin() + 1), std::make_move_iterator(frames_.end()));
    frames_.resize(1);
    frames_.push_back(std::move(frame));
    std::string text = std::exchange(out_, "");
    body(macro.bodies[0]);
    std::swap(text, out_);
    frames_.resize(1);
    frames_.insert(frames_.end(), std::make_move_iterator(outside.begin()), std::make_move_iterator(outside.end()));
    return text;
  }

  Value method(int line, std::string_view name, const Value& value, const Arguments& given) {
    if (value.is_discarded()) fail(line, fmt::format("'{}' of something undefined", name));
    if (value.is_object()) {
      if (name == "items") return pairs(line, value);
      if (name == "keys") return items_of(line, value);
      if (name == "get") {
        const Value* found = item(line, value, given.get(0, ""));
        const Value& standard = given.get(1, "");
        if (found != nullptr && !found->is_discarded()) return copied(line, *found);
        return standard.is_discarded() ? Value() : copied(line, standard);
      }
    }
    if (value.is_string()) {
      const std::string& text = value.get_ref<const std::string&>();
      work_text(line, text);
      const Value& first = given.get(0, "");
      const std::string what = text_of(line, first);
      if (name == "strip" || name == "lstrip" || name == "rstrip")
        return std::string(
            trimmed(text, first.is_string() ? std::string_view(what) : kBlank, name != "rstrip", name != "lstrip"));
      if (name == "lower" || name == "upper") return in_case(text, name == "upper");
      if (name == "capitalize" || name == "title") return capitalized(text, name == "title");
      if (name == "startswith") return text.starts_with(what);
      if (name == "endswith") return text.ends_with(what);
      if (name == "replace") return replaced(line, text, what, text_of(line, given.get(1, "")));
      if (name == "split" && !what.empty()) return split(line, text, what);
    }
    fail(line, fmt::format("the method '{}' is not understood", name));
  }

  Value split(int line, const std::string& text, std::string_view at) {
    Value parts = Value::array();
    size_t begin = 0;
    for (size_t end; (end = find_text(text, at, begin)) != std::string::npos; begin = end + at.size()) {
      if (parts.size() + 1 >= kMostItems)
        fail(line, fmt::format("split(): expected at most {} parts, got more", kMostItems));
      parts.push_back(text.substr(begin, end - begin));
    }
    parts.push_back(text.substr(begin));
    work(line, parts.size());
    return parts;
  }

  const std::string& where_;
  std::vector<Frame> frames_;  // [0]: of the template itself
  std::map<std::string, const Statement*, std::less<>> macros_;
  std::string out_;
  int64_t steps_ = 0;
  size_t work_ = 0;
  int levels_ = 0;
};

}  // namespace
}  // namespace jinja

JinjaTemplate::JinjaTemplate(std::string_view text, const std::string& where)
    : program_(std::make_unique<Program>(Program{jinja::parse(text, where), where})) {}
JinjaTemplate::~JinjaTemplate() = default;
JinjaTemplate::JinjaTemplate(JinjaTemplate&&) noexcept = default;
JinjaTemplate& JinjaTemplate::operator=(JinjaTemplate&&) noexcept = default;

std::string JinjaTemplate::render(const nlohmann::ordered_json& variables) const {
  return jinja::Renderer(program_->where, variables).run(program_->statements);
}

}  // namespace fw
