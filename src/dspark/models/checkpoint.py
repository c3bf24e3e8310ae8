"""A drafter's directory: config.json and model.safetensors under DeepSpec's tensor names.

What is read is checked against config.json and against the target before it is used; what is
written appears whole or not at all. It knows no request and no training step.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.errors import ModelError, NumericsError
from dspark.models.config_spellings import (
    ParsedConfig,
    drafter_kind,
    parse_config,
    parse_provenance,
)
from dspark.models.directory import replaced_directory
from dspark.models.drafter_config import DrafterConfig, DrafterKind
from dspark.models.drafter_format import Provenance, config_document, file_name, module_name
from dspark.models.kinds import AnyDrafter, drafter_of
from dspark.models.vocabulary_fit import (
    EMBEDDING,
    HEAD,
    fitted,
    own_embedding_of,
    own_head_of,
    target_ids,
)

__all__ = [
    "Provenance",
    "check_state",
    "load_drafter",
    "read_provenance",
    "save_drafter",
    "target_fingerprint",
]

MAP = "d2t"
_CONFIDENCE_BIAS = "confidence_head.proj.bias"
_DERIVED = frozenset(("t2d", "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"))
"""Tensors of other exporters that follow from the rest of the file."""
_FLOAT_TYPES = frozenset(("F32", "BF16", "F16"))
_WRITTEN = re.compile(r"config\.json|model(-.*)?\.safetensors(\.index\.json)?")
"""Files of a directory that a save makes anew; all others stay."""

Report = Callable[[str], None]


class TargetSizes(Protocol):
    """What a drafter must agree with; `TargetSpec` has it."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...


class TargetWeights(Protocol):
    """What a drafter borrows; `Target` has it."""

    @property
    def spec(self) -> TargetSizes: ...
    @property
    def embed_weight_VD(self) -> Tensor: ...
    @property
    def head_weight_VD(self) -> Tensor: ...


def check_folder(path: str | Path) -> None:
    """Raises `ModelError` for a directory that holds no drafter's configuration: a question for the
    time before a target is loaded."""
    _document(Path(path))


def check_place(path: str | Path) -> None:
    """Raises `ModelError` where a save would take the place of weights that are no drafter's."""
    folder = Path(path)
    if not folder.is_dir() or not any(_WRITTEN.fullmatch(file.name) for file in folder.iterdir()):
        return
    try:
        drafter_kind(_document(folder))
    except ModelError as error:
        raise ModelError(
            f"{folder} holds a model that is no drafter, which a drafter written there would "
            "replace; give another directory."
        ) from error


def load_drafter(
    path: str | Path,
    target: TargetWeights,
    *,
    num_tokens: int | None = None,
    template_hash: str | None = None,
    report: Report | None = None,
) -> AnyDrafter:
    """The drafter in directory `path`, sharing the target's embedding and LM head.

    It keeps the stored dtype and lies on the target's device. `num_tokens`: ids that the
    target's tokenizer can produce, added tokens included; ids beyond it are never proposed, and
    without it the vocabularies must have the same number of rows. `template_hash`: of the chat
    template in use, compared with that of training. `report` gets a sentence for each thing that
    was assumed, ignored or suspicious; by default it becomes a Python warning.
    Raises `ModelError` for what is missing, damaged or does not fit.
    """
    tell = report or _warn
    folder = Path(path)
    parsed = parse_config(_document(folder), num_target_layers=target.spec.num_layers)
    _check_target(parsed.config, target.spec, num_tokens)
    with _opened(folder, parsed.config.kind) as stored:
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        findings = [*parsed.findings, *check_state(parsed.config, shapes)]
        tensors = _tensors(stored, _wanted(parsed.config, shapes))
    findings += _suspicions(parsed, target, template_hash)
    drafter = _assembled(parsed, tensors, target, num_tokens, findings)
    for finding in findings:
        tell(finding)
    return drafter


def save_drafter(drafter: AnyDrafter, path: str | Path, *, provenance: Provenance) -> None:
    """Write the drafter to directory `path`, or leave what was there as it was.

    Everything goes to a directory beside it first, which then takes its place; other files of an
    earlier save are kept. The target's embedding and LM head are not stored.
    Raises `NumericsError` for a tensor that is not finite, `CapacityError` for a full disk,
    `ModelError` for a directory with a model that is no drafter.
    """
    check_place(path)
    tensors = _state(drafter)
    check_state(drafter.config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    _check_finite(tensors, NumericsError, "nothing was saved; train from the last good state")
    dtype = str(drafter.dtype).removeprefix("torch.")
    document = config_document(drafter.config, dtype=dtype, provenance=provenance)
    with replaced_directory(Path(path), replaces=_WRITTEN) as new:
        (new / "config.json").write_text(json.dumps(document, indent=2) + "\n")
        named = {file_name(drafter.config, name): tensor for name, tensor in tensors.items()}
        save_file(named, new / "model.safetensors", metadata={"format": "pt"})


def read_provenance(path: str | Path) -> Provenance | None:
    """What the drafter in `path` was trained for; `None` if its file does not say."""
    return parse_provenance(_document(Path(path)))


def target_fingerprint(embed_weight_VD: Tensor) -> str:
    """Tells targets apart by 64 rows of the embedding, the same for bf16 and fp32 loads."""
    rows = torch.linspace(0, len(embed_weight_VD) - 1, 64).round().long()
    sample = embed_weight_VD.detach()[rows.to(embed_weight_VD.device)]
    bits = sample.to(device="cpu", dtype=torch.bfloat16).contiguous().view(torch.uint8)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]


