import json
import math
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

import qat
from qat.errors import ConfigError
from qat.report.html import page, picture, write_report
from qat.report.layers import filter_ranges, read_layers, write_layers
from qat.report.plots import alone_picture, filters_picture, jitter_picture, ranges_picture, sqnr_picture
from qat.report.plots.filters import ratio
from qat.report.plots.jitter import most_changed
from qat.report.plots.ranges import doublings
from qat.report.plots.style import quantiles, short
from qat.report.sensitivity import Cost, cost_bars, layer_table

STEPS = [1, 5, 9]
SVG = "{http://www.w3.org/2000/svg}"


def tensor(*scales, sign=-1):
    return {"scale_low": list(scales), "scale_high": list(scales), "low": [sign * 2.0] * len(scales), "high": [2.0] * len(scales)}


@pytest.fixture
def layers():
    """Five layers, one of which was not quantized at first."""
    shares = {f"block.{i}.conv<{i}>": [0.01 * i, 0.02 * i, 0.03 * i] for i in range(4)} | {"head$x$": [None, None, 0.5]}
    return {
        "version": 1,
        "jitter": {"steps": STEPS, "layers": shares},
        "jitter_statistics": {"steps": STEPS, "layers": {name: [0.0, 0.0, 0.01] for name in shares}},
        "ranges": {
            "steps": STEPS,
            "tensors": {
                "a.weight_quantizer": tensor(1.0, 2.0, 64.0),
                "quantizers.a": tensor(0.5, None, 0.25, sign=0),
                "quantizers.x": tensor(1, 1, 1),
            },
        },
        "filters": {
            "a": {"before": [1.0, 1.0, 2.0], "after": [0.0, 1.0, 1.0, 30.0]},
            "static": {"after": [1.0, 2.0]},
            "dead": {"after": [0.0]},
        },
        "sqnr": {"quantizers.x": 44.4, "quantizers.a": -0.01, "quantizers.lost": None},
        "alone": {f"layer{i:02}": i / 10 for i in range(20)} | {"helps": -0.5},
    }


def texts(svg):
    """The words of a picture; parsing fails where it is no SVG."""
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


PICTURES = {
    "jitter": jitter_picture,
    "ranges": ranges_picture,
    "filters": filters_picture,
    "sqnr": sqnr_picture,
    "alone": alone_picture,
}


@pytest.mark.parametrize("section", PICTURES)
def test_a_picture_needs_its_section_alone(layers, section):
    svg = PICTURES[section](layers)
    assert svg.startswith("<svg") and svg.count("<svg") == 1 and texts(svg)
    own = {key: layers[key] for key in (section, "jitter_statistics")}
    assert PICTURES[section](own) == svg
    without = {key: value for key, value in layers.items() if key != section}
    assert PICTURES[section]({}) == PICTURES[section](without) == PICTURES[section]({section: {}}) == ""


@pytest.mark.parametrize("key", ["jitter", "ranges"])
def test_a_record_of_no_or_one_moment(layers, key):
    part = layers[key]
    part["steps"] = []
    assert PICTURES[key](layers) == ""
    part["steps"] = [4]
    for name, row in part.get("layers", {}).items():
        part["layers"][name] = row[:1]
    for row in part.get("tensors", {}).values():
        row |= {end: values[:1] for end, values in row.items()}
    layers.pop("jitter_statistics")
    assert texts(PICTURES[key](layers, 4))


def test_jitter_names_the_most_changed_and_the_freeze(layers):
    words = texts(jitter_picture(layers, 6))
    assert most_changed(layers["jitter"]) == ["head$x$", "block.3.conv<3>", "block.2.conv<2>", "block.1.conv<1>"]
    assert {*most_changed(layers["jitter"]), "BN frozen at 6"} <= set(words) and "block.0.conv<0>" not in words
    assert {"by the batch statistics alone (median layer)", "in all, with the optimizer's step"} <= set(words)
    assert "BN frozen at 6" not in texts(jitter_picture(layers))


def test_quantiles_ignore_what_is_missing():
    rows = [[0.0, None], [1.0, None], [None, None], [2.0, None]]
    low, middle = quantiles(rows, (0.0, 0.5))
    assert (low[0], middle[0]) == (0.0, 1.0) and math.isnan(low[1]) and math.isnan(middle[1])


