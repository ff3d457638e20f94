// PTX as the machine runs it: instructions decoded once, every operand a slot.
//
// A slot holds a value for each lane of a warp: registers, but constants, addresses and %tid too. Values keep their low
// bits and each instruction reads as many as its type has. A predicate is the mask in lane 0 of its slot.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ptx {

inline constexpr int kLanes = 32;

class Warp;
struct Instruction;
using Operation = void (*)(Warp&, const Instruction&);

enum class Kind { plain, branch, exit, barrier, collective };
enum class Space { none, global, shared, param };

struct Instruction {
  Kind kind = Kind::plain;
  Operation run = nullptr;
  int guard = -1;  // slot of a predicate, or none
  bool guard_wanted = true;
  std::array<int, 6> operand{};  // slots; what is written comes first
  int target = 0;                // of a branch
  int members = -1;              // of a collective: the slot of the lanes that take part
  // Of memory: operand[0] is the address, the values follow.
  Space space = Space::none;
  int values = 1;
  std::int64_t offset = 0;
  std::string text;
};

struct Parameter {
  std::size_t offset, bytes;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  std::size_t parameter_bytes = 0, shared_bytes = 0;  // without dynamic shared memory, which begins at the end
  int slots = 0, most_threads = 1024;
  std::vector<std::pair<int, std::uint64_t>> constants;
  std::map<std::string, int> specials;  // slots of %tid.x and its kind
};

// What the operation of an opcode is, without guards and operands. Throws where there is none.
Operation operation_of(const std::string& opcode);
// Of a load, a store or an atomic: `kind` is "ld", "st" or the atomic's own ("add").
Operation memory_operation_of(const std::string& kind, const std::string& type);

// The kernels of one source, each decoded when it is first asked for.
class Module {
 public:
  explicit Module(std::string_view text);
  const Kernel& kernel(const std::string& name);

 private:
  struct Function {
    std::vector<std::string> results, parameters;  // names; what a kernel's are, `declarations` says
    std::vector<std::string> declarations, statements;
    int most_threads = 1024;
    bool is_kernel = false;
  };
  friend class Decoder;

  std::map<std::string, Function> functions_;
  std::vector<std::string> shared_;  // declarations outside of functions
  std::map<std::string, Kernel> decoded_;
};

}  // namespace ptx