def check_state(config: DrafterConfig, shapes: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Names and shapes of a file's tensors against its configuration.

    Embedding and LM head may be left out. Returns a sentence for what is left unused; raises
    `ModelError` that names the key, what was found and what was expected.
    """
    expected = _expected_shapes(config)
    optional = _optional_shapes(config)
    if len(shapes.get(EMBEDDING, ())) == 2:  # rows beyond the vocabulary may hold the mask token
        optional[EMBEDDING] = (max(config.vocab_size, shapes[EMBEDDING][0]), config.hidden_size)
    for name, shape in expected.items():
        if name not in shapes and name != _CONFIDENCE_BIAS:
            raise ModelError(
                f"The drafter lacks tensor {name} {list(shape)}, which its config.json asks for; "
                "take the weights that belong to that file."
            )
    for name, shape in {**expected, **optional}.items():
        if name in shapes and tuple(shapes[name]) != shape:
            raise ModelError(
                f"The drafter's tensor {name} has shape {list(shapes[name])}, but its "
                f"config.json means {list(shape)}; take the weights that belong to that file."
            )
    findings = []
    if _CONFIDENCE_BIAS in expected and _CONFIDENCE_BIAS not in shapes:
        findings.append(f"The drafter has no {_CONFIDENCE_BIAS}; 0 is used.")
    unknown = sorted(set(shapes) - set(expected) - set(optional) - _DERIVED)
    if unknown:
        findings.append(f"The drafter has tensors that are not used: {', '.join(unknown)}.")
    return tuple(findings)


def _expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    nothing = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    size = config.draft_vocab_size
    d2t_S = None if size is None else torch.empty(size, dtype=torch.int64, device="meta")
    blank = drafter_of(config, embed_weight_VD=nothing, head_weight_VD=nothing, d2t_S=d2t_S)
    shapes = {name: tuple(tensor.shape) for name, tensor in blank.state_dict().items()}
    if size is not None:
        shapes[MAP] = (size,)  # UC-076: a reduced head means nothing without its map
    return shapes


def _optional_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    return {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        HEAD: (config.num_draft_tokens, config.hidden_size),
    }


def _wanted(config: DrafterConfig, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    known = {**_expected_shapes(config), **_optional_shapes(config)}
    return [name for name in shapes if name in known]


def _check_target(config: DrafterConfig, spec: TargetSizes, num_tokens: int | None) -> None:
    pairs = {
        "hidden_size": (config.hidden_size, spec.hidden_size),
        "num_target_layers": (config.num_target_layers, spec.num_layers),
    }
    for key, (found, expected) in pairs.items():
        if found != expected:
            raise ModelError(
                f"The drafter's {key} is {found}, but target {spec.name} has {expected}; "
                "use the drafter that was trained for this target."
            )
    if num_tokens is None and config.vocab_size != spec.vocab_size:
        raise ModelError(
            f"The drafter's vocab_size is {config.vocab_size}, but target {spec.name} has "
            f"{spec.vocab_size} rows; say how many tokens their common tokenizer has."
        )
    if num_tokens is not None and config.vocab_size < min(num_tokens, spec.vocab_size):
        raise ModelError(
            f"The drafter's vocab_size is {config.vocab_size}, but target {spec.name} has a "
            f"tokenizer of {num_tokens} tokens; use the drafter that was trained for it."
        )


def _suspicions(
    parsed: ParsedConfig, target: TargetWeights, template_hash: str | None
) -> list[str]:
    """What may cost acceptance; the text stays the target's own in every case."""
    config, spec, findings = parsed.config, target.spec, []
    if config.mask_token_id in spec.eos_ids:
        findings.append(
            f"The drafter's mask_token_id {config.mask_token_id} ends the target's text; check "
            "that it was trained so."
        )
    if config.max_position_embeddings < spec.max_positions:
        findings.append(
            f"The drafter was trained for {config.max_position_embeddings} positions, the target "
            f"has {spec.max_positions}; beyond the former more drafts may be rejected."
        )
    origin = parsed.provenance
    if origin is None:
        return findings
    dtype = str(target.embed_weight_VD.dtype).removeprefix("torch.")
    facts = {
        "weights": (origin.target_fingerprint, target_fingerprint(target.embed_weight_VD)),
        "arithmetic": (origin.target_dtype, dtype),
        "chat template": (origin.template_hash, template_hash or origin.template_hash),
    }
    for name, (trained, served) in facts.items():
        if trained != served:
            findings.append(
                f"The drafter was trained for {origin.target_name} with {name} {trained}, but "
                f"{spec.name} has {served}; more drafts may be rejected."
            )
    return findings


def _document(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        document = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelError(f"{file} does not exist; give the directory of a drafter.") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); copy the drafter again.") from error
    if not isinstance(document, dict):
        raise ModelError(f"{file} holds no JSON object; copy the drafter again.")
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor in an open file, of which only the header was read."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        return str(self.file.get_slice(self.name).get_dtype())


@contextmanager
def _opened(folder: Path, kind: DrafterKind) -> Iterator[dict[str, _Stored]]:
    """The tensors of a directory, under the names of our modules."""
    with ExitStack() as stack:
        stored: dict[str, _Stored] = {}
        for path in _weight_files(folder):
            file = stack.enter_context(_open(path))
            for name in file.keys():  # noqa: SIM118  # not a dict
                own = module_name(kind, name)
                if own in stored:
                    raise ModelError(
                        f"{folder} stores both {stored[own].name} and {name}, which are the same "
                        "tensor of a drafter; keep the one of its training."
                    )
                stored[own] = _Stored(file=file, name=name)
        yield stored


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [single]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{index} cannot be read ({error}); copy the drafter again.") from error
    return [folder / name for name in sorted(names)]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{file} does not exist; copy the drafter again.") from error
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is damaged ({error}); copy the drafter again.") from error


def _tensors(stored: Mapping[str, _Stored], names: Sequence[str]) -> dict[str, Tensor]:
    tensors = {}
    for name in names:
        tensor = stored[name]
        if name != MAP and tensor.dtype not in _FLOAT_TYPES:
            raise ModelError(
                f"The drafter's tensor {name} is stored as {tensor.dtype}, but it must be float32, "
                "bfloat16 or float16; use weights that are not quantized."
            )
        # A copy: the library maps the file, and whoever overwrites it would change our weights.
        tensors[name] = tensor.file.get_tensor(tensor.name).clone()
    _check_finite(tensors, ModelError, "copy or train the drafter again")
    return tensors


def _check_finite(
    tensors: Mapping[str, Tensor], kind: type[ModelError | NumericsError], remedy: str
) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise kind(f"The drafter's tensor {name} holds NaN or infinite values; {remedy}.")


def _assembled(
    parsed: ParsedConfig,
    tensors: dict[str, Tensor],
    target: TargetWeights,
    num_tokens: int | None,
    findings: list[str],
) -> AnyDrafter:
    """Stored tensors, fitted to the target's vocabulary, as a drafter on the target's device."""
    device = target.embed_weight_VD.device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    d2t_S = target_ids(tensors.pop(MAP, None), parsed.vocabulary_map)
    if parsed.is_tied and d2t_S is None and EMBEDDING in tensors:
        tensors.setdefault(HEAD, tensors[EMBEDDING])
    config, d2t_S = fitted(parsed.config, tensors, d2t_S, target.spec.vocab_size, num_tokens)
    own_embedding = own_embedding_of(
        tensors.pop(EMBEDDING, None), target.embed_weight_VD, mask_token_id=config.mask_token_id
    )
    own_head = own_head_of(tensors.pop(HEAD, None), target.head_weight_VD, d2t_S)
    for name, own in ((EMBEDDING, own_embedding), (HEAD, own_head)):
        if own is not None:
            findings.append(f"The drafter's {name} differs from the target's; its own is used.")
    drafter = drafter_of(
        config,
        embed_weight_VD=target.embed_weight_VD if own_embedding is None else own_embedding,
        head_weight_VD=target.head_weight_VD if own_head is None else own_head,
        d2t_S=d2t_S,
        has_own_embedding=own_embedding is not None,
        has_own_head=own_head is not None,
    )
    if config.enable_confidence_head:
        tensors.setdefault(_CONFIDENCE_BIAS, tensors["norm.weight"].new_zeros(1))
    drafter.load_state_dict(tensors, assign=True)
    return drafter.to(tensors["norm.weight"].dtype)


def _state(drafter: AnyDrafter) -> dict[str, Tensor]:
    """What a file holds of a drafter, on the CPU."""
    tensors = drafter.state_dict()
    if drafter.has_own_embedding:
        tensors[EMBEDDING] = drafter.embed_weight_VD
    if drafter.has_own_head:
        tensors[HEAD] = drafter.head_weight_SD
    if drafter.d2t_S is not None:
        tensors[MAP] = drafter.d2t_S
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _warn(finding: str) -> None:
    warnings.warn(finding, stacklevel=3)
