"""A `DrafterConfig` from a config.json of either layout; nothing is guessed.

Everything that is wrong is said, not only the first. A problem means that we would compute
something else than the drafter was trained for, so it is not loaded. A flaw only misleads others
who read the file; `python -m dflash_ext.export --check` says both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dflash_ext.drafter import DrafterConfig
from dflash_ext.drafter_rules import SLIDING, broken_rules
from dflash_ext.layouts import DECODER_KEYS, TRAINED_AS, Layout, TargetLabel, layout_of

# Keys of z-lab's dflash_config beside our three, and the values that change nothing.
HARMLESS = {
    "use_aux_hidden_state": (True,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "sample_from_anchor": (False,),
    "output_multiplier": (1.0,),
    "input_embedding_scale": (1.0,),
    "final_logit_softcapping": (0.0,),
}
OWN_KEYS = {"mask_token_id", "target_layer_ids", "block_size", "causal"}
KINDS: dict[str, type] = {"rms_norm_eps": float, "attention_bias": bool}  # the others are int


@dataclass
class Reading:
    """What a config.json says."""

    layout: Layout
    values: dict[str, Any] = field(default_factory=dict)
    """Fields of a `DrafterConfig`, as far as they could be read."""
    problems: list[str] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    label: TargetLabel = field(default_factory=TargetLabel)

    def config(self) -> DrafterConfig:
        """Only where there are no problems."""
        return DrafterConfig(**self.values)


class Fields:
    """One object of a config.json. Reading never fails: what is wrong goes to `problems`."""

    def __init__(self, content: dict[str, Any] | None, problems: list[str], path: str = "") -> None:
        """content None: the object itself is missing, which has been said already."""
        self.content, self.problems, self._path = content or {}, problems, path
        self._absent = content is None

    def get(self, key: str, kind: type) -> Any:
        """The value, or None if it is absent, null, or of another kind (a problem)."""
        value = self.content.get(key)
        # In JSON 1 is a fine 1.0, but `true` is no number.
        if value is None or type(value) in ((int, float) if kind is float else (kind,)):
            return value
        self.problems.append(f"key {self._path}{key} is {value!r}, expected {kind.__name__}")
        return None

    def need(self, key: str, kind: type) -> Any:
        """`get`; that it is absent is a problem too."""
        if self.content.get(key) is None and not self._absent:
            self.problems.append(f"key {self._path}{key} is missing")
        return self.get(key, kind)

    def need_list(self, key: str, kind: type) -> tuple[Any, ...] | None:
        """A list of one kind, as a tuple."""
        values = self.need(key, list)
        if wrong := [value for value in values or () if type(value) is not kind]:
            what = f"holds {wrong[0]!r}, expected {kind.__name__} only"
            self.problems.append(f"key {self._path}{key} {what}")
            return None
        return None if values is None else tuple(values)

    def section(self, key: str) -> Fields:
        return Fields(self.need(key, dict), self.problems, f"{self._path}{key}.")

    def agree(self, key: str, *found: Any) -> Any:
        """The one value among `found`, which are readings of the same thing."""
        values = [value for value in found if value is not None]
        if any(value != values[0] for value in values):
            self.problems.append(f"key {self._path}{key} is given twice and differs: {values}")
            return None
        if not values and not self._absent:
            self.problems.append(f"key {self._path}{key} is missing")
        return values[0] if values else None

    def only(self, key: str, *supported: Any) -> None:
        """A problem if the value is there and none of the supported ones."""
        value = self.content.get(key)
        if value is not None and value not in supported:
            only = f", only {' or '.join(map(repr, supported))}" if supported else ""
            self.problems.append(f"{self._path}{key} {value!r} is not supported{only}")


def read_layout(content: dict[str, Any]) -> Reading:
    """All that a config.json says about its drafter, and all that is wrong with it."""
    reading = Reading(layout_of(content))
    top = Fields(content, reading.problems)
    if reading.layout == "speculators":
        values = _speculators(top, reading)
    else:
        values = _zlab(top, reading)
    for key, value in TRAINED_AS.items():
        top.only(key, value)
    # Embedding and lm_head are shared, so the layouts know one width.
    width = values.setdefault("target_hidden_size", values["hidden_size"])
    if width is None:
        values["target_hidden_size"] = values["hidden_size"]
    may_be_none = {"sliding_window", "is_causal", "num_target_layers"}
    reading.values = {k: v for k, v in values.items() if v is not None or k in may_be_none}
    reading.problems += broken_rules(reading.values)
    return reading


def _zlab(top: Fields, reading: Reading) -> dict[str, Any]:
    inner = top.section("dflash_config")
    block_sizes = top.get("block_size", int), inner.get("block_size", int)
    causal = top.get("is_causal", bool), inner.get("causal", bool)
    for key in sorted(inner.content.keys() - OWN_KEYS):
        inner.only(key, *HARMLESS.get(key, ()))
    return {
        **_decoder(top, reading),
        "num_target_layers": top.need("num_target_layers", int),
        "block_size": top.agree("block_size", *block_sizes),
        "mask_token_id": inner.need("mask_token_id", int),
        "target_layer_ids": inner.need_list("target_layer_ids", int),
        "is_causal": None if causal == (None, None) else top.agree("is_causal", *causal),
    }


def _speculators(top: Fields, reading: Reading) -> dict[str, Any]:
    top.only("speculators_model_type", "dflash")
    top.only("sample_from_anchor", False)
    decoder = top.section("transformer_layer_config")
    values = _decoder(decoder, reading)
    values["is_causal"] = _speculators_causality(top, decoder, values["layer_types"] or ())
    ids = top.need_list("aux_hidden_state_layer_ids", int)
    if ids is not None and 0 in ids:
        reading.problems.append(
            "aux_hidden_state_layer_ids has 0, the embedding's output: only outputs of decoder "
            "layers (1 is the first one's) can be tapped"
        )
        ids = None
    drafted, vocabulary = top.get("draft_vocab_size", int), values["vocab_size"]
    if None not in (drafted, vocabulary) and drafted != vocabulary:
        reading.problems.append(
            f"draft_vocab_size {drafted} of {vocabulary}: a reduced vocabulary with an lm_head of "
            "its own is not supported, only the target's own"
        )
    block_size = top.need("block_size", int)
    _proposal(top, block_size, reading)
    return {
        **values,
        "num_target_layers": top.get("num_target_layers", int),
        "target_hidden_size": top.get("target_hidden_size", int),
        "block_size": block_size,
        "mask_token_id": top.need("mask_token_id", int),
        "target_layer_ids": None if ids is None else tuple(i - 1 for i in ids),
    }


def _speculators_causality(top: Fields, decoder: Fields, layer_types: Iterable[str]) -> bool | None:
    """`DrafterConfig.is_causal`; without the explicit key their flag is about sliding layers."""
    explicit, non_causal = (
        decoder.get("is_causal", bool),
        top.get("sliding_window_non_causal", bool),
    )
    slides = SLIDING in layer_types
    if explicit is not None and non_causal is not None and slides:
        return top.agree("sliding_window_non_causal", explicit, not non_causal)
    return False if explicit is None and slides and non_causal else explicit


def _proposal(top: Fields, block_size: int | None, reading: Reading) -> None:
    """What the speculators layout says about use: a flaw where it contradicts the drafter."""
    flaws: list[str] = []
    described = Fields(top.get("speculators_config", dict), flaws, "speculators_config.")
    described.only("algorithm", "dflash")
    methods = described.get("proposal_methods", list) or [{}]
    tokens = methods[0].get("speculative_tokens") if isinstance(methods[0], dict) else None
    if block_size is not None and tokens != block_size - 1:
        flaws.append(
            f"speculators_config.proposal_methods: speculative_tokens {tokens}, expected "
            f"{block_size - 1} (block_size - 1)"
        )
    verifier = Fields(described.get("verifier", dict), flaws, "speculators_config.verifier.")
    name = verifier.get("name_or_path", str)
    architectures = verifier.get("architectures", list) or ()
    reading.label = dataclasses.replace(
        reading.label, name=name, architectures=tuple(architectures)
    )
    if name is None:
        flaws.append("speculators_config.verifier.name_or_path is missing: the target is not named")
    reading.flaws += flaws


def _decoder(fields: Fields, reading: Reading) -> dict[str, Any]:
    """The Qwen3 decoder's fields, which both layouts have."""
    bos, eos = fields.content.get("bos_token_id"), fields.content.get("eos_token_id")
    reading.label = dataclasses.replace(reading.label, bos_token_id=bos, eos_token_id=eos)
    fields.only("hidden_act", "silu")
    fields.only("logit_scale", 1.0)
    fields.only("final_logit_softcapping", 0.0)
    fields.only("add_swa_attention_sink_bias", False)
    values = {name: fields.need(key, KINDS.get(key, int)) for name, key in DECODER_KEYS.items()}
    layer_types = fields.need_list("layer_types", str)
    flaws, content = reading.flaws, fields.content
    if content.get("model_type", "qwen3") != "qwen3":
        flaws.append(f"model_type is {content['model_type']!r}, expected 'qwen3'")
    if content.get("tie_word_embeddings"):
        flaws.append(
            "tie_word_embeddings is true, expected false: a drafter has no embedding to tie to"
        )
    dtype = content.get("dtype", content.get("torch_dtype"))
    if dtype not in (None, "bfloat16"):
        flaws.append(f"dtype is {dtype!r}, expected 'bfloat16'")
    slides = SLIDING in (layer_types or ())
    if layer_types is not None and content.get("use_sliding_window", slides) != slides:
        flaws.append(
            f"use_sliding_window is {content['use_sliding_window']}, but layer_types say {slides}"
        )
    return {
        **values,
        "rope_theta": _rope_theta(fields),
        "layer_types": layer_types,
        "sliding_window": fields.get("sliding_window", int) if slides else None,
    }


def _rope_theta(fields: Fields) -> float | None:
    """The base of a plain RoPE over the whole head; anything else is a problem."""
    rope = Fields(fields.get("rope_parameters", dict), fields.problems, "rope_parameters.")
    rope.only("rope_type", "default")
    rope.only("partial_rotary_factor", 1.0)
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for key in sorted(rope.content.keys() - known):  # mrope_section, factor, one per layer type
        rope.only(key)
    scaling = fields.content.get("rope_scaling")
    if (
        not isinstance(scaling, dict)
        or set(scaling) - {"type", "rope_type"}
        or (set(scaling.values()) != {"default"})
    ):
        fields.only("rope_scaling")
    fields.only("partial_rotary_factor", 1.0)
    fields.only("is_neox_style", True)
    for key in ("mrope_section", "mrope_interleaved", "rope_local_base_freq"):
        fields.only(key, False)
    return fields.agree(
        "rope_theta", fields.get("rope_theta", float), rope.get("rope_theta", float)
    )
