"""Names and shapes of a checkpoint's tensors, in all published layouts.

The Hugging Face layout has separate tensors for query, key and value. gpt-oss has two layouts. In
the Hugging Face layout, unquantised experts are input-major. In `original/`, query, key and value
are fused and experts are output-major. In both layouts, experts are stacked, the rows of gate and
up are interleaved (gate even, up odd), and MXFP4 experts are a tensor of blocks and a tensor of
scales. Other families store separate matrices for each expert, and for gate and up.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nmoe_core.base.errors import CheckpointError
from nmoe_core.engine.weights.config import GROUP_SIZE, MXFP4, ModelConfig
from nmoe_core.engine.weights.families import GPT_OSS

FLOAT_DTYPES = ("BF16", "F16", "F32")
PACKED_DTYPES = ("U8",)
EXPERT_PARTS = ("gate_up_weight", "down_weight")
_MAX_PROBLEMS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape of one stored tensor, and the safetensors dtypes that are allowed for it."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOAT_DTYPES

    def __str__(self) -> str:
        return f"{'/'.join(self.dtypes)} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Layout:
    """A published layout of the tensors.

    A layout without a head (`has_head`) has no logits. `parts` maps a part of a block to its stored
    tensors, which are concatenated by rows. `experts` maps expert matrices in the same way: to the
    stem of a stack, or to the matrices of expert `{}`.
    """

    embedding: str
    final_norm: str
    unembedding: str
    block_prefix: str
    parts: Mapping[str, tuple[str, ...]]
    experts: Mapping[str, tuple[str, ...]]
    packed_suffixes: tuple[str, str] = ("_blocks", "_scales")
    is_stacked: bool = True
    is_input_major: bool = False
    has_head: bool = True

    def block_name(self, layer: int, name: str) -> str:
        """Full name of a block's tensor; `layer` counts from 0."""
        return f"{self.block_prefix.format(layer)}{name}"

    def packed_names(self, layer: int, part: str) -> tuple[str, str]:
        """Names of the blocks and the scales of an expert stack."""
        stem = self.block_name(layer, self.experts[part][0])
        blocks, scales = self.packed_suffixes
        return stem + blocks, stem + scales

    def expert_names(self, layer: int, part: str, experts: Iterable[int]) -> list[str]:
        """Names of the matrices of experts that are stored separately."""
        names = (self.block_name(layer, name) for name in self.experts[part])
        return [name.format(expert) for name in names for expert in experts]

    def is_packed(self, layer: int, part: str, names: Collection[str]) -> bool:
        """Whether the files have an expert stack as MXFP4."""
        return self.is_stacked and any(name in names for name in self.packed_names(layer, part))


# Part of a block, its tensors in the Hugging Face layout, its tensor in `original/`.
_PARTS = (
    ("attn_norm", ("input_layernorm.weight",), "attn.norm.scale"),
    ("qkv_weight", tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), "attn.qkv.weight"),
    ("qkv_bias", tuple(f"self_attn.{part}_proj.bias" for part in "qkv"), "attn.qkv.bias"),
    ("sinks", ("self_attn.sinks",), "attn.sinks"),
    ("out_weight", ("self_attn.o_proj.weight",), "attn.out.weight"),
    ("out_bias", ("self_attn.o_proj.bias",), "attn.out.bias"),
    ("mlp_norm", ("post_attention_layernorm.weight",), "mlp.norm.scale"),
    ("router_weight", ("mlp.router.weight",), "mlp.gate.weight"),
    ("router_bias", ("mlp.router.bias",), "mlp.gate.bias"),
    ("gate_up_bias", ("mlp.experts.gate_up_proj_bias",), "mlp.mlp1_bias"),
    ("down_bias", ("mlp.experts.down_proj_bias",), "mlp.mlp2_bias"),
)
HUGGING_FACE = Layout(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    unembedding="lm_head.weight",
    block_prefix="model.layers.{}.",
    parts={part: names for part, names, _ in _PARTS},
    experts={
        "gate_up_weight": ("mlp.experts.gate_up_proj",),
        "down_weight": ("mlp.experts.down_proj",),
    },
    is_input_major=True,
)
ORIGINAL = Layout(
    embedding="embedding.weight",
    final_norm="norm.scale",
    unembedding="unembedding.weight",
    block_prefix="block.{}.",
    parts={part: (name,) for part, _, name in _PARTS},
    experts={"gate_up_weight": ("mlp.mlp1_weight",), "down_weight": ("mlp.mlp2_weight",)},
    packed_suffixes=(".blocks", ".scales"),
)
# Old files of other families contain this buffer beside the weights.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


