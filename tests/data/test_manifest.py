"""The token cache: built once, complete or absent, found again."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from titan_lowprec.data.manifest import open_cache
from titan_lowprec.data.shards import LocalFiles
from titan_lowprec.data.tokenize import load_tokenizer


class CountingFiles(LocalFiles):
    """Local files that count how often they are read from the start."""

    reads = 0

    def documents(self, start):
        self.reads += 1
        return super().documents(start)


@pytest.fixture
def open_counted(make_spec, tmp_path):
    """Return a function that opens the cache of a fixed source and says how often it was read."""
    spec = make_spec((3, 5, 0, 7))
    source = CountingFiles(spec.paths, text_column="text")

    def open_it(add_eos=True, cache_dir=spec.cache_dir):
        tokenizer = load_tokenizer(spec.tokenizer_path, add_bos=False, add_eos=add_eos)
        store = open_cache(source, tokenizer, cache_dir=cache_dir, progress=False)
        return store, source.reads

    return open_it


def test_a_cache_is_built_once_and_holds_every_document(open_counted, tmp_path):
    store, reads = open_counted()
    assert reads == 1
    assert store.lengths_M.tolist() == [4, 6, 1, 8]
    assert store.tokens_N.tolist() == [0, 1, 2, 2002, *range(3, 8), 2002, 2002, *range(8, 15), 2002]
    assert store.tokens_N.dtype == np.int32
    again, reads = open_counted()
    assert reads == 1
    assert again.sha256 == store.sha256


def test_the_manifest_says_what_made_the_ids(open_counted, tmp_path):
    store, _ = open_counted()
    (file,) = (tmp_path / "cache").glob("*/manifest.json")
    manifest = json.loads(file.read_text())
    assert manifest["identity"]["engine"] == "tokenizers"
    assert len(manifest["identity"]["tokenizer_sha256"]) == 64
    assert manifest["identity"]["engine_version"]
    assert (manifest["identity"]["prefix"], manifest["identity"]["suffix"]) == ([], [2002])
    assert (manifest["documents"], manifest["tokens"], manifest["dtype"]) == (4, 19, "int32")
    assert manifest["sha256"] == store.sha256


def test_another_delimiter_policy_is_another_cache(open_counted):
    first, _ = open_counted()
    second, reads = open_counted(add_eos=False)
    assert reads == 2
    assert first.sha256 != second.sha256
    assert open_counted()[1] == 2


def test_a_changed_file_is_tokenised_again(make_dataset):
    first = make_dataset((3, 5))
    second = make_dataset((3, 6))
    assert first.plan != second.plan
    assert second.statistics.tokens == 9


@pytest.mark.parametrize("damage", ["tokens.bin", "offsets.bin", "manifest.json"])
def test_an_incomplete_cache_is_built_again(open_counted, tmp_path, damage):
    store, _ = open_counted()
    expected = store.tokens_N.tolist()
    (file,) = (tmp_path / "cache").glob(f"*/{damage}")
    os.truncate(file, file.stat().st_size // 2)
    store, reads = open_counted()
    assert reads == 2
    assert store.tokens_N.tolist() == expected


def test_a_failed_build_leaves_nothing_behind(make_spec, tmp_path):
    spec = make_spec((3, 5))
    with open(spec.paths[0], "a") as stream:
        stream.write("broken\n")
    tokenizer = load_tokenizer(spec.tokenizer_path, add_bos=False, add_eos=False)
    source = LocalFiles(spec.paths, text_column="text")
    with pytest.raises(ValueError, match="line 3"):
        open_cache(source, tokenizer, cache_dir=spec.cache_dir, progress=False)
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_a_killed_build_left_is_removed(open_counted, tmp_path):
    store, _ = open_counted()
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    left_over = folder.rename(folder.with_name(folder.name + ".part123"))
    store, reads = open_counted()
    assert reads == 2
    assert not left_over.exists()
    assert store.lengths_M.tolist() == [4, 6, 1, 8]


def test_a_cache_without_any_token_is_legal(make_spec):
    spec = make_spec(texts=["", ""])
    tokenizer = load_tokenizer(spec.tokenizer_path, add_bos=False, add_eos=False)
    source = LocalFiles(spec.paths, text_column="text")
    store = open_cache(source, tokenizer, cache_dir=spec.cache_dir, progress=False)
    assert store.lengths_M.tolist() == [0, 0]


def test_a_folder_that_cannot_be_written_is_named(open_counted, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache_dir must be a folder we can write to, got .*file"):
        open_counted(cache_dir=str(tmp_path / "file"))


@pytest.mark.slow
def test_of_three_processes_one_builds_and_all_read(make_spec, tmp_path):
    spec = make_spec((3, 5, 7) * 60)
    program = textwrap.dedent(
        """
        import logging, sys
        from titan_lowprec.data.manifest import open_cache
        from titan_lowprec.data.shards import LocalFiles
        from titan_lowprec.data.tokenize import load_tokenizer
        logging.basicConfig(level=logging.INFO, stream=sys.stdout)
        file, tokenizer_path, cache_dir = sys.argv[1:]
        tokenizer = load_tokenizer(tokenizer_path, add_bos=False, add_eos=False)
        source = LocalFiles([file], text_column="text")
        store = open_cache(source, tokenizer, cache_dir=cache_dir, progress=False)
        print("contents", store.sha256)
        """
    )
    arguments = [spec.paths[0], spec.tokenizer_path, spec.cache_dir]
    command = [sys.executable, "-c", program, *arguments]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    lines = [line for output in outputs for line in output.splitlines()]
    assert len({line for line in lines if line.startswith("contents")}) == 1
    assert sum("tokenising" in line for line in lines) == 1
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 1
