// The Python face. Conversions only: what a value means is decided below.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "buffer_pool.h"
#include "chunk_hash.h"
#include "errors.h"
#include "fault_posix.h"
#include "job.h"
#include "transfer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nvme_resume {
namespace {

// Paths are bytes to the kernel; Python's surrogateescape carries those that are not UTF-8.
std::string encode_path(const nb::str& path) {
  nb::object bytes = nb::steal(PyUnicode_EncodeFSDefault(path.ptr()));
  if (!bytes.is_valid()) throw nb::python_error();
  char* data = nullptr;
  Py_ssize_t length = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &length) != 0) throw nb::python_error();
  return std::string(data, static_cast<size_t>(length));
}

nb::str decode_path(const std::string& path) {
  nb::object text = nb::steal(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
  if (!text.is_valid()) throw nb::python_error();
  return nb::cast<nb::str>(text);
}

nb::bytes to_bytes(const std::string& data) {
  return nb::bytes(data.data(), data.size());
}

EngineKind parse_engine(const std::string& name) {
  if (name == "auto") return EngineKind::kAuto;
  if (name == "threads") return EngineKind::kThreads;
  if (name == "libaio") return EngineKind::kLibaio;
  throw std::invalid_argument("engine must be 'auto', 'threads' or 'libaio', not '" + name + "'");
}

DirectMode parse_direct(const std::string& name) {
  if (name == "auto") return DirectMode::kAuto;
  if (name == "on") return DirectMode::kOn;
  if (name == "off") return DirectMode::kOff;
  throw std::invalid_argument("direct must be 'auto', 'on' or 'off', not '" + name + "'");
}

// OSError(errno, text, path) picks the subclass (FileNotFoundError, ...) itself.
void raise_os_error(const IoError& error) {
  std::string text = std::strerror(error.code());
  if (!error.detail().empty()) text += ": " + error.detail();
  nb::object type = nb::borrow(PyExc_OSError);
  nb::object path = error.path().empty() ? nb::object(nb::none()) : decode_path(error.path());
  nb::object exception = type(error.code(), text, path);
  exception.attr("offset") = error.offset();
  exception.attr("operation") = error.operation();
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
}

std::string repr(const Job& job) {
  const auto quoted = [](const std::string& path) {
    return std::string(nb::repr(decode_path(path)).c_str());
  };
  return "Job(" + quoted(job.src) + ", " + (job.dst ? quoted(*job.dst) : "None") +
         ", src_offset=" + std::to_string(job.src_offset) +
         ", dst_offset=" + std::to_string(job.dst_offset) +
         ", length=" + std::to_string(job.length) +
         ", truncate=" + (job.truncate ? "True" : "False") + ")";
}

// What the two testing hooks have asked for; each of them starts the counts anew.
struct TestingState {
  std::vector<Fault> faults;
  int64_t kill_at = 0;

  void apply() const {
    if (faults.empty() && kill_at <= 0) {
      set_current_posix(nullptr);
    } else {
      set_current_posix(std::make_shared<FaultPosix>(faults, kill_at));
    }
  }
};

TestingState& testing_state() {
  static TestingState state;  // the GIL guards it
  return state;
}

Fault parse_fault(nb::handle item) {
  const auto fields = nb::cast<nb::tuple>(item);
  if (fields.size() != 3) throw std::invalid_argument("a fault is (operation, nth_call, action)");
  Fault fault{nb::cast<std::string>(fields[0]), nb::cast<int64_t>(fields[1]), 0};
  if (nb::isinstance<nb::str>(fields[2])) {
    if (nb::cast<std::string>(fields[2]) != "short") {
      throw std::invalid_argument("action must be an errno or 'short'");
    }
    fault.action = Fault::kShort;
  } else {
    fault.action = nb::cast<int>(fields[2]);
    if (fault.action <= 0) throw std::invalid_argument("action must be an errno or 'short'");
  }
  return fault;
}

}  // namespace
}  // namespace nvme_resume

