"""Callbacks of Lightning, with the real trainer on small data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import acnml
from cases import normal
from fits import loaders

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

from acnml.lightning import Calibrate, CollectSwag  # noqa: E402
from acnml.torchmetrics import Ece, Nll  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, no logger


class Network(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch):
        x, labels = batch
        return nn.functional.cross_entropy(self(x), labels)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Measured(Network):
    """With metrics inside, as Lightning recommends."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.scores = torchmetrics.MetricCollection({"nll": Nll(), "ece": Ece()})

    def validation_step(self, batch):
        x, labels = batch
        log_probs = torch.log_softmax(self(x), -1)
        self.scores.update(log_probs, labels)
        self.accuracy.update(log_probs, labels)

    def on_validation_epoch_end(self):
        self.log_dict(self.scores.compute())
        self.scores.reset()


def trainer(*callbacks, folder=None, epochs: int = 4, package=lightning):
    return package.Trainer(
        max_epochs=epochs,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_swag_is_what_the_loop_would_have_collected(package, tmp_path):
    module = pytest.importorskip(package)
    ours, by_hand = CollectSwag(start_epoch=2, rank=3), acnml.Swag(rank=3)

    class ByHand(module.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch in (2, 3, 4):
                by_hand.update(pl_module)

    network = Network() if package == "lightning.pytorch" else _in(module)
    running = trainer(ours, ByHand(), folder=tmp_path, epochs=5, package=module)
    running.fit(network, *loaders())
    assert ours.swag.updates == 3
    expected, got = by_hand.state_dict(), ours.swag.state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    posterior = ours.swag.low_rank()
    predict = acnml.Acnml(acnml.Classifier(network), posterior, alpha=0.1)
    assert predict(normal(5, 4).float()).shape == (5, 3)


def _in(module) -> nn.Module:
    """Return the network as a module of the other package."""
    members = {n: f for n, f in vars(Network).items() if callable(f) and n != "__init__"}
    kind = type("Network", (module.LightningModule,), members)
    network = kind()
    network.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return network


def test_swag_resumes_from_a_checkpoint(tmp_path):
    whole, first, second = (CollectSwag(start_epoch=1, rank=3) for _ in range(3))
    start = Network().state_dict()

    def fit(callback, epochs, **options):
        network = Network()
        network.load_state_dict(start)
        running = trainer(callback, folder=tmp_path, epochs=epochs)
        running.fit(network, *loaders(), **options)
        return running

    fit(whole, 4)
    fit(first, 2).save_checkpoint(tmp_path / "half.ckpt")
    assert first.swag.updates == 1
    fit(second, 4, ckpt_path=tmp_path / "half.ckpt")
    expected, got = whole.swag.state_dict(), second.swag.state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", [Network, Measured])
def test_the_network_is_calibrated_at_the_end(kind, tmp_path):
    network, (train, validation) = kind(), loaders()
    callback = Calibrate(price=0.02, path=tmp_path / "calibrated.safetensors", progress=False)
    with pytest.raises(ValueError, match="there is no calibrated network yet"):
        _ = callback.calibrated
    trainer(callback, folder=tmp_path).fit(network, train, validation)
    expected = acnml.calibrate(network, train, validation, price=0.02, progress=False)
    assert callback.calibrated.alpha == pytest.approx(expected.alpha, rel=1e-4)
    x = normal(5, 4).float()
    again = acnml.load(tmp_path / "calibrated.safetensors", acnml.Classifier(network))
    assert torch.equal(again.log_probs(x), callback.calibrated.log_probs(x))


def test_loaders_and_the_network_can_be_given(tmp_path):
    network, (train, validation) = Network(), loaders()
    callback = Calibrate(
        network=lambda module: module.layers,
        train_loader=list(train),
        validation_loader=list(validation),
        progress=False,
    )
    trainer(callback, folder=tmp_path).fit(network, train, [validation, validation])
    assert callback.calibrated.classifier.model is network.layers


class Counted(Network):
    """Counts the batches that it was trained on."""

    batches = 0

    def training_step(self, batch, index):
        self.batches += 1
        return super().training_step(batch, index)


@pytest.mark.parametrize(
    ("path", "loaders_given", "message"),
    [
        (None, 0, r"no validation data .* pass Calibrate\(validation_loader=\.\.\.\)"),
        (None, 2, r"exactly one loader for validation_loader"),
        ("nowhere/calibrated.safetensors", 1, "nowhere/calibrated.safetensors"),
    ],
)
def test_what_would_fail_after_training_is_refused_before_it(
    path, loaders_given, message, tmp_path
):
    network, (train, validation) = Counted(), loaders()
    callback = Calibrate(**({} if path is None else {"path": tmp_path / path}))
    run = trainer(callback, folder=tmp_path, epochs=1)
    with pytest.raises((ValueError, OSError), match=message):
        run.fit(network, train, [validation] * loaders_given or None)
    assert network.batches == 0


def test_mistakes():
    with pytest.raises(ValueError, match="start_epoch must be at least 0"):
        CollectSwag(start_epoch=-1)
    with pytest.raises(ValueError, match="price must be a positive"):
        Calibrate(price=0)
    with pytest.raises(ValueError, match="all data in one process, but there are 2"):
        Calibrate().on_train_start(SimpleNamespace(world_size=2), Network())
    with pytest.raises(TypeError, match="unexpected keyword argument 'prize'"):
        Calibrate(temperature=1.0, prize=0.02)
