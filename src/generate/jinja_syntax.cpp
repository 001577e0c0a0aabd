#include "generate/jinja_syntax.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <utility>

#include "base/error.h"
#include "tokenizer/utf8.h"

namespace fw::jinja {
namespace {

constexpr int kMostDepth = 100;      // of expressions and blocks in one another
constexpr size_t kMostInTag = 4000;  // tokens, so that what is built of them is no deeper
constexpr std::string_view kSpace = " \t\n\r\f\v";

struct Token {
  enum class Kind { kText, kBeginOutput, kEndOutput, kBeginBlock, kEndBlock, kName, kString, kNumber, kSign, kEnd };
  Kind kind = Kind::kEnd;
  int line = 0;
  std::string text;
};

bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c >= '0' && c <= '9');
}
bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  Lexer(std::string_view text, const std::string& where) : where_(where) {
    text_.reserve(text.size());
    for (size_t i = 0; i < text.size(); ++i) {
      const bool crlf = text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n';
      if (!crlf) text_ += text[i];
    }
    if (text_.ends_with('\n')) text_.pop_back();
  }

  std::vector<Token> run() {
    bool line_begins = true;
    while (at_ < text_.size()) {
      const size_t open = find_open();
      std::string data = text_.substr(at_, open == std::string::npos ? open : open - at_);
      if (open == std::string::npos) {
        add_text(std::move(data));
        break;
      }
      const char kind = text_[open + 1];
      size_t inside = open + 2;
      const char sign = inside < text_.size() ? text_[inside] : '\0';
      if (sign == '-' || sign == '+') ++inside;
      if (sign == '-') {
        data.resize(data.find_last_not_of(kSpace) + 1);
      } else if (sign != '+' && kind != '{') {
        const size_t line = data.rfind('\n') + 1;  // npos + 1 is 0
        if ((line > 0 || line_begins) && data.find_first_not_of(kSpace, line) == std::string::npos) data.resize(line);
      }
      const std::string_view passed = std::string_view(text_).substr(at_, inside - at_);
      add_text(std::move(data));
      count_lines(passed);
      at_ = inside;
      if (kind == '#')
        skip_comment();
      else
        read_tag(kind == '{');
      line_begins = text_[at_ - 1] == '\n';
    }
    add(Token::Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(std::string_view what) const { fail_usage("{}, line {}: {}", where_, line_, what); }
  void add(Token::Kind kind, std::string text) { tokens_.push_back({kind, line_, std::move(text)}); }
  void add_text(std::string text) {
    if (!text.empty()) add(Token::Kind::kText, std::move(text));
  }
  void count_lines(std::string_view passed) {
    for (const char c : passed) line_ += c == '\n' ? 1 : 0;
  }
  bool next_is(std::string_view what) const { return std::string_view(text_).substr(at_).starts_with(what); }

  size_t find_open() const {
    for (size_t i = text_.find('{', at_); i != std::string::npos && i + 1 < text_.size(); i = text_.find('{', i + 1)) {
      if (text_[i + 1] == '{' || text_[i + 1] == '%' || text_[i + 1] == '#') return i;
    }
    return std::string::npos;
  }

  // Behind what ends a tag: '-' takes all space, a block takes one line break.
  void pass_end(size_t end, char sign, bool block) {
    count_lines(std::string_view(text_).substr(at_, end - at_));
    at_ = end;
    const size_t begin = at_;
    if (sign == '-') {
      at_ = std::min(text_.find_first_not_of(kSpace, at_), text_.size());
    } else if (block && sign != '+' && at_ < text_.size() && text_[at_] == '\n') {
      ++at_;
    }
    count_lines(std::string_view(text_).substr(begin, at_ - begin));
  }

  void skip_comment() {
    const size_t end = text_.find("#}", at_);
    if (end == std::string::npos) fail("a comment has no #}");
    pass_end(end + 2, end > at_ ? text_[end - 1] : '\0', true);
  }

  void read_tag(bool output) {
    const std::string_view close = output ? "}}" : "%}";
    add(output ? Token::Kind::kBeginOutput : Token::Kind::kBeginBlock, "");
    const size_t first = tokens_.size();
    int open = 0;
    for (;;) {
      if (tokens_.size() - first > kMostInTag)
        fail(fmt::format("expected at most {} parts of a block or an output, got more", kMostInTag));
      while (at_ < text_.size() && kSpace.find(text_[at_]) != std::string_view::npos) {
        line_ += text_[at_] == '\n' ? 1 : 0;
        ++at_;
      }
      if (at_ >= text_.size()) fail(output ? "an output has no }}" : "a block has no %}");
      const char sign = text_[at_];
      const bool signed_end =
          (sign == '-' || (sign == '+' && !output)) && std::string_view(text_).substr(at_ + 1).starts_with(close);
      if (signed_end || (open == 0 && next_is(close))) {
        add(output ? Token::Kind::kEndOutput : Token::Kind::kEndBlock, "");
        pass_end(at_ + close.size() + (signed_end ? 1 : 0), signed_end ? sign : '\0', !output);
        return;
      }
      read_token();
      if (tokens_.back().kind != Token::Kind::kSign) continue;
      const std::string& text = tokens_.back().text;
      if (text == "(" || text == "[" || text == "{") ++open;
      if (text == ")" || text == "]" || text == "}") open = std::max(open - 1, 0);
    }
  }

  void read_token() {
    const char c = text_[at_];
    if (c == '"' || c == '\'') return read_string(c);
    if (is_name_char(c)) {
      size_t end = at_;
      const bool number = is_digit(c);
      while (end < text_.size() && (is_name_char(text_[end]) || (number && text_[end] == '.' &&
                                                                 end + 1 < text_.size() && is_digit(text_[end + 1]))))
        ++end;
      add(number ? Token::Kind::kNumber : Token::Kind::kName, text_.substr(at_, end - at_));
      at_ = end;
      return;
    }
    for (const std::string_view sign : {"==", "!=", "<=", ">=", "//", "**", "(", ")", "[", "]", "{", "}", ".",
                                        ",",  ":",  "|",  "=",  "<",  ">",  "+", "-", "*", "/", "%", "~"}) {
      if (!next_is(sign)) continue;
      add(Token::Kind::kSign, std::string(sign));
      at_ += sign.size();
      return;
    }
    fail(fmt::format("expected an expression, got '{}'", c));
  }

  void read_string(char quote) {
    std::string value;
    for (++at_; at_ < text_.size() && text_[at_] != quote; ++at_) {
      line_ += text_[at_] == '\n' ? 1 : 0;
      if (text_[at_] != '\\' || at_ + 1 >= text_.size()) {
        value += text_[at_];
        continue;
      }
      const char c = text_[++at_];
      constexpr std::string_view kEscapes = "n\nt\tr\rb\bf\f\\\\'\"\"\"";
      if (c == 'u' || c == 'x') {
        read_code(c == 'u' ? 4 : 2, value);
      } else if (c == '\'' || c == '"') {
        value += c;
      } else if (const size_t found = kEscapes.find(c); found != std::string_view::npos && found % 2 == 0) {
        value += kEscapes[found + 1];
      } else {
        value += '\\';
        value += c;
      }
    }
    if (at_ >= text_.size()) fail("a string has no end");
    ++at_;
    add(Token::Kind::kString, std::move(value));
  }

  void read_code(size_t digits, std::string& value) {
    uint32_t code = 0;
    const char* begin = text_.data() + at_ + 1;
    const char* end = begin + std::min(digits, text_.size() - at_ - 1);
    const auto [rest, error] = std::from_chars(begin, end, code, 16);
    if (error != std::errc() || rest != begin + digits) fail("a string has an incomplete escape");
    if (code >= 0xd800 && code < 0xe000) fail("a string has half a character");
    utf8_append(value, code);
    at_ += digits;
  }

  std::string text_;
  const std::string& where_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

class Parser {
 public:
  Parser(std::vector<Token> tokens, const std::string& where) : tokens_(std::move(tokens)), where_(where) {}

  std::vector<Statement> run() {
    std::vector<Statement> all = block({});
    if (next().kind != Token::Kind::kEnd) fail("a block ends that did not begin");
    return all;
  }

 private:
  using Kind = Token::Kind;

  const Token& next() const { return tokens_[at_]; }
  [[noreturn]] void fail(std::string_view what) const { fail_usage("{}, line {}: {}", where_, next().line, what); }
  [[noreturn]] void expected(std::string_view what) const {
    fail(fmt::format("expected {}, got {}", what, next().text.empty() ? "the end" : "'" + next().text + "'"));
  }
  bool is(Kind kind, std::string_view text) const { return next().kind == kind && next().text == text; }
  bool take(Kind kind, std::string_view text) {
    if (!is(kind, text)) return false;
    ++at_;
    return true;
  }
  bool take_sign(std::string_view text) { return take(Kind::kSign, text); }
  bool take_word(std::string_view text) { return take(Kind::kName, text); }
  void need_sign(std::string_view text) {
    if (!take_sign(text)) expected(fmt::format("'{}'", text));
  }
  void need(Kind kind, std::string_view what) {
    if (next().kind != kind) expected(what);
    ++at_;
  }
  std::string name() {
    if (next().kind != Kind::kName) expected("a name");
    return tokens_[at_++].text;
  }
  void end_block() { need(Kind::kEndBlock, "%}"); }

  // Refuses what nests deeper than a stack bears.
  struct Depth {
    explicit Depth(Parser& parser) : parser_(parser) {
      if (++parser.depth_ > kMostDepth)
        parser.fail(fmt::format("expected at most {} blocks and expressions in one another, got more", kMostDepth));
    }
    ~Depth() { --parser_.depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
    Parser& parser_;
  };

  // ---- statements

  // Up to a block that begins with one of `ends`, whose name is left to be read.
  std::vector<Statement> block(const std::vector<std::string_view>& ends) {
    const Depth depth(*this);
    std::vector<Statement> all;
    while (next().kind != Kind::kEnd) {
      Statement one;
      one.line = next().line;
      if (next().kind == Kind::kText) {
        one.text = tokens_[at_++].text;
      } else if (next().kind == Kind::kBeginOutput) {
        ++at_;
        one.kind = Statement::Kind::kOutput;
        one.exprs.push_back(expression());
        need(Kind::kEndOutput, "}}");
      } else {
        need(Kind::kBeginBlock, "a block");
        for (const std::string_view end : ends) {
          if (is(Kind::kName, end)) return all;
        }
        statement(one);
      }
      all.push_back(std::move(one));
    }
    if (!ends.empty()) fail(fmt::format("expected {{% {} %}}, got the end", ends.back()));
    return all;
  }

  void statement(Statement& one) {
    const std::string word = name();
    if (word == "if") return read_if(one);
    if (word == "for") return read_for(one);
    if (word == "set") return read_set(one);
    if (word == "macro") return read_macro(one);
    if (word == "generation" || word == "with") return read_group(one, word);
    if (word != "break" && word != "continue") {
      --at_;
      fail(fmt::format("{{% {} %}} is not understood", word));
    }
    one.kind = word == "break" ? Statement::Kind::kBreak : Statement::Kind::kContinue;
    end_block();
  }

  void read_if(Statement& one) {
    one.kind = Statement::Kind::kIf;
    do {
      one.exprs.push_back(expression());
      end_block();
      one.bodies.push_back(block({"elif", "else", "endif"}));
    } while (take_word("elif"));
    if (take_word("else")) {
      end_block();
      one.bodies.push_back(block({"endif"}));
    }
    finish("endif");
  }

  void read_for(Statement& one) {
    one.kind = Statement::Kind::kFor;
    one.names = targets();
    if (!take_word("in")) expected("in");
    one.exprs.push_back(or_expression());
    if (take_word("if")) one.exprs.push_back(expression());
    end_block();
    one.bodies.push_back(block({"else", "endfor"}));
    if (take_word("else")) {
      end_block();
      one.bodies.push_back(block({"endfor"}));
    }
    finish("endfor");
  }

  void read_set(Statement& one) {
    one.kind = Statement::Kind::kSet;
    one.names = targets();
    if (take_sign(".")) one.text = name();
    if (take_sign("=")) {
      one.exprs.push_back(tuple());
      return end_block();
    }
    if (one.names.size() > 1 || !one.text.empty()) expected("=");
    end_block();
    one.bodies.push_back(block({"endset"}));
    finish("endset");
  }

  void read_macro(Statement& one) {
    one.kind = Statement::Kind::kMacro;
    one.text = name();
    need_sign("(");
    while (!take_sign(")")) {
      if (!one.names.empty()) need_sign(",");
      one.names.push_back(name());
      if (take_sign("="))
        one.exprs.push_back(expression());
      else if (!one.exprs.empty())
        expected("a default");
    }
    end_block();
    one.bodies.push_back(block({"endmacro"}));
    finish("endmacro");
  }

  void read_group(Statement& one, const std::string& word) {
    one.kind = Statement::Kind::kGroup;
    one.text = word;
    while (word == "with" && next().kind == Kind::kName) {
      one.names.push_back(name());
      need_sign("=");
      one.exprs.push_back(expression());
      if (!take_sign(",")) break;
    }
    end_block();
    const std::string end = "end" + word;
    one.bodies.push_back(block({end}));
    finish(end);
  }

  void finish(std::string_view word) {
    if (!take_word(word)) expected(word);
    end_block();
  }

  std::vector<std::string> targets() {
    const bool bracket = take_sign("(");
    std::vector<std::string> names{name()};
    while (take_sign(",")) names.push_back(name());
    if (bracket) need_sign(")");
    return names;
  }

  // ---- expressions, from what binds least

  Expr make(Expr::Kind kind, std::string text = "") const {
    Expr expr;
    expr.kind = kind;
    expr.line = next().line;
    expr.text = std::move(text);
    return expr;
  }
  Expr literal(Value value) const {
    Expr expr = make(Expr::Kind::kLiteral);
    expr.value = std::move(value);
    return expr;
  }
  Expr binary(std::string text, Expr left, Expr right) const {
    Expr expr = make(Expr::Kind::kBinary, std::move(text));
    expr.children.push_back(std::move(left));
    expr.children.push_back(std::move(right));
    return expr;
  }
  static Expr of(Expr expr, Expr child) {
    expr.children.push_back(std::move(child));
    return expr;
  }

  Expr tuple() {
    Expr first = expression();
    if (!is(Kind::kSign, ",")) return first;
    Expr list = of(make(Expr::Kind::kList), std::move(first));
    while (take_sign(",")) {
      if (is(Kind::kSign, ")")) break;
      list.children.push_back(expression());
    }
    return list;
  }

  Expr expression() {
    const Depth depth(*this);
    Expr value = or_expression();
    while (take_word("if")) {
      Expr choice = make(Expr::Kind::kChoice);
      choice.children.push_back(or_expression());
      choice.children.push_back(std::move(value));
      choice.children.push_back(take_word("else") ? expression() : literal(Value(Value::value_t::discarded)));
      value = std::move(choice);
    }
    return value;
  }

  Expr or_expression() {
    Expr left = and_expression();
    while (take_word("or")) left = binary("or", std::move(left), and_expression());
    return left;
  }
  Expr and_expression() {
    Expr left = not_expression();
    while (take_word("and")) left = binary("and", std::move(left), not_expression());
    return left;
  }
  Expr not_expression() {
    const Depth depth(*this);
    if (take_word("not")) return of(make(Expr::Kind::kNot), not_expression());
    return comparison();
  }

  // 1 < 2 < 3 is no chain here: such templates are refused.
  Expr comparison() {
    Expr left = sum();
    for (const std::string_view sign : {"==", "!=", "<=", ">=", "<", ">"}) {
      if (!take_sign(sign)) continue;
      left = binary(std::string(sign), std::move(left), sum());
      break;
    }
    if (take_word("in")) return binary("in", std::move(left), sum());
    if (is(Kind::kName, "not") && tokens_[at_ + 1].kind == Kind::kName && tokens_[at_ + 1].text == "in") {
      at_ += 2;
      return of(make(Expr::Kind::kNot), binary("in", std::move(left), sum()));
    }
    return left;
  }

  Expr sum() {
    Expr left = concatenation();
    for (;;) {
      if (take_sign("+"))
        left = binary("+", std::move(left), concatenation());
      else if (take_sign("-"))
        left = binary("-", std::move(left), concatenation());
      else
        return left;
    }
  }
  Expr concatenation() {
    Expr left = product();
    while (take_sign("~")) left = binary("~", std::move(left), product());
    return left;
  }
  Expr product() {
    Expr left = unary();
    for (;;) {
      bool found = false;
      for (const std::string_view sign : {"*", "//", "/", "%"}) {
        if (!take_sign(sign)) continue;
        left = binary(std::string(sign), std::move(left), unary());
        found = true;
        break;
      }
      if (!found) return left;
    }
  }
  // A sign binds more than a filter: -5|string is '-5'.
  Expr unary() { return filters(signed_value()); }
  Expr signed_value() {
    const Depth depth(*this);
    if (take_sign("-")) return of(make(Expr::Kind::kNegative), signed_value());
    return postfix(primary());
  }

  Expr filters(Expr value) {
    for (;;) {
      if (take_sign("|")) {
        Expr filter = make(Expr::Kind::kFilter, name());
        filter.children.push_back(std::move(value));
        if (take_sign("(")) arguments(filter);
        value = std::move(filter);
      } else if (take_word("is")) {
        value = test(std::move(value));
      } else {
        return value;
      }
    }
  }

  Expr test(Expr value) {
    const bool inverse = take_word("not");
    Expr one = make(Expr::Kind::kTest, is(Kind::kSign, "==") ? "eq" : "");
    if (one.text.empty())
      one.text = name();
    else
      ++at_;
    one.children.push_back(std::move(value));
    constexpr std::string_view kGoOn[] = {"and", "or", "else", "if", "is", "not", "in", "elif"};
    bool argument = next().kind == Kind::kName || next().kind == Kind::kString || next().kind == Kind::kNumber ||
                    is(Kind::kSign, "[");
    for (const std::string_view word : kGoOn) argument = argument && !is(Kind::kName, word);
    if (take_sign("("))
      arguments(one);
    else if (argument)
      one.children.push_back(postfix(primary()));
    return inverse ? of(make(Expr::Kind::kNot), std::move(one)) : std::move(one);
  }

  // Behind the bracket.
  void arguments(Expr& call) {
    bool first = true;
    while (!take_sign(")")) {
      if (!first) need_sign(",");
      first = false;
      if (take_sign(")")) return;
      const bool named =
          next().kind == Kind::kName && tokens_[at_ + 1].kind == Kind::kSign && tokens_[at_ + 1].text == "=";
      if (named) {
        call.names.push_back(name());
        ++at_;
      } else if (!call.names.empty()) {
        expected("a named argument");
      }
      call.children.push_back(expression());
    }
  }

  Expr postfix(Expr value) {
    for (;;) {
      if (take_sign(".")) {
        Expr attribute = make(Expr::Kind::kAttribute, next().kind == Kind::kNumber ? next().text : "");
        if (!attribute.text.empty())
          ++at_;
        else
          attribute.text = name();
        value = of(std::move(attribute), std::move(value));
      } else if (take_sign("[")) {
        value = subscript(std::move(value));
      } else if (take_sign("(")) {
        Expr call = of(make(Expr::Kind::kCall), std::move(value));
        arguments(call);
        value = std::move(call);
      } else {
        return value;
      }
    }
  }

  Expr subscript(Expr value) {
    const auto part = [&] { return is(Kind::kSign, ":") || is(Kind::kSign, "]") ? literal(Value()) : expression(); };
    Expr first = part();
    if (!is(Kind::kSign, ":")) {
      need_sign("]");
      return of(of(make(Expr::Kind::kItem), std::move(value)), std::move(first));
    }
    Expr slice = of(of(make(Expr::Kind::kSlice), std::move(value)), std::move(first));
    for (int i = 0; i < 2; ++i) slice.children.push_back(take_sign(":") ? part() : literal(Value()));
    need_sign("]");
    return slice;
  }

  Expr primary() {
    const Token token = next();
    if (token.kind == Kind::kString) {
      std::string text;  // strings that stand side by side are one
      while (next().kind == Kind::kString) text += tokens_[at_++].text;
      return literal(Value(std::move(text)));
    }
    if (token.kind == Kind::kNumber) return number();
    if (token.kind == Kind::kName) {
      ++at_;
      for (const auto& [word, value] :
           {std::pair<std::string_view, Value>("true", true), std::pair<std::string_view, Value>("True", true),
            std::pair<std::string_view, Value>("false", false), std::pair<std::string_view, Value>("False", false),
            std::pair<std::string_view, Value>("none", Value()), std::pair<std::string_view, Value>("None", Value())}) {
        if (token.text == word) return literal(value);
      }
      return make(Expr::Kind::kName, token.text);
    }
    if (take_sign("(")) {
      if (take_sign(")")) return make(Expr::Kind::kList);
      Expr inner = tuple();
      need_sign(")");
      return inner;
    }
    if (take_sign("[")) return list("]", false);
    if (take_sign("{")) return list("}", true);
    expected("an expression");
  }

  Expr number() {
    const std::string text = tokens_[at_++].text;
    const char* end = text.data() + text.size();
    if (int64_t whole = 0; std::from_chars(text.data(), end, whole).ptr == end) return literal(Value(whole));
    double value = 0;
    if (std::from_chars(text.data(), end, value).ptr != end) fail(fmt::format("expected a number, got '{}'", text));
    return literal(Value(value));
  }

  Expr list(std::string_view close, bool pairs) {
    Expr all = make(pairs ? Expr::Kind::kDict : Expr::Kind::kList);
    while (!take_sign(close)) {
      if (!all.children.empty()) need_sign(",");
      if (take_sign(close)) break;
      all.children.push_back(expression());
      if (!pairs) continue;
      need_sign(":");
      all.children.push_back(expression());
    }
    return all;
  }

  std::vector<Token> tokens_;
  const std::string& where_;
  size_t at_ = 0;
  int depth_ = 0;
};

bool find_calls(Expr& expr) {
  expr.calls = expr.kind == Expr::Kind::kCall;
  for (Expr& child : expr.children) expr.calls = find_calls(child) || expr.calls;
  return expr.calls;
}
void find_calls(std::vector<Statement>& statements) {
  for (Statement& one : statements) {
    for (Expr& expr : one.exprs) find_calls(expr);
    for (std::vector<Statement>& body : one.bodies) find_calls(body);
  }
}

}  // namespace

std::vector<Statement> parse(std::string_view text, const std::string& where) {
  std::vector<Statement> all = Parser(Lexer(text, where).run(), where).run();
  find_calls(all);
  return all;
}

}  // namespace fw::jinja
