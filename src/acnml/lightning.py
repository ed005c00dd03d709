"""Callbacks for Lightning: collect SWAG's moments during training, calibrate at its end.

    trainer = Trainer(callbacks=[CollectSwag(start_epoch=10), Calibrate(price=0.01)])

A `LightningModule` whose `forward` returns logits can be calibrated as it is. `acnml.torchmetrics`
has the metrics. It needs `pip install 'acnml[lightning]'`; `pytorch_lightning` works as well.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

from torch import nn

from acnml._util import checks
from acnml._util.files import require_target
from acnml._util.messages import needed_by
from acnml._util.structure import Layers
from acnml.calibration import Calibrated, calibrate
from acnml.fit import Swag
from acnml.storage import save

with needed_by("acnml.lightning", "acnml[lightning]"):
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ModuleNotFoundError:
        from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[no-redef]


@final
class CollectSwag(Callback):
    """Collect the weights at the end of every epoch, for a SWAG posterior.

    The result is `callback.swag`: `callback.swag.low_rank()` is the posterior and
    `callback.swag.mean` the averaged weights. It is part of the trainer's checkpoints, so training
    can be resumed. Use a constant or cyclical learning rate while weights are collected.

    Args:
        start_epoch: the first epoch to collect, counted from 0 as `trainer.current_epoch`.
        rank: number of deviations to store.
        layers: layers, parameters or their names to cover; by default all.

    >>> from acnml.lightning import CollectSwag
    >>> callback = CollectSwag(start_epoch=10)  # Trainer(callbacks=[callback]), then callback.swag
    >>> callback.swag.updates
    0
    """

    def __init__(self, start_epoch: int = 0, rank: int = 20, layers: Layers = None) -> None:
        self.start_epoch = checks.require_integer(start_epoch, "start_epoch", least=0)
        self.swag = Swag(rank, layers)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the weights of this epoch."""
        if trainer.current_epoch >= self.start_epoch:
            self.swag.update(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments for a checkpoint."""
        return dict(self.swag.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the moments of a checkpoint."""
        self.swag.load_state_dict(state_dict)


@final
class Calibrate(Callback):
    """Calibrate the network with `acnml.calibrate` when training has ended.

    The result is `callback.calibrated`. It stands on the weights at the end of `fit`. To calibrate
    the best checkpoint, load it and call `acnml.calibrate` instead.

    Args:
        price: nats of validation NLL that the caution may cost.
        path: file to store the result in, see `acnml.save`.
        network: the part of the module that maps inputs to logits; by default the module itself,
            whose `forward` must then return logits.
        train_loader: all training data, not augmented; by default the trainer's loader.
        validation_loader: by default the trainer's.
        options: further arguments of `acnml.calibrate`.

    >>> from acnml.lightning import Calibrate
    >>> callback = Calibrate(price=0.02)  # Trainer(callbacks=[callback]), then callback.calibrated
    >>> callback.price
    0.02
    """

    def __init__(
        self,
        price: float = 0.01,
        path: str | os.PathLike[str] | None = None,
        *,
        network: Callable[[LightningModule], nn.Module] | None = None,
        train_loader: Iterable[Any] | None = None,
        validation_loader: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        checks.require_positive(price, "price")
        inspect.signature(calibrate).bind(None, None, None, **options)  # unknown ones, in time
        self.price, self.path, self.options = price, path, options
        self._network = network
        self._train_loader, self._validation_loader = train_loader, validation_loader
        self._calibrated: Calibrated | None = None

    @property
    def calibrated(self) -> Calibrated:
        """The calibrated network."""
        if self._calibrated is None:
            raise ValueError("there is no calibrated network yet: it is made at the end of fit")
        return self._calibrated

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse before training what is known to fail after it."""
        if trainer.world_size > 1:
            raise ValueError(
                f"Calibrate needs all data in one process, but there are {trainer.world_size}; "
                "call acnml.calibrate in one process after training"
            )
        if self.path is not None:
            require_target(Path(self.path))
        if not trainer.enable_validation and self._validation_loader is None:
            raise ValueError(
                "the trainer has no validation data to choose alpha on: give it a validation "
                "loader and a validation_step, or pass Calibrate(validation_loader=...)"
            )
        self._loaders(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Calibrate, on the CPU, to which Lightning has then moved the module."""
        model = pl_module if self._network is None else self._network(pl_module)
        train, validation = self._loaders(trainer)
        self._calibrated = calibrate(model, train, validation, price=self.price, **self.options)
        if self.path is not None:
            save(self._calibrated, self.path)

    def _loaders(self, trainer: Trainer) -> tuple[Any, Any]:
        """Return the loaders that were given, or those of the trainer if it has one of each."""
        train, validation = self._train_loader, self._validation_loader
        if train is None:
            train = _single(trainer.train_dataloader, "train_loader")
        if validation is None:
            validation = _single(trainer.val_dataloaders, "validation_loader")
        return train, validation


def _single(loaders: Any, argument: str) -> Any:
    found = list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
    if len(found) != 1 or isinstance(found[0], dict):
        raise ValueError(
            f"the trainer does not have exactly one loader for {argument}: pass "
            f"Calibrate({argument}=...)"
        )
    return found[0]
