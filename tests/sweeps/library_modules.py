"""Small modules of timm and transformers with random weights: are the default parameters those of PyTorch?

    python tests/sweeps/library_modules.py [timm:resnet ...] [--ways dynamo ...] [--gradients] [--fresh]

In an environment with torch, onnxscript, transformers and timm, which may be installed without torchvision.
Says for each export whether the default of `training.parameters` has exactly the elements of the module's
parameters, or else whether a warning names what differs. Checks names of PyTorch and patterns for modules.
`--fresh` keeps the values of new modules, of which the exporters merge equal ones. With `--gradients`, those
of the sum of all outputs are compared with PyTorch's. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

# Started as a script, Python finds the modules of tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from support.exported_parameters import (
    WAYS,
    compare,
    export,
    make_distinct,
    quiet,
    wrong_fresh,
    wrong_gradients,
    wrong_modules,
    wrong_names,
)

Case = tuple[nn.Module, tuple[Any, ...]]

PICTURE = (1, 3, 64, 64)
# Name, and options of `timm.create_model`.
TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": {"channels": (16, 16, 32, 32)},
    "resnetv2_18": {"channels": (16, 16, 32, 32)},
    "mobilenetv3_small_050": {},
    "ghostnet_050": {},
    "densenet121": {"growth_rate": 4, "block_config": (1, 2, 2, 1)},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "edgenext_xx_small": {},
    "mobilevitv2_050": {},
    "levit_128s": {"img_size": 64, "embed_dim": (16, 32, 32), "num_heads": (1, 2, 2), "key_dim": 8},
    "vit_tiny_patch16_224": {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "beit_base_patch16_224": {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "eva02_tiny_patch14_224": {"img_size": 56, "embed_dim": 48, "depth": 2, "num_heads": 3},
    "cait_xxs24_224": {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "xcit_nano_12_p16_224": {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 16,
        "depths": (2, 1),
        "num_heads": (2, 2),
    },
    "swinv2_tiny_window8_256": {"img_size": 64, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2)},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "sequencer2d_s": {
        "img_size": 56,
        "layers": (1, 1),
        "embed_dims": (16, 32),
        "hidden_sizes": (8, 8),
        "patch_sizes": (7, 2),
        "mlp_ratios": (2, 2),
    },
}


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(0).integers(3, high, shape))


def numbers(*shape: int) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(1).standard_normal(shape, np.float32))


WIDTHS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 40,
}
SPEECH_WIDTHS = {
    # In training mode, layers are left out at random.
    "layerdrop": 0.0,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
VISION_WIDTHS = {"image_size": 32, "patch_size": 16}
ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 61,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
CLIP = {
    "text_config": {**WIDTHS, "projection_dim": 16},
    "vision_config": {**WIDTHS, **VISION_WIDTHS, "projection_dim": 16},
    "projection_dim": 16,
}
IDS = {"input_ids": (61, 1, 7)}
PIXELS = {"pixel_values": (1, 3, 32, 32)}
SOUND = {"input_values": (1, 400)}
# Class, options of its configuration, and inputs: (largest, size ...) of integers, or sizes of numbers.
TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BertModel": (WIDTHS, IDS),
    "BertForMaskedLM": (WIDTHS, IDS),
    "RobertaForSequenceClassification": (WIDTHS, IDS),
    "DistilBertModel": ({"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "vocab_size": 61}, IDS),
    "AlbertModel": ({**WIDTHS, "embedding_size": 16}, IDS),
    "ElectraForPreTraining": ({**WIDTHS, "embedding_size": 16}, IDS),
    "DebertaV2Model": (
        {**WIDTHS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        IDS,
    ),
    "MPNetModel": (WIDTHS, IDS),
    "GPT2LMHeadModel": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 40}, IDS),
    "GPTNeoXForCausalLM": (WIDTHS, IDS),
    "OPTForCausalLM": ({**WIDTHS, "ffn_dim": 48, "word_embed_proj_dim": 32}, IDS),
    "LlamaForCausalLM": ({**WIDTHS, "num_key_value_heads": 1}, IDS),
    "Qwen2ForCausalLM": ({**WIDTHS, "num_key_value_heads": 1, "tie_word_embeddings": True}, IDS),
    "Gemma2Model": ({**WIDTHS, "num_key_value_heads": 1, "head_dim": 16}, IDS),
    "MambaModel": ({**WIDTHS, "state_size": 4}, IDS),
    "T5EncoderModel": (T5, IDS),
    "T5ForConditionalGeneration": (T5, {**IDS, "decoder_input_ids": (61, 1, 5)}),
    "BartModel": (ENCODER_DECODER, IDS),
    "MarianMTModel": (ENCODER_DECODER, {**IDS, "decoder_input_ids": (61, 1, 5)}),
    "WhisperModel": (
        {**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12},
        {"input_features": (1, 8, 20), "decoder_input_ids": (61, 1, 5)},
    ),
    "CLIPModel": (CLIP, {**IDS, **PIXELS}),
    "SiglipModel": (CLIP, {**IDS, **PIXELS}),
    "ViTForImageClassification": ({**WIDTHS, **VISION_WIDTHS}, PIXELS),
    "Dinov2Model": ({**WIDTHS, **VISION_WIDTHS}, PIXELS),
    "SegformerForSemanticSegmentation": (
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "decoder_hidden_size": 16},
        {"pixel_values": (1, 3, 64, 64)},
    ),
    "ConvNextModel": ({"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]}, PIXELS),
    "Wav2Vec2Model": ({**WIDTHS, **SPEECH_WIDTHS, "num_feat_extract_layers": 2}, SOUND),
    "HubertModel": ({**WIDTHS, **SPEECH_WIDTHS}, SOUND),
    "ASTModel": ({**WIDTHS, "max_length": 64, "num_mel_bins": 32}, {"input_values": (1, 64, 32)}),
}


class Call(nn.Module):
    """The call of a module with arguments by name; returns the floating-point tensors in the result."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.module(**dict(zip(self.names, args, strict=True)))
        values = result.values() if isinstance(result, dict) else [result]
        return tuple(v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())


