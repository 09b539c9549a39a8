"""Models of transformers with their own attention, which ``attn_implementation="pyattn"`` does not replace.

transformers alone would accept the name for them without a word; :mod:`pyattn.adapters.transformers.builds` refuses it.
Its own models are listed here as of :data:`CHECKED`; a test compares the list with the installed version. Models of
other people are known by what they call when they run.
"""

import importlib.util
import weakref
from importlib.metadata import version

import torch
from torch import nn

CHECKED = "5.24.0"
"""The version of transformers that the lists were checked with."""


def _classes(table: str) -> dict[str, tuple[str, ...]]:
    """Each line's file and the classes after the colon."""
    lines = (line.split(":") for line in table.strip().splitlines())
    return {file.strip(): tuple(classes.split()) for file, classes in lines}


WHOLE = _classes(
    """
    autoformer: AutoformerAttention
    bark: BarkSelfAttention
    big_bird: BigBirdSelfAttention BigBirdBlockSparseAttention
    blip: BlipAttention
    blip_text: BlipTextSelfAttention
    bloom: BloomAttention
    bros: BrosSelfAttention
    canine: CanineSelfAttention
    clvp: ClvpSelfAttention
    convbert: ConvBertSelfAttention
    cpmant: CpmAntAttention
    cvt: CvtSelfAttention
    dab_detr: DetrAttention DabDetrAttention
    data2vec_vision: Data2VecVisionSelfAttention Data2VecVisionSdpaSelfAttention
    deberta: DisentangledSelfAttention
    deberta_v2: DisentangledSelfAttention
    dinat: NeighborhoodAttention
    donut_swin: DonutSwinSelfAttention
    esmfold: EsmFoldSelfAttention EsmFoldInvariantPointAttention
    falcon: FalconAttention
    fastspeech2_conformer: FastSpeech2ConformerAttention
    flaubert: MultiHeadAttention
    flava: FlavaSelfAttention
    fsmt: Attention
    funnel: FunnelRelMultiheadAttention
    glpn: GLPNEfficientSelfAttention
    got_ocr2: GotOcr2VisionAttention
    gpt_neo: GPTNeoSelfAttention
    gpt_neox_japanese: GPTNeoXJapaneseAttention
    granite_speech: GraniteSpeechConformerAttention
    granite_speech_plus: GraniteSpeechPlusConformerAttention
    grounding_dino: GroundingDinoBiMultiHeadAttention GroundingDinoMultiheadAttention
    groupvit: GroupViTAssignAttention GroupViTAttention
    hiera: HieraMaskUnitAttention
    ibert: IBertSelfAttention
    imagegpt: ImageGPTAttention
    layoutlmv2: LayoutLMv2SelfAttention
    led: LEDEncoderSelfAttention LEDDecoderAttention
    levit: LevitAttention LevitAttentionSubsample
    lilt: LiltSelfAttention
    longformer: LongformerSelfAttention
    luke: LukeSelfAttention
    lxmert: LxmertAttention
    mask2former: Mask2FormerAttention
    maskformer_swin: MaskFormerSwinSelfAttention
    megatron_bert: MegatronBertSelfAttention
    mgp_str: MgpstrAttention
    mm_grounding_dino: MMGroundingDinoBiMultiHeadAttention MMGroundingDinoMultiheadAttention
    mobilevit: MobileViTSelfAttention
    mobilevitv2: MobileViTV2LinearSelfAttention
    mpnet: MPNetSelfAttention
    mpt: MptAttention
    mra: MraSelfAttention
    mvp: MvpAttention
    nystromformer: NystromformerSelfAttention
    omdet_turbo: OmDetTurboMultiheadAttention
    oneformer: OneFormerAttention OneFormerTextMapperAttention
    openai: Attention
    perceiver: PerceiverSelfAttention
    prophetnet: ProphetNetAttention ProphetNetNgramSelfAttention
    pvt: PvtEfficientSelfAttention
    pvt_v2: PvtV2SelfAttention
    reformer: LSHSelfAttention LocalSelfAttention
    rembert: RemBertSelfAttention
    roformer: RoFormerSelfAttention
    seggpt: SegGptAttention
    sew_d: DisentangledSelfAttention
    slanext: SLANeXtVisionAttention
    speecht5: SpeechT5Attention
    squeezebert: SqueezeBertSelfAttention
    superglue: SuperGlueSelfAttention
    swiftformer: SwiftFormerEfficientAdditiveAttention
    swin2sr: Swin2SRSelfAttention
    swinv2: Swinv2SelfAttention
    table_transformer: TableTransformerAttention
    tapas: TapasSelfAttention
    timesformer: TimesformerSelfAttention
    trocr: TrOCRAttention
    tvp: TvpAttention
    vilt: ViltSelfAttention
    visual_bert: VisualBertSelfAttention
    vitdet: VitDetAttention
    vits: VitsAttention
    wavlm: WavLMAttention
    wavtokenizer: WavTokenizerVocosAttention
    xglm: XGLMAttention
    xlm: MultiHeadAttention
    xlnet: XLNetRelativeAttention
    yoso: YosoSelfAttention
    zoedepth: ZoeDepthMultiheadAttention
    """
)
"""Classes of modules that compute attention themselves, in files where no module asks transformers for attention.

The key is the file's name: "bloom" means ``modeling_bloom.py`` and ``configuration_bloom.py``.
"""

