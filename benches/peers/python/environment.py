"""A virtual environment of the Python peers, with a torch that loads on a machine without CUDA."""

import pathlib
import re
import subprocess
import venv

HERE = pathlib.Path(__file__).parent
TARGET = HERE.parent / "target"

# The one library of CUDA that torch calls when it is loaded, GPU or not: 1 MB.
CUDA_RUNTIME = "nvidia-cuda-runtime==13.2.86"
# Those it only refers to: 3 GB.
CUDA_LIBRARIES = [
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
    "libcufft.so.12",
    "libcufile.so.0",
    "libcupti.so.13",
    "libcurand.so.10",
    "libcusolver.so.12",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libnvrtc.so.13",
    "libnvshmem_host.so.3",
]


class Environment:
    def __init__(self, name):
        self.folder = TARGET / name
        self.python = self.folder / "bin" / "python"
        if not self.python.exists():
            venv.create(self.folder, with_pip=True)

    def pip(self, *words):
        subprocess.run([self.python, "-m", "pip", "--disable-pip-version-check", *words], check=True)

    def install(self, requirements):
        self.pip("install", "--requirement", HERE / requirements)

    def loads(self, module):
        return subprocess.run([self.python, "-c", f"import {module}"], capture_output=True).returncode == 0

    def install_torch(self, torch):
        """Installs a release of torch, without its dependencies. True if it loads."""
        self.pip("install", "--no-deps", torch)
        if not self.loads("torch"):
            where = "import sysconfig; print(sysconfig.get_path('purelib'))"
            packages = subprocess.run([self.python, "-c", where], capture_output=True, text=True, check=True)
            self.stand_ins(pathlib.Path(packages.stdout.strip()) / "torch" / "lib")
        return self.loads("torch")

    def stand_ins(self, folder):
        """Makes libraries with the names and symbols that torch refers to, and nothing behind them.

        Torch for Linux is built for GPUs, and does not load without their libraries, though a CPU uses none of them.
        What is in these ends the program.
        """
        self.pip("install", "--no-deps", CUDA_RUNTIME)
        undefined = subprocess.run(
            ["nm", "-D", "--undefined-only", *folder.glob("*.so")], capture_output=True, text=True, check=True
        ).stdout
        symbols = set(re.findall(r" [UVvw] (\w+)(?:@+([\w.]+))?$", undefined, re.MULTILINE))
        for name in CUDA_LIBRARIES:
            version = "NVSHMEM" if "nvshmem" in name else name
            mine = {symbol for symbol, of in symbols if of == version}
            command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", f"-Wl,-soname,{name}", "-o", folder / name]
            if mine:
                script = self.folder / "versions"
                script.write_text(f"{version} {{ *; }};")
                command.append(f"-Wl,--version-script={script}")
            else:
                # A library without versions: all that might be its own.
                mine = {symbol for symbol, of in symbols if not of and re.match("cuFile|cusparseLt|nccl", symbol)}
            source = "".join(f"void {symbol}(void) {{ __builtin_trap(); }}\n" for symbol in sorted(mine))
            subprocess.run(command, input=source, text=True, check=True)
