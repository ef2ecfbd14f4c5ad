"""What the pictures of a comparison show, read back from their SVG, and the means behind them."""

import itertools
import json
import re

import numpy as np
import pytest

from qat.report.colours import BLUE, INK, ORANGE
from qat.report.compare_layer_plots import filter_boxes, noise_map, range_strips, spread_dots, worst_layers
from qat.report.compare_layers import mean_layers, nanmean, nanmedian
from qat.report.compare_palette import ORDER, in_order, styles
from qat.report.compare_panel import wrapped
from qat.report.compare_plots import jitter_lines, swatch
from qat.report.plots.bars import MOST


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def written(tmp_path, *contents):
    folders = []
    for i, content in enumerate(contents):
        folders.append(tmp_path / str(i))
        folders[-1].mkdir()
        (folders[-1] / "layers.json").write_text(json.dumps(content))
    return folders


def test_a_strategy_has_its_colour_whatever_it_is_compared_with():
    every = styles(list(ORDER))
    for names in itertools.combinations(ORDER, 3):
        assert styles(list(names)) == {name: every[name] for name in names}
    assert styles(["mine", "static", "other"])["static"] == every["static"]


def test_styles_tell_many_variants_apart_without_their_colours():
    many = styles([*ORDER, *(f"variant {i}" for i in range(12))])
    assert len(set(many.values())) == 20
    assert len({style[1:] for style in list(many.values())[:8]}) == 8 and len({style.colour for style in list(many.values())[:8]}) == 8
    # on white paper, without colours: every line is dark enough to be seen
    for style in many.values():
        red, green, blue = (int(style.colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.75
        assert style.colour in swatch(style)


def seen_by(colour, matrix):
    """Linear RGB of a colour under a dichromat's projection [Vienot 1999]."""
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return matrix @ np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def test_the_colours_survive_colour_blindness_and_grey():
    colours = [style.colour for style in styles(list(ORDER)).values()]
    matrices = {
        "all": np.eye(3),
        "protan": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
        "deutan": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
    }
    for who, matrix in matrices.items():
        for a, b in itertools.combinations(colours, 2):
            assert np.abs(seen_by(a, matrix) - seen_by(b, matrix)).max() > 0.08, (who, a, b)
    grey = [float(seen_by(colour, np.array([0.2126, 0.7152, 0.0722]))) for colour in (BLUE, ORANGE, INK)]  # those of a run's report
    assert all(abs(a - b) > 0.08 for a, b in itertools.combinations(grey, 2))


def test_the_order_of_the_documents():
    names = ["zebra", "static", "naive", "bn_correction, freeze 0.5", "bn_correction", "apple"]
    assert in_order(names) == ["naive", "bn_correction", "bn_correction, freeze 0.5", "static", "apple", "zebra"]


def test_means_over_seeds(tmp_path):
    ends = {"scale_low": [1, 1], "low": [-1, -1], "high": [1, 3]}
    a = {
        "jitter": {"steps": [0, 10], "layers": {"x": [0.1, None], "y": [0.3, 0.2]}},
        "ranges": {"steps": [0, 10], "tensors": {"q": {**ends, "scale_high": [1, 4]}}},
        "filters": {"x": {"before": [1, 2], "after": [2, 4]}},
        "sqnr": {"x": 10, "y": 30},
        "alone": {"x": 0.2},
    }
    b = {
        "jitter": {"steps": [0, 5, 10], "layers": {"x": [0.3, 0.3, 0.4], "y": [0.5, 0.4, 0.3]}},
        "ranges": {"steps": [0, 5, 10], "tensors": {"q": {k: [v[0], 7, v[1]] for k, v in {**ends, "scale_high": [4, 16]}.items()}}},
        "filters": {"x": {"after": [4, 8]}},
        "sqnr": {"x": 20},
    }
    found = mean_layers([*written(tmp_path, a, b), tmp_path / "nowhere"])
    assert found["jitter"]["steps"].tolist() == [0, 10]
    np.testing.assert_allclose(found["jitter"]["layers"]["x"], [0.2, 0.4])  # null is left out
    np.testing.assert_allclose(found["jitter"]["runs"], [[0.2, 0.2], [0.4, 0.35]])  # medians over x and y
    np.testing.assert_allclose(found["ranges"]["tensors"]["q"]["scale_high"], [2, 8])  # geometric
    np.testing.assert_allclose(found["ranges"]["tensors"]["q"]["high"], [1, 3])
    np.testing.assert_allclose(found["filters"]["x"]["after"], [3, 6])
    assert found["filters"]["x"]["before"].tolist() == [1, 2]
    assert found["sqnr"] == {"x": 15, "y": 30} and found["alone"] == {"x": 0.2}
    assert mean_layers([tmp_path / "nowhere"]) == {}


def test_means_with_gaps_are_numpys():
    values = np.array([[1.0, np.nan, np.nan], [3.0, 5.0, np.nan], [8.0, 7.0, np.nan]])
    for mine, theirs in ((nanmean(list(values)), np.nanmean), (nanmedian(values), np.nanmedian)):
        np.testing.assert_allclose(mine[:2], theirs(values[:, :2], axis=0))
        assert np.isnan(mine[2])


@pytest.mark.parametrize(("values", "logarithmic"), [([0.001, 0.01, 0.1], True), ([0.0, 0.01, 0.1], False), ([0.0, 0.0, 0.0], False)])
def test_jitter_of_zero_is_shown(values, logarithmic):
    layers = {"naive": {"jitter": {"steps": np.arange(3.0), "layers": {}, "runs": [np.array(values)]}}, "static": {}}
    svg = jitter_lines("W4A8", layers, styles(list(layers)))
    assert "<path" in svg and ("0.001" in texts(svg)) == logarithmic
    assert jitter_lines("W4A8", layers, styles(list(layers)), "jitter_statistics") == ""
    layers["static"]["jitter_statistics"] = layers["naive"]["jitter"]
    assert "W4A8: by the statistics alone" in texts(jitter_lines("W4A8", layers, styles(list(layers)), "jitter_statistics"))


def test_the_layers_that_cost_most_come_first_and_no_more_than_can_be_read():
    alone = {"naive": {"alone": {f"layer{i}": i / 100 for i in range(20)}}, "static": {"alone": {"layer0": 9.0}}}
    named = [text for text in texts(worst_layers("W4A8", alone, styles(list(alone)))) if text.startswith("layer")]
    assert named[0] == "layer0" and set(named) & {"layer19", "layer18"} and len([n for n in named if n[5:].isdigit()]) == MOST


def test_noise_is_written_in_its_cell():
    layers = {"naive": {"sqnr": {"quantizers.a": 12.4, "quantizers.b": 3.6}}, "static": {"sqnr": {"quantizers.a": 20.0}}}
    found = texts(noise_map("W4A8", layers))
    assert {"a", "b", "12", "4", "20", "naive", "static"} <= set(found)
    assert noise_map("W4A8", {"naive": {}}) == ""


def test_strips_are_for_weights_or_activations():
    ends = {end: np.array([1.0, 2.0]) for end in ("scale_low", "scale_high", "low", "high")}
    layers = {"naive": {"ranges": {"steps": np.array([0.0, 9.0]), "tensors": {"c.weight_quantizer": ends, "quantizers.r": ends}}}}
    look = styles(["naive"])
    weights, activations = range_strips("s", layers, look, weights=True), range_strips("s", layers, look, weights=False)
    assert "c" in texts(weights) and "r" not in texts(weights) and "1 … 2" in texts(weights)
    assert "r" in texts(activations) and "c" not in texts(activations)
    assert range_strips("s", {"naive": {}}, look, weights=True) == ""


def test_dead_filters_and_dead_layers_are_survived():
    filters = {"a": {"after": np.array([0.0, 1.0, 2.0])}, "b": {"after": np.zeros(3), "before": np.ones(3)}}
    look = styles(["naive"])
    assert "b" in texts(filter_boxes("naive", filters, look["naive"]))
    assert "a" in texts(spread_dots("s", {"naive": {"filters": filters}}, look))
    assert filter_boxes("naive", {"b": {"after": np.zeros(3)}}, look["naive"]) == ""


def test_names_are_text_and_no_mathematics():
    assert max(map(len, wrapped("word " * 40, 48).splitlines())) <= 48
    layers = {"naive": {"sqnr": {"<b>&$x$": 1.0, "plain": 2.0}}}
    assert "&lt;b&gt;&amp;$x$" in noise_map("W4A8, <i>", layers)


def test_ids_of_two_pictures_do_not_meet():
    layers = {"naive": {"sqnr": {"a": 1.0, "b": 2.0}}}
    first, second = (set(re.findall(r'\bid="([^"]*)"', noise_map("s", layers))) for _ in range(2))
    assert first and not first & second
    svg = noise_map("s", layers)
    ids, used = set(re.findall(r'\bid="([^"]*)"', svg)), set(re.findall(r'(?:href="#|url\(#)([^")]*)', svg))
    assert used <= ids
