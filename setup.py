"""Builds the native module. Everything else about the project is in pyproject.toml."""

import copy
import sys
import tempfile
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

SOURCES = Path("csrc")
NANOBIND = Path(nanobind.__file__).parent

# What the native module needs from the system: a program that builds only where it is there, and the
# libraries to link it with.
SYSTEM_NEEDS = {
    "a C++17 compiler": (
        "#include <optional>\nint main() { return std::optional<int>(0).value(); }",
        [],
    ),
    "libaio.h or libaio.so": (
        "#include <libaio.h>\nint main() { io_context_t context{}; return io_destroy(context); }",
        ["aio"],
    ),
    "xxhash.h": (
        "#define XXH_INLINE_ALL\n#include <xxhash.h>\nint main() { XXH3_64bits(nullptr, 0); }",
        [],
    ),
}
COMPILE_ARGS = [
    "-std=c++17",
    "-O3",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",  # nanobind asks for it
    "-ffunction-sections",
    "-fdata-sections",
]
LINK_ARGS = ["-Wl,--gc-sections", "-Wl,-s"]

# nanobind supports the stable ABI from 3.12 on: one wheel for that and all later versions.
STABLE_ABI = sys.version_info >= (3, 12) and sys.implementation.name == "cpython"


class BuildNative(build_ext):
    """Says in one line what is missing, instead of a page of compiler errors."""

    def build_extension(self, ext):
        for need, (program, libraries) in SYSTEM_NEEDS.items():
            if not self._builds(program, libraries):
                raise SystemExit(
                    f"nvme_resume: cannot build the native module: {need} not found. "
                    "On Debian and Ubuntu: apt-get install libaio-dev libxxhash-dev g++"
                )
        # Not in the extension's own list: that becomes the list of files in a source distribution.
        with_nanobind = copy.copy(ext)
        with_nanobind.sources = [*ext.sources, str(NANOBIND / "src" / "nb_combined.cpp")]
        super().build_extension(with_nanobind)

    def _builds(self, program, libraries):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(program)
            try:
                objects = self.compiler.compile(
                    [str(source)], output_dir=folder, extra_postargs=["-std=c++17"]
                )
                self.compiler.link_executable(
                    objects, str(Path(folder, "probe")), libraries=libraries, target_lang="c++"
                )
            except (CompileError, LinkError):
                return False
            return True


native = Extension(
    "nvme_resume._native",
    sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))],
    depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
    include_dirs=[str(NANOBIND / "include"), str(NANOBIND / "ext" / "robin_map" / "include")],
    define_macros=[
        ("NDEBUG", None),
        ("NB_COMPACT_ASSERTIONS", None),
        *([("Py_LIMITED_API", "0x030C0000")] if STABLE_ABI else []),
    ],
    libraries=["aio"],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=LINK_ARGS,
    language="c++",
    py_limited_api=STABLE_ABI,
)

setup(
    ext_modules=[native],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if STABLE_ABI else {},
)
