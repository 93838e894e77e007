"""Optimizers whose updates need whole matrices and whose states have other shapes, as a user may write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Preconditioned(Optimizer):
    """An optimizer of any parameters, one by one.

    Args:
        parameters: as of `torch.optim.Optimizer`.
        lr: learning rate.
        eps: damps.
    """

    needs_whole_parameters = True

    def __init__(self, parameters: Any, lr: float = 0.01, eps: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps, "step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if any(each.grad is not None for each in group["params"]):
                group["step"] += 1
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(self.update(each.grad, self.state[each], group), alpha=group["lr"])
        return loss

    def update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return the update of a parameter."""
        raise NotImplementedError


class TwoFactors(Preconditioned):
    """Shampoo: a factor for each axis; their inverse roots are computed in every second step."""

    def update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            for axis, size in enumerate(gradient.shape):
                state[f"factor_{axis}"] = group["eps"] * torch.eye(size, dtype=gradient.dtype)
                state[f"root_{axis}"] = torch.eye(size, dtype=gradient.dtype)
        found = gradient
        for axis in range(gradient.dim()):
            unfolded = gradient.transpose(0, axis).flatten(1) if gradient.dim() > 1 else gradient[:, None]
            state[f"factor_{axis}"] += unfolded @ unfolded.T
            if group["step"] % 2:
                values, vectors = torch.linalg.eigh(state[f"factor_{axis}"])
                power = -1 / (2 * gradient.dim())
                state[f"root_{axis}"] = (vectors * values.clamp(min=group["eps"]) ** power) @ vectors.T
            found = torch.tensordot(found, state[f"root_{axis}"], dims=([0], [0]))
        return found


class Rotated(Preconditioned):
    """SOAP: Adam in the eigenvectors of the two factors, which are lists; the first step only computes them."""

    def update(self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if gradient.dim() < 2:
            return gradient
        if not state:
            damped = [torch.linspace(1.0, 2.0, size, dtype=gradient.dtype).diag() for size in gradient.shape]
            state["factors"] = [gradient @ gradient.T + damped[0], gradient.T @ gradient + damped[1]]
            state["bases"] = [torch.linalg.eigh(each).eigenvectors for each in state["factors"]]
            state["moments"] = {"first": torch.zeros_like(gradient), "second": torch.zeros_like(gradient)}
            state["began"] = torch.tensor(float(group["step"]))
            return torch.zeros_like(gradient)
        left, right = state["bases"]
        turned = left.T @ gradient @ right
        first, second = state["moments"]["first"], state["moments"]["second"]
        first.lerp_(gradient, 0.1)
        second.lerp_(turned.square(), 0.05)
        found = left @ ((left.T @ first @ right) / (second.sqrt() + group["eps"])) @ right.T
        state["factors"][0].lerp_(gradient @ gradient.T, 0.1)
        state["factors"][1].lerp_(gradient.T @ gradient, 0.1)
        if group["step"] % 3 == 0:
            state["bases"] = [torch.linalg.qr(g @ q).Q for g, q in zip(state["factors"], (left, right), strict=True)]
        return found


PRECONDITIONED: dict[str, type[Preconditioned]] = {"shampoo": TwoFactors, "soap": Rotated}