def layouts(config: ModelConfig) -> tuple[Layout, ...]:
    """The possible layouts of a checkpoint with this config."""
    if config.family is GPT_OSS:
        return HUGGING_FACE, ORIGINAL
    shapes = part_shapes(config)
    parts = {part: names for part, names in HUGGING_FACE.parts.items() if part in shapes}
    if config.family.has_head_norms:
        parts |= {f"{part}_norm": (f"self_attn.{part}_norm.weight",) for part in "qk"}
    if config.family.has_router:
        parts["router_weight"] = ("mlp.gate.weight",)
    place = "mlp.experts.{}." if config.family.has_router else "mlp."
    experts = {
        "gate_up_weight": (f"{place}gate_proj.weight", f"{place}up_proj.weight"),
        "down_weight": (f"{place}down_proj.weight",),
    }
    unembedding = HUGGING_FACE.unembedding
    if config.tie_word_embeddings:
        unembedding = HUGGING_FACE.embedding
    whole = dataclasses.replace(
        HUGGING_FACE,
        unembedding=unembedding,
        parts=parts,
        experts=experts,
        is_stacked=False,
        is_input_major=False,
    )
    # A base model is stored without a prefix; it has a head only if the tables are tied.
    embedding = HUGGING_FACE.embedding.removeprefix("model.")
    base = dataclasses.replace(
        whole,
        embedding=embedding,
        unembedding=embedding,
        final_norm=whole.final_norm.removeprefix("model."),
        block_prefix=whole.block_prefix.removeprefix("model."),
        has_head=config.tie_word_embeddings,
    )
    return whole, base


def part_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every part of a block as the engine uses it: matrices are [.., outputs, inputs]."""
    hidden = config.hidden_size
    inner = config.intermediate_size
    experts = config.num_experts
    query_size = config.qkv_sizes[0]
    qkv_size = sum(config.qkv_sizes)
    family = config.family
    has_biases = config.family.has_feed_forward_biases
    shapes = {
        "attn_norm": (True, (hidden,)),
        "qkv_weight": (True, (qkv_size, hidden)),
        "qkv_bias": (config.attention_bias or family.has_qkv_biases, (qkv_size,)),
        "q_norm": (family.has_head_norms, (config.head_dim,)),
        "k_norm": (family.has_head_norms, (config.head_dim,)),
        "sinks": (family.has_sinks, (config.num_attention_heads,)),
        "out_weight": (True, (hidden, query_size)),
        "out_bias": (config.attention_bias, (hidden,)),
        "mlp_norm": (True, (hidden,)),
        "router_weight": (family.has_router, (experts, hidden)),
        "router_bias": (has_biases, (experts,)),
        "gate_up_weight": (True, (experts, 2 * inner, hidden)),
        "gate_up_bias": (has_biases, (experts, 2 * inner)),
        "down_weight": (True, (experts, hidden, inner)),
        "down_bias": (has_biases, (experts, hidden)),
    }
    return {part: shape for part, (is_there, shape) in shapes.items() if is_there}


def block_tensors(
    config: ModelConfig, layout: Layout, layer: int
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, part and shape of every stored tensor of a block, except the expert stacks."""
    shapes = part_shapes(config)
    for part, pieces in layout.parts.items():
        sizes = config.qkv_sizes if len(pieces) == 3 else shapes[part][:1]
        for piece, rows in zip(pieces, sizes, strict=True):
            yield layout.block_name(layer, piece), part, (rows, *shapes[part][1:])