def test_ranges_show_weights_and_activations_apart(layers):
    weights, activations = (texts(ranges_picture(layers, kind=kind)) for kind in ("weights", "activations"))
    assert {"a", "± 2"} <= set(weights) and "x" not in weights
    assert {"a", "x", "± 2", "0 … 2"} <= set(activations)
    np.testing.assert_allclose(doublings(tensor(1.0, 2.0, 0.25)), [0, 1, -2])
    np.testing.assert_allclose(doublings(tensor(None, 2.0, None, 1.0)), [np.nan, 0, np.nan, -1])
    assert np.isnan(doublings(tensor(None, None))).all()


def test_filters_in_units_of_the_median(layers):
    assert ratio([0.0, 1.0, 2.0, 30.0]) == 15 and math.isnan(ratio([0.0, 0.0])) and math.isnan(ratio([None]))
    words = texts(filters_picture(layers))
    assert {"a", "static", "dead", "30", "1.33", "before folding", "after folding"} <= set(words)


def test_bars_keep_the_order_of_the_network_and_sort_losses(layers):
    words = texts(sqnr_picture(layers))
    assert words.index("x") < words.index("a") and "lost" not in words and {"44.4", "0.0"} <= set(words)
    named = [word for word in texts(alone_picture(layers)) if word.startswith(("layer", "helps"))]
    assert named == [f"layer{i:02}" for i in range(19, 4, -1)]


def costs_of(names):
    """A row of each kind for every name."""
    return [
        Cost(kind, name, "4/4", 1.0, 0.5, -0.2 if i % 3 else 1.5, 0.1, 1.0) for i, name in enumerate(names) for kind in ("alone", "others")
    ]


@pytest.mark.parametrize("section", [*PICTURES, "costs"])
def test_text_is_readable_on_a_phone(layers, section):
    """390 pixels less the margins: no letter below 8 pixels, and no more than 7 inches on a desk."""
    if section == "costs":
        svg = cost_bars(costs_of(f"a_very_long.qualified.name_of.a_layer.{i}" for i in range(65)))
    else:
        svg = PICTURES[section](layers)
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
    assert width < 7 * 72
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?([\d.]+)px", svg)]
    assert sizes and min(size for size in sizes if size > 6.9) * (390 - 24) / width >= 8
    assert re.match(r'<svg width="\d+"', svg) and "height=" not in svg[: svg.index(">")]


def test_long_names_keep_both_ends():
    name = "backbone.stages.3.blocks.17.mlp.fc2.conv_pointwise"
    assert len(short(name)) == 24 and short(name).startswith("backbon…") and short(name).endswith("conv_pointwise")
    assert short("a.b") == "a.b" and short("$x$") == r"\$x\$"


@pytest.mark.parametrize("strategy", ["bn_correction", "static", "scale_merge"])
def test_filters_before_and_after_folding(strategy):
    floats = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(75, 2)
    )
    with torch.no_grad():
        for norm in (floats[1], floats[4]):
            norm.weight.uniform_(-2, 2)
            norm.running_var.uniform_(0.1, 3)
    x = torch.randn(2, 2, 6, 6)
    found = filter_ranges(qat.prepare(floats, (x,), qat.QATConfig(fold=strategy)), floats)
    assert list(found) == ["0", "3", "6"]
    for layer, norm, axes in (("0", floats[1], (1, 2, 3)), ("3", floats[4], (0, 2, 3))):
        before = floats.get_submodule(layer).weight.detach().abs().amax(axes)
        factor = (norm.weight / (norm.running_var + norm.eps).sqrt()).abs()
        assert found[layer]["before"] == pytest.approx(before.tolist())
        assert found[layer]["after"] == pytest.approx((factor * before).tolist(), rel=1e-5)
    assert found["6"]["before"] == found["6"]["after"] == pytest.approx(floats[6].weight.detach().abs().amax(1).tolist())
    if strategy == "static":
        assert list(filter_ranges(qat.prepare(floats, (x,), qat.QATConfig(fold=strategy)), nn.Sequential())["0"]) == ["after"]


