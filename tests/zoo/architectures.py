"""The zoo: its architectures, with the fields and inputs that do not follow from their names."""

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

F32 = torch.float32
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Entry(NamedTuple):
    """One architecture.

    Attributes:
        config: fields of its config that `tiny` cannot guess.
        inputs: shapes of its inputs that `inputs` cannot guess; None = left out.
        dtype: of the modes other than bf16; float32 where a kernel has no float64, such as that of mixtures of experts.
        coupled: whether its loss is not a mean over rows, so that one device must cut the batch as the ranks do.
        images: the number of places of the text that an image takes.
        refused: the remedies that refusals name, in order, until a step is taken.
        refused_in: mode -> further ones in it.
        impossible: the modes that it cannot run in, and the error of torch or shardfn.
    """

    config: Mapping[str, Any] = _NOTHING
    inputs: Mapping[str, Any] = _NOTHING
    dtype: torch.dtype = torch.float64
    coupled: bool = False
    images: int = 0
    refused: tuple[str, ...] = ()
    refused_in: Mapping[str, tuple[str, ...]] = _NOTHING
    impossible: Mapping[str, str] = _NOTHING


# For these the names suffice.
_PLAIN = """
    Aimv2VisionModel AlbertForMaskedLM ApertusForCausalLM ASTForAudioClassification BailingHybridForCausalLM
    BambaForCausalLM BartForCausalLM BartForConditionalGeneration BeamForCausalLM BeitForImageClassification
    BertGenerationDecoder BertLMHeadModel BioGptForCausalLM BitNetForCausalLM
    BlenderbotForCausalLM BlipForConditionalGeneration BloomForCausalLM CLIPForImageClassification CLIPTextModel
    CLIPVisionModel CodeGenForCausalLM Cohere2ForCausalLM CohereForCausalLM ConvBertForMaskedLM
    ConvNextForImageClassification ConvNextV2ForImageClassification DebertaForMaskedLM DebertaV2ForMaskedLM
    DiffLlamaForCausalLM Dinov2ForImageClassification DistilBertForMaskedLM DogeForCausalLM DPRQuestionEncoder
    ElectraForCausalLM EsmcForMaskedLM EuroBertForMaskedLM Exaone4ForCausalLM FalconForCausalLM
    FalconMambaForCausalLM FlaubertWithLMHeadModel FlintForCausalLM
    Gemma2ForCausalLM Gemma3ForCausalLM Gemma4ForCausalLM GemmaForCausalLM
    GitForCausalLM Glm4ForCausalLM GlmForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM
    GPTNeoXForCausalLM GraniteForCausalLM GteForMaskedLM HeliumForCausalLM
    IJepaForImageClassification ImageGPTForImageClassification JinaEmbeddingsV3ForMaskedLM
    LayoutLMForMaskedLM Lfm2ForCausalLM Llama4ForCausalLM LlamaForCausalLM LukeForMaskedLM
    M2M100ForConditionalGeneration MambaForCausalLM MarianForCausalLM MarkupLMForSequenceClassification
    MistralForCausalLM MLCDVisionModel ModernBertDecoderForCausalLM ModernBertForMaskedLM MPNetForMaskedLM
    MptForCausalLM NanoChatForCausalLM NomicBertForMaskedLM NystromformerForMaskedLM Olmo2ForCausalLM
    Olmo3ForCausalLM OlmoForCausalLM OlmoHybridForCausalLM OpenAIGPTLMHeadModel OPTForCausalLM PersimmonForCausalLM
    Phi3ForCausalLM PhiForCausalLM PixioModel PoolFormerForImageClassification PvtForImageClassification
    PvtV2ForImageClassification
    Qwen2ForCausalLM Qwen3_5ForCausalLM Qwen3ForCausalLM RadioModel RecurrentGemmaForCausalLM RemBertForCausalLM
    RobertaForCausalLM RoFormerForCausalLM RwkvForCausalLM SamVisionModel SegformerForImageClassification
    SiglipForImageClassification SqueezeBertForMaskedLM StableLmForCausalLM Starcoder2ForCausalLM
    T5GemmaForConditionalGeneration TapasForMaskedLM TimesformerForVideoClassification TrOCRForCausalLM
    UltrabertForMaskedLM UMT5ForConditionalGeneration VideoMAEForVideoClassification VisualBertForPreTraining
    VitDetModel ViTForImageClassification WhisperForConditionalGeneration
""".split()

_MLA: dict[str, Any] = {"num_key_value_heads": 4}  # heads have keys of their own there
_NO_JIT: dict[str, Any] = {"jit": ("no jit",)}
_START = {"decoder_start_token_id": 0}

