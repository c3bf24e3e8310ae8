"""The spellings of a drafter's config.json: DeepSpec, SpecForge, speculators and our own.

It turns a JSON object into one `DrafterConfig`; it opens no file and knows no weight. What only
drafters of the chain kinds have: chain_spellings.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.errors import ModelError
from dspark.models.chain_spellings import chain_fields, chain_kind
from dspark.models.config_keys import (
    INERT,
    OURS,
    READ,
    ROPE,
    SECTIONS,
    SHIFTED_LAYER_KEYS,
    SPECIAL_KEYS,
    STRUCTURE,
    check_kinds,
)
from dspark.models.drafter_config import DrafterConfig, DrafterKind
from dspark.models.drafter_format import (
    ARCHITECTURE,
    EAGLE3_ARCHITECTURE,
    FORMAT_VERSION,
    LAYER_KEYS,
    LAYOUT,
    MTP_ARCHITECTURE,
    Provenance,
    VocabularyMap,
)

_NESTED_ARCHITECTURES = frozenset(
    ("DSparkDraftModel", "DSparkSpeculator", "DFlashDraftModel", ARCHITECTURE)
)
"""Class names of exporters that nest their keys and name the drafter's type beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedConfig:
    """A config.json, understood."""

    config: DrafterConfig
    findings: tuple[str, ...]
    """One sentence for each thing that was assumed or not understood."""
    vocabulary_map: VocabularyMap | None
    """`None`: the file does not say, which is refused if it has a draft vocabulary."""
    is_tied: bool
    """A stored embedding also serves as LM head if no LM head is stored."""
    special_ids: Mapping[str, tuple[int, ...]]
    provenance: Provenance | None


def parse_config(
    document: Mapping[str, Any], *, num_target_layers: int | None = None
) -> ParsedConfig:
    """Understand DeepSpec's, SpecForge's, speculators' or our own config.json.

    `num_target_layers` serves files that do not store it. Raises `ModelError` for another kind
    of drafter, a missing or contradictory key, and for what this engine would draft wrongly.
    """
    kind = drafter_kind(document)
    ours = _ours(document)
    _check_version(ours)
    values = _flattened(document)
    check_kinds(values, READ)
    findings: list[str] = _unknown_keys(document, values, ours)
    _check_unsupported(values, is_chain=kind.is_chain)
    num_target_layers = _num_target_layers(values, num_target_layers)
    if kind.is_chain:
        own = chain_fields(kind, document, values, num_target_layers=num_target_layers)
        fields = dict(own.fields)
        findings += own.findings
    else:
        fields = _block_fields(values)
        findings += _check_layout(values, ours, is_nested="speculators_model_type" in document)
    fields |= {name: _integer(values, name) for name in LAYER_KEYS if name not in fields}
    rope_theta, rope_scaling = _rope(values)
    config = DrafterConfig(
        **fields,
        kind=kind,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        layer_windows=_windows(values, ours),
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        attention_bias=bool(values.get("attention_bias", False)),
        num_target_layers=num_target_layers,
        draft_vocab_size=_draft_vocab_size(values),
    )
    special = {key: _ids(values[key]) for key in SPECIAL_KEYS if key in values}
    return ParsedConfig(
        config=config,
        findings=(*findings, *_check_mask(config, special)),
        vocabulary_map=_vocabulary_map(document, ours, kind),
        is_tied=bool(values.get("tie_word_embeddings", False)),
        special_ids=special,
        provenance=parse_provenance(document),
    )


def _block_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """What only drafters of the block kind have."""
    return {
        "block_size": _integer(values, "block_size"),
        "markov_rank": _integer(values, "markov_rank"),
        "target_layer_ids": _target_layer_ids(values),
        "mask_token_id": _mask_token_id(values),
        "num_anchors": values.get("num_anchors", 512),
        "markov_head_type": values.get("markov_head_type", "vanilla"),
        "enable_confidence_head": bool(values.get("enable_confidence_head", False)),
        "confidence_head_with_markov": bool(values.get("confidence_head_with_markov", False)),
        "tap_mixing": bool(values.get("tap_mixing", False)),
    }


def parse_provenance(document: Mapping[str, Any]) -> Provenance | None:
    """What a config.json of ours says of the drafter's target; `None` for other exporters."""
    ours = _ours(document)
    target = ours.get("target")
    if target is None:
        return None
    return Provenance(
        target_name=str(target.get("name")),
        target_fingerprint=str(target.get("fingerprint")),
        target_dtype=str(target.get("dtype")),
        template_hash=target.get("template_hash"),
        thinking=target.get("thinking"),
        system=target.get("system"),
        recipe=ours.get("recipe") or {},
    )


def _ours(document: Mapping[str, Any]) -> Mapping[str, Any]:
    check_kinds(document, STRUCTURE)
    ours: Mapping[str, Any] = document.get("dspark") or {}
    check_kinds(ours, OURS)
    return ours


