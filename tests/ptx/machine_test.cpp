// The machine itself: what it computes for opcodes whose corners matter, and what it refuses.
#include "machine.h"

#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>

namespace {

constexpr unsigned kNan = 0x7fffffff;

// Runs `body` in one block: %r1 is the thread, %rd1 the address of its word. All words, afterwards.
std::vector<std::uint32_t> run(const std::string& body, unsigned threads = 32, std::size_t words = 64) {
  const std::string text =
      ".version 9.0\n.target sm_90\n.entry test(\n.param .u64 out\n)\n.maxntid 64, 1, 1\n{\n"
      "ld.param.u64 %rd0, [out];\ncvta.to.global.u64 %rd0, %rd0;\nmov.u32 %r1, %tid.x;\n"
      "mul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd1, %rd0, %rd2;\n" +
      body + "\nret;\n}\n";
  ptx::Module module(text);
  ptx::Memory memory;
  void* out = memory.allocate(4 * words);
  std::vector<std::byte> parameters(8);
  std::memcpy(parameters.data(), &out, 8);
  ptx::run_grid(module.kernel("test"), {1, 1, threads, 0}, parameters, memory, false);
  std::vector<std::uint32_t> found(words);
  std::memcpy(found.data(), out, 4 * words);
  return found;
}

std::uint32_t first(const std::string& body) { return run(body + "\nst.global.u32 [%rd1], %r9;", 1)[0]; }
std::string hex(float x) {
  char text[16];
  std::snprintf(text, sizeof text, "0f%08X", std::bit_cast<unsigned>(x));
  return text;
}

}  // namespace

TEST_CASE("float instructions are IEEE's, with the device's NaN") {
  CHECK(first("mul.rn.f32 %r9, " + hex(1e-30f) + ", " + hex(1e-12f) + ";") == std::bit_cast<unsigned>(1e-30f * 1e-12f));
  CHECK(first("div.rn.f32 %r9, " + hex(0) + ", " + hex(0) + ";") == kNan);
  CHECK(first("max.f32 %r9, 0f7FC00001, " + hex(-2) + ";") == std::bit_cast<unsigned>(-2.0f));
  CHECK(first("max.NaN.f32 %r9, 0f7FC00001, " + hex(-2) + ";") == kNan);
  CHECK(first("min.f32 %r9, " + hex(0.0f) + ", " + hex(-0.0f) + ";") == 0x80000000);
  CHECK(first("cvt.rni.f32.f32 %r9, " + hex(2.5f) + ";") == std::bit_cast<unsigned>(2.0f));
  CHECK(first("cvt.rn.bf16.f32 %r9, 0f3F808000;") == 0x3f80);  // a tie, to even
  CHECK(first("cvt.rn.f16.f32 %r9, " + hex(65520) + ";") == 0x7c00);
}

TEST_CASE("conversions to integers saturate, and NaN is 0 or the least") {
  CHECK(first("cvt.rzi.s32.f32 %r9, " + hex(3e9f) + ";") == 0x7fffffff);
  CHECK(first("cvt.rzi.s32.f32 %r9, " + hex(-INFINITY) + ";") == 0x80000000);
  CHECK(first("cvt.rzi.s32.f32 %r9, 0f7FFFFFFF;") == 0);
  CHECK(first("cvt.rzi.s32.f64 %r9, 0d7FF8000000000000;") == 0x80000000);
  CHECK(first("cvt.rzi.u32.f32 %r9, " + hex(-1) + ";") == 0);
}

TEST_CASE("comparisons with NaN are false, or true where they are unordered") {
  const auto compared = [](const std::string& how) {
    return first("setp." + how + ".f32 %p1, 0f7FFFFFFF, 0f3F800000;\nselp.b32 %r9, 1, 0, %p1;");
  };
  for (const char* how : {"eq", "ne", "lt", "le", "gt", "ge", "num"}) CHECK(compared(how) == 0);
  for (const char* how : {"equ", "neu", "ltu", "leu", "gtu", "geu", "nan"}) CHECK(compared(how) == 1);
}

TEST_CASE("integers wrap, shifts beyond the width leave nothing, parts come back") {
  CHECK(first("add.s32 %r9, 2147483647, 1;") == 0x80000000);
  CHECK(first("mul.hi.s32 %r9, -2, 3;") == 0xffffffff);
  CHECK(first("shl.b32 %r9, 1, 40;") == 0);
  CHECK(first("shr.s32 %r9, -8, 40;") == 0xffffffff);
  CHECK(first("prmt.b32 %r9, 0x33221100, 0x77665544, 0x7604;") == 0x77660044);
  CHECK(first("bfi.b32 %r9, 5, 0xffffffff, 4, 8;") == 0xfffff05f);
  CHECK(first("mov.b32 {%rs1, %rs2}, 0x12345678;\nmov.b32 %r9, {%rs2, %rs1};") == 0x56781234);
}