def test_what_is_written_is_read_rounded_and_without_empty_sections(tmp_path):
    history = {"jitter": {"steps": [], "layers": {}}, "ranges": {"steps": [1], "tensors": {"a": {"low": [0.123456, math.nan]}}}}
    write_layers(tmp_path, {**history, "sqnr": {"x": math.inf, "y": 12.3456}, "alone": {}})
    assert read_layers(tmp_path) == {
        "version": 1,
        "ranges": {"steps": [1], "tensors": {"a": {"low": [0.1235, None]}}},
        "sqnr": {"x": None, "y": 12.35},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["layers.json"]
    json.loads((tmp_path / "layers.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', "{}"])
def test_a_file_that_is_none_of_ours(tmp_path, text):
    assert read_layers(tmp_path) == {}
    (tmp_path / "layers.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "layers.json"))):
        read_layers(tmp_path)


RESULT = {
    "status": "ok",
    "recipe": "mine",
    "fold": "naive",
    "seed": 3,
    "weight_bits": 4,
    "activation_bits": 8,
    "per_channel": False,
    "accuracy": {"float": 1.0, "integer": 0.75},
    "freeze_step": 5,
    "steps": 9,
}


def report(folder, layers, parity=None, **changes):
    row = SimpleNamespace(name="quantizers.x", compared=100, identical=1.0, max_lsb=0)
    parity = parity or SimpleNamespace(tensors=(row,), identical=1.0, max_lsb=0)
    metrics = [{"step": 0.0, "train_loss_step": 2.0}]
    counts = torch.tensor([[3, 1], [0, 2]])
    path = write_report(folder, {**RESULT, **changes}, metrics, nn.Sequential(), parity, counts, ["one", "two"], layers)
    return path.read_text(encoding="utf-8")


def test_the_page_has_every_picture_and_says_what_run_it_is(tmp_path, layers):
    text = report(tmp_path, layers)
    assert text.count("<svg") == 9 and "Not recorded" not in text and "Not measured" not in text
    assert "<title>mine: naive, 4-bit weights per tensor, 8-bit activations, seed 3</title>" in text
    assert "block.3.conv&lt;3&gt;" in text and "conv<3>" not in text
    contents = re.findall(r'<li><a href="#([^"]+)">', text)
    assert len(contents) == len(set(contents)) == 13 and all(f'id="{anchor}"' in text for anchor in contents)
    assert "@media print" in text and "break-inside: avoid" in text and "@media (max-width" in text


def test_what_was_not_recorded_leaves_a_word(tmp_path):
    text = report(tmp_path, {})
    assert text.count("<svg") == 3
    assert text.count("report.moments=60") == 3 and text.count("report.pictures=256") == 2
    assert report(tmp_path, None, steps=0, freeze_step=None).count("This run had no training.") == 3


def test_sections_that_fail_do_not_cost_the_page(tmp_path, layers, caplog):
    layers["jitter"] = {"steps": [1], "layers": "nonsense"}
    layers["sqnr"] = ["nonsense"]
    text = report(tmp_path, layers, parity=SimpleNamespace(identical=1.0))
    assert text.count("It could not be drawn") == 2 and text.count("It could not be filled (AttributeError") == 1
    assert text.count("<svg") == 7 and "</html>" in text
    assert "no picture 'Jitter of the integer weights'" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_words_of_a_page_are_escaped():
    failed = picture("<b>", "", lambda: {}["<i>"])
    text = page("<t>", "<s>", [failed, {"title": "without note", "svg": "<svg></svg>"}], [])
    assert "<b>" not in text and "<i>" not in text and "<t>" not in text and "<s>" not in text and "<svg></svg>" in text


def test_stars_are_corrected_for_the_number_of_layers():
    costs = [Cost(kind, f"c{i}", "4/4", 1.0, 0.5, 0.3, 0.1, p) for i, p in enumerate((0.001, 0.04)) for kind in ("alone", "others")]
    table = layer_table(costs)
    assert [row[4] for row in table.rows] == [row[8] for row in table.rows] == ["*", ""]  # both are three standard errors above 0
    assert "p < 0.025" in table.note and "Holm's correction for 2 layers" in table.note


def test_names_of_layers_are_no_mathematics_in_the_picture_of_losses():
    assert "c$x_{$1" in cost_bars(costs_of(["c$x_{$1"]))