def drafter_kind(document: Mapping[str, Any]) -> DrafterKind:
    """UC-082: a drafter of a kind unknown here is refused by name, before any weight is read."""
    check_kinds(document, STRUCTURE)
    names = set(document.get("architectures") or ())
    section = document.get("dflash_config") or {}
    check_kinds(section, STRUCTURE)
    stated = document.get("speculators_model_type") or section.get("projector_type")
    chain = chain_kind(document)
    if chain is not None:
        return chain
    is_dspark = stated == "dspark" and bool(names & _NESTED_ARCHITECTURES)
    if is_dspark or (stated in (None, "dspark") and ARCHITECTURE in names):
        return DrafterKind.DSPARK
    found = ", ".join(sorted(map(str, names))) or "no architecture"
    raise ModelError(
        f"config.json describes {found} of type {stated or document.get('model_type')!r}, but a "
        f"drafter is expected: dspark ({ARCHITECTURE}), eagle3 ({EAGLE3_ARCHITECTURE}) or mtp "
        f"({MTP_ARCHITECTURE}); give a checkpoint of such a kind."
    )


def _check_version(ours: Mapping[str, Any]) -> None:
    version = ours.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ModelError(
            f"The drafter's format_version is {version!r}, but this dspark reads "
            f"{FORMAT_VERSION}; update dspark."
        )


def _flattened(document: Mapping[str, Any]) -> dict[str, Any]:
    """All keys on one level; null is the same as absent; a contradiction is refused."""
    values: dict[str, Any] = {}
    for section in (document, *(document.get(name) or {} for name in SECTIONS)):
        for key, value in section.items():
            if value is None or key in INERT or key in STRUCTURE:
                continue
            if values.setdefault(key, value) != value and key in READ:
                raise ModelError(
                    f"config.json gives {key} twice, as {values[key]!r} and as {value!r}; "
                    "keep the one that the drafter was trained with."
                )
    return values


def _unknown_keys(
    document: Mapping[str, Any], values: Mapping[str, Any], ours: Mapping[str, Any]
) -> list[str]:
    strange = {f"dspark.{key}" for key in set(ours) - set(OURS)}
    for key in ("rope_parameters", "rope_scaling"):
        strange |= {f"{key}.{name}" for name in set(values.get(key, ())) - set(ROPE)}
    unknown = sorted(set(values) - set(READ)) + sorted(strange)
    if not unknown:
        return []
    return [f"config.json of {document.get('architectures')} has unknown keys: {unknown}."]


def _check_layout(
    values: Mapping[str, Any], ours: Mapping[str, Any], *, is_nested: bool
) -> list[str]:
    """UC-081: the layout is stored, or assumed aloud, or refused; never guessed in silence."""
    is_anchor_first = values.get("sample_from_anchor")
    if "layout" in ours and is_anchor_first is None:
        is_anchor_first = ours["layout"] == LAYOUT
    if is_anchor_first is None and is_nested:
        raise ModelError(
            "config.json lacks sample_from_anchor, which its exporters read both ways; add true "
            "if slot 0 (the anchor) predicts the first token, false if the masks alone predict."
        )
    if is_anchor_first is None:
        return [
            f"config.json does not store its block layout; {LAYOUT} is assumed, as DeepSpec "
            "writes it. Acceptance near zero means that this is wrong."
        ]
    if not is_anchor_first:
        raise ModelError(
            "The drafter's block layout is fill-in (sample_from_anchor false: K + 1 slots, the "
            f"masks alone predict), but only {LAYOUT} is supported; retrain it anchor-first."
        )
    return []


