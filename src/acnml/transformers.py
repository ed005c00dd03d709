"""Hugging Face: loaders of datasets, texts in and labels out, and one folder for model and head.

Most models of `transformers` need nothing from here: `acnml.calibrate(model, train, validation)`
takes the logits from the model's output and leaves the labels out of its inputs. This module has
what belongs to that library's habits:

- `loader` makes batches of a tokenised dataset, as `Trainer` does.
- `pipeline` maps texts to labels with calibrated scores and regrets.
- `save_pretrained` and `from_pretrained` keep everything in the folder of the model.
- `LastToken` is for decoders, whose head scores every position of a text.
- `LabelTokens` is for language models that answer with one of a few tokens.

It needs `pip install 'acnml[transformers]'`.

The how-to is docs/howto/transformers.md.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from acnml._util import checks
from acnml._util.messages import needed_by
from acnml.calibration import Calibrated
from acnml.classifier import Classifier
from acnml.storage import StorageError, load, save

# The file in a model's folder, next to `model.safetensors` or `adapter_model.safetensors`.
FILE = "acnml.safetensors"

# What `Trainer` takes for labels, besides the arguments of the model.
LABEL_COLUMNS = {"label", "labels", "label_ids"}

# A label with its score and the regret of the text, as a pipeline of `transformers` returns it.
Answer: TypeAlias = dict[str, Any]


# Batches ----------------------------------------------------------------------------------------


def loader(dataset: Any, model: nn.Module, tokenizer: Any, batch_size: int = 64) -> DataLoader[Any]:
    """Return batches of a tokenised dataset, in its order, for `acnml.calibrate` or a fit.

    As in `Trainer`, columns that the model does not take are dropped, the labels are in "labels",
    and texts are padded to the longest of their batch. Labels of tokens are padded with -100.

    Args:
        dataset: a `datasets.Dataset` with the tokenizer's outputs as columns.
        model: decides which columns are inputs.
        tokenizer: pads the batches.
        batch_size: number of texts per batch.

    >>> batches = acnml.transformers.loader(data, model, tokenizer)  # doctest: +SKIP
    >>> sorted(next(iter(batches)))  # doctest: +SKIP
    ['attention_mask', 'input_ids', 'labels', 'token_type_ids']
    """
    with needed_by("acnml.transformers", "acnml[transformers]"):
        from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding

    if "input_ids" not in dataset.column_names:
        raise ValueError(
            f"the dataset has the columns {dataset.column_names} and no 'input_ids'; tokenise it "
            'first: dataset.map(lambda rows: tokenizer(rows["text"], truncation=True), '
            "batched=True)"
        )
    inner = _without_adapter(model.model if isinstance(model, _OneToken) else model)
    taken = {*inspect.signature(inner.forward).parameters, *LABEL_COLUMNS}
    unused = [name for name in dataset.column_names if name not in taken]
    label = next((name for name in dataset.column_names if name in LABEL_COLUMNS), None)
    by_token = label is not None and len(dataset) > 0 and isinstance(dataset[0][label], list)
    kind = DataCollatorForTokenClassification if by_token else DataCollatorWithPadding
    collate = kind(tokenizer)  # labels of padding become -100
    return DataLoader(dataset.remove_columns(unused), batch_size=batch_size, collate_fn=collate)


# Decoders ---------------------------------------------------------------------------------------


class _OneToken(nn.Module):
    """A decoder of which one position counts: that of the last token that is not padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self.model.config

    def _hidden(self, input_ids: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden state (B, d) of the last token."""
        inner = _without_adapter(self.model)
        hidden: Tensor = inner.base_model(input_ids, **inputs).last_hidden_state
        padding = inner.config.get_text_config().pad_token_id
        mask = inputs.get("attention_mask")
        if padding is None and mask is None and len(input_ids) > 1:
            raise ValueError("the model has no padding token: set model.config.pad_token_id")
        is_text = torch.ones_like(input_ids) if padding is None else input_ids != padding
        is_text = mask if mask is not None and padding is None else is_text
        last = (torch.arange(input_ids.shape[1], device=hidden.device) * is_text).argmax(-1)
        return hidden[torch.arange(len(last), device=last.device), last]


@final
class LastToken(_OneToken):
    """A decoder for sequence classification whose head sees only the last token of a text.

    Models such as `LlamaForSequenceClassification` apply their last layer to every position and
    then select the logits of the last token that is not padding. Their logits are therefore not
    the outputs of the layer, and `acnml.calibrate` refuses them. This module selects the hidden
    state first. The logits are the same, and the last layer runs on one position.

    Args:
        model: such a model, or a PEFT model around it.

    >>> import transformers
    >>> from acnml.transformers import LastToken
    >>> size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30, "pad_token_id": 0}
    >>> config = transformers.GPT2Config(**size, bos_token_id=1, eos_token_id=1, num_labels=3)
    >>> model = LastToken(transformers.GPT2ForSequenceClassification(config)).eval()
    >>> mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    >>> model(input_ids=torch.tensor([[5, 6, 7], [5, 6, 0]]), attention_mask=mask).shape
    torch.Size([2, 3])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        kind = type(_without_adapter(model)).__name__
        if not kind.endswith("ForSequenceClassification") or not self._has_score(model):
            raise TypeError(
                "LastToken takes a decoder for sequence classification with a Linear layer "
                f"`score`, not a {kind}: pass that to acnml.calibrate as it is"
            )

    @staticmethod
    def _has_score(model: nn.Module) -> bool:
        score = getattr(_without_adapter(model), "score", None)
        wrapped = getattr(score, "original_module", getattr(score, "base_layer", None))  # by PEFT
        return isinstance(score, nn.Linear) or isinstance(wrapped, nn.Linear)

    def forward(self, input_ids: Tensor, **inputs: Tensor) -> Tensor:
        """Return the logits (B, K) of the last token that is not padding."""
        logits: Tensor = _without_adapter(self.model).score(self._hidden(input_ids, inputs))
        return logits


