"""Least squares from sums over rows, and a low-dimensional view of features that predict best.

It knows no drafter and no file. Letters: F features, Y outputs, D dimensions of the view.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Moments:
    """Sums over the rows seen so far, float32: all that a ridge regression needs."""

    gram_FF: Tensor
    cross_FY: Tensor
    sum_F: Tensor
    num_rows: Tensor

    @classmethod
    def empty(cls, num_features: int, num_outputs: int, *, device: torch.device) -> "Moments":
        """No row yet."""
        return cls(
            torch.zeros(num_features, num_features, device=device),
            torch.zeros(num_features, num_outputs, device=device),
            torch.zeros(num_features, device=device),
            torch.zeros((), device=device),
        )

    def add(self, x_NF: Tensor, y_NY: Tensor, weight_N: Tensor | None = None) -> None:
        """Rows of features and of what they are to predict."""
        weighted_NF = x_NF if weight_N is None else x_NF * weight_N[:, None]
        self.gram_FF.addmm_(x_NF.T, weighted_NF)
        self.cross_FY.addmm_(weighted_NF.T, y_NY)
        self.sum_F += weighted_NF.sum(dim=0)
        self.num_rows += len(x_NF)

    def parts(self) -> list[Tensor]:
        """The sums, to be added up in place over processes."""
        return [self.gram_FF, self.cross_FY, self.sum_F, self.num_rows]


def ridge(gram_FF: Tensor, cross_FY: Tensor, *, share: float) -> Tensor:
    """Weights [F, Y] of least squares, a share of the mean square of the features as penalty."""
    weights_FY: Tensor = torch.linalg.solve(_regular(gram_FF, share), cross_FY)
    return weights_FY


def predictive_view(
    gram_FF: Tensor, cross_FY: Tensor, mean_F: Tensor, *, size: int, share: float
) -> Tensor:
    """A projection [D, F] of features, its outputs uncorrelated and of mean square 1.

    Row 0 is as near to 1 as a combination of features can be; the others carry most of the
    prediction of the outputs, the best first (reduced-rank regression, Izenman 1975). Rows that
    the outputs give no reason for are zeros. `gram_FF` and `cross_FY` are means over rows.
    """
    root_FF = torch.linalg.cholesky(_regular(gram_FF, share))
    constant_F = torch.linalg.solve_triangular(root_FF, mean_F[:, None], upper=False)[:, 0]
    constant_F = constant_F / constant_F.norm().clamp(min=1e-12)
    # With gram = L L^T, the weights L^-T L^-1 cross predict with a spread of L^-1 cross.
    spread_FY = torch.linalg.solve_triangular(root_FF, cross_FY, upper=False)
    spread_FY = spread_FY - torch.outer(constant_F, constant_F @ spread_FY)
    left_FR = torch.linalg.svd(spread_FY, full_matrices=False).U[:, : size - 1]
    # Where the outputs' rank is used up, a left vector may be anything, the constant too.
    base_FD = torch.linalg.qr(torch.cat((constant_F[:, None], left_FR), dim=1)).Q
    base_FD[:, 0] = constant_F  # QR may turn it round
    view_DF = torch.linalg.solve_triangular(root_FF.T, base_FD, upper=True).T
    return torch.nn.functional.pad(view_DF, (0, 0, 0, size - len(view_DF)))


def reflection(first_D: Tensor) -> Tensor:
    """The orthogonal matrix [D, D] that takes the first axis to this direction (Householder)."""
    unit_D = first_D / first_D.norm()
    normal_D = -unit_D
    normal_D[0] += 1.0
    normal_D = normal_D / normal_D.norm().clamp(min=1e-12)
    return torch.eye(len(unit_D), device=unit_D.device) - 2.0 * torch.outer(normal_D, normal_D)


def _regular(gram_FF: Tensor, share: float) -> Tensor:
    penalty = share * gram_FF.diagonal().mean().clamp(min=1e-12)
    return gram_FF + penalty * torch.eye(len(gram_FF), device=gram_FF.device)
