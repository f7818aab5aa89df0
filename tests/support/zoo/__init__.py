"""Small networks of known architectures, for PyTorch's exporters."""

from __future__ import annotations

from . import audio, generative, language, structures, texts, vision
from .architecture import DYNAMO, TORCHSCRIPT, Architecture, constant, integers, mask, normal
from .language import VOCABULARY

PICTURE = {"x": normal("N", 3, 16, 16)}
LARGE = {"x": normal("N", 3, 32, 32)}
IDS = integers(VOCABULARY, "N", "T")
SHORT = integers(VOCABULARY, "N", 4)
SEQUENCE = {"x": normal("N", "T", 8)}
EDGES = integers(6, 2, "E")

ARCHITECTURES = [
    Architecture("resnet", vision.ResNet, LARGE),
    Architecture(
        "resnet_training",
        vision.ResNet,
        LARGE,
        training=True,
        without={DYNAMO: "it writes batch normalization in evaluation mode"},
    ),
    Architecture("mobilenet_v3", vision.MobileNetV3, {"x": normal("N", 3, 16, 16, scale=3.0)}),
    Architecture("efficientnet", vision.EfficientNet, PICTURE),
    Architecture("convnext", vision.ConvNeXt, LARGE),
    Architecture("densenet", vision.DenseNet, PICTURE),
    Architecture("yolo", vision.Yolo, LARGE),
    Architecture("unet", vision.UNet, PICTURE),
    Architecture("vit", vision.ViT, PICTURE),
    Architecture("swin", vision.Swin, PICTURE),
    Architecture("retinanet", vision.RetinaNet, LARGE, ("classes", "boxes")),
    Architecture("mlp_mixer", vision.MlpMixer, PICTURE),
    Architecture("spatial_transformer", vision.SpatialTransformer, PICTURE),
    Architecture("perceiver", vision.Perceiver, PICTURE),
    Architecture("deformable_conv", vision.DeformableConv, PICTURE),
    Architecture(
        "quantized_cnn",
        vision.QuantizedCnn,
        PICTURE,
        without={DYNAMO: "torch.export has no fake quantization"},
    ),
    Architecture(
        "bert",
        language.Bert,
        {"ids": IDS, "attention_mask": mask("N", "T"), "types": integers(2, "N", "T")},
        ("y", "pooled"),
    ),
    Architecture("gpt", language.Gpt, {"ids": SHORT, "cache": normal(2, 2, "N", 4, "T", 4)}, ("y", "longer")),
    Architecture("llama", language.Llama, {"ids": IDS}, text=texts.LLAMA),
    Architecture("t5", language.T5, {"ids": IDS, "attention_mask": mask("N", "T"), "target": SHORT}),
    Architecture(
        "transformer", language.Transformer, {"source": normal("N", 6, 16), "target": normal("N", 5, 16)}
    ),
    Architecture("seq2seq", language.Seq2Seq, {"ids": IDS, "target": SHORT}),
    Architecture("gru_with_attention", language.GruWithAttention, {"ids": IDS, "target": SHORT}),
    Architecture("mamba", language.Mamba, SEQUENCE, fold=False, text=texts.MAMBA),
    Architecture("rwkv", language.Rwkv, {"x": normal("N", 5, 8)}, fold=False),
    Architecture("mixture_of_experts", language.MixtureOfExperts, SEQUENCE),
    Architecture("mixture_by_rows", language.MixtureByRows, SEQUENCE),
    Architecture("conformer", audio.Conformer, {"x": normal("N", "T", 16)}),
    Architecture("crnn", audio.Crnn, {"x": normal("N", 1, 16, 24)}),
    Architecture(
        "voice_detector",
        audio.VoiceDetector,
        {"x": normal("N", 60), "state": normal(2, "N", 5), "sr": constant(8000)},
        ("y", "following"),
        script=True,
        text=texts.VOICE_DETECTOR,
        without={DYNAMO: "the branch depends on a value; conditional_detector has torch.cond"},
    ),
    Architecture(
        "conditional_detector",
        audio.ConditionalDetector,
        {"x": normal("N", 60), "state": normal(2, "N", 5), "sr": constant(8000)},
        ("y", "following"),
        without={TORCHSCRIPT: "it has no torch.cond; voice_detector has the same If"},
    ),
    Architecture("wavenet", audio.WaveNet, {"x": normal("N", 1, "T")}),
    Architecture(
        "spectrogram",
        audio.Spectrogram,
        {"x": normal("N", 64)},
        text=texts.SPECTROGRAM,
        without={TORCHSCRIPT: "it has no complex numbers"},
    ),
    Architecture("wav2vec", audio.Wav2Vec, {"x": normal("N", 80)}, fold=False),
    Architecture(
        "vae", generative.Vae, {"x": normal("N", 1, 8, 8), "noise": normal("N", 3)}, ("y", "divergence")
    ),
    Architecture("generator", generative.Generator, {"z": normal("N", 6)}),
    Architecture("diffusion", generative.Diffusion, {"x": normal("N", 3, 8, 8), "t": normal("N", scale=9.0)}),
    Architecture("flow", generative.Flow, {"x": normal("N", 6)}, fold=False),
    Architecture("super_resolution", generative.SuperResolution, {"x": normal("N", 3, 8, 8)}),
    Architecture(
        "style_generator",
        generative.StyleGenerator,
        {"z": normal("N", 6), "noise": normal("N", 1, 8, 8)},
        fold=False,
    ),
    Architecture("pointnet", structures.PointNet, {"x": normal("N", 3, "T")}),
    Architecture(
        "graph_network",
        structures.GraphNetwork,
        {"x": normal(6, 4), "edges": EDGES, "features": normal("E", 3)},
    ),
    Architecture("graph_attention", structures.GraphAttention, {"x": normal(6, 4), "edges": EDGES}),
    Architecture("deep_sets", structures.DeepSets, {"x": normal("N", "T", 4)}),
    Architecture(
        "neural_ode",
        structures.NeuralOde,
        {"x": normal("N", 4), "steps": constant(3)},
        script=True,
        text=texts.NEURAL_ODE,
        without={DYNAMO: "the number of iterations depends on a value"},
    ),
]