ZOO: dict[str, Entry] = {name: Entry() for name in _PLAIN} | {
    # Logits of every image against every text.
    "AltCLIPModel": Entry(coupled=True),
    "CLIPSegModel": Entry(coupled=True),
    "ChineseCLIPModel": Entry(coupled=True),
    "OwlViTModel": Entry(coupled=True),
    # Mixtures of experts.
    "AfmoeForCausalLM": Entry(dtype=F32),
    "AriaTextForCausalLM": Entry(dtype=F32),
    "DeepseekV3ForCausalLM": Entry(_MLA, dtype=F32),
    "Ernie4_5_MoeForCausalLM": Entry(dtype=F32),
    "FlexOlmoForCausalLM": Entry(dtype=F32),
    "Glm4MoeForCausalLM": Entry(dtype=F32),
    "GptOssForCausalLM": Entry(dtype=F32),
    "GraniteMoeForCausalLM": Entry(dtype=F32),
    "MixtralForCausalLM": Entry(dtype=F32),
    "OlmoeForCausalLM": Entry(dtype=F32),
    "Qwen2MoeForCausalLM": Entry(dtype=F32),
    "Qwen3MoeForCausalLM": Entry(dtype=F32),
    "KimiLinearForCausalLM": Entry(dtype=F32),
    "NemotronHForCausalLM": Entry(dtype=F32),
    "PhimoeForCausalLM": Entry(dtype=F32, refused=("eval",)),  # draws the noise that it adds to its router's logits
    "Qwen3NextForCausalLM": Entry(dtype=F32),
    "Qwen4ExpForCausalLM": Entry(dtype=F32),
    "SolarOpenForCausalLM": Entry(dtype=F32),
    # Encoders and decoders that need the token that begins a text.
    "SwitchTransformersForConditionalGeneration": Entry(
        _START, dtype=F32, refused_in={"bf16": ("exceptions",), **_NO_JIT}
    ),
    "NllbMoeForConditionalGeneration": Entry(dtype=F32),
    "T5ForConditionalGeneration": Entry(_START),
    "UdopForConditionalGeneration": Entry(_START, refused_in=_NO_JIT),
    # torch's FFT has no bfloat16.
    "FNetForMaskedLM": Entry(impossible={"bf16": "Unsupported dtype BFloat16"}),
    # Their forward needs the value of a tensor, which a captured step does not have.
    "HiggsAudioV2ForConditionalGeneration": Entry(refused_in=_NO_JIT),
    "HubertForCTC": Entry(refused_in=_NO_JIT),
    "JetMoeForCausalLM": Entry(refused_in=_NO_JIT),
    "LongformerForMaskedLM": Entry(refused_in=_NO_JIT),
    "Wav2Vec2ForCTC": Entry(refused_in=_NO_JIT),
    # BatchNorm.
    "GLPNForDepthEstimation": Entry(refused=("constant statistics",)),
    "RegNetForImageClassification": Entry(refused=("constant statistics",)),
    "ResNetForImageClassification": Entry(refused=("constant statistics",)),
    "SwiftFormerForImageClassification": Entry(refused=("constant statistics",)),
    # Swin and its kin: heads by stage that divide the widths.
    "SwinForImageClassification": Entry({"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}),
    "Swinv2ForImageClassification": Entry({"embed_dim": 8, "num_heads": [2, 2, 2, 2]}),
    "DonutSwinModel": Entry({"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}),
    "MaskFormerSwinModel": Entry({"embed_dim": 8, "num_heads": [2, 2, 2, 2]}),
    # Texts this short have no blocks; it would make other layers, in its forward.
    "BigBirdForCausalLM": Entry({"attention_type": "original_full"}),
    "LEDForConditionalGeneration": Entry(
        {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}, refused_in=_NO_JIT
    ),
    "XLNetLMHeadModel": Entry({"d_inner": 48}),
    # Models of images: an image takes `images` places of a text.
    "Gemma3ForConditionalGeneration": Entry({"mm_tokens_per_image": 4}, images=4),
    "LlavaForConditionalGeneration": Entry(images=16),
    "PaliGemmaForConditionalGeneration": Entry(images=16),
}

# Those that are run with dropout as well, by keys.
DROPOUT = [
    "BertLMHeadModel",
    "BloomForCausalLM",
    "DistilBertForMaskedLM",
    "MPNetForMaskedLM",
    "T5ForConditionalGeneration",
]

# Run every day, in one mode. Other tests have Llama and GPT-2.
DAILY = [("BertLMHeadModel", "checkpointing"), ("ResNetForImageClassification", "stage 3")]
