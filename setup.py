"""Builds the extension and the emulated driver; everything else is in pyproject.toml.

The project's addresses come from GitHub's variables in the workflow that publishes.

Switches, all through the environment: MANAGEDMEM_SANITIZE=address,undefined (or thread) adds those
sanitizers, MANAGEDMEM_WERROR=1 turns warnings into errors, MANAGEDMEM_DEBUG=1 keeps assertions,
MANAGEDMEM_COVERAGE=1 makes the extension record for gcov which lines and branches run.
"""

import email
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

CUDA_HEADERS = 13000  # the oldest cuda.h whose typedefs name everything that is used
EMULATOR = "managedmem.libmanagedmem_emulator"
PROBE = "#include <Python.h>\n#include <stdatomic.h>\n"
INSTALL = """
pip compiles managedmem, which needs a C compiler, the headers of the C library and the headers of
Python:
    Debian, Ubuntu    apt install gcc libc6-dev python3-dev
    Fedora, RHEL      dnf install gcc python3-devel
    Alpine            apk add gcc musl-dev python3-dev
    conda             conda install -c conda-forge c-compiler
To use another compiler, set the environment variable CC."""


def project_urls():
    """The addresses that PKG-INFO of a source package names, or else those of the GitHub repository
    whose workflow builds. A plain clone has none of these."""
    repository = os.environ.get("GITHUB_REPOSITORY")
    if not repository or Path("PKG-INFO").exists():
        about = Path("PKG-INFO").read_text() if Path("PKG-INFO").exists() else ""
        named = email.message_from_string(about).get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in named)
    home = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
    return {
        "Homepage": home,
        "Documentation": f"{home}/tree/main/docs",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def description(urls):
    """The README. Its links become absolute if the project's address is known, because an index
    shows no files beside it."""
    text = Path("README.md").read_text(encoding="utf-8")
    home = urls.get("Homepage")
    if home is None:
        return text
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{home}/raw/main/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{home}/blob/main/", text)


def header_version(include):
    try:
        text = (include / "cuda.h").read_text(errors="replace")
    except OSError:
        return 0
    found = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", text)
    return int(found.group(1)) if found else 0


def cuda_include():
    """The first folder with a cuda.h that is new enough: toolkit first, then header package."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    roots += [Path(nvcc).resolve().parents[1] if nvcc else None, "/usr/local/cuda"]
    places = [Path(root) / "include" for root in roots if root]
    places += [Path(entry) / "nvidia" / "cu13" / "include" for entry in sys.path if entry]
    for include in places:
        if header_version(include) >= CUDA_HEADERS:
            return str(include)
    raise SystemExit(
        "managedmem: no cuda.h of CUDA 13.0 or newer found. Looked in: "
        + ", ".join(map(str, places))
        + ". Set CUDA_HOME, or pip install 'nvidia-cuda-runtime==13.0.*'."
    )


# The times of a wheel's files are fixed, so that two builds of the same sources are equal.
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")  # 1980, where the times of zip files begin


def compiler_is_zig():
    """Whether CC is `zig cc`, or `python -m ziglang cc` of its package."""
    words = shlex.split(os.environ.get("CC", ""))
    return any(Path(word).name in ("zig", "ziglang") for word in words)


def is_fresh(target, command):
    """Whether an object was made by this command, and is younger than all files that it was made
    of."""
    made = Path(target + ".made")
    try:
        files = Path(target + ".d").read_text().replace("\\\n", " ").split()[1:]
        time = os.stat(target).st_mtime_ns
        return made.read_text() == command and all(os.stat(f).st_mtime_ns < time for f in files)
    except OSError:
        return False


def compile_in_parallel(
    self, sources, output_dir, macros, include_dirs, debug, extra_postargs, **_
):
    """Replaces the compile() of setuptools, which makes all objects again, one after the other."""
    _, objects, after, options, build = self._setup_compile(
        output_dir, macros, include_dirs, sources, [], extra_postargs
    )
    before = self._get_cc_args(options, debug, None)

    def make(target):
        source, suffix = build[target]
        arguments = [*after, "-MD", "-MF", target + ".d"]
        command = repr((self.compiler_so, before, source, arguments))
        if self.force or not is_fresh(target, command):
            self._compile(target, source, suffix, before, arguments, options)
            Path(target + ".made").write_text(command)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        list(workers.map(make, build))
    return objects


class BuildExt(build_ext):
    """Gives the emulated driver, which is no Python module, a plain library name."""

    def get_ext_filename(self, fullname):
        if fullname.endswith(EMULATOR.rpartition(".")[2]):
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def check_compiler(self):
        """Fails with instructions; setuptools would only name the missing file."""
        program = self.compiler.compiler_so[0]
        if shutil.which(program) is None:
            raise SystemExit(f"managedmem: the C compiler {program!r} was not found.{INSTALL}")
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.c")
            probe.write_text(PROBE)
            try:
                self.compiler.compile([str(probe)], output_dir=folder)
            except CompileError:
                raise SystemExit(
                    f"managedmem: {program!r} cannot compile a file that includes Python.h and "
                    f"stdatomic.h; its message is above.{INSTALL}"
                ) from None

    def drop_search_paths(self):
        """Removes the library path that Pythons built from source pass to extensions. With it,
        every machine with the package would search the driver there first."""
        self.compiler.linker_so = [
            argument
            for argument in self.compiler.linker_so
            if not argument.startswith("-Wl,-rpath")
        ]

    def compile_args(self, own):
        """The compiler arguments of an extension, with checks for overflows. _FORTIFY_SOURCE needs
        an optimizing compiler, and would hide calls from a sanitizer. Debug information has paths
        of this machine, so it is made only on request (-g in CFLAGS, or MANAGEDMEM_DEBUG).

        -fstack-protector guards arrays of characters, where texts overflow. Its -strong form would
        cost the shortest calls 8 % more instructions. MM_GUARD_ARRAYS is for other arrays."""
        flags = [*self.compiler.compiler_so, *own]
        level = [flag for flag in flags if flag.startswith("-O")][-1:]
        sanitized = any(flag.startswith("-fsanitize") for flag in flags)
        debug_info = os.environ.get("MANAGEDMEM_DEBUG") or "-g" in os.environ.get("CFLAGS", "")
        added = ["-fstack-protector"]
        if level not in ([], ["-O0"]) and not sanitized:
            added += ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
        if not debug_info and not sanitized:
            added.append("-g0")
        return added + own

    def build_extensions(self):
        self.check_compiler()
        self.drop_search_paths()
        include = cuda_include()
        for extension in self.extensions:
            extension.include_dirs.append(include)
            extension.extra_compile_args = self.compile_args(extension.extra_compile_args)
        self.compiler.compile = partial(compile_in_parallel, self.compiler)
        super().build_extensions()


limited = not sysconfig.get_config_var("Py_GIL_DISABLED")
compile_args = ["-std=c11", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow"]
link_args = ["-Wl,-z,relro,-z,now,-z,noexecstack", "-Wl,--build-id=sha1"]
if not compiler_is_zig():
    link_args.append("-Wl,-z,text")  # zig always does this, and refuses the option
macros = [("_GNU_SOURCE", None)]
if os.environ.get("MANAGEDMEM_WERROR"):
    compile_args.append("-Werror")
if sanitize := os.environ.get("MANAGEDMEM_SANITIZE"):
    compile_args += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g", "-O1"]
    link_args.append(f"-fsanitize={sanitize}")
cover_compile, cover_link = [], []
if os.environ.get("MANAGEDMEM_COVERAGE"):
    # Threads share the counters: if a line loses its only count, it looks uncovered.
    cover_compile = ["--coverage", "-O0", "-fprofile-update=atomic"]
    if sanitize:  # without the checks that gcov would count as branches
        absent = "bool,enum,integer-divide-by-zero,nonnull-attribute,returns-nonnull-attribute"
        cover_compile.append(f"-fno-sanitize={absent}")
    # tests/gcov/sitecustomize.py calls this function of gcov's, which is linked only if needed.
    cover_link = ["--coverage", "-Wl,-u,__gcov_dump"]
undefine = ["NDEBUG"] if sanitize or os.environ.get("MANAGEDMEM_DEBUG") else []
common = {
    "undef_macros": undefine,
    "libraries": ["pthread", "dl"],
}

urls = project_urls()
setup(
    project_urls=urls,
    long_description=description(urls),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": BuildExt},
    ext_modules=[
        Extension(
            "managedmem._managedmem",
            sources=sorted(glob("src/_managedmem/*/*.c")),
            depends=sorted(glob("src/_managedmem/*/*.h")),
            define_macros=macros + ([("Py_LIMITED_API", "0x030b0000")] if limited else []),
            py_limited_api=limited,
            extra_compile_args=compile_args + cover_compile,
            extra_link_args=link_args + cover_link,
            **common,
        ),
        Extension(
            EMULATOR,
            sources=sorted(glob("src/emulator/*.c")),
            depends=sorted(glob("src/emulator/*.h")),
            define_macros=macros,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            **common,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if limited else {},
)
