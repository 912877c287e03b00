"""Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE against transformers, on seeded random shapes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nmoe_core.engine import ModelConfig, Transformer, make_tiny_checkpoint
from nmoe_core.engine.weights.config import FULL, SLIDING
from nmoe_core.engine.weights.rope import Llama3Scaling, YarnScaling
from nmoe_core.engine.weights.tiny_config import tiny_config
from tests.core.engine.builders import (
    HIDDEN_RTOL,
    assert_equals_transformers,
    draw_weights,
    greedy,
    make_generator,
)
from tests.refusals import refused

transformers = pytest.importorskip("transformers")
NUM_SHAPES = 20
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.3,
        "beta_fast": 8.0,
        "original_max_position_embeddings": 32,
    },
]


def _reference(family: str, rng: random.Random) -> Any:
    """A float32 model of transformers of a random shape, with random weights."""
    num_kv, num_experts = rng.choice([1, 2, 3]), rng.choice([3, 5, 8])
    num_heads = num_kv * rng.choice([1, 2, 4])
    own: dict[str, Any] = {}
    if family == "mistral":
        own |= {"sliding_window": rng.choice([None, 9])}
    if family in ("qwen2", "qwen3") and rng.random() < 0.4:
        own |= {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    if family == "qwen3_moe":
        own |= {"num_experts": num_experts, "num_experts_per_tok": rng.randint(1, num_experts)}
        own |= {
            "moe_intermediate_size": 8 * rng.randint(2, 9),
            "norm_topk_prob": rng.random() < 0.5,
        }
    config = getattr(transformers, f"{FAMILIES[family]}Config")(
        num_hidden_layers=rng.randint(1, 4),
        vocab_size=rng.randint(50, 300),
        hidden_size=num_heads * 8 * rng.randint(1, 3),
        intermediate_size=8 * rng.randint(3, 12),
        head_dim=rng.choice([8, 16, 32]),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv,
        attention_bias=rng.random() < 0.3,
        tie_word_embeddings=rng.random() < 0.5,
        rms_norm_eps=rng.choice([1e-5, 1e-6]),
        max_position_embeddings=256,
        rope_parameters={"rope_theta": rng.choice([1e4, 5e5]), **rng.choice(ROPES)},
        **own,
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config).eval()
    draw_weights(model, rng.randint(0, 10**6))
    return model


LONG = "original_max_position_embeddings"


def _ids(model: Transformer, *shape: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator())


@pytest.mark.parametrize("seed", range(NUM_SHAPES))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_shape_of_a_family_equals_transformers(tmp_path: Path, family: str, seed: int):
    theirs = _reference(family, random.Random(f"{family} {seed}"))
    theirs.save_pretrained(tmp_path)
    ours = Transformer.from_checkpoint(tmp_path)
    assert_equals_transformers(ours, theirs, _ids(ours, 2, 70))


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_continues_as_the_forward_pass_in_any_batch(tmp_path: Path, family: str):
    _reference(family, random.Random(7)).save_pretrained(tmp_path)
    model = Transformer.from_checkpoint(tmp_path)
    vocab_size = model.config.vocab_size
    prompts = [[i * 7 % vocab_size for i in range(3, 3 + n)] for n in (1, 9, 40, 70)]
    expected = [greedy(model, prompt, 6) for prompt in prompts]
    cases: list[dict[str, Any]] = [{}, {"max_batch": 1}, {"max_step_tokens": 7, "page_size": 5}]
    for sizes in cases:
        generator = make_generator(model, 100, **sizes)
        assert generator.generate_batch(prompts, max_tokens=6) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_of_a_ragged_batch_has_the_states_it_has_alone(tmp_path: Path, family: str):
    _reference(family, random.Random(11)).save_pretrained(tmp_path)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        model = Transformer.from_checkpoint(tmp_path, dtype=dtype)
        depth = model.config.num_hidden_layers
        call: dict[str, Any] = {"return_hidden_states": (depth,), "no_logits": True}
        ids = _ids(model, 3, 66)
        _, together = model(ids, torch.tensor([66, 5, 31]), **call)
        for row, length in enumerate((66, 5, 31)):
            _, alone = model(ids[row : row + 1, :length], **call)
            assert (together[depth][row, :length] - alone[depth][0]).abs().max() <= tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_near_float32_in_the_median(tmp_path: Path, family: str):
    _reference(family, random.Random(13)).save_pretrained(tmp_path)
    exact = Transformer.from_checkpoint(tmp_path)
    ids = _ids(exact, 2, 60)
    rounded = Transformer.from_checkpoint(tmp_path, dtype=torch.bfloat16)(ids)
    expected = exact(ids)
    errors = (rounded - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.05


def _raw(family: str = "llama", **changes: Any) -> dict[str, Any]:
    if family == "gpt_oss":
        return tiny_config("gpt_oss", 0, 2) | changes
    config = getattr(transformers, f"{FAMILIES[family]}Config")(num_hidden_layers=2, head_dim=64)
    return config.to_dict() | {"architectures": [f"{FAMILIES[family]}ForCausalLM"]} | changes


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "beta_fast": 2}}, "beta_fast"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        ("llama", {"model_type": "mamba"}, "model_type"),
        ("llama", {"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config"),
        ("qwen3", {"layer_types": [FULL, SLIDING], "use_sliding_window": False}, "layer_types"),
        ("qwen3", {"layer_types": [FULL, SLIDING], "use_sliding_window": None}, "layer_types"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window"),
        ("mistral", {"layer_types": [FULL, FULL]}, "layer_types"),
        ("qwen2", {"layer_types": [FULL, SLIDING]}, "layer_types"),
        ("llama", {"is_causal": False}, "is_causal"),
        ("gpt_oss", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("gpt_oss", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    ],
)
def test_a_variant_that_is_not_computed_is_refused_by_name(family: str, changes, field: str):
    with refused("E-CHECKPOINT-ARCH", field):
        ModelConfig.from_dict(_raw(family, **changes))


def test_what_a_file_may_leave_out_is_what_transformers_takes():
    raw = {k: v for k, v in _raw().items() if k not in ("rope_parameters", "attention_bias")}
    for name in ("num_key_value_heads", "head_dim", "tie_word_embeddings"):
        raw.pop(name)
    config = ModelConfig.from_dict(raw)
    assert (config.rope_theta, config.num_key_value_heads, config.head_dim) == (10_000.0, 32, 128)
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    config = ModelConfig.from_dict(_raw("qwen3", layer_types=None, **windows))
    assert config.layer_types == (FULL, SLIDING)
    with refused("E-CHECKPOINT-CONFIG", "head_dim"):
        ModelConfig.from_dict(_raw("qwen3", head_dim=None))
    raw = _raw("mistral", sliding_window=None)
    assert ModelConfig.from_dict(raw).layer_types == (FULL, FULL)
    assert ModelConfig.from_dict(raw | {"sliding_window": 8}).layer_types == (SLIDING, SLIDING)
    del raw["sliding_window"]
    with refused("E-CHECKPOINT-CONFIG", "sliding_window is missing"):
        ModelConfig.from_dict(raw)


def _edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _read_by_transformers(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def test_old_buffers_are_not_read(tmp_path: Path):
    made = make_tiny_checkpoint(tmp_path, family="llama", vocab_size=64, num_layers=2)
    expected = Transformer.from_checkpoint(made)(torch.arange(9)[None])
    save_file(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, made / "extra.safetensors"
    )
    (made / "model.safetensors.index.json").unlink()
    assert torch.equal(Transformer.from_checkpoint(made)(torch.arange(9)[None]), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_copy", [True, False])
def test_a_head_beside_tied_tables_is_read_unless_it_is_a_copy(
    tmp_path: Path, family: str, is_copy: bool
):
    theirs = _reference(family, random.Random(3))
    theirs.config.tie_word_embeddings = False
    if is_copy:
        theirs.lm_head.weight.data = theirs.model.embed_tokens.weight.data.clone()
    else:
        theirs.lm_head.weight = torch.nn.Parameter(theirs.model.embed_tokens.weight.data.flip(0))
    theirs.save_pretrained(tmp_path)
    _edit(tmp_path, tie_word_embeddings=True)
    ours = Transformer.from_checkpoint(tmp_path)
    assert (ours.unembedding.data_ptr() == ours.embedding.data_ptr()) == is_copy
    assert_equals_transformers(ours, _read_by_transformers(tmp_path), _ids(ours, 2, 40))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_base_model_without_a_head_gives_states_and_logits_only_if_tied(
    tmp_path: Path, family: str, is_tied: bool
):
    theirs = _reference(family, random.Random(4)).model
    theirs.save_pretrained(tmp_path)
    _edit(tmp_path, tie_word_embeddings=is_tied)
    ours = Transformer.from_checkpoint(tmp_path)
    ids = _ids(ours, 2, 40)
    depth = ours.config.num_hidden_layers
    _, states = ours(ids, return_hidden_states=(depth,), no_logits=True)
    with torch.no_grad():
        expected = theirs(ids).last_hidden_state
    assert (ours.norm(states[depth]) - expected).norm() / expected.norm() <= HIDDEN_RTOL
    if is_tied:
        assert_equals_transformers(ours, _read_by_transformers(tmp_path), ids)
        return
    with refused("E-CHECKPOINT-HEAD", "without a head"):
        ours(ids)
    with refused("E-CHECKPOINT-HEAD", "without a head"):
        make_generator(ours, 50).generate_batch([[1, 2, 3]], max_tokens=2)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
@pytest.mark.parametrize("scaling", [YARN, {"rope_type": "linear", "factor": 4.0}])
def test_rope_scaling_beside_rope_parameters_is_refused_unless_both_say_the_same(
    tmp_path: Path, family: str, scaling: dict[str, Any]
):
    made = make_tiny_checkpoint(tmp_path, family=family, vocab_size=64, num_layers=2)
    plain = {"rope_type": "default", "rope_theta": 5e5}
    _edit(made, rope_parameters=plain, rope_scaling=scaling, rope_theta=5e5)
    with refused("E-CHECKPOINT-CONFIG", naming=["rope_scaling", "keep one of the two"]):
        Transformer.from_checkpoint(made)
    _edit(made, rope_parameters=scaling | {"rope_theta": 5e5}, rope_scaling=scaling)
    if family == "gpt_oss" and scaling is not YARN:
        return
    ours = Transformer.from_checkpoint(made)
    assert_equals_transformers(ours, _read_by_transformers(made), _ids(ours, 2, 70))
    _edit(made, rope_scaling=None)
    assert Transformer.from_checkpoint(made).config == ours.config


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rope", ROPES[2:4])
@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 32}])
def test_a_context_length_at_the_top_level_comes_first(
    tmp_path: Path, family: str, rope: dict[str, Any], inner: dict[str, Any]
):
    _reference(family, random.Random(5)).save_pretrained(tmp_path)
    outer = {key: value for key, value in rope.items() if key != LONG}
    _edit(tmp_path, rope_parameters={"rope_theta": 1e4, **outer, **inner}, **{LONG: 64})
    ours = Transformer.from_checkpoint(tmp_path)
    scaling = ours.config.rope_scaling
    assert isinstance(scaling, Llama3Scaling | YarnScaling)
    assert scaling.original_max_position == 64
    assert_equals_transformers(ours, _read_by_transformers(tmp_path), _ids(ours, 2, 70))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "adapter_model.safetensors", "a.safetensors.index.json"]
)
def test_weights_beside_those_of_an_index_are_refused(tmp_path: Path, name: str):
    made = make_tiny_checkpoint(tmp_path, family="llama", vocab_size=64, num_layers=2)
    assert (made / "model.safetensors.index.json").is_file()
    ours = Transformer.from_checkpoint(made)
    if name.endswith("json"):
        (made / name).write_bytes((made / "model.safetensors.index.json").read_bytes())
    else:
        save_file({"lm_head.weight": torch.ones(64, 64)}, made / name)
    with refused("E-CHECKPOINT-FILE", naming=["index.json", "the other model"]):
        Transformer.from_checkpoint(made)
    (made / name).unlink()
    assert Transformer.from_checkpoint(made).digest == ours.digest


def test_kernels_are_refused_for_a_family_that_they_do_not_compute(tmp_path: Path):
    made = make_tiny_checkpoint(tmp_path, family="qwen3", vocab_size=64, num_layers=1)
    with refused("E-CONFIG-KERNELS", "qwen3"):
        Transformer.from_checkpoint(made, use_kernels=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_checkpoint_of_a_family_is_read_by_transformers(tmp_path: Path, family: str):
    make_tiny_checkpoint(tmp_path, family=family, vocab_size=64, num_layers=2)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = Transformer.from_checkpoint(tmp_path)
    assert_equals_transformers(ours, theirs, torch.arange(40)[None])


def test_factors_without_a_frequency_between_them_are_refused() -> None:
    Llama3Scaling(8.0, 1.0, 1.5, 32)
    for high in (1.0, 0.5):
        with refused("E-CHECKPOINT-CONFIG", "high_freq_factor"):
            Llama3Scaling(8.0, 1.0, high, 32)
