"""Builds ggml's shared libraries from the sources that llama-cpp-python brings; its own code is not built."""

import os
import shutil
import subprocess
import tarfile

from environment import TARGET

LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
SOURCES = "vendor/llama.cpp/"
# Everything but the library itself.
WITHOUT = ["COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP"]


def build(environment):
    """Leaves them in target/ggml/bin, with instructions of this machine. True if they load."""
    folder = TARGET / "ggml"
    sources = folder / "llama.cpp"
    shutil.rmtree(folder, ignore_errors=True)
    environment.pip(
        "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder / "download", LLAMA_CPP_PYTHON
    )
    (archive,) = (folder / "download").glob("*.tar.gz")
    unpack(archive, sources)
    shutil.rmtree(folder / "download")
    tools = {**os.environ, "PATH": f"{environment.python.parent}{os.pathsep}{os.environ['PATH']}"}
    options = [f"-DLLAMA_BUILD_{part}=OFF" for part in WITHOUT]
    options += ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF"]
    subprocess.run(["cmake", "-G", "Ninja", "-S", sources, "-B", folder, *options], env=tools, check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "ggml"], env=tools, check=True)
    shutil.rmtree(sources)
    return (folder / "bin" / "libggml-cpu.so").exists()


def unpack(archive, folder):
    """The part of the archive that is llama.cpp."""
    with tarfile.open(archive) as files:
        for entry in files:
            name = entry.name.partition("/")[2]
            if name.startswith(SOURCES) and entry.isfile():
                target = folder / name.removeprefix(SOURCES)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files.extractfile(entry).read())
