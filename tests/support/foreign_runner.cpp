// Runs kernels of a library that another machine's Python cannot load: `foreign_cpu.py` starts this program, under an
// emulator where needed, with the library's path, and writes requests to its standard input.
//
// A request is a kind, a function's name and, for a launch, its argument block, the memory that the block points into,
// and where in the block those pointers are. The answer to a launch is that memory as the kernel left it. All numbers
// are 64-bit little-endian.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr size_t kAlignment = 64;  // of a region: its address keeps its remainder

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

void read_all(void* to, size_t count) {
  char* at = static_cast<char*>(to);
  while (count > 0) {
    const ssize_t got = read(STDIN_FILENO, at, count);
    if (got <= 0) std::exit(got < 0);
    at += got;
    count -= got;
  }
}

void write_all(const void* from, size_t count) {
  const char* at = static_cast<const char*>(from);
  while (count > 0) {
    const ssize_t put = write(STDOUT_FILENO, at, count);
    if (put <= 0) fail("cannot write the answer");
    at += put;
    count -= put;
  }
}

int64_t read_number() {
  int64_t value;
  read_all(&value, sizeof(value));
  return value;
}

void write_number(int64_t value) { write_all(&value, sizeof(value)); }

std::string read_string() {
  std::string text(read_number(), '\0');
  read_all(text.data(), text.size());
  return text;
}

struct Region {
  std::vector<char> memory;
  char* data;
  size_t size;

  Region(size_t size, size_t remainder) : memory(size + 2 * kAlignment), size(size) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory.data());
    data = memory.data() + (kAlignment - begin % kAlignment) + remainder;
    read_all(data, size);
  }
};

void launch(int64_t (*kernel)(const void*)) {
  const std::string block = read_string();
  // As Python's own blocks are, aligned for any scalar.
  std::vector<uint64_t> args((block.size() + 7) / 8);
  std::memcpy(args.data(), block.data(), block.size());
  std::vector<Region> regions;
  for (int64_t left = read_number(); left > 0; --left) {
    const int64_t size = read_number(), remainder = read_number();
    regions.emplace_back(size, remainder);
  }
  for (int64_t left = read_number(); left > 0; --left) {
    const int64_t at = read_number(), region = read_number(), offset = read_number();
    char* pointer = regions.at(region).data + offset;
    std::memcpy(reinterpret_cast<char*>(args.data()) + at, &pointer, sizeof(pointer));
  }
  write_number(kernel(args.data()) ? 1 : 0);
  for (const Region& region : regions) write_all(region.data, region.size);
}

}  // namespace

int main(int count, char** arguments) {
  void* library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
  if (library == nullptr) fail(count == 2 ? dlerror() : "usage: foreign_runner LIBRARY");
  for (;;) {
    const int64_t kind = read_number();
    void* function = dlsym(library, read_string().c_str());
    if (kind == 'f') {
      write_number(function != nullptr);
      continue;
    }
    if (function == nullptr) fail(dlerror());
    if (kind == 't') {
      reinterpret_cast<void (*)(int64_t)>(function)(read_number());
    } else if (kind == 'n') {
      write_number(reinterpret_cast<int64_t (*)()>(function)());
    } else if (kind == 's') {
      const char* text = reinterpret_cast<const char* (*)()>(function)();
      write_number(std::strlen(text));
      write_all(text, std::strlen(text));
    } else {
      launch(reinterpret_cast<int64_t (*)(const void*)>(function));
    }
  }
}