@final
class LabelTokens(_OneToken):
    """A language model as a classifier: the logits of a few tokens after the prompt.

    Each class has one token, with which the model would answer, such as " yes" and " no". The other
    tokens have no say. Free text is not a class, and nothing here calibrates it.

    Args:
        model: a causal language model with a Linear layer `lm_head`.
        tokens: the id of a token for each class. Their rows of `lm_head` are copied.

    >>> import transformers
    >>> from acnml.transformers import LabelTokens
    >>> size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30}
    >>> config = transformers.GPT2Config(**size, bos_token_id=1, eos_token_id=1)
    >>> model = LabelTokens(transformers.GPT2LMHeadModel(config), tokens=[7, 8, 9]).eval()
    >>> mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    >>> model(input_ids=torch.tensor([[5, 6, 7], [5, 6, 0]]), attention_mask=mask).shape
    torch.Size([2, 3])
    """

    def __init__(self, model: nn.Module, tokens: Sequence[int]) -> None:
        super().__init__(model)
        head = getattr(_without_adapter(model), "lm_head", None)
        if not isinstance(head, nn.Linear):
            raise TypeError(
                "LabelTokens takes a causal language model with a Linear layer `lm_head`, not a "
                f"{type(_without_adapter(model)).__name__}"
            )
        if len({*tokens}) != len(tokens) or len(tokens) < 2:
            raise ValueError(f"classes need different tokens, at least two, got {list(tokens)}")
        rows = torch.as_tensor(tokens, device=head.weight.device)
        self.head = nn.Linear(head.in_features, len(tokens), head.bias is not None)
        self.head.weight = nn.Parameter(head.weight.detach()[rows].clone())
        if head.bias is not None:
            self.head.bias = nn.Parameter(head.bias.detach()[rows].clone())

    def forward(self, input_ids: Tensor, **inputs: Tensor) -> Tensor:
        """Return the logits (B, K) of the classes' tokens after the last token of each prompt."""
        logits: Tensor = self.head(self._hidden(input_ids, inputs))
        config = _without_adapter(self.model).config.get_text_config()
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _without_adapter(model: nn.Module) -> Any:
    """Return the model inside a PEFT model, with its adapters, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]


# Texts in, labels out ---------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class TextClassifier:
    """Maps texts to labels with calibrated scores and regrets; see `pipeline`.

    Args:
        calibrated: the calibrated model. The names of its labels are in `model.config.id2label`.
        tokenizer, batch_size, max_length: see `pipeline`.

    >>> ask = acnml.transformers.pipeline(calibrated, tokenizer)  # doctest: +SKIP
    >>> ask(["a good film", "bad"])  # doctest: +SKIP
    [{'label': 'positive', 'score': 0.93, 'regret': 0.05}, {'label': 'negative', ...}]
    """

    calibrated: Calibrated
    tokenizer: Any
    batch_size: int = 32
    max_length: int | None = None

    def __post_init__(self) -> None:
        checks.settle_integers(self, batch_size=1)
        kind = getattr(self._config, "problem_type", None)
        if kind not in (None, "single_label_classification"):
            raise ValueError(
                f"the model is for {kind!r}, but ACNML needs exactly one label for each text"
            )

    def __call__(
        self, texts: str | Mapping[str, str] | Iterable[Any], top_k: int | None = 1
    ) -> list[Any]:
        """Return labels, scores and regrets in the form of the pipelines of `transformers`.

        Args:
            texts: a text or several. A text is a string, or {"text": ..., "text_pair": ...} or a
                pair of strings where the model takes pairs.
            top_k: number of labels for each text, the likeliest first; None for all.

        Returns:
            For `top_k=1` a list of dicts {"label", "score", "regret"}, one for each text. Otherwise
            a list of such lists, or for a single text one such list. A text without an answer
            (after `calibrate(..., on_error="flag")`) has the label None, and NaN.
        """
        is_one = isinstance(texts, (str, Mapping))
        given = [_text(each) for each in ([texts] if is_one else texts)]
        found = list[list[Answer]]()
        for start in range(0, len(given), self.batch_size):
            found += self._batch(given[start : start + self.batch_size], top_k)
        if is_one:
            return found[0]
        return [answers[0] for answers in found] if top_k == 1 else found

    def _batch(self, texts: Sequence[Any], top_k: int | None) -> list[list[Answer]]:
        shape = {"padding": True, "truncation": True, "max_length": self.max_length}
        found = self.calibrated(self.tokenizer(list(texts), **shape, return_tensors="pt"))
        classes = found.probs.shape[-1]
        scores, order = found.probs.topk(min(top_k or classes, classes))
        order = order.where(~scores.isnan(), -1)
        answers = list[list[Answer]]()
        for own, labels, regret in zip(scores.tolist(), order, found.regret.tolist(), strict=True):
            names = map(self._label, labels.tolist())
            pairs = zip(names, own, strict=True)
            answers.append([{"label": n, "score": s, "regret": regret} for n, s in pairs])
        return answers

    @property
    def _config(self) -> Any:
        return getattr(self.calibrated.classifier.model, "config", None)

    def _label(self, index: int) -> str | None:
        if index < 0:
            return None
        names = getattr(self._config, "id2label", None) or {}
        return str(names.get(index, f"LABEL_{index}"))


def _text(given: Any) -> Any:
    """Return a text, or a pair of texts, in the form that tokenizers take."""
    if not isinstance(given, Mapping):
        return given
    pair = given.get("text_pair")
    return given["text"] if pair is None else (given["text"], pair)


def pipeline(
    calibrated: Calibrated | str | os.PathLike[str],
    tokenizer: Any = None,
    *,
    batch_size: int = 32,
    max_length: int | None = None,
) -> TextClassifier:
    """Return a function from texts to labels with calibrated scores and regrets.

    Args:
        calibrated: from `acnml.calibrate`, or a folder that `save_pretrained` has written.
        tokenizer: of the model; by default the one in the folder.
        batch_size: number of texts per forward pass.
        max_length: tokens after which a text is cut; by default the tokenizer's own limit.

    >>> ask = acnml.transformers.pipeline("my-model")  # doctest: +SKIP
    >>> ask("a good film", top_k=2)  # doctest: +SKIP
    [{'label': 'positive', 'score': 0.93, ...}, {'label': 'negative', 'score': 0.07, ...}]
    """
    if not isinstance(calibrated, Calibrated):
        with needed_by("acnml.transformers", "acnml[transformers]"):
            from transformers import AutoTokenizer

        folder = Path(calibrated)
        calibrated = from_pretrained(folder)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder)
    if tokenizer is None:
        raise ValueError("pass the tokenizer of the model: pipeline(calibrated, tokenizer)")
    return TextClassifier(calibrated, tokenizer, batch_size, max_length)


# One folder -------------------------------------------------------------------------------------


def save_pretrained(
    calibrated: Calibrated, folder: str | os.PathLike[str], tokenizer: Any = None
) -> None:
    """Store the model, its calibration and optionally its tokenizer in one folder.

    The calibration is in `acnml.safetensors`. The model's files are those of its own
    `save_pretrained`, so everything else that reads the folder works as before. For a PEFT model
    these are the adapter and its head; the base model stays where it is.

    >>> acnml.transformers.save_pretrained(calibrated, "my-model", tokenizer)  # doctest: +SKIP
    """
    network = calibrated.classifier.model
    model: Any = network.model if isinstance(network, LastToken) else network
    if not hasattr(model, "save_pretrained"):
        raise TypeError(
            f"{type(model).__name__} is not a model of transformers; use acnml.save(calibrated, "
            "path) and store the model yourself"
        )
    calibrated.require_current()  # before files are replaced
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    save(_with_unused_heads(calibrated), Path(folder) / FILE)


def from_pretrained(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    weights: Literal["exact", "rounded"] = "exact",
    **options: Any,
) -> Calibrated:
    """Load what `save_pretrained` stored.

    Args:
        folder: the folder.
        model: the model, if you have loaded it already or it is not a class of `transformers`.
        weights: "rounded" accepts a model in another precision, e.g. after `dtype=torch.bfloat16`;
            see `acnml.load`.
        options: for the `from_pretrained` of the model, for example `num_labels` for the base of a
            PEFT model.

    >>> calibrated = acnml.transformers.from_pretrained("my-model")  # doctest: +SKIP
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: write it with acnml.transformers.save_pretrained"
        )
    network = _load_model(Path(folder), options) if model is None else model
    try:
        loaded = load(path, Classifier(network), weights=weights)
    except StorageError:
        if isinstance(network, LastToken) or not LastToken._has_score(network):
            raise
        loaded = load(path, Classifier(LastToken(network)), weights=weights)  # as it was saved
    if not isinstance(loaded, Calibrated):
        raise StorageError(f"{path} holds a {type(loaded).__name__}: use acnml.load")
    return loaded


