#include "program.h"

#include <algorithm>
#include <charconv>
#include <optional>

namespace ptx {

namespace {

constexpr std::string_view kSpaces = " \t\r\n";

std::string trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(kSpaces);
  if (first == text.npos) return {};
  return std::string(text.substr(first, text.find_last_not_of(kSpaces) - first + 1));
}

std::string without_comments(std::string_view text) {
  std::string kept;
  for (std::size_t at = 0; at < text.size();) {
    const auto comment = std::min(text.find("//", at), text.size());
    kept += text.substr(at, comment - at);
    at = std::min(text.find('\n', comment), text.size());
  }
  return kept;
}

// What stands between commas that are in no brackets.
std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ',';
    depth += c == '{' || c == '[' || c == '(';
    depth -= c == '}' || c == ']' || c == ')';
    if (c != ',' || depth > 0) continue;
    if (std::string part = trimmed(text.substr(begin, i - begin)); !part.empty()) parts.push_back(std::move(part));
    begin = i + 1;
  }
  return parts;
}

std::vector<std::string> words(std::string_view text) {
  std::vector<std::string> found;
  for (std::size_t at = text.find_first_not_of(kSpaces); at != text.npos; at = text.find_first_not_of(kSpaces, at)) {
    const auto end = std::min(text.find_first_of(kSpaces, at), text.size());
    found.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return found;
}

std::vector<std::string> parts_of(const std::string& opcode) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (std::size_t dot; (dot = opcode.find('.', begin)) != opcode.npos; begin = dot + 1) {
    parts.push_back(opcode.substr(begin, dot - begin));
  }
  parts.push_back(opcode.substr(begin));
  return parts;
}

std::size_t bytes_of(std::string_view type) {
  const auto digit = type.find_first_of("0123456789");
  std::size_t bits = 0;
  if (digit != type.npos) std::from_chars(type.data() + digit, type.data() + type.size(), bits);
  if (bits == 0 || bits % 8 != 0) throw std::runtime_error("no size of type " + std::string(type));
  return bits / 8;
}

std::size_t rounded_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

// ".shared .align 8 .b8 name[80]", ".param .u64 name"
struct Declaration {
  std::string name;
  std::size_t alignment, bytes;
};

Declaration declaration_of(const std::string& text) {
  const auto tokens = words(text);
  Declaration found{tokens.back(), 0, 0};
  std::size_t element = 0;
  for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
    if (tokens[i] == ".align") {
      found.alignment = std::stoul(tokens[++i]);
    } else if (tokens[i].find_first_of("0123456789") != std::string::npos) {
      element = bytes_of(tokens[i]);
    }
  }
  std::size_t count = 1;
  if (const auto bracket = found.name.find('['); bracket != std::string::npos) {
    const std::string inside = found.name.substr(bracket + 1, found.name.find(']') - bracket - 1);
    count = inside.empty() ? 0 : std::stoul(inside);  // "[]": dynamic
    found.name.resize(bracket);
  }
  found.bytes = element * count;
  if (found.alignment == 0) found.alignment = element;
  return found;
}

// "$L__BB0_3", not "ld.global.u32 %r1, [...]"
bool is_label(std::string_view text) { return !text.empty() && text.find_first_of(" \t\n.") == text.npos; }

}  // namespace

// Turns the statements of a kernel into instructions; a call becomes the statements of what is called.
class Decoder {
 public:
  Decoder(const Module& module, std::string name) : module_(module) { kernel_.name = std::move(name); }