def stored_tensors(
    config: ModelConfig, layout: Layout, names: Collection[str]
) -> dict[str, TensorSpec]:
    """All tensors of a checkpoint with this config, by name.

    An expert stack is MXFP4 if `names` has its blocks or scales. If `names` has neither these nor
    the plain stack, the config decides.
    """
    shapes = part_shapes(config)
    table = TensorSpec((config.vocab_size, config.hidden_size))
    specs = {layout.embedding: table, layout.unembedding: table}
    if config.tie_word_embeddings and HUGGING_FACE.unembedding in names:
        specs[HUGGING_FACE.unembedding] = table
    specs[layout.final_norm] = TensorSpec((config.hidden_size,))
    for layer in range(config.num_hidden_layers):
        for name, _, shape in block_tensors(config, layout, layer):
            specs[name] = TensorSpec(shape)
        for part in EXPERT_PARTS:
            experts, outputs, inputs = shapes[part]
            if not layout.is_stacked:
                rows = outputs // len(layout.experts[part])
                for name in layout.expert_names(layer, part, range(experts)):
                    specs[name] = TensorSpec((rows, inputs))
                continue
            plain = layout.block_name(layer, layout.experts[part][0])
            says_packed = plain not in names and config.quant_method == MXFP4
            if layout.is_packed(layer, part, names) or says_packed:
                blocks, scales = layout.packed_names(layer, part)
                rows = (experts, outputs, inputs // GROUP_SIZE)
                specs[blocks] = TensorSpec((*rows, GROUP_SIZE // 2), PACKED_DTYPES)
                specs[scales] = TensorSpec(rows, PACKED_DTYPES)
            else:
                sides = (inputs, outputs) if layout.is_input_major else (outputs, inputs)
                specs[plain] = TensorSpec((experts, *sides))
    return specs


def detect_layout(config: ModelConfig, names: Collection[str], where: Path) -> Layout:
    """The layout whose embedding table is among `names`. Raises CheckpointError if `names` has no
    embedding table (E-CHECKPOINT-TENSOR)."""
    known = layouts(config)
    for layout in known:
        if layout.embedding in names:
            return layout
    raise CheckpointError(
        "no embedding table among the tensors",
        where=where,
        found=f"{len(names)} tensors",
        expected=" or ".join(layout.embedding for layout in known),
        code="E-CHECKPOINT-TENSOR",
    )


def check_tensors(
    config: ModelConfig, layout: Layout, found: Mapping[str, TensorSpec], where: Path
) -> None:
    """Raise CheckpointError if tensors are missing, unknown or have a wrong shape
    (E-CHECKPOINT-TENSOR).

    `found` has every stored tensor, with the tensor's dtype as its only dtype; `where` is the
    location in the error.
    """
    expected = stored_tensors(config, layout, found)
    problems = []
    for name, spec in expected.items():
        if name not in found:
            problems.append(f"{name} is missing")
        elif found[name].shape != spec.shape or found[name].dtypes[0] not in spec.dtypes:
            problems.append(f"{name} is {found[name]}, expected {spec}")
    extra = sorted(set(found) - set(expected))
    if config.family is not GPT_OSS:
        extra = [name for name in extra if not name.endswith(_IGNORED_SUFFIX)]
    problems += [f"{name} is not a tensor of this model" for name in extra]
    if not problems:
        return
    shown = "; ".join(problems[:_MAX_PROBLEMS_SHOWN])
    hidden = len(problems) - _MAX_PROBLEMS_SHOWN
    raise CheckpointError(
        f"{shown}; and {hidden} more" if hidden > 0 else shown,
        where=where,
        do="download the checkpoint again; all files must be from the same checkpoint",
        code="E-CHECKPOINT-TENSOR",
    )
