"""Tokenisation: delimiters once per document, and no special id out of a text."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, processors

from titan_lowprec.data.bundled import ASSETS, BUNDLED
from titan_lowprec.data.tokenize import load_tokenizer

BUNDLE = BUNDLED["bundled:tokenizer"]


def load(folder, add_bos=True, add_eos=True):
    return load_tokenizer(str(folder), add_bos=add_bos, add_eos=add_eos)


def encode(tokenizer, text):
    return tokenizer.encode([text])[0].tolist()


@pytest.fixture
def folder(tmp_path):
    """Return a copy of the bundled tokenizer that a test may change."""
    return shutil.copytree(BUNDLE, tmp_path / "tokenizer")


def change(file, edit):
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def test_bundled_tokenizer_has_2048_entries_and_any_text_survives():
    tokenizer = load("bundled:tokenizer")
    assert tokenizer.vocab_size == 2048
    assert (tokenizer.prefix, tokenizer.suffix, tokenizer.pad_id) == ((0,), (1,), 1)
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)]))
    for text in ("", " ", "\r\n\t", "naïve 中文 🙂\u200d", everything):
        ids = encode(tokenizer, text)
        assert (ids[0], ids[-1]) == (0, 1)
        assert tokenizer.engine.decode(ids[1:-1], skip_special_tokens=False) == text


def test_special_strings_in_a_text_are_text():
    tokenizer = load("bundled:tokenizer")
    text = "a<|end_of_text|>b <|begin_of_text|>"
    ids = encode(tokenizer, text)
    assert ids.count(0) == ids.count(1) == 1
    assert tokenizer.engine.decode(ids[1:-1], skip_special_tokens=False) == text


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_delimiters_follow_the_policy(add_bos, add_eos):
    ids = encode(load(BUNDLE, add_bos, add_eos), "hello")
    assert (0 in ids, 1 in ids) == (add_bos, add_eos)


def test_a_post_processor_does_not_add_delimiters_again(folder):
    engine = Tokenizer.from_file(str(folder / "tokenizer.json"))
    engine.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|end_of_text|>",
        special_tokens=[("<|begin_of_text|>", 0), ("<|end_of_text|>", 1)],
    )
    engine.enable_truncation(4)
    engine.enable_padding(length=64)
    engine.save(str(folder / "tokenizer.json"))
    text = "a text of more than four tokens, and fewer than sixty-four"
    assert engine.encode(text).ids[0] == 0
    assert encode(load(folder), text) == encode(load(BUNDLE), text)


def test_lone_surrogates_become_replacement_characters():
    tokenizer = load(BUNDLE)
    assert encode(tokenizer, "a\ud800b") == encode(tokenizer, "a\ufffdb")
    assert encode(tokenizer, "\ud83d\ude42") == encode(tokenizer, "🙂")


def test_the_tokenizer_file_itself_is_a_path():
    assert load(BUNDLE / "tokenizer.json").sha256 == load(BUNDLE).sha256


def test_missing_tokenizer_says_how_to_get_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"hf download .*tokenizer_config\.json"):
        load(tmp_path)


def test_damaged_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"must be a Hugging Face tokenizer\.json"):
        load(folder)


def test_a_delimiter_that_is_not_named_is_refused_only_when_asked_for(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"add_bos needs bos_token .* set add_bos=false"):
        load(folder)
    assert load(folder, add_bos=False, add_eos=False).pad_id == 0
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|end_of_text|>"})
    )
    assert load(folder).prefix == (0,)


def test_a_delimiter_that_the_tokenizer_lacks_is_refused(folder):
    change(folder / "tokenizer_config.json", lambda config: config.update(eos_token="<eos>"))
    with pytest.raises(ValueError, match=r"eos_token '<eos>' .* must be in tokenizer\.json"):
        load(folder)


def test_bundled_text_carries_its_licence_and_provenance():
    licence = (ASSETS / "LICENSE-PSF-2.0.txt").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    provenance = (ASSETS / "README.md").read_text()
    for name, documents in (("train", 283), ("validation", 31)):
        records = [json.loads(line) for line in (ASSETS / f"{name}.jsonl").open(encoding="utf-8")]
        characters = sum(len(record["text"]) for record in records)
        assert f"{documents} documents, {characters:,} characters" in provenance
        assert len({record["id"] for record in records}) == len(records) == documents


def test_torchtitan_loads_the_bundled_tokenizer():
    component = pytest.importorskip("torchtitan.components.tokenizer", reason="needs torchtitan")
    theirs = component.HuggingFaceTokenizer(str(BUNDLE))
    assert (theirs.bos_id, theirs.eos_id, theirs.get_vocab_size()) == (0, 1, 2048)
    text = "def f(x):\n    return x + 1\n"
    assert theirs.encode(text, add_bos=True, add_eos=True) == encode(load(BUNDLE), text)