  Kernel decode() {
    const Module::Function& function = module_.functions_.at(kernel_.name);
    kernel_.most_threads = function.most_threads;
    for (const std::string& text : function.parameters) {
      const Declaration parameter = declaration_of(text);
      const std::size_t offset = rounded_up(kernel_.parameter_bytes, parameter.alignment);
      kernel_.parameters.push_back({offset, parameter.bytes});
      kernel_.parameter_bytes = offset + parameter.bytes;
      addresses_[parameter.name] = offset;
    }
    std::vector<std::string> shared = module_.shared_;
    for (const std::string& text : function.declarations) {
      if (text.starts_with(".shared")) shared.push_back(text);
    }
    // Dynamic shared memory, which has no size here, begins behind the rest.
    std::stable_partition(shared.begin(), shared.end(),
                          [](const std::string& text) { return text.find("[]") == text.npos; });
    for (const std::string& text : shared) {
      const Declaration variable = declaration_of(text);
      kernel_.shared_bytes = rounded_up(kernel_.shared_bytes, variable.alignment);
      addresses_[variable.name] = kernel_.shared_bytes;
      kernel_.shared_bytes += variable.bytes;
    }
    add(function.statements, Scope{});
    kernel_.code.push_back({.kind = Kind::exit, .text = "ret"});
    for (auto& [instruction, label] : branches_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) throw std::runtime_error("no label " + label);
      kernel_.code[instruction].target = found->second;
    }
    kernel_.slots = static_cast<int>(slots_.size());
    return std::move(kernel_);
  }

 private:
  // Names of a called function are its own; its formal parameters are the caller's.
  struct Scope {
    std::string prefix;
    std::map<std::string, std::string> formal;
  };

  void add(const std::vector<std::string>& statements, const Scope& scope) {
    for (const std::string& statement : statements) {
      if (statement.ends_with(':')) {
        labels_[scope.prefix + statement.substr(0, statement.size() - 1)] = here();
        continue;
      }
      try {
        add(statement, scope);
      } catch (const std::exception& error) {
        throw std::runtime_error(kernel_.name + ": " + statement + ": " + error.what());
      }
    }
  }

  void add(const std::string& statement, const Scope& scope) {
    Instruction to;
    to.text = statement;
    std::string_view rest = statement;
    if (rest.front() == '@') {
      to.guard_wanted = rest[1] != '!';
      const auto end = rest.find_first_of(kSpaces);
      to.guard = slot(std::string(rest.substr(to.guard_wanted ? 1 : 2, end - (to.guard_wanted ? 1 : 2))), scope);
      rest = rest.substr(rest.find_first_not_of(kSpaces, end));
    }
    const auto end = std::min(rest.find_first_of(kSpaces), rest.size());
    const std::string opcode(rest.substr(0, end));
    const auto operands = split(rest.substr(end));
    const auto parts = parts_of(opcode);
    const std::string& head = parts.front();
    if (head == "bra") {
      to.kind = Kind::branch;
      branches_.emplace_back(here(), scope.prefix + operands.at(0));
    } else if (head == "ret" && !scope.prefix.empty()) {
      to.kind = Kind::branch;
      branches_.emplace_back(here(), scope.prefix + "end");
    } else if (head == "ret" || head == "exit") {
      to.kind = Kind::exit;
    } else if (opcode == "bar.sync" && operands == std::vector<std::string>{"0"}) {
      to.kind = Kind::barrier;
    } else if (head == "call") {
      if (to.guard >= 0) throw std::runtime_error("no guarded calls");
      return add_call(operands, scope);
    } else if (head == "ld" || head == "st" || head == "atom" || head == "red") {
      if (!add_memory(to, parts, operands, scope)) return;
    } else if (head == "mov" && operands.at(1).starts_with('{')) {
      return add_parts(to, operands, 1, scope);
    } else if (head == "mov" && operands.at(0).starts_with('{')) {
      return add_parts(to, operands, 0, scope);
    } else {
      to.run = operation_of(opcode);
      if (head == "shfl" || head == "vote" || head == "redux" || head == "bar") to.kind = Kind::collective;
      std::size_t count = 0;
      for (const std::string& operand : operands) {
        const auto bar =
            operand.find('|');  // two results: the second is last, so that inputs stand where they always do
        if (count >= to.operand.size()) throw std::runtime_error("too many operands");
        to.operand[count++] = slot(operand.substr(0, bar), scope);
        if (bar != operand.npos) to.operand.back() = slot(operand.substr(bar + 1), scope);
      }
      if (to.kind == Kind::collective) {
        to.members = to.operand[count - 1];
        to.values = operands.at(0).find('|') == std::string::npos ? 1 : 2;
      }
    }
    kernel_.code.push_back(std::move(to));
  }

  void add_call(const std::vector<std::string>& operands, const Scope& scope) {
    const auto inside = [](const std::string& list) {
      return split(std::string_view(list).substr(1, list.size() - 2));
    };
    const Module::Function& function = module_.functions_.at(operands.at(1));
    Scope called{scope.prefix + std::to_string(here()) + "/", {}};
    const auto bind = [&](const std::vector<std::string>& formal, const std::vector<std::string>& actual) {
      for (std::size_t i = 0; i < formal.size(); ++i) {
        called.formal[declaration_of(formal[i]).name] = scope.prefix + actual.at(i);
      }
    };
    bind(function.results, inside(operands.at(0)));
    bind(function.parameters, inside(operands.at(2)));
    add(function.statements, called);
    labels_[called.prefix + "end"] = here();
  }

  // False where the address is a parameter of a call, which is a slot like any other: then it is a move.
  bool add_memory(Instruction& to, const std::vector<std::string>& parts, const std::vector<std::string>& operands,
                  const Scope& scope) {
    const std::string &head = parts.front(), &type = parts.back();
    const bool is_load = head == "ld", is_store = head == "st";
    std::string kind = head;
    for (std::size_t i = 1; i + 1 < parts.size(); ++i) {
      const std::string& part = parts[i];
      if (part == "global" || part == "shared" || part == "param") {
        to.space = part == "global" ? Space::global : part == "shared" ? Space::shared : Space::param;
      } else if (part == "v2" || part == "v4") {
        to.values = part[1] - '0';
      } else if (!is_load && !is_store && (part == "add" || part == "min" || part == "max" || part == "or")) {
        kind = part;
      } else if (part != "volatile" && part != "cg" && part != "nc" && part != "ca" && part != "relaxed") {
        throw std::runtime_error("unknown modifier " + part);
      }
    }
    if (to.space == Space::none) throw std::runtime_error("no generic addresses");
    const std::string& address = operands.at(is_store || head == "red" ? 0 : 1);
    std::string base = address.substr(1, address.size() - 2);
    if (const auto sign = base.find_first_of("+-", 1); sign != base.npos) {
      to.offset = std::stoll(base.substr(sign + (base[sign] == '+')));
      base = trimmed(base.substr(0, sign));
    }
    std::string value = operands.at(is_store || head == "red" ? 1 : 0);
    if (to.space == Space::param && base.front() != '%' && !addresses_.contains(base)) {
      const int parameter = slot(base, scope), other = slot(value, scope);
      to.space = Space::none;
      to.run = operation_of("mov." + type);
      to.operand[0] = is_load ? other : parameter;
      to.operand[1] = is_load ? parameter : other;
      kernel_.code.push_back(std::move(to));
      return false;
    }
    to.operand[0] = slot(base, scope);
    if (value.starts_with('{')) value = value.substr(1, value.size() - 2);
    const auto values = split(value);
    if (values.size() != static_cast<std::size_t>(to.values)) throw std::runtime_error("values do not fit the vector");
    for (std::size_t i = 0; i < values.size(); ++i) to.operand[1 + i] = slot(values[i], scope);
    if (head == "atom") to.operand[2] = slot(operands.at(2), scope);
    if (head == "red") to.operand[2] = to.operand[1], to.operand[1] = slot("_", scope);
    to.run = memory_operation_of(kind, type);
    return true;
  }

  // A vector taken apart or put together: an instruction for each part.
  void add_parts(const Instruction& whole, const std::vector<std::string>& operands, int braced, const Scope& scope) {
    const std::string& list = operands.at(braced);
    const auto names = split(std::string_view(list).substr(1, list.size() - 2));
    const std::string type = parts_of(words(whole.text)[whole.guard >= 0]).back();
    const std::size_t bits = bytes_of(type) * 8 / names.size();
    const std::string single = operands.at(1 - braced);
    for (std::size_t i = 0; i < names.size(); ++i) {
      Instruction part = whole;
      part.run = operation_of((braced == 1 ? "pack." : "unpack.") + std::to_string(bits));
      part.operand[0] = slot(braced == 1 ? single : names[i], scope);
      part.operand[1] = slot(braced == 1 ? names[i] : single, scope);
      part.operand[2] = slot(std::to_string(i * bits), scope);
      kernel_.code.push_back(std::move(part));
    }
  }

  int here() const { return static_cast<int>(kernel_.code.size()); }

  int slot(const std::string& operand, const Scope& scope) {
    if (const auto formal = scope.formal.find(operand); formal != scope.formal.end()) return named(formal->second);
    if (const auto address = addresses_.find(operand); address != addresses_.end()) return constant(address->second);
    if (operand.starts_with("0f") || operand.starts_with("0d")) {
      std::uint64_t bits = 0;
      std::from_chars(operand.data() + 2, operand.data() + operand.size(), bits, 16);
      return constant(bits);
    }
    if (operand.find_first_of("0123456789") == (operand.front() == '-' ? 1u : 0u)) {
      return constant(operand.front() == '-' ? static_cast<std::uint64_t>(std::stoll(operand, nullptr, 0))
                                             : std::stoull(operand, nullptr, 0));
    }
    if (operand.starts_with("%tid.") || operand.starts_with("%ctaid.") || operand.starts_with("%ntid.") ||
        operand.starts_with("%nctaid.") || operand == "%laneid") {
      if (operand.ends_with(".z") || operand == "%tid.y" || operand == "%ntid.y") {
        throw std::runtime_error("no such dimension");
      }
      return kernel_.specials[operand] = named(operand);
    }
    if (operand.front() == '!') throw std::runtime_error("no negated operands");
    return named(scope.prefix + operand);
  }

  int named(const std::string& name) { return slots_.try_emplace(name, static_cast<int>(slots_.size())).first->second; }

  int constant(std::uint64_t value) {
    const auto before = slots_.size();
    std::string name = "#";
    const int found = named(name += std::to_string(value));
    if (slots_.size() != before) kernel_.constants.emplace_back(found, value);
    return found;
  }

  const Module& module_;
  Kernel kernel_;
  std::map<std::string, std::uint64_t> addresses_;  // of parameters and of shared variables
  std::map<std::string, int> slots_, labels_;
  std::vector<std::pair<int, std::string>> branches_;
};

