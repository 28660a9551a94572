// A server's decoding loop without Python: loads a program that jax.export wrote and runs it on any
// PJRT plugin, with the handlers of libxla_paged_attention.so.
//
//   client PLUGIN HANDLERS FOLDER STEPS
//
// FOLDER is what `python -m examples.cpp_client.export` writes. The results of a step are the first
// arguments of the next one. The last results go to FOLDER/result-0, result-1 and so on.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pjrt.h"

namespace {

namespace fs = std::filesystem;

constexpr const char* kTargets[] = {"xla_gpu_kv_cache_update", "xla_gpu_paged_attention"};

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

// Registers the handlers under the name of the plugin's platform, which is "cpu" or "cuda".
void RegisterHandlers(const Plugin& plugin, const std::string& platform, const char* library) {
  using FindHandler = void*(const char* platform, const char* target);
  auto* find_handler = reinterpret_cast<FindHandler*>(LoadSymbol(library, "xla_gpu_handler"));
  for (const char* target : kTargets) {
    void* handler = find_handler(platform.c_str(), target);
    if (handler == nullptr) {
      throw std::runtime_error(std::string(library) + " has no handler of " + target + " for " +
                               platform);
    }
    plugin.RegisterHandler(platform, target, handler);
  }
}

// Each line of FOLDER/arguments is an argument: its dtype, and its dimensions. The numbers are in
// FOLDER/0, FOLDER/1 and so on.
std::vector<Array> ReadArguments(const fs::path& folder) {
  std::istringstream lines(ReadFile(folder / "arguments"));
  std::vector<Array> arrays;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string dtype;
    words >> dtype;
    std::vector<int64_t> dims(std::istream_iterator<int64_t>(words), {});
    arrays.push_back({dtype, dims, ReadFile(folder / std::to_string(arrays.size()))});
  }
  return arrays;
}

void Run(const char* plugin_path, const char* library, const fs::path& folder, int num_steps) {
  const Plugin plugin(plugin_path);
  const Client client(plugin);
  const std::string platform = client.platform();
  RegisterHandlers(plugin, platform, library);
  const Executable step =
      client.Compile(ReadFile(folder / "program"), ReadFile(folder / "compile_options"));

  std::vector<Buffer> arrays;
  for (const Array& array : ReadArguments(folder)) arrays.push_back(client.ToDevice(array));
  const uintptr_t cache = arrays[0].address();
  size_t num_results = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < num_steps; ++i) {
    std::vector<Buffer> results = step.Run(arrays);
    num_results = results.size();
    std::move(results.begin(), results.end(), arrays.begin());
  }
  const std::chrono::duration<double, std::micro> elapsed =
      std::chrono::steady_clock::now() - start;

  for (size_t i = 0; i < num_results; ++i) {
    std::ofstream(folder / ("result-" + std::to_string(i)), std::ios::binary) << arrays[i].ToHost();
  }
  std::printf("%s, PJRT %d.%d: %d steps, %.0f us each\n", platform.c_str(), plugin.major_version(),
              plugin.minor_version(), num_steps, elapsed.count() / num_steps);
  std::printf("the cache %s\n",
              arrays[0].address() == cache ? "stayed where it was" : "was copied");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 || std::atoi(argv[4]) < 1) {
    std::fprintf(stderr, "usage: %s PLUGIN HANDLERS FOLDER STEPS\n", argv[0]);
    return 2;
  }
  try {
    Run(argv[1], argv[2], argv[3], std::atoi(argv[4]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
