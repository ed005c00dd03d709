"""Models of `transformers`: batches, decoders, pipelines and folders, on tiny random models."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import acnml
from acnml.features import Place
from acnml.problem import at_last_layer, only_linear

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

from acnml.transformers import (  # noqa: E402
    LabelTokens,
    LastToken,
    from_pretrained,
    loader,
    pipeline,
    save_pretrained,
)

WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *("good", "bad", "fine", "film", "a", "so", "very"),
]
SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": len(WORDS),
    "max_position_embeddings": 40,
    "num_labels": 3,
    "pad_token_id": 0,
}
DECODER = {name: SIZE[name] for name in list(SIZE)[:4]}
NAMES = {0: "bad", 1: "good", 2: "fine"}


def sharpened(model: nn.Module) -> nn.Module:
    """Scale the head, so that the random model prefers different classes for different texts."""
    with torch.no_grad():
        acnml.last_linear(model).weight.mul_(40)
    return model


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZE, id2label=NAMES, label2id={})
    return sharpened(transformers.BertForSequenceClassification(config))


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZE, bos_token_id=2, eos_token_id=3, id2label=NAMES, label2id={}
    )
    return sharpened(transformers.LlamaForSequenceClassification(config))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(WORDS),
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=40,
        num_labels=3,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    return sharpened(transformers.GPT2ForSequenceClassification(config))


def with_lora(model: nn.Module, *targets: str) -> nn.Module:
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=list(targets))
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():  # as after training: the adapter and the new head differ from the base
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return adapted


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def make_tokenizer():
    tokens = {word: index for index, word in enumerate(WORDS)}
    return transformers.BertTokenizer(vocab=tokens, model_max_length=32)


def texts(count: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (count,), generator=generator).tolist()
    draws = [torch.randint(5, len(WORDS), (n,), generator=generator).tolist() for n in lengths]
    return [" ".join(WORDS[index] for index in draw) for draw in draws]


def dataset(model: nn.Module, tokenizer, count: int, seed: int):
    """Texts with labels that the model finds likely."""
    rows = texts(count, seed)
    log_probs = acnml.Map(acnml.Classifier(model))(
        tokenizer(rows, padding=True, return_tensors="pt", return_token_type_ids=False)
    )
    generator = torch.Generator().manual_seed(seed)
    labels = (2 * log_probs).softmax(-1).multinomial(1, generator=generator).flatten().tolist()
    raw = datasets.Dataset.from_dict({"text": rows, "label": labels})
    return raw.map(lambda batch: tokenizer(batch["text"]), batched=True)


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def calibrated(tokenizer) -> acnml.Calibrated:
    return calibrated_of(bert().double(), tokenizer)


def calibrated_of(model: nn.Module, tokenizer) -> acnml.Calibrated:
    inner = model.model if isinstance(model, LastToken) else model
    parts = [loader(dataset(inner, tokenizer, 80, seed), inner, tokenizer) for seed in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few validation data
        return acnml.calibrate(model, *parts, price=0.05)


# Batches -----------------------------------------------------------------------------------------


def test_a_batch_of_the_collator_is_predicted_without_its_labels(tokenizer):
    model = bert().eval()
    seen = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(set(kwargs)), with_kwargs=True
    )
    batch = next(iter(loader(dataset(model, tokenizer, 20, 0), model, tokenizer)))
    assert isinstance(batch, transformers.BatchEncoding)
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    log_probs = acnml.Map(acnml.Classifier(model))(batch)
    assert all("labels" not in names for names in seen)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    torch.testing.assert_close(log_probs, torch.log_softmax(model(**inputs).logits, -1))


def test_a_text_is_as_typical_alone_as_in_a_padded_batch(calibrated, tokenizer):
    rows = texts(6, 5)
    together = calibrated(tokenizer(rows, padding=True, return_tensors="pt"))
    for row, text in enumerate(rows):
        alone = calibrated(tokenizer([text], return_tensors="pt"))
        torch.testing.assert_close(alone.regret[0], together.regret[row], rtol=0, atol=1e-5)


def test_only_tokenised_datasets_are_loaded(tokenizer):
    raw = datasets.Dataset.from_dict({"text": ["good"], "label": [1]})
    with pytest.raises(
        ValueError, match=r"\['text', 'label'\] and no 'input_ids'; tokenise it first"
    ):
        loader(raw, bert(), tokenizer)


# Last layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layer"), [("Bert", "classifier"), ("Roberta", "classifier.out_proj")]
)
def test_the_last_layer_of_encoders_is_found(kind, layer):
    config = getattr(transformers, f"{kind}Config")(**SIZE)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    assert model.get_submodule(layer) is acnml.last_linear(model)
    classifier = acnml.Classifier(model)
    site = only_linear(classifier, [f"{layer}.weight", f"{layer}.bias"])
    x = {"input_ids": torch.randint(5, len(WORDS), (3, 6))}
    found = at_last_layer(classifier, site, x)
    assert found is not None
    torch.testing.assert_close(found.logits, model(**x).logits)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_decoder_is_refused_until_its_last_token_is_selected_first(build, tokenizer):
    model = build().eval()
    data = loader(dataset(model, tokenizer, 60, 0), model, tokenizer)
    with pytest.raises(ValueError, match="no features were found"):
        acnml.calibrate(model, data, list(data))
    for side in ("left", "right"):
        tokenizer.padding_side = side
        x = tokenizer(texts(10, 3), padding=True, return_tensors="pt", return_token_type_ids=False)
        expected = model(**x).logits
        torch.testing.assert_close(LastToken(model)(**x), expected, rtol=1e-6, atol=1e-6)
    found = calibrated_of(LastToken(model), tokenizer)
    assert found.places[-1] == Place("model.score", is_input=True)


def test_batches_for_a_last_token_have_all_inputs_of_the_model(tokenizer, monkeypatch):
    """Texts padded before: without its mask, a decoder would read the padding."""
    monkeypatch.setattr(tokenizer, "padding_side", "left")
    model = gpt2().eval()
    data = dataset(model, tokenizer, 12, 0)
    padded = data.map(
        lambda rows: tokenizer(rows["text"], padding="max_length", max_length=20), batched=True
    )
    (own,), (wrapped,) = (
        list(loader(padded, each, tokenizer)) for each in (model, LastToken(model))
    )
    assert own.keys() == wrapped.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in wrapped.items())


@pytest.mark.parametrize("model", [bert(), nn.Linear(4, 3)])
def test_the_last_token_of_another_model_is_refused(model):
    with pytest.raises(TypeError, match=f"not a {type(model).__name__}: pass that"):
        LastToken(model)


# Pipelines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_label_tokens_are_logits_of_the_language_model(kind, side, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "padding_side", side)
    torch.manual_seed(0)
    name = "GPT2LMHeadModel" if kind == "GPT2" else "LlamaForCausalLM"
    language_model = getattr(transformers, name)
    config = getattr(transformers, f"{kind}Config")(
        **{"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
        **({"n_embd": 16, "n_layer": 1, "n_head": 2} if kind == "GPT2" else DECODER),
    )
    model = language_model(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(10 if kind == "Llama" else 3)
    classes = [WORDS.index(word) for word in ("bad", "good", "fine")]
    asked = LabelTokens(model, classes)
    x = tokenizer(texts(10, 3), padding=True, return_tensors="pt", return_token_type_ids=False)
    every = model(**x).logits
    length = x["attention_mask"].sum(1)
    last = length - 1 if side == "right" else torch.full((10,), every.shape[1] - 1)
    expected = every[torch.arange(10), last][:, classes]
    torch.testing.assert_close(asked(**x), expected, rtol=1e-5, atol=1e-5)
    found = calibrated_of(asked, tokenizer)
    assert found.places == (Place("head", is_input=True),)
    assert torch.equal(found.predict(x), expected.argmax(-1))


@pytest.mark.parametrize("tokens", [[7, 7], [7]])
def test_classes_have_different_tokens(tokens):
    config = transformers.GPT2Config(vocab_size=12, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="classes need different tokens"):
        LabelTokens(transformers.GPT2LMHeadModel(config), tokens)
    with pytest.raises(TypeError, match="takes a causal language model with a Linear layer"):
        LabelTokens(bert(), [1, 2])


def test_every_token_has_a_class(tokenizer):
    """Token classification: words of a kind; special tokens and padding have the label -100."""
    torch.manual_seed(0)
    model = transformers.BertForTokenClassification(transformers.BertConfig(**SIZE)).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(30)
        some = tokenizer(texts(60, 0), padding=True, return_tensors="pt")
        model.classifier.bias.sub_(model(**some).logits.mean((0, 1)))  # words of every class

    def tagged(count, seed):
        rows = tokenizer(texts(count, seed), return_token_type_ids=False)
        labels = []
        for ids in rows["input_ids"]:  # what the model finds likely, but for every fourth word
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            own = (logits.argmax(-1) + (torch.arange(len(ids)) % 4 == 3)) % 3
            labels.append([-100, *own[1:-1].tolist(), -100])
        return datasets.Dataset.from_dict({**rows, "labels": labels})

    batches = [loader(tagged(*part), model, tokenizer, 16) for part in ((60, 0), (80, 1))]
    assert next(iter(batches[0]))["labels"].shape == next(iter(batches[0]))["input_ids"].shape
    found = acnml.calibrate(model, *batches, price=0.05)
    assert [str(place) for place in found.places] == ["input of 'classifier'"]
    rows = tokenizer(["good film", "so so so bad film"], padding=True, return_tensors="pt")
    answer = found(dict(rows))
    is_text = rows["attention_mask"].bool()
    assert answer.probs.shape == (2, 7, 3)
    assert (answer.label[~is_text] == -1).all()
    alone = found(dict(tokenizer(["good film"], return_tensors="pt")))
    torch.testing.assert_close(answer.probs[:1, :4], alone.probs, rtol=1e-4, atol=1e-5)


def test_a_pipeline_answers_like_those_of_transformers(calibrated, tokenizer):
    model = calibrated.classifier.model
    ask, asked = pipeline(calibrated, tokenizer, batch_size=3), texts(7, 5)
    theirs = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    for given in (asked, asked[0]):
        for how_many in ({}, {"top_k": 2}, {"top_k": None}):
            ours, same = ask(given, **how_many), theirs(given, **how_many)
            shape = [type(each) for each in ours], len(ours)
            assert shape == ([type(each) for each in same], len(same))
    for text, answer in zip(asked, ask(asked), strict=True):
        solved = calibrated(tokenizer([text], return_tensors="pt"))
        assert answer["label"] == NAMES[int(solved.log_probs.argmax())]
        assert answer["score"] == pytest.approx(float(solved.log_probs.exp().max()), abs=1e-5)
        assert answer["regret"] == pytest.approx(float(solved.regret), abs=1e-5)
    assert sum(each["score"] for each in ask(asked[0], top_k=None)) == pytest.approx(1, abs=1e-5)


def test_a_text_without_an_answer_has_no_label(calibrated, tokenizer):
    fitted = calibrated.calibrator
    nowhere = replace(fitted.atypicality, mean=math.nan * fitted.atypicality.mean)
    flagging = replace(calibrated, calibrator=replace(fitted, on_error="flag"))
    broken = replace(fitted, on_error="flag", atypicality=nowhere)
    ask = pipeline(replace(calibrated, calibrator=broken), tokenizer)
    for answers in (ask("good"), ask("good", top_k=2)):
        assert all(each["label"] is None and math.isnan(each["score"]) for each in answers)
    assert pipeline(flagging, tokenizer)("good")[0]["label"] in NAMES.values()


def test_pairs_of_texts_and_long_texts(calibrated, tokenizer):
    (pair,) = pipeline(calibrated, tokenizer)([("a good film", "so bad")])
    encoded = tokenizer("a good film", "so bad", return_tensors="pt")
    assert encoded["token_type_ids"].sum() > 0
    assert pair["regret"] == pytest.approx(float(calibrated.regret(encoded)), abs=1e-5)
    (cut,) = pipeline(calibrated, tokenizer, max_length=4)(["good film " * 50])
    kept = tokenizer("good film", return_tensors="pt")
    assert cut["regret"] == pytest.approx(float(calibrated.regret(kept)), abs=1e-5)


def test_texts_in_dicts(calibrated, tokenizer):
    ask = pipeline(calibrated, tokenizer)
    pair = {"text": "a good film", "text_pair": "so bad"}
    assert ask({"text": "good"}) == ask("good")
    assert ask({"text": "good", "text_pair": None}, top_k=2) == ask("good", top_k=2)
    assert ask(pair) == ask([pair]) == ask([("a good film", "so bad")])
    assert ask([{"text": each} for each in texts(4, 1)]) == ask(texts(4, 1))


def test_what_no_pipeline_can_be_made_of(tokenizer):
    model = bert()
    calibrated = calibrated_of(model, tokenizer)
    with pytest.raises(ValueError, match="batch_size must be"):
        pipeline(calibrated, tokenizer, batch_size=-1)
    with pytest.raises(ValueError, match="pass the tokenizer"):
        pipeline(calibrated)
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match="ACNML needs exactly one label"):
        pipeline(calibrated, tokenizer)


# One folder --------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [bert, lambda: LastToken(llama())])
def test_model_and_calibration_share_a_folder(build, tokenizer, tmp_path):
    calibrated = calibrated_of(build(), tokenizer)
    save_pretrained(calibrated, tmp_path, tokenizer)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors", "acnml.safetensors", "config.json"} <= names
    before = calibrated(tokenizer(texts(5, 7), padding=True, return_tensors="pt"))
    kind = type(calibrated.classifier.model).__name__
    restored = from_pretrained(tmp_path)
    assert type(restored.classifier.model).__name__ == kind
    after = restored(tokenizer(texts(5, 7), padding=True, return_tensors="pt"))
    assert torch.equal(before.log_probs, after.log_probs)
    labels = [answer["label"] for answer in pipeline(tmp_path)(texts(5, 7))]
    assert labels == [NAMES[i] for i in before.label.tolist()]


def test_a_model_in_another_precision_is_loaded_on_request(tokenizer, tmp_path):
    save_pretrained(calibrated_of(bert(), tokenizer), tmp_path, tokenizer)
    with pytest.raises(acnml.storage.StorageError, match="weights='rounded'"):
        from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    loaded = from_pretrained(tmp_path, torch_dtype=torch.bfloat16, weights="rounded")
    rounded = bert()
    rounded.load_state_dict(from_pretrained(tmp_path).classifier.model.state_dict())
    expected = acnml.load(
        tmp_path / "acnml.safetensors", rounded.to(torch.bfloat16), weights="rounded"
    )
    batch = tokenizer(texts(5, 7), padding=True, return_tensors="pt")
    assert torch.equal(loaded.log_probs(batch), expected.log_probs(batch))


def test_a_model_that_was_trained_since_leaves_the_folder_alone(tokenizer, tmp_path):
    model = bert()
    calibrated = calibrated_of(model, tokenizer)
    save_pretrained(calibrated, tmp_path, tokenizer)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with torch.no_grad():
        model.classifier.bias.add_(0.1)
    with pytest.raises(ValueError, match="trained since"):
        save_pretrained(calibrated, tmp_path, tokenizer)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_what_cannot_be_saved_or_loaded(calibrated, tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"acnml\.safetensors is missing: write it with"):
        from_pretrained(tmp_path)
    save_pretrained(calibrated, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MyModel"]}))
    with pytest.raises(ValueError, match="a model of MyModel, which is not in transformers: load"):
        from_pretrained(tmp_path)
    assert from_pretrained(tmp_path, calibrated.classifier.model).alpha == calibrated.alpha
    plain = replace(calibrated, classifier=acnml.Classifier(nn.Linear(4, 3)))
    with pytest.raises(TypeError, match="is not a model of transformers; use"):
        save_pretrained(plain, tmp_path)


# PEFT --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "targets", "wrap"),
    [(bert, ("query", "value"), lambda model: model), (llama, ("q_proj", "v_proj"), LastToken)],
)
def test_an_adapter_with_its_head_shares_a_folder(build, targets, wrap, tokenizer, tmp_path):
    base = build()
    base.save_pretrained(tmp_path / "base")
    adapted = with_lora(type(base).from_pretrained(tmp_path / "base"), *targets)
    calibrated = calibrated_of(wrap(adapted), tokenizer)
    save_pretrained(calibrated, tmp_path / "adapter", tokenizer)
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "acnml.safetensors"} <= names
    x = tokenizer(texts(5, 7), padding=True, return_tensors="pt")
    expected = calibrated.log_probs(x)
    # The head of the base model is random each time that it is loaded, as for most base models.
    _remove_head(tmp_path / "base")
    restored = from_pretrained(tmp_path / "adapter", num_labels=3)
    torch.testing.assert_close(restored.log_probs(x), expected, rtol=0, atol=1e-6)
    (answer,) = pipeline(restored, tokenizer)(["a good film"])
    assert answer["label"] in NAMES.values()


def _remove_head(folder) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    kept = {n: t for n, t in load_file(path).items() if not n.startswith(("classifier", "score"))}
    save_file(kept, path, metadata={"format": "pt"})
