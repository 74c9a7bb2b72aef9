// Runs transfers without Python, for the sanitizers: see csrc/sanitize.sh. What the results have to
// be is tested from Python; here they are checked only as far as shows that work was done.
//
//   sanitizer_driver FOLDER...     uses each folder (of different file systems) for its files
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "../buffer_pool.h"
#include "../errors.h"
#include "../fault_posix.h"
#include "../transfer.h"

namespace {

using namespace nvme_resume;

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "sanitizer_driver: %s\n", what.c_str());
  std::exit(1);
}

void expect(bool truth, const std::string& what) {
  if (!truth) die(what);
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string pattern(size_t length, unsigned seed) {
  std::string data(length, '\0');
  for (char& c : data) c = static_cast<char>((seed = seed * 1664525u + 1013904223u) >> 24);
  return data;
}

struct Setting {
  std::string folder;
  EngineKind engine;
  DirectMode direct;
  int64_t block_bytes;

  std::string path(const std::string& name) const { return folder + "/" + name; }
  Options options() const {
    Options options;
    options.engine = engine;
    options.direct = direct;
    options.block_bytes = block_bytes;
    return options;
  }
};

Job job_of(const std::string& src, std::optional<std::string> dst) {
  Job job;
  job.src = src;
  job.dst = std::move(dst);
  return job;
}

// Sources 0..n-1 exist; returns their contents.
std::vector<std::string> write_sources(const Setting& setting) {
  const size_t block = static_cast<size_t>(setting.block_bytes);
  std::vector<std::string> contents;
  for (size_t size : {size_t{0}, size_t{1}, size_t{511}, size_t{4097}, block - 1, block, block + 1,
                      size_t{5} * 1024 * 1024 + 12345}) {
    contents.push_back(pattern(size, static_cast<unsigned>(size)));
    std::ofstream(setting.path("src" + std::to_string(contents.size() - 1)), std::ios::binary)
        << contents.back();
  }
  return contents;
}

std::vector<Job> copies(const Setting& setting, size_t count) {
  std::vector<Job> jobs;
  for (size_t i = 0; i < count; ++i) {
    const std::string number = std::to_string(i);
    jobs.push_back(job_of(setting.path("src" + number), setting.path("dst" + number)));
  }
  return jobs;
}

void check_copies(const Setting& setting, const std::vector<std::string>& contents) {
  for (size_t i = 0; i < contents.size(); ++i) {
    expect(read_file(setting.path("dst" + std::to_string(i))) == contents[i], "a copy differs");
  }
}

void copy_and_verify(const Setting& setting, const std::vector<std::string>& contents) {
  const auto copied = Transfer(copies(setting, contents.size()), setting.options()).run();
  check_copies(setting, contents);
  std::vector<Job> reads;
  for (size_t i = 0; i < contents.size(); ++i) {
    reads.push_back(job_of(setting.path("dst" + std::to_string(i)), std::nullopt));
  }
  const auto verified = Transfer(reads, setting.options()).run();
  for (size_t i = 0; i < contents.size(); ++i) {
    expect(copied[i].digest == verified[i].digest, "a digest differs");
  }
}

// Ranges of odd sizes into one file: buffered tails next to direct blocks.
void copy_into_one_file(const Setting& setting, const std::vector<std::string>& contents) {
  std::string whole;
  std::vector<Job> jobs;
  for (size_t i = 0; i < contents.size(); ++i) {
    Job job = job_of(setting.path("src" + std::to_string(i)), setting.path("one"));
    job.truncate = false;
    job.dst_offset = static_cast<int64_t>(whole.size());
    jobs.push_back(job);
    whole += contents[i];
  }
  std::ofstream(setting.path("one"), std::ios::binary | std::ios::trunc);
  Transfer(jobs, setting.options()).run();
  expect(read_file(setting.path("one")) == whole, "the assembled file differs");
}

// Faults that a transfer gets over, then faults that end it.
void meet_faults(const Setting& setting, const std::vector<std::string>& contents) {
  for (const char* operation : {"pread", "pwrite"}) {
    for (int action : {Fault::kShort, EINTR, EAGAIN}) {
      set_current_posix(std::make_shared<FaultPosix>(
          std::vector<Fault>{{operation, 1, action}, {operation, 3, action}}, 0));
      Transfer(copies(setting, contents.size()), setting.options()).run();
      set_current_posix(nullptr);
      check_copies(setting, contents);
    }
  }
  for (const char* operation : {"open", "pread", "pwrite", "fallocate", "fdatasync", "close",
                                "io_setup", "io_submit", "io_getevents"}) {
    if (std::string(operation).rfind("io_", 0) == 0 && setting.engine != EngineKind::kLibaio) {
      continue;
    }
    for (int64_t nth : {1, 2, 4}) {
      set_current_posix(std::make_shared<FaultPosix>(std::vector<Fault>{{operation, nth, EIO}}, 0));
      bool failed = false;
      try {
        Transfer(copies(setting, contents.size()), setting.options()).run();
      } catch (const IoError& error) {
        failed = error.code() == EIO;
      }
      set_current_posix(nullptr);
      // There is one io_setup, and two waits may do for everything.
      const bool may_not_happen = nth > 1 && std::string(operation).rfind("io_", 0) == 0;
      expect(failed || may_not_happen, std::string("EIO was lost: ") + operation);
    }
  }
}

void cancel_from_another_thread(const Setting& setting, size_t count) {
  for (int delay_us : {0, 50, 500, 2000, 10000}) {
    Options options = setting.options();
    options.bandwidth_limit = delay_us == 10000 ? 1 << 20 : 0;
    Transfer transfer(copies(setting, count), options);
    std::atomic<bool> finished{false};
    std::thread watcher([&] {
      while (!finished) {
        const auto [done, total] = transfer.progress();
        expect(done <= total || total == 0, "progress beyond the total");
        std::this_thread::yield();
      }
    });
    std::thread canceller([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      transfer.cancel();
    });
    try {
      transfer.run();
    } catch (const Cancelled&) {
    }
    finished = true;
    watcher.join();
    canceller.join();
  }
}

void pause_from_another_thread(const Setting& setting, const std::vector<std::string>& contents) {
  Options options = setting.options();
  options.low_priority = true;
  Transfer transfer(copies(setting, contents.size()), options);
  transfer.set_paused(true);
  std::atomic<bool> finished{false};
  std::thread training([&] {
    for (bool paused = false; !finished; paused = !paused) {
      transfer.set_paused(paused);
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  });
  transfer.run();
  finished = true;
  training.join();
  check_copies(setting, contents);
}

void run_side_by_side(const Setting& setting, const std::vector<std::string>& contents) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      std::vector<Job> jobs;
      for (size_t k = 0; k < contents.size(); ++k) {
        const std::string number = std::to_string(k);
        jobs.push_back(job_of(setting.path("src" + number),
                              setting.path("side" + std::to_string(i) + "-" + number)));
      }
      Transfer(jobs, setting.options()).run();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void exercise(const Setting& setting) {
  const std::vector<std::string> contents = write_sources(setting);
  copy_and_verify(setting, contents);
  copy_into_one_file(setting, contents);
  if (setting.direct == DirectMode::kAuto) meet_faults(setting, contents);
  cancel_from_another_thread(setting, contents.size());
  pause_from_another_thread(setting, contents);
  run_side_by_side(setting, contents);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) die("usage: sanitizer_driver FOLDER...");
  for (int i = 1; i < argc; ++i) {
    for (EngineKind engine : {EngineKind::kThreads, EngineKind::kLibaio}) {
      for (DirectMode direct : {DirectMode::kAuto, DirectMode::kOff}) {
        for (int64_t block : {int64_t{64} << 10, int64_t{4} << 20}) {
          exercise({argv[i], engine, direct, block});
        }
      }
    }
  }
  BufferPool::shared().trim();
  expect(BufferPool::shared().idle_bytes() == 0, "the pool kept a buffer");
  std::puts("sanitizer_driver: all good");
  return 0;
}
