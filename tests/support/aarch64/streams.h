// Reads and writes the standard streams of programs that the tests run.
#pragma once

#include <unistd.h>

#include <cstdlib>

inline void ReadBytes(void* to, size_t num_bytes) {
  char* place = static_cast<char*>(to);
  while (num_bytes > 0) {
    const ssize_t count = read(STDIN_FILENO, place, num_bytes);
    if (count <= 0) std::abort();
    place += count;
    num_bytes -= count;
  }
}

inline void WriteBytes(const void* from, size_t num_bytes) {
  const char* place = static_cast<const char*>(from);
  while (num_bytes > 0) {
    const ssize_t count = write(STDOUT_FILENO, place, num_bytes);
    if (count <= 0) std::abort();
    place += count;
    num_bytes -= count;
  }
}

template <typename T>
T Read() {
  T x;
  ReadBytes(&x, sizeof(x));
  return x;
}
