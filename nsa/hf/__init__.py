"""NSA in Transformers: `import nsa.hf` registers `model_type="nsa_llama"` with the Auto classes.

import nsa.hf
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(folder)  # of `nsa export` or `nsa convert`
"""

# ruff: noqa: E402  what is missing is named before it is imported

from __future__ import annotations

import re
from importlib.util import find_spec

OLDEST = (5, 14)
INSTALL = "pip install 'nsa[hf]', or pip install 'transformers>=5.14'"

if find_spec("transformers") is None:
    raise ModuleNotFoundError(f"nsa.hf needs the package transformers, 5.14 or later: {INSTALL}", name="transformers")

import transformers

if tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2]) < OLDEST:
    # Earlier versions silently build their own cache layers for a layer type that they do not know.
    raise ImportError(
        f"nsa.hf needs transformers 5.14 or later, and {transformers.__version__} is installed: {INSTALL}"
    )

from nsa.hf.cache import NSADynamicLayer, NSAStaticLayer
from nsa.hf.configuration import NSALlamaConfig
from nsa.hf.modeling import NSALlamaForCausalLM, NSALlamaModel, NSALlamaPreTrainedModel

__all__ = [
    "NSADynamicLayer",
    "NSALlamaConfig",
    "NSALlamaForCausalLM",
    "NSALlamaModel",
    "NSALlamaPreTrainedModel",
    "NSAStaticLayer",
]

transformers.AutoConfig.register(NSALlamaConfig.model_type, NSALlamaConfig)
transformers.AutoModel.register(NSALlamaConfig, NSALlamaModel)
transformers.AutoModelForCausalLM.register(NSALlamaConfig, NSALlamaForCausalLM)