class _StubClass(type):
    def __getattr__(cls, name: str) -> str:
        if not name.isupper():
            raise AttributeError(name)
        return name


class _Stub(types.ModuleType):
    """A module whose attributes are classes that nobody uses."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _StubClass(name, (nn.Module,), {})
        setattr(self, name, found)
        return found


class _StubFinder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def timm_case(name: str) -> Case:
    if importlib.util.find_spec("torchvision") is None:
        importlib.import_module("transformers")  # which would look at it
        sys.meta_path.append(_StubFinder())  # type: ignore[arg-type]
    timm = importlib.import_module("timm")
    size = TIMM[name].get("img_size", PICTURE[-1])
    module = timm.create_model(name, num_classes=7, exportable=True, **TIMM[name])
    return module, (numbers(2, 3, size, size),)


def transformers_case(name: str) -> Case:
    transformers = importlib.import_module("transformers")
    options, inputs = TRANSFORMERS[name]
    kind = getattr(transformers, name)
    config = kind.config_class(**options)
    # PyTorch's exporter fails at T5's own call of scaled_dot_product_attention.
    fused = getattr(kind, "_supports_sdpa", False) and not name.startswith("T5")
    config._attn_implementation = "sdpa" if fused else "eager"
    if hasattr(config, "use_cache"):
        config.use_cache = False
    args = [integers(*shape) if "ids" in key else numbers(*shape) for key, shape in inputs.items()]
    return Call(kind(config), [*inputs]), tuple(args)


CASES: dict[str, Callable[[], Case]] = {
    **{f"timm:{name}": lambda name=name: timm_case(name) for name in TIMM},  # type: ignore[misc]
    **{f"transformers:{name}": lambda name=name: transformers_case(name) for name in TRANSFORMERS},  # type: ignore[misc]
}


def _untold(module: nn.Module, way: str) -> set[str]:
    """Return differences of which a file of the older exporter knows nothing.

    Its buffers look like parameters, and a number that was computed from a parameter like any constant.
    """
    if not way.startswith("script"):
        return set()
    buffers = {f"{name}: others" for name, _ in module.named_buffers()}
    if way != "script":
        return buffers
    return buffers | {f"{name}: changed" for name, p in module.named_parameters() if p.numel() == 1}


def examine(name: str, way: str, fresh: bool, with_gradients: bool) -> tuple[str, list[str]]:
    """Return "exact", "named in a warning" or "WRONG", and what is wrong."""
    torch.manual_seed(0)
    with quiet():
        try:
            module, args = CASES[name]()
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            return "not made", [f"{type(error).__name__}: {error}"]
        module = module.eval() if fresh else make_distinct(module.eval())
    try:
        model = export(module, args, way)
    except Exception as error:  # exporters raise whatever fails in them
        return "not exported", [f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"]
    if fresh:
        wrong = wrong_fresh(module, args, model)
        return "WRONG" if wrong else "ok", wrong
    found = compare(module, args, model)
    untold = _untold(module, way)
    wrong = [text for text in found.unexplained(way) if text not in untold]
    wrong += [*wrong_names(found, way), *wrong_modules(found, way)]
    if with_gradients and found.exact:
        wrong += wrong_gradients(module, args, model, found)
    verdict = "exact" if found.exact else "named in a warning"
    if not wrong and untold & {*found.unexplained(way)}:
        verdict = "not told by the file"
    if found.exact and found.chosen.warning:
        verdict, texts = "exact, with a warning", [found.chosen.warning]
        return "WRONG" if wrong else verdict, wrong or texts
    return "WRONG" if wrong else verdict, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of names; default: all")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--gradients", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    totals: Counter[str] = Counter()
    for name in CASES:
        if arguments.names and not any(name.startswith(start) for start in arguments.names):
            continue
        for way in arguments.ways:
            start = time.perf_counter()
            verdict, texts = examine(name, way, arguments.fresh, arguments.gradients)
            totals[verdict] += 1
            print(f"{name}, {way}: {verdict} ({time.perf_counter() - start:.0f} s)", flush=True)
            for text in texts[:12]:
                print(f"    {text}", flush=True)
    print(", ".join(f"{verdict}: {count}" for verdict, count in totals.items()))
    return int(totals["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