TEST_CASE("threads part at a branch and meet again") {
  const auto found =
      run("setp.lt.u32 %p1, %r1, 5;\n@%p1 bra LOW;\nmov.u32 %r2, 7;\nbra.uni BOTH;\nLOW:\nmov.u32 %r2, 3;\nBOTH:\n"
          "redux.sync.add.u32 %r3, %r2, 0xffffffff;\nst.global.u32 [%rd1], %r3;");
  for (int i = 0; i < 32; ++i) CHECK(found[i] == 5 * 3 + 27 * 7);
}

TEST_CASE("threads that go round a loop faster wait at its beginning for those that are still in it") {
  const auto found = run(
      "mov.u32 %r2, 0;\nLOOP:\nredux.sync.add.u32 %r3, %r1, 0xffffffff;\nadd.u32 %r2, %r2, 1;\nsetp.lt.u32 %p1, %r2, 4;"
      "\n@!%p1 bra END;\nsetp.lt.u32 %p2, %r1, 5;\n@%p2 bra LOOP;\nbar.warp.sync 0xffffffe0;\nbra.uni LOOP;\nEND:\n"
      "st.global.u32 [%rd1], %r2;");
  for (int i = 0; i < 32; ++i) CHECK(found[i] == 4);
}

TEST_CASE("ballots say who, and bits are found") {
  const auto found =
      run("setp.gt.u32 %p1, %r1, 29;\nvote.sync.ballot.b32 %r2, %p1, 0xffffffff;\nst.global.u32 [%rd1], %r2;");
  for (int i = 0; i < 32; ++i) CHECK(found[i] == 0xc0000000);
  CHECK(first("brev.b32 %r9, 6;") == 0x60000000);
  CHECK(first("bfind.shiftamt.u32 %r9, 6;") == 29);
  CHECK(first("bfind.shiftamt.u32 %r9, 0;") == 0xffffffff);
}

TEST_CASE("shuffles keep to the range they are given") {
  const auto found =
      run("shfl.sync.down.b32 %r2|%p1, %r1, 4, 31, 0xffffffff;\n@!%p1 mov.u32 %r2, 99;\nst.global.u32 [%rd1], %r2;");
  for (unsigned i = 0; i < 32; ++i) CHECK(found[i] == (i < 28 ? i + 4 : 99));
}

TEST_CASE("a barrier stands between what one warp writes and another reads") {
  const auto found =
      run(".shared .align 4 .b8 cell[4];\nsetp.eq.u32 %p1, %r1, 40;\n@%p1 st.shared.u32 [cell], %r1;\nbar.sync 0;\n"
          "ld.shared.u32 %r2, [cell];\nst.global.u32 [%rd1], %r2;",
          64);
  for (int i = 0; i < 64; ++i) CHECK(found[i] == 40);
}

TEST_CASE("what a device would trap on, or not survive, is an error") {
  using Catch::Contains;
  CHECK_THROWS_WITH(run("st.global.u32 [%rd1+4], %r1;", 32, 32), Contains("outside of every allocation"));
  CHECK_THROWS_WITH(run("ld.global.v2.u32 {%r2, %r3}, [%rd1];"), Contains("misaligned"));
  CHECK_THROWS_WITH(run(".shared .align 4 .b8 cell[4];\nst.shared.u32 [cell+4], %r1;"), Contains("outside of shared"));
  CHECK_THROWS_WITH(run("setp.lt.u32 %p1, %r1, 5;\n@%p1 bra END;\nbar.sync 0;\nst.global.u32 [%rd1], %r1;\nbra.uni "
                        "END2;\nEND:\nbar.sync 0;\nEND2:"),
                    Contains("wait for each other"));
  CHECK_THROWS_WITH(run("setp.lt.u32 %p1, %r1, 5;\n@%p1 exit;\nredux.sync.add.u32 %r3, %r1, 0xffffffff;"),
                    Contains("have ended"));
  CHECK_THROWS_WITH(run("redux.sync.add.u32 %r3, %r1, 0xff;"), Contains("its own mask"));
  CHECK_THROWS_WITH(run("tanh.approx.f32 %r9, %r1;"), Contains("no operation tanh.approx.f32"));
  CHECK_THROWS_WITH(run("bra NOWHERE;"), Contains("no label NOWHERE"));
}
