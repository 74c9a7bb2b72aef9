// The two ways a transfer ends early. Both cross the binding and become Python exceptions there.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

namespace nvme_resume {

// A storage call failed for good. `operation` is one of the names in csrc/README.md.
class IoError : public std::exception {
 public:
  IoError(int code, const char* operation, std::string path, int64_t offset,
          std::string detail = {})
      : code_(code),
        operation_(operation),
        path_(std::move(path)),
        offset_(offset),
        detail_(std::move(detail)) {}

  int code() const { return code_; }
  const char* operation() const { return operation_; }
  const std::string& path() const { return path_; }
  int64_t offset() const { return offset_; }
  const std::string& detail() const { return detail_; }
  const char* what() const noexcept override { return operation_; }

 private:
  int code_;
  const char* operation_;  // string literal
  std::string path_;
  int64_t offset_;
  std::string detail_;  // what strerror() cannot say; may be empty
};

// cancel() was called before the work was done.
class Cancelled : public std::exception {
 public:
  const char* what() const noexcept override { return "the transfer was cancelled"; }
};

}  // namespace nvme_resume