NB_MODULE(_native, m) {
  using namespace nvme_resume;

  m.doc() = "Copies and hashes byte ranges of files. See _native.pyi.";
  // What a process has not tidied away when it dies is no news to its user.
  nb::set_leak_warnings(false);
  m.attr("CHUNK_BYTES") = kChunkBytes;

  nb::exception<Cancelled>(m, "Cancelled");
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const IoError& error) {
      raise_os_error(error);
    }
  });

  nb::class_<Job>(m, "Job", nb::is_final())
      .def(
          "__init__",
          [](Job* self, const nb::str& src, const std::optional<nb::str>& dst, int64_t src_offset,
             int64_t dst_offset, int64_t length, bool truncate) {
            Job job{encode_path(src), std::nullopt, src_offset, dst_offset, length, truncate};
            if (dst) job.dst = encode_path(*dst);
            validate(job);
            new (self) Job(std::move(job));
          },
          "src"_a, "dst"_a = nb::none(), nb::kw_only(), "src_offset"_a = 0, "dst_offset"_a = 0,
          "length"_a = kToEndOfFile, "truncate"_a = true)
      .def_prop_ro("src", [](const Job& self) { return decode_path(self.src); })
      .def_prop_ro("dst",
                   [](const Job& self) {
                     return self.dst ? nb::object(decode_path(*self.dst)) : nb::object(nb::none());
                   })
      .def_ro("src_offset", &Job::src_offset)
      .def_ro("dst_offset", &Job::dst_offset)
      .def_ro("length", &Job::length)
      .def_ro("truncate", &Job::truncate)
      .def("__repr__", &repr);

  nb::class_<FileResult>(m, "FileResult", nb::is_final())
      .def_ro("bytes", &FileResult::bytes)
      .def_ro("digest", &FileResult::digest)
      .def_prop_ro("chunk_digests",
                   [](const FileResult& self) { return to_bytes(self.chunk_digests); })
      .def_ro("direct", &FileResult::direct)
      .def_ro("engine", &FileResult::engine);

  nb::class_<Transfer>(m, "Transfer", nb::is_final())
      .def(
          "__init__",
          [](Transfer* self, const nb::sequence& jobs, int64_t block_bytes, int in_flight,
             const std::string& engine, const std::string& direct, bool sync, bool hash,
             int64_t bandwidth_limit, bool low_priority) {
            std::vector<Job> list;
            for (nb::handle job : jobs) {
              if (!nb::isinstance<Job>(job)) throw nb::type_error("jobs must be a list of Job");
              list.push_back(nb::cast<Job>(job));
            }
            Options options;
            options.block_bytes = block_bytes;
            options.in_flight = in_flight;
            options.engine = parse_engine(engine);
            options.direct = parse_direct(direct);
            options.sync = sync;
            options.hash = hash;
            options.bandwidth_limit = bandwidth_limit;
            options.low_priority = low_priority;
            new (self) Transfer(std::move(list), options);
          },
          "jobs"_a, nb::kw_only(), "block_bytes"_a = Options().block_bytes,
          "in_flight"_a = Options().in_flight, "engine"_a = "auto", "direct"_a = "auto",
          "sync"_a = Options().sync, "hash"_a = Options().hash,
          "bandwidth_limit"_a = Options().bandwidth_limit,
          "low_priority"_a = Options().low_priority)
      .def("run", &Transfer::run, nb::call_guard<nb::gil_scoped_release>())
      .def("cancel", &Transfer::cancel)
      .def("set_paused", &Transfer::set_paused, "paused"_a)
      .def("progress", &Transfer::progress);

  m.def(
      "digest_of_chunks",
      [](const nb::bytes& chunk_digests) {
        if (chunk_digests.size() % kDigestBytes != 0) {
          throw std::invalid_argument("chunk_digests must be a multiple of 16 bytes long");
        }
        return digest_of_chunks({chunk_digests.c_str(), chunk_digests.size()});
      },
      "chunk_digests"_a);

  m.def(
      "_testing_faults",
      [](const nb::sequence& faults) {
        std::vector<Fault> list;
        for (nb::handle item : faults) list.push_back(parse_fault(item));
        TestingState changed{std::move(list), testing_state().kill_at};
        changed.apply();
        testing_state() = std::move(changed);
      },
      "faults"_a);
  m.def(
      "_testing_kill_at",
      [](int64_t nth_call) {
        testing_state().kill_at = nth_call;
        testing_state().apply();
      },
      "nth_call"_a);
}
