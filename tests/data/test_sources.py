"""Where documents come from: files of each kind, from any document on, or a clear error."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titan_lowprec.data.dataset import build_packed_dataset, check_data
from titan_lowprec.data.shards import LocalFiles, find_files

TEXTS = [f"document {number}" for number in range(10)]


def write_jsonl(file, texts, column="text"):
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "wt", encoding="utf-8") as stream:
        for text in texts:
            stream.write(json.dumps({"id": 1, column: text}) + "\n\n")
    return file


def write_parquet(file, texts, column="text", row_group_size=3):
    table = pa.table({"id": list(range(len(texts))), column: texts})
    pq.write_table(table, file, row_group_size=row_group_size)
    return file


def read(paths, start=0, text_column="text"):
    return list(LocalFiles([str(path) for path in paths], text_column=text_column).documents(start))


@pytest.mark.parametrize(
    "write, name",
    [
        (write_jsonl, "a.jsonl"),
        (write_jsonl, "a.json"),
        (write_jsonl, "a.jsonl.gz"),
        (write_parquet, "a.parquet"),
    ],
)
def test_documents_of_one_file_from_any_start(tmp_path, write, name):
    file = write(tmp_path / name, TEXTS)
    for start in range(11):
        assert read([file], start) == TEXTS[start:]


def test_documents_of_mixed_files_from_any_start(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS[:4])
    (tmp_path / "b.txt").write_text(TEXTS[4])
    with gzip.open(tmp_path / "c.txt.gz", "wt") as stream:
        stream.write(TEXTS[5])
    write_jsonl(tmp_path / "d.jsonl", TEXTS[6:])
    for start in range(12):
        assert read([tmp_path], start) == TEXTS[start:]


def test_text_column_is_configurable(tmp_path):
    files = [
        write_jsonl(tmp_path / "a.jsonl", ["x"], column="body"),
        write_parquet(tmp_path / "b.parquet", ["y"], column="body"),
    ]
    assert read(files, text_column="body") == ["x", "y"]


def test_folders_and_globs_are_sorted_and_hidden_files_are_not_data(tmp_path):
    for name in ("b", "a", "sub/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "book.json").write_text("{}")
    (tmp_path / "notes.md").write_text("not data")
    assert read([tmp_path]) == ["a", "b", "sub/c"]
    assert read([tmp_path / "*.txt"]) == ["a", "b"]
    assert read([tmp_path / "**" / "*.txt"]) == ["a", "b", "sub/c"]
    assert read([tmp_path / "b.txt", tmp_path]) == ["b", "a", "sub/c"]


def test_bundled_names_are_paths(tmp_path):
    assert len(read(["bundled:train"])) == 283
    assert len(read(["bundled:validation"])) == 31
    with pytest.raises(ValueError, match=r"one of \['bundled:tokenizer'.*got 'bundled:test'"):
        find_files(["bundled:test"])


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; correct the path"):
        find_files([str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty holds no such file"):
        find_files([str(tmp_path / "empty")])
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(ValueError, match=r"must end in one of .*got .*a\.csv; convert it"):
        find_files([str(tmp_path / "a.csv")])


@pytest.mark.parametrize("write, name", [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")])
def test_missing_column_names_the_columns_found(tmp_path, write, name):
    file = write(tmp_path / name, TEXTS, column="body")
    with pytest.raises(ValueError, match=r"a column 'text', got columns \['body', 'id'\]; set"):
        LocalFiles([str(file)], text_column="text")


def test_damaged_files_are_named_with_the_place(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "x"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 must be one JSON object"):
        read([file])
    file.write_bytes(b'{"text": "x"}\n["text"]\n')
    with pytest.raises(ValueError, match=r"line 2 must be one JSON object, got list"):
        read([file])
    file.write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"line 2 must be UTF-8, got byte 0xff"):
        read([file])
    file.write_bytes(b'{"text": "x"}\n{"text": null}\n')
    with pytest.raises(ValueError, match=r"'text' of .*line 2 must be a text, got NoneType"):
        read([file])
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"a\.parquet must be a parquet file"):
        read([tmp_path / "a.parquet"])
    write_parquet(tmp_path / "b.parquet", ["x", "x", "x", None])
    with pytest.raises(ValueError, match=r"b\.parquet, row 4 must be a text, got NoneType"):
        read([tmp_path / "b.parquet"])


def test_empty_files_are_refused(tmp_path, make_spec):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"a\.jsonl must hold at least one document, got none"):
        LocalFiles([str(tmp_path / "a.jsonl")], text_column="text")
    spec = make_spec(paths=(str(write_parquet(tmp_path / "b.parquet", [""][:0])),))
    with pytest.raises(ValueError, match=r"b\.parquet must hold at least one document, got none"):
        build_packed_dataset(spec)


def test_a_corpus_that_the_rule_empties_is_refused(make_dataset):
    with pytest.raises(ValueError, match=r"min_document_tokens=9 tokens .* got none; check"):
        make_dataset((3, 5), min_document_tokens=9)
    with pytest.raises(ValueError, match=r"long_document='drop', got none"):
        make_dataset((30, 50), long_document="drop")


def test_check_data_reads_no_corpus(make_spec, tmp_path):
    check_data(make_spec())
    assert not (tmp_path / "cache").exists()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        check_data(make_spec(paths=(str(tmp_path / "gone.jsonl"),)))
    with pytest.raises(ValueError, match="got columns"):
        check_data(make_spec(text_column="body"))
    with pytest.raises(FileNotFoundError, match="hf download"):
        check_data(make_spec(tokenizer_path=str(tmp_path / "gone")))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"paths": ()}, r"needs paths to files or folders"),
        ({"paths": ("a.txt", "")}, r"needs paths"),
        ({"source": "hf"}, r"source='hf' needs hf_name"),
        ({"seq_len": 1}, r"seq_len must be an integer of at least 2, got 1"),
        ({"max_documents": 0}, r"max_documents must be"),
        ({"seed": -1}, r"seed must be"),
        ({"seed": 2**64}, r"seed must be below"),
        ({"tokenizer_path": ""}, r"tokenizer_path is required"),
        ({"cache_dir": ""}, r"cache_dir is required unless streaming"),
    ],
)
def test_impossible_specs_are_refused(make_spec, change, message):
    with pytest.raises(ValueError, match=message):
        make_spec(**change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"source": "web"}, r"source must be one of \('local', 'hf'\), got 'web'"),
        ({"packer": "greedy"}, r"packer must be one of"),
        ({"long_document": "keep"}, r"long_document must be one of"),
        ({"paths": "a.txt"}, r'write \["a\.txt"\]'),
        ({"seq_len": "2048"}, r"seq_len must be an integer"),
        ({"repeat": "no"}, r"repeat must be true or false, got 'no'"),
    ],
)
def test_specs_of_wrong_types_are_refused(make_spec, change, message, request):
    if request.config.getoption("jaxtyping_packages", None):
        pytest.skip("the run-time type checks of this pass refuse the value first")
    with pytest.raises(ValueError, match=message):
        make_spec(**change)
