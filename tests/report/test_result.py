import json

import pytest

from qat.errors import ConfigError
from qat.report.result import failed_result, read_result, write_result

CONFIG = {
    "recipe": "r",
    "seed": 3,
    "fold": {"name": "naive"},
    "quant": {"weight": {"bits": 4, "per_channel": False}, "activation": {"bits": 8}},
}


def test_what_is_written_is_read(tmp_path):
    write_result(tmp_path, {"status": "ok", "accuracy": {"float": 0.5}})
    assert read_result(tmp_path) == {"status": "ok", "accuracy": {"float": 0.5}}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_result_that_is_not_json_leaves_the_old_one(tmp_path):
    write_result(tmp_path, {"status": "ok"})
    with pytest.raises(ValueError, match="Out of range"):
        write_result(tmp_path, {"status": "ok", "accuracy": float("nan")})
    assert read_result(tmp_path) == {"status": "ok"}


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_no_result_says_which_folder(tmp_path, text):
    if text is not None:
        (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_result(tmp_path)


def test_failed_result_has_the_traceback_and_what_was_asked_for():
    try:
        raise RuntimeError("no luck")
    except RuntimeError as error:
        result = failed_result(CONFIG, error)
    assert (result["status"], result["fold"], result["weight_bits"], result["per_channel"]) == ("failed", "naive", 4, False)
    assert result["error"] == "RuntimeError: no luck" and "Traceback" in result["traceback"]
    json.dumps(result)
