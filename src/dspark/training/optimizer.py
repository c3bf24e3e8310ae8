"""Muon for the matrices, AdamW for the rest, on float32 master weights. It knows no loss.

Muon: momentum, then the nearest orthogonal matrix by Newton-Schulz steps, scaled so that an
update has the root mean square of an AdamW update. It was the one change that mattered most in
the measured CPU runs, and its cost is fixed per step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dspark.errors import InputError, NumericsError
from dspark.training.ranks import OneProcess, Ranks
from dspark.training.shards import is_sharded, local_of, shard_of, whole_of

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz polynomial that pushes all singular values towards 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Rates and decays. Learning rates are peaks; `schedule` gives the factor of a step."""

    muon_lr: float = 3e-3
    """Peak learning rate of the matrices of the layers."""
    adam_lr: float = 3e-3
    """Peak learning rate of everything else."""
    muon_momentum: float = 0.95
    newton_schulz_steps: int = 5
    update_rms: float = 0.2
    """Root mean square of the entries of a Muon update before the learning rate."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    """Decoupled, on the matrices that Muon updates."""
    clip_norm: float = 1.0
    warmup: float = 0.04
    """Share of all steps in which the learning rate rises linearly."""

    def __post_init__(self) -> None:
        for name in ("muon_lr", "adam_lr", "clip_norm", "update_rms"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise InputError(f"{name} is {value!r}, but it must be above 0.")
        if not 0.0 <= self.warmup < 1.0:
            raise InputError(f"warmup is {self.warmup!r}, but it must lie in [0, 1).")


def schedule(step: int, *, num_steps: int, warmup: float) -> float:
    """Factor of the learning rate in step 0..num_steps-1: linear rise, then cosine to 0."""
    done = (step + 1) / num_steps
    if done <= warmup:
        return done / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (done - warmup) / (1.0 - warmup)))


class Optimizer:
    """Updates a module's parameters in place from the gradients of one or more backward passes.

    Layer matrices and `fc` go to Muon, batched over equal shapes; embeddings, norms, heads to
    AdamW. The float32 masters are what is trained; parameters are their rounded copies, and
    gradients are added up in float32. Of a sharded parameter (FSDP2) this process keeps its own
    shard of master and state; what a checkpoint holds is whole, whoever wrote it.
    """

    def __init__(
        self, module: nn.Module, *, config: OptimizerConfig, ranks: Ranks | None = None
    ) -> None:
        self.config = config
        self._ranks = OneProcess() if ranks is None else ranks
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.masters = {n: local_of(p).float().clone() for n, p in self.parameters.items()}
        self._muon = {n for n, p in self.parameters.items() if is_matrix_of_backbone(n, p)}
        self._momentum = {n: torch.zeros_like(self.masters[n]) for n in sorted(self._muon)}
        adam = [n for n in self.parameters if n not in self._muon]
        self._first = {n: torch.zeros_like(self.masters[n]) for n in adam}
        self._second = {n: torch.zeros_like(self.masters[n]) for n in adam}
        self._num_updates = 0
        self._gradients: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._gradients.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add what a backward pass left in `.grad` to the float32 sum, and empty it."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            gradient = local_of(parameter.grad).float()
            if name in self._gradients:
                self._gradients[name] += gradient
            else:
                self._gradients[name] = gradient
            parameter.grad = None

    @torch.no_grad()
    def step(self, *, factor: float) -> float:
        """One update with learning rates times `factor`; the gradient norm before clipping.

        A gradient that is not finite raises `NumericsError` naming the first such tensor, and
        no weight has changed (UC-115).
        """
        self.accumulate()
        gradients = self._reduced()
        norm = self._global_norm(gradients)
        if not math.isfinite(norm):
            raise NumericsError(f"the gradient of {_first_bad(gradients)} is not finite")
        clip = min(1.0, self.config.clip_norm / (norm + 1e-6))
        self._num_updates += 1
        self._step_muon(gradients, clip=clip, lr=factor * self.config.muon_lr)
        self._step_adam(gradients, clip=clip, lr=factor * self.config.adam_lr)
        self.copy_to_parameters()
        self._gradients.clear()
        return norm

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Round the masters into the parameters."""
        for name, parameter in self.parameters.items():
            local_of(parameter).copy_(self.masters[name])

    def whole_masters(self) -> dict[str, Tensor]:
        """The masters, whole on every rank."""
        return self._whole(self.masters)

    @torch.no_grad()
    def load_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Take whole masters and round them into the parameters."""
        self._load(self.masters, masters)
        self.copy_to_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, masters included, all of it whole."""
        return {
            "masters": self._whole(self.masters),
            "momentum": self._whole(self._momentum),
            "first": self._whole(self._first),
            "second": self._whole(self._second),
            "num_updates": self._num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a `state_dict` back and round it into the parameters."""
        for own, key in (
            (self.masters, "masters"),
            (self._momentum, "momentum"),
            (self._first, "first"),
            (self._second, "second"),
        ):
            if own.keys() != state[key].keys():
                raise InputError(
                    f"The checkpoint's optimiser state {key!r} is of another drafter; "
                    "use another output folder or the configuration it was started with."
                )
            self._load(own, state[key])
        self._num_updates = int(state["num_updates"])
        self.copy_to_parameters()

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: whole_of(t, like=self.parameters[name]) for name, t in tensors.items()}

    def _load(self, own: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        for name, tensor in own.items():
            saved = whole[name].to(tensor.device)
            tensor.copy_(shard_of(saved, like=self.parameters[name]))

    def _reduced(self) -> dict[str, Tensor]:
        """Gradients of the whole step: those of shards are already summed over the ranks.

        Where ranks hold whole parameters, a parameter without a gradient here may have one there.
        """
        whole = [n for n, p in self.parameters.items() if not is_sharded(p)]
        if self._ranks.size > 1:
            for name in whole:
                self._gradients.setdefault(name, torch.zeros_like(self.masters[name]))
            self._ranks.sum_all([self._gradients[name] for name in whole])
        return self._gradients

    def _global_norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Over whole parameters here and the shards of all ranks."""
        whole, shards = torch.zeros(()), torch.zeros(())
        for name, gradient in gradients.items():
            square = gradient.square().sum().cpu()
            if is_sharded(self.parameters[name]):
                shards += square
            else:
                whole += square
        if any(is_sharded(parameter) for parameter in self.parameters.values()):
            self._ranks.sum_all([shards])
        return math.sqrt(float(whole + shards))

    def _step_muon(self, gradients: Mapping[str, Tensor], *, clip: float, lr: float) -> None:
        config = self.config
        by_shape: dict[tuple[int, int], list[tuple[str, bool]]] = {}
        for name in sorted(self._muon & gradients.keys()):
            rows, columns = self.parameters[name].shape
            shape = (min(rows, columns), max(rows, columns))
            by_shape.setdefault(shape, []).append((name, rows > columns))
        for shape, members in by_shape.items():
            wanted = []
            for name, is_tall in members:
                gradient = gradients[name] * clip
                momentum = self._momentum[name]
                momentum.mul_(config.muon_momentum).add_(gradient)
                update = gradient.add(momentum, alpha=config.muon_momentum)  # Nesterov
                update = whole_of(update, like=self.parameters[name])
                wanted.append(update.T if is_tall else update)
            directions = orthogonalise(
                torch.stack(wanted),
                steps=config.newton_schulz_steps,
                dtype=self.parameters[members[0][0]].dtype,
            )
            scale = config.update_rms * math.sqrt(shape[1])
            for (name, is_tall), direction in zip(members, directions, strict=True):
                master = self.masters[name]
                master.mul_(1.0 - lr * config.weight_decay)
                whole = direction.T if is_tall else direction
                master.add_(shard_of(whole, like=self.parameters[name]), alpha=-lr * scale)

    def _step_adam(self, gradients: Mapping[str, Tensor], *, clip: float, lr: float) -> None:
        beta_1, beta_2 = self.config.adam_betas
        correct_1 = 1.0 - beta_1**self._num_updates
        correct_2 = 1.0 - beta_2**self._num_updates
        for name, first in self._first.items():
            if name not in gradients:
                continue
            gradient, second = gradients[name] * clip, self._second[name]
            first.lerp_(gradient, 1.0 - beta_1)
            second.mul_(beta_2).addcmul_(gradient, gradient, value=1.0 - beta_2)
            scale = (second / correct_2).sqrt_().add_(1e-8)
            self.masters[name].addcdiv_(first, scale, value=-lr / correct_1)


def is_matrix_of_backbone(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates this parameter: the matrices of the layers and `fc`."""
    return parameter.ndim == 2 and (name.startswith("layers.") or name == "fc.weight")


def orthogonalise(
    matrices_BRC: Tensor, *, steps: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The orthogonal factors (rows <= columns) by Newton-Schulz in `dtype`, float32 out.

    Singular values end near 1 (about 0.7..1.2), which is what Muon needs and no more.
    """
    a, b, c = _QUINTIC
    norms = matrices_BRC.flatten(1).norm(dim=1).clamp(min=1e-12)
    results = []
    for matrix, norm in zip(matrices_BRC, norms, strict=True):
        x = (matrix / norm).to(dtype)
        for _ in range(steps):
            gram = x @ x.T
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
        results.append(x.float())
    return torch.stack(results)


def _first_bad(tensors: Mapping[str, Tensor]) -> str:
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            return name
    return "all parameters together"
