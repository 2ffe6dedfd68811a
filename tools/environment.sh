# Sourced by quickstart.sh and test.sh. Plain pip; the only index asked is the configured one, and
# for torch the one that TORCH_INDEX_URL names, if it is set.
# PYTHON chooses the interpreter (3.11 or newer).

prepare_environment() { # prepare_environment FOLDER EXTRA
    local folder=$1 extra=$2 torch_requirement
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "titan_lowprec needs Python >= 3.11; set PYTHON to one" >&2
        return 1
    }
    [ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
    # shellcheck disable=SC1091
    source "$folder/bin/activate"
    torch_requirement=$(python - <<'PY'
import tomllib
with open("pyproject.toml", "rb") as file:
    dependencies = tomllib.load(file)["project"]["dependencies"]
print(next(d for d in dependencies if d.startswith("torch>")))
PY
    )
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        python -m pip install --quiet --index-url "$TORCH_INDEX_URL" "$torch_requirement"
    fi
    python -m pip install --quiet -e ".${extra:+[$extra]}"
}