Module::Module(std::string_view source) {
  const std::string text = without_comments(source);
  std::string so_far;
  Function* inside = nullptr;
  int depth = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const std::string statement = c == ';' || c == ':' || c == '{' || c == '}' ? trimmed(so_far) : std::string();
    if (inside == nullptr && c == '{') {  // a function begins: its head is what was read
      Function function;
      function.is_kernel = statement.find(".entry") != statement.npos;
      const auto head = statement.find(function.is_kernel ? ".entry" : ".func") + (function.is_kernel ? 6 : 5);
      auto open = statement.find('(', head);
      if (!function.is_kernel && trimmed(std::string_view(statement).substr(head, open - head)).empty()) {
        const auto close = statement.find(')', open);
        function.results = split(std::string_view(statement).substr(open + 1, close - open - 1));
        open = statement.find('(', close);
        so_far = statement.substr(close + 1, open - close - 1);
      } else {
        so_far = statement.substr(head, open - head);
      }
      const auto close = statement.find(')', open);
      function.parameters = split(std::string_view(statement).substr(open + 1, close - open - 1));
      if (const auto at = statement.find(".maxntid", close); at != statement.npos) {
        function.most_threads = std::stoi(statement.substr(at + 8));
      }
      inside = &(functions_[trimmed(so_far)] = std::move(function));
      depth = 1;
      so_far.clear();
    } else if (inside == nullptr && c == ';') {
      if (statement.find(".shared") != statement.npos) shared_.push_back(statement.substr(statement.find(".shared")));
      so_far.clear();
    } else if (inside != nullptr && c == '{' && statement.empty()) {
      ++depth;
    } else if (inside != nullptr && c == '}' && statement.empty()) {
      if (--depth == 0) inside = nullptr;
      so_far.clear();
    } else if (inside != nullptr && c == ':' && is_label(statement)) {
      inside->statements.push_back(statement + ":");
      so_far.clear();
    } else if (inside != nullptr && c == ';') {
      if (!statement.empty())
        (statement.front() == '.' ? inside->declarations : inside->statements).push_back(statement);
      so_far.clear();
    } else {
      so_far += c;
    }
  }
}

const Kernel& Module::kernel(const std::string& name) {
  const auto found = decoded_.find(name);
  return found != decoded_.end() ? found->second : decoded_.emplace(name, Decoder(*this, name).decode()).first->second;
}

}  // namespace ptx
