// Runs a target on random inputs, where there is no libFuzzer: TARGET [inputs]. The n-th input is the same everywhere.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  const long inputs = argc > 1 ? std::atol(argv[1]) : 1000;
  for (long i = 0; i < inputs; ++i) {
    std::mt19937 random(static_cast<unsigned>(i));
    std::vector<std::uint8_t> bytes(random() % 400);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%ld random inputs\n", inputs);
}
