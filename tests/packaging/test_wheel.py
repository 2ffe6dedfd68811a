"""A built wheel carries what the editable install has: hook, assets, licence, version."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import titan_lowprec

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("titan_lowprec", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy, so that the checkout stays clean."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in SOURCES), str(tree)], check=True)
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run(
        [*pip_wheel, "--no-build-isolation", "--wheel-dir", str(out), str(tree)], check=True
    )
    (file,) = out.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield file, {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_wheel_has_the_hook_the_assets_and_the_licences(wheel):
    file, contents = wheel
    assert f"-{titan_lowprec.__version__}-" in file.name
    info = f"titan_lowprec-{titan_lowprec.__version__}.dist-info"
    hook = contents[f"{info}/entry_points.txt"].decode()
    assert "[torch.backends]\ntitan_lowprec = titan_lowprec._autoload:install" in hook
    assert f"{info}/licenses/LICENSE" in contents
    for asset in ("train.jsonl", "validation.jsonl", "LICENSE-PSF-2.0.txt"):
        path = f"titan_lowprec/data/assets/{asset}"
        assert contents[path] == (ROOT / path).read_bytes()
    assert "titan_lowprec/data/assets/tokenizer/tokenizer.json" in contents


@pytest.mark.slow
def test_every_module_is_in_the_wheel(wheel):
    _, contents = wheel
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "titan_lowprec").rglob("*.py")}
    assert modules <= set(contents)
