"""Installs the Python peers and fetches the model of `embed`: python3 benches/peers/python/setup.py

The first go to benches/peers/target/python, a virtual environment of 2 GB; the model goes to target/models.
"""

import pathlib
import re
import subprocess
import sys
import venv

HERE = pathlib.Path(__file__).parent
TARGET = HERE.parent / "target"
PYTHON = TARGET / "python" / "bin" / "python"

TORCH = "torch==2.15.0"
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
    "libcusolver.so.12",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libnvrtc.so.13",
    "libnvshmem_host.so.3",
]


def pip(*words):
    subprocess.run([PYTHON, "-m", "pip", "--disable-pip-version-check", *words], check=True)


def torch_loads():
    return subprocess.run([PYTHON, "-c", "import torch"], capture_output=True).returncode == 0


def stand_ins(folder):
    """Libraries with the names and symbols that torch refers to, and nothing behind them.

    Torch for Linux is built for GPUs, and does not load without their libraries, though a CPU uses none of them. What
    is in these ends the program.
    """
    pip("install", "--no-deps", CUDA_RUNTIME)
    undefined = subprocess.run(
        ["nm", "-D", "--undefined-only", *folder.glob("*.so")], capture_output=True, text=True, check=True
    ).stdout
    symbols = set(re.findall(r" [UVvw] (\w+)(?:@+([\w.]+))?$", undefined, re.MULTILINE))
    for name in CUDA_LIBRARIES:
        version = "NVSHMEM" if "nvshmem" in name else name
        mine = {symbol for symbol, of in symbols if of == version}
        command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", f"-Wl,-soname,{name}", "-o", folder / name]
        if mine:
            script = TARGET / "versions"
            script.write_text(f"{version} {{ *; }};")
            command.append(f"-Wl,--version-script={script}")
        else:
            # A library without versions: all that might be its own.
            mine = {symbol for symbol, of in symbols if not of and re.match("cuFile|cusparseLt|nccl", symbol)}
        source = "".join(f"void {symbol}(void) {{ __builtin_trap(); }}\n" for symbol in sorted(mine))
        subprocess.run(command, input=source, text=True, check=True)


def install():
    venv.create(TARGET / "python", with_pip=True)
    pip("install", "--requirement", HERE / "requirements.txt")
    pip("install", "--no-deps", TORCH)
    if not torch_loads():
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = subprocess.run([PYTHON, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
        stand_ins(pathlib.Path(packages) / "torch" / "lib")
    if not torch_loads():
        sys.exit("torch does not load; the other peers are installed")


if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    install()
    # The model goes where the repository's own tests look for it.
    subprocess.run([HERE.parent.parent.parent / ".ci" / "fetch-minilm"], check=True)
    print(f"Installed: {PYTHON}")