def _check_unsupported(values: Mapping[str, Any], *, is_chain: bool = False) -> None:
    has_windows = "sliding_attention" in values.get("layer_types", ())
    refused = {
        "hidden_act": values.get("hidden_act", "silu") != "silu",
        "causal": not is_chain and bool(values.get("causal", False)),
        "attention_mode": values.get("attention_mode", "gqa") != "gqa",
        "rope_interleave": bool(values.get("rope_interleave", False)),
        "partial_rotary_factor": values.get("partial_rotary_factor", 1.0) != 1.0,
        "sliding_window_non_causal": has_windows
        and not is_chain
        and not values.get("sliding_window_non_causal", True),
        "target_hidden_size": values.get("target_hidden_size", values.get("hidden_size"))
        != values.get("hidden_size"),
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise ModelError(
                f"The drafter's {key} is {values[key]!r}, which this engine would draft wrongly; "
                "use a drafter with SwiGLU, half-split rotary embedding, two-way blocks (chains: "
                "causal) and the target's hidden size."
            )


def _rope(values: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """Base and scaling from both spellings; disagreement or absence is refused (UC-067)."""
    sources = [values.get("rope_parameters") or {}, values.get("rope_scaling") or {}]
    for source in sources:
        check_kinds(source, ROPE)
    if any(isinstance(value, Mapping) for source in sources for value in source.values()):
        raise ModelError(
            f"The drafter's rope_parameters is {sources[0]!r}, one rotary embedding for each "
            "kind of layer, but all layers must share one; convert or retrain the drafter."
        )
    bases = {source["rope_theta"] for source in (values, *sources) if source.get("rope_theta")}
    if len(bases) != 1:
        found = f"gives rope_theta as {sorted(bases)}" if bases else "has no rope_theta"
        raise ModelError(
            f"config.json {found}, at the top level or in rope_parameters; write the one base "
            "that the drafter was trained with."
        )
    scalings = [scaling for scaling in map(_scaling, sources) if scaling is not None]
    if scalings[1:] and scalings[0] != scalings[1]:
        raise ModelError(
            f"config.json gives rope_parameters {scalings[0]!r} and rope_scaling "
            f"{scalings[1]!r}; keep the one that the drafter was trained with."
        )
    return float(bases.pop()), scalings[0] if scalings else None


def _scaling(source: Mapping[str, Any]) -> Mapping[str, Any] | None:
    kind = source.get("rope_type") or source.get("type") or "default"
    _check_unsupported({"partial_rotary_factor": source.get("partial_rotary_factor", 1.0)})
    if kind == "default":
        return None
    dropped = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
    rest = {key: source[key] for key in ROPE if key not in dropped and source.get(key) is not None}
    return {"rope_type": kind, **rest}


def _windows(values: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    """The window of each layer (UC-070): ours, else layer_types, else Qwen's older flags."""
    if ours.get("layer_windows") is not None:
        return tuple(ours["layer_windows"])
    width, kinds = values.get("sliding_window"), values.get("layer_types")
    if kinds is None:
        if not values.get("use_sliding_window", False):
            return None
        first, count = values.get("max_window_layers", 0), _integer(values, "num_hidden_layers")
        kinds = [("sliding" if i >= first else "full") + "_attention" for i in range(count)]
    if set(kinds) - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"The drafter's layer_types is {kinds!r}, but it must be a list of full_attention "
            "and sliding_attention."
        )
    if "sliding_attention" in kinds and width is None:
        raise ModelError(
            f"The drafter's sliding_window is {width!r}, but its layer_types name sliding "
            "layers; write the window that the drafter was trained with."
        )
    return tuple(width if kind == "sliding_attention" else None for kind in kinds)


def _target_layer_ids(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Our count from any spelling: layer i means the output of decoder layer i (UC-088)."""
    spellings = {key: [i - 1 for i in values[key]] for key in SHIFTED_LAYER_KEYS if key in values}
    if "target_layer_ids" in values:
        spellings["target_layer_ids"] = list(values["target_layer_ids"])
    distinct = {tuple(ids) for ids in spellings.values()}
    if len(distinct) != 1:
        found = f"gives {spellings}, which disagree" if distinct else "has no target_layer_ids"
        raise ModelError(f"config.json {found}; write the layers that the drafter was trained on.")
    return distinct.pop()


def _mask_token_id(values: Mapping[str, Any]) -> int:
    """UC-079: never a silent fallback to padding or end of text."""
    if "mask_token_id" not in values:
        raise ModelError(
            "config.json has no mask_token_id; write the id that filled the slots 1..K-1 while "
            "the drafter was trained, usually an unused row of the target's embedding."
        )
    return _integer(values, "mask_token_id")


def _check_mask(config: DrafterConfig, special: Mapping[str, tuple[int, ...]]) -> list[str]:
    roles = [key for key, ids in special.items() if config.mask_token_id in ids]
    if not roles:
        return []
    return [
        f"The drafter's mask_token_id {config.mask_token_id} is also its {' and '.join(roles)}; "
        "check that it was trained so."
    ]


def _num_target_layers(values: Mapping[str, Any], fallback: int | None) -> int:
    if "num_target_layers" not in values and fallback is not None:
        return fallback
    return _integer(values, "num_target_layers")


def _draft_vocab_size(values: Mapping[str, Any]) -> int | None:
    size = values.get("draft_vocab_size")
    return None if size is None or size == values.get("vocab_size") else int(size)


def _vocabulary_map(
    document: Mapping[str, Any], ours: Mapping[str, Any], kind: DrafterKind
) -> VocabularyMap | None:
    stated = ours.get("vocabulary_map")
    if stated is not None:
        if stated not in list(VocabularyMap):
            raise ModelError(
                f"config.json gives dspark.vocabulary_map as {stated!r}, but it must be one of "
                f"{', '.join(VocabularyMap)}; take the file that came with these weights."
            )
        return VocabularyMap(stated)
    is_exported = "speculators_model_type" in document or "dflash_config" in document
    is_exported = is_exported or kind is DrafterKind.EAGLE3  # all its exporters agree
    return VocabularyMap.OFFSETS if is_exported else None


def _integer(values: Mapping[str, Any], key: str) -> int:
    if key not in values:
        raise ModelError(f"config.json has no {key}; take the file that came with these weights.")
    return int(values[key])


def _ids(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