def _load_model(folder: Path, options: dict[str, Any]) -> nn.Module:
    """Load a model of the class that its configuration names."""
    with needed_by("acnml.transformers", "acnml[transformers]"):
        import transformers

    if (folder / "adapter_config.json").is_file():
        with needed_by("a folder with an adapter", "peft"):
            from peft import AutoPeftModelForSequenceClassification

        model: nn.Module = AutoPeftModelForSequenceClassification.from_pretrained(folder, **options)
        return model
    config = transformers.AutoConfig.from_pretrained(folder)
    name = (config.architectures or ["no class"])[0]
    if not hasattr(transformers, name):
        raise ValueError(
            f"{folder} holds a model of {name}, which is not in transformers: load it and pass it "
            "as `model`"
        )
    model = getattr(transformers, name).from_pretrained(folder, **options)
    return model


def _with_unused_heads(calibrated: Calibrated) -> Calibrated:
    """Store the heads that PEFT has replaced together with the calibration.

    PEFT trains a copy of the head and keeps the original, which it never runs. The base model
    usually has no head in its files, so the original is random and new every time it is loaded. As
    a part of the file it does not count as a changed weight.
    """
    tensors = calibrated.classifier.tensors
    unused = {name: tensor for name, tensor in tensors.items() if ".original_module." in name}
    return replace(calibrated, classifier=calibrated.classifier.at(unused))
