"""KFAC-Laplace as in the code of Maddox et al. (2019), which the paper's experiments adapted.

It differs from the Laplace approximation of `acnml.fit_laplace`, which the study also has:

- The factors come from *one* training minibatch, with the network in train mode: images are
  augmented, dropout is on, and batch norm normalises by the batch.
- The gradients are those of the true labels' loss (the empirical Fisher). A is the mean of aaᵀ over
  examples and positions, and so is G of δδᵀ, with the gradients δ of single examples.
- There is no prior. Each factor is damped by √(ε / positions), ε = 5e-4.
- Samples of A⁻¹ ⊗ G⁻¹ are multiplied by scale / N, so that the covariance is divided by N² where a
  Laplace approximation would divide it by N.
- Batch norm has no posterior.

Their code multiplies noise by the inverse of A's Cholesky factor without transposing it. Samples
then have the eigenvalues of A⁻¹, but other eigenvectors; here they have A⁻¹ itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

import acnml
from acnml import Classifier, Kronecker
from acnml._util.torch_state import seeded
from acnml.posteriors import Affine, EigenBlock
from studies.engine.grounds import Ground, Pair
from studies.engine.method import Method
from studies.engine.workshop import Workshop
from studies.store import Artefact, Content, Stage, Work

DAMPING, BATCH = 5e-4, 128


@final
@dataclass(frozen=True)
class MaddoxKfac(Ground):
    """The posterior around a network; the knob scales its covariance."""

    def artefacts(self, method: Method, workshop: Workshop) -> tuple[Artefact, ...]:
        """Return the weights, and the posterior."""
        weights, data = workshop.weights(self.network), workshop.train_data(self.network)
        stage = Stage("fit one batch KFAC", None, workshop.seed, needs=(weights.stage,))

        def make(_: Work) -> Content:
            generator = torch.Generator().manual_seed(workshop.seed)
            rows = torch.randperm(len(data.labels), generator=generator)[:BATCH]
            model = workshop.study.networks[self.network].model
            images = model.augmented(data.inputs[rows].to(workshop.study.device), generator)
            labels = data.labels[rows].to(workshop.study.device)
            classifier = workshop.classifier(self.network, weights)
            with seeded(workshop.seed):  # of dropout
                found = kfac_of_one_batch(classifier, images, labels, len(data.labels))
            return Content.of_saved(found)

        return weights, workshop.make(stage, make)

    def pairs(self, method: Method, workshop: Workshop) -> tuple[Pair, ...]:
        """Return the posterior with its covariance scaled by the knob."""
        weights, fitted = self.artefacts(method, workshop)
        assert method.value is not None  # it is set
        posterior = fitted.load_saved().scaled(method.value)
        return (Pair(workshop.classifier(self.network, weights), posterior),)


def kfac_of_one_batch(
    classifier: Classifier, inputs: Tensor, labels: Tensor, data: int
) -> acnml.Kronecker:
    """Return the posterior from one batch of N = `data` training examples."""
    model = copy.deepcopy(classifier.model).train()
    received: dict[str, Tensor] = {}
    pulled: dict[str, Tensor] = {}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def record(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            received[name] = given[0].detach()
            output.register_hook(lambda gradient: pulled.update({name: gradient}))

        return record

    for name, layer in layers.items():
        layer.register_forward_hook(hook(name))
    with torch.inference_mode(False), torch.enable_grad():
        functional.cross_entropy(model(inputs.clone()), labels).backward()
    blocks = tuple(
        _block(name, layer, received[name], len(labels) * pulled[name], data)
        for name, layer in layers.items()
    )
    names = [name for block in blocks for name in block.layer.names]
    return Kronecker(classifier.copy_parameters(names), blocks)


def _block(
    name: str, layer: nn.Linear | nn.Conv2d, inputs: Tensor, gradients: Tensor, data: int
) -> EigenBlock:
    """Return Σ = (A + dI)⁻¹ ⊗ (G + dI)⁻¹ / N² of a layer."""
    positions = 1
    if isinstance(layer, nn.Conv2d):
        if layer.groups != 1:
            raise ValueError(f"{name!r} is a grouped convolution, for which there is no such KFAC")
        assert not isinstance(layer.padding, str)  # the networks of the studies give numbers
        inputs = functional.unfold(
            inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride
        ).mT.flatten(0, 1)
        positions = gradients.shape[2] * gradients.shape[3]
        gradients = gradients.permute(0, 2, 3, 1).flatten(0, 2)
    if layer.bias is not None:
        inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
    damping = math.sqrt(DAMPING / positions)
    (a, U_A), (g, U_G) = (torch.linalg.eigh(r.mT @ r / len(r)) for r in (inputs, gradients))
    bias = None if layer.bias is None else f"{name}.bias"
    affine = Affine(f"{name}.weight", bias)
    var = 1 / ((g + damping).unsqueeze(1) * (a + damping))
    return EigenBlock(affine, U_A, U_G, var / data**2)