PARTS = _classes(
    """
    apertus1p5: Apertus1p5VisionTokenizerAttnBlock
    bigbird_pegasus: BigBirdPegasusSelfAttention BigBirdPegasusBlockSparseAttention
    chameleon: ChameleonVQVAEEncoderAttnBlock
    clap: ClapAudioSelfAttention
    deepseek_ocr2: DeepseekOcr2SamVisionAttention DeepseekOcr2SamVisionSdpaAttention
    evolla: EvollaSequenceCompressorAttention EvollaSequenceAlignerCrossAttention
    gemma3n: Gemma3nAudioAttention
    gemma4: Gemma4AudioAttention
    git: GitSelfAttention
    informer: InformerProbSparseAttention
    janus: JanusVQVAEAttnBlock
    longt5: LongT5LocalAttention LongT5TransientGlobalAttention
    pegasus_x: PegasusXGlobalLocalAttention
    pp_formulanet: PPFormulaNetVisionAttention
    sam: SamVisionAttention SamVisionSdpaAttention
    sam_hq: SamHQVisionAttention SamHQVisionSdpaAttention
    unlimited_ocr: UnlimitedOcrSamVisionAttention UnlimitedOcrSamVisionSdpaAttention
    """
)
"""The same for files where other modules do ask: an encoder beside a decoder, or one model of several."""

CONFIGURATIONS = frozenset(
    {"DeepseekOcr2SamVisionConfig", "GitConfig", "SamHQVisionConfig", "SamVisionConfig", "UnlimitedOcrSamVisionConfig"}
)
"""The configurations of :data:`PARTS` whose models choose their attention's class from a table of names."""

EXTENDING = frozenset({"deepseek_v4"})
"""Files whose layers append keys and extend the mask, if it is a float tensor: 0 = visible, lowest number = hidden."""

_callers: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes of modules that called the attention function."""


def described() -> str | None:
    """The installed version of transformers and the architectures listed here; None if it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    installed, names = version("transformers"), sorted(WHOLE | PARTS)
    checked = "" if installed == CHECKED else f" in {CHECKED}"
    return f"{installed}; {len(names)} architectures keep their own attention{checked}: {' '.join(names)}"


def _architecture(kind: type) -> str:
    """The file of a class of transformers' models, as the lists name it; "" for other classes."""
    package, _, name = kind.__module__.rpartition(".")
    return name.partition("_")[2] if package.startswith("transformers.models.") else ""


def computes_attention_itself(config: type) -> bool:
    """Whether no model of a configuration asks transformers for an attention function."""
    return any(_architecture(kind) in WHOLE for kind in config.__mro__)


def keeps_its_own(config: type) -> bool:
    """Whether a model of a configuration can't be built with another attention than its own."""
    return computes_attention_itself(config) or config.__name__ in CONFIGURATIONS


def extends_masks(config: type) -> bool:
    """Whether layers of a configuration extend their mask by keys that they append: see :data:`EXTENDING`."""
    return any(_architecture(kind) in EXTENDING for kind in config.__mro__)


def has_attention_of_its_own(kind: type[nn.Module]) -> bool:
    """Whether a class of transformers' modules computes attention and does not ask transformers for it."""
    lists = WHOLE | PARTS
    return any(base.__name__ in lists.get(_architecture(base), ()) for base in kind.__mro__)


def remember(module: nn.Module) -> None:
    """Records a layer that calls the attention function."""
    if not torch.compiler.is_compiling():
        _callers.add(type(module))


def fallbacks(model: nn.Module, name: str) -> list[str]:
    """The lines of :func:`pyattn.adapters.transformers.fallbacks` on parts whose attention is not that of ``name``.

    Each configuration is reported once. Other people's models are known by the calls of their classes so far.
    """
    lines: list[str] = []
    configured: set[int] = set()
    for path, part in model.named_modules():
        where = f"{path or 'the model'} ({type(part).__name__})"
        config = getattr(part, "config", None)
        chosen = getattr(config, "_attn_implementation", None)
        if chosen is not None and id(config) not in configured:
            configured.add(id(config))
            theirs = type(part).__module__.startswith("transformers.")
            if chosen != name:
                lines.append(f"{where}: attn_implementation is {chosen}")
            elif not (theirs or any(type(layer) in _callers for layer in part.modules())):
                lines.append(f"{where}: it has not called the attention function so far")
        if has_attention_of_its_own(type(part)):
            lines.append(f"{where}: its own attention")
    return lines
