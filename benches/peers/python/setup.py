"""Installs the Python peers and fetches the model of `embed`: python3 benches/peers/python/setup.py

They go to benches/peers/target: `python`, a virtual environment of torch, ONNX Runtime and OpenVINO; `zentorch`, another
with zentorch and the release of torch that it is built for; `ggml`, its libraries. 4 GB. The model goes to target/models.
With names of them as arguments, only those.
"""

import subprocess
import sys

import build_ggml
from environment import HERE, TARGET, Environment


def common():
    """torch, ONNX Runtime, OpenVINO, and what builds and calls ggml."""
    environment = Environment("python")
    environment.install("requirements.txt")
    environment.install("requirements-torch.txt")
    return environment.install_torch("torch==2.15.0")


def ggml():
    """ggml's libraries, from the sources in llama-cpp-python, for this machine."""
    environment = Environment("python")
    environment.install("requirements.txt")
    return build_ggml.build(environment)


def zentorch():
    """AMD's extension of torch. Its compiled code fits one minor release: the `2.14` of both."""
    environment = Environment("zentorch")
    environment.install("requirements-torch.txt")
    environment.install("requirements-zentorch.txt")
    environment.install_torch("torch==2.14.0")
    environment.pip("install", "--no-deps", "zentorch==2.14.0.1")
    return environment.loads("zentorch")


def model():
    """The model goes where the repository's own tests look for it."""
    return subprocess.run([HERE.parent.parent.parent / ".ci" / "fetch-minilm"]).returncode == 0


PARTS = {part.__name__: part for part in (common, ggml, zentorch, model)}


def main(names):
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: none of {', '.join(PARTS)}")
    TARGET.mkdir(exist_ok=True)
    failed = []
    for name in names or PARTS:
        try:
            works = PARTS[name]()
        except (OSError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            works = False
        if not works:
            failed.append(name)
    if failed:
        sys.exit(f"Not installed, or installed and does not load: {', '.join(failed)}. The others are.")
    print(f"Installed: {TARGET}")


if __name__ == "__main__":
    main(sys.argv[1:])
