"""The page on speed: its figures are those of the measured files, and a bad file is refused."""

import json

import pytest

from minibatcher.labkit import speed, speed_inside
from minibatcher.labkit.notebooks import BuildError


def spread(*values):
    return {"median": sorted(values)[len(values) // 2], "min": min(values), "max": max(values), "values": list(values)}


def report(**changes):
    names = {"minibatcher:compiled": "minibatcher (compiled)", "other": "another engine"}
    ratio = {"output_tokens_per_s": spread(1.4, 1.5, 1.7)}
    figures = {
        name: {
            "output_tokens_per_s": spread(90, 100, 110),
            "others_share": {"max": 0.02},
            "bound_share_of_run": spread(0.71) if name in speed.OURS else None,
            **{f"{metric}_{p}_ms": spread(1.0, 2.0, 3.0) for metric in ("ttft", "itl") for p in ("p50", "p99")},
        }
        for name in names
    }
    return {
        "ratios": {"minibatcher:compiled": {"other": ratio}},
        "titles": names,
        "figures": figures,
        "outputs_equal": {"minibatcher:compiled": {"equal": 3, "of": 3}, "other": {"equal": 2, "of": 3}},
        "failures": [],
        "interrupted": False,
        "runs": [{"peer": "other", "facts": {"versions": {"engine": "1.2"}}}, {"peer": "other", "facts": None}],
        "provenance": {
            "measured": {"date": "2030-01-02T03:04:05+00:00"},
            "hardware": {"device": "a processor"},
            "threads": 2,
            "workload": {"num_requests": 3, "num_prompt_tokens": 1000, "num_output_tokens": 50},
            "peers": {"other": {"settings": {"server": "/somewhere", "slots": 4}, "python": "/somewhere/python"}},
        },
        **changes,
    }


@pytest.fixture
def root(tmp_path):
    (tmp_path / speed.FOLDER).mkdir(parents=True)
    return tmp_path


def save(root, name, data):
    (root / speed.FOLDER / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")


def test_what_is_kept_names_versions_and_no_places():
    kept = speed.keep(report())
    assert kept["provenance"]["peers"]["other"] == {"settings": {"slots": 4}, "versions": {"engine": "1.2"}}
    assert "runs" not in kept and "somewhere" not in json.dumps(kept)


def test_a_ratio_stands_with_its_spread_under_its_shape(root):
    save(root, "15M-bfloat16", speed.keep(report()))
    save(root, "110M-float32", speed.keep(report(ratios={})))
    table = speed.ratios(root).splitlines()
    assert table[0].endswith("| 15M bfloat16 | 110M float32 |")
    assert table[2:] == ["| another engine | **1.50** (1.40–1.70) | – |"]


def test_engines_that_were_too_slow_to_go_round_with_the_others_stand_in_the_same_column(root):
    slow = report()
    for key in ("titles", "figures"):
        slow[key]["slow"] = slow[key].pop("other")
    slow["ratios"]["minibatcher:compiled"] = {"slow": {"output_tokens_per_s": spread(20.0, 30.0)}}
    save(root, "15M-bfloat16", speed.keep(report()))
    save(root, "15M-bfloat16-slow", speed.keep(slow))
    assert len(speed.ratios(root).splitlines()) == 4
    assert "**30.0** (20.0–30.0)" in speed.ratios(root)


def test_circumstances_tell_rounds_quiet_bound_and_answers(root):
    save(root, "15M-bfloat16", speed.keep(report()))
    text = speed.circumstances(root)
    assert "| 15M bfloat16, 2030-01-02 | 3 | 3 | 2 % | 71 % | another engine 2 |" in text
    assert "a processor, 2 threads" in text and "1,000 prompt and 50 output tokens" in text
    assert speed.versions(root).endswith("| another engine | engine 1.2 |\n")


@pytest.mark.parametrize("change", [{"failures": ["it fell"]}, {"interrupted": True}])
def test_a_run_that_failed_is_no_figure(root, change):
    save(root, "15M-bfloat16", speed.keep(report(**change)))
    with pytest.raises(BuildError, match="failed or was cut short"):
        speed.ratios(root)


def test_a_gain_is_bold_where_every_pair_says_so(root):
    gains = [{"gain": 1.2, "lowest": 1.1}, {"gain": 1.2, "lowest": 0.9}]
    row = {"name": "a trick", "over": "a path", "invariant": "all", "cases": dict(zip(("one", "two"), gains))}
    where = {"model": {"name": "15M"}, "dtype": "bfloat16", "threads": 2, "pairs": 7}
    where["hardware"] = {"omp_wait_policy": "passive"}
    for name in speed_inside.LEDGERS:
        save(root, name, {"rows": [row], "provenance": where})
    assert "| a trick (on: a path) | all | **1.20** | 1.20 |" in speed_inside.ledger(root)
