"""Corpora whose every token is a different id, so that a lost or repeated one shows."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from titan_lowprec.data.dataset import build_packed_dataset
from titan_lowprec.data.spec import DataSpec

WORDS = 2000
BOS, EOS = WORDS + 1, WORDS + 2


def write_tokenizer(folder, *, bos="<s>", eos="</s>"):
    """Write a tokenizer in which the word ``7`` has id 7."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {str(word): word for word in range(WORDS)} | {"?": WORDS}
    engine = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    engine.save(str(folder / "tokenizer.json"))
    assert engine.token_to_id("<s>") == BOS and engine.token_to_id("</s>") == EOS
    config = {"bos_token": bos, "eos_token": {"content": eos}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def document_texts(lengths):
    """Return texts of the given numbers of words, no word twice."""
    word = 0
    texts = []
    for length in lengths:
        texts.append(" ".join(str(word + offset) for offset in range(length)))
        word += length
    assert word <= WORDS
    return texts


@pytest.fixture
def make_spec(tmp_path):
    """Return a factory of specs over a jsonl file of documents with the given word counts."""

    def make(lengths=(3, 5), *, texts=None, **overrides):
        file = tmp_path / "documents.jsonl"
        texts = document_texts(lengths) if texts is None else texts
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        options = {
            "source": "local",
            "paths": (str(file),),
            "tokenizer_path": write_tokenizer(tmp_path / "tokenizer"),
            "seq_len": 8,
            "max_documents": 8,
            "packer": "concat",
            "long_document": "split",
            "seed": 1,
            "repeat": True,
            "cache_dir": str(tmp_path / "cache"),
            "add_bos": False,
            "add_eos": False,
            "min_document_tokens": 1,
        }
        return DataSpec(**(options | overrides))

    return make


@pytest.fixture
def make_dataset(make_spec):
    """Return a factory of data sets; the arguments are those of ``make_spec``."""

    def make(*args, **overrides):
        return build_packed_dataset(make_spec(*args, **overrides))

    return make


@pytest.fixture
def tokenizer_factory():
    """Return the writer of word tokenizers."""
    return write_tokenizer


@pytest.fixture
def texts_factory():
    """Return the writer of documents without a repeated word."""
    return document_texts
